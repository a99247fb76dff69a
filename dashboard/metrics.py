"""`/metrics`: reports the fleet to Prometheus.

A device's gauges have the same names as in the file that a service writes for node_exporter, so that one set of alerts
works for both.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from nicegui import app
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import select
from starlette.responses import Response

from benchd.dashboard import queries
from benchd.dashboard.limits import READ
from benchd.dashboard.messages import Result
from benchd.dashboard.queries import CollectorState, Device, Gap
from benchd.dashboard.schema import DOCUMENT
from benchd.dashboard.store import KEEP_S, Store

_Thing = TypeVar("_Thing")
_Gauges = dict[str, tuple[str, Callable[[_Thing], float | None]]]


# by name: the help text, and the value or None if it is unknown
DEVICE: _Gauges[Device] = {
    "online": ("1 while the device is online.", lambda device: device.state == "online"),
    "problem": ("1 while something is wrong.", lambda device: device.health.problem is not None),
    "throttled": ("1 while its clocks are throttled.", lambda device: device.throttled),
    "power_watts": ("Power of the whole device, from its sensors.", lambda device: device.power_w),
    "cases_left": ("Cases left in the runs that have begun.", lambda device: device.health.cases_left),
    "pending": ("Results and events that no broker has acknowledged.", lambda device: device.health.pending),
    "refused": ("Results and events that the broker refuses.", lambda device: device.health.refused),
}
CASE: _Gauges[Result] = {
    "case_ok": ("1 if the last result of the case succeeded.", lambda result: result.status == "ok"),
    "case_arrived_timestamp_seconds": ("When the last result arrived.", lambda result: result.arrived_s),
    "case_measured_timestamp_seconds": ("When the last result was measured.", lambda result: result.measured_s),
    "case_median_seconds": ("Median time of one batch.", lambda result: _scaled(result.median_ms)),
    "case_low_seconds": ("Lower end of the median's interval.", lambda result: _scaled(result.low_ms)),
    "case_high_seconds": ("Upper end of the median's interval.", lambda result: _scaled(result.high_ms)),
    "case_energy_joules": ("Energy of one inference, gross.", lambda result: _scaled(result.energy_mj)),
    "case_energy_error_joules": ("Error bar of that energy.", lambda result: _scaled(result.energy_err_mj)),
    "case_check_passed": ("1 if the outputs were correct.", lambda result: _passed(result.checked)),
}
CASES = 10 * READ  # maximum number of cases measured within KEEP_S
CASE_LABELS = ("device_id", "case_id", "model", "variant", "batch_size")


class Fleet(Collector):
    """The gauges for every device, and for the last result of every current case, at the Unix time `now_s`."""

    def __init__(self, store: Store, now_s: float) -> None:
        self._store, self._now_s = store, now_s

    def collect(self) -> Iterator[Metric]:
        """Yield each metric with its values, possibly none."""
        yield _up(queries.collectors(self._store, self._now_s), self._now_s)
        text = f"Known devices; the {READ} last heard from are listed."
        yield GaugeMetricFamily("benchd_devices", text, queries.devices(self._store))
        yield from _families(DEVICE, ("device_id",), queries.fleet(self._store, self._now_s))
        yield _missing(queries.gaps(self._store))
        cases = queries.last_of_each_case(self._store, self._now_s - KEEP_S, CASES)
        yield from _families(CASE, CASE_LABELS, cases)
        yield _slower(self._store)


def add(store: Store) -> None:
    """Serve `/metrics`."""

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(Fleet(store, time.time())), media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _up(collectors: Sequence[CollectorState], now_s: float) -> Metric:
    text = "1 while the collector stores what arrives."
    family = GaugeMetricFamily("benchd_collector_up", text, labels=("collector",))
    for collector in collectors:
        family.add_metric([collector.name], now_s - collector.seen_s < queries.STALE_S and collector.problem is None)
    return family


def _missing(gaps: Sequence[Gap]) -> GaugeMetricFamily:
    counts: dict[str, int] = defaultdict(int)
    for gap in gaps:
        counts[gap.device_id] += gap.last - gap.first + 1
    text = "Results and events that the device has sent but the collector lacks."
    family = GaugeMetricFamily("benchd_results_missing", text, labels=("device_id",))
    for device_id, results in sorted(counts.items()):
        family.add_metric([device_id], results)
    return family


def _families(gauges: _Gauges[_Thing], labels: Sequence[str], things: Sequence[_Thing]) -> Iterator[GaugeMetricFamily]:
    for name, (text, value) in gauges.items():
        family = GaugeMetricFamily(f"benchd_{name}", text, labels=labels)
        for thing in things:
            number = value(thing)
            if number is not None:
                family.add_metric([str(getattr(thing, label)) for label in labels], number)
        yield family


def _slower(store: Store) -> GaugeMetricFamily:
    """Return the devices' verdicts on the last results of their cases relative to the baselines."""
    text = "1 while the last result is slower than its baseline."
    family = GaugeMetricFamily("benchd_case_slower", text, labels=("device_id", "case_id"))
    mine = (DOCUMENT.c.kind.startswith("latest/"), DOCUMENT.c.state.is_not(None))
    wanted = select(DOCUMENT.c.device_id, DOCUMENT.c.kind, DOCUMENT.c.state).where(*mine).limit(CASES)
    for device_id, kind, state in store.read(wanted):
        family.add_metric([device_id, kind.removeprefix("latest/")], state == "slower")
    return family


def _scaled(thousandths: float | None) -> float | None:
    return None if thousandths is None else thousandths / 1e3


def _passed(checked: str | None) -> bool | None:
    return None if checked in (None, "void") else checked == "passed"
