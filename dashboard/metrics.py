"""`/metrics`: the fleet as Prometheus reads it, in its text format.

Gauges of a device are called as in the file that a service writes for node_exporter, so that one set of alerts does.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from nicegui import app
from sqlalchemy import func, select
from starlette.responses import PlainTextResponse

from benchd.dashboard import queries
from benchd.dashboard.messages import Result
from benchd.dashboard.queries import Device
from benchd.dashboard.store import Store

MEDIA_TYPE = "text/plain; version=0.0.4"
_Thing = TypeVar("_Thing")
_Gauges = dict[str, tuple[str, Callable[[_Thing], float | None]]]


class Verdict(NamedTuple):
    """What a device says of the last result of a case against its baseline."""

    device_id: str
    case_id: str
    answer: str


# by name: what it says, and its value, None where there is none
DEVICE: _Gauges[Device] = {
    "online": ("1 while the device is heard.", lambda device: device.state == "online"),
    "problem": ("1 while something is wrong.", lambda device: device.health.problem is not None),
    "throttled": ("1 while its clocks are held down.", lambda device: device.throttled),
    "power_watts": ("Power of the whole device, as its sensors know it.", lambda device: device.power_w),
    "cases_left": ("Cases of the passes that have begun.", lambda device: device.health.cases_left),
    "outbox_pending": ("Messages that no broker has acknowledged.", lambda device: device.health.outbox_pending),
    "outbox_unstored": ("Results that no collector has stored.", lambda device: device.health.outbox_unstored),
}
CASE: _Gauges[Result] = {
    "case_ok": ("1 where the last result of the case ended well.", lambda result: result.status == "ok"),
    "case_arrived_timestamp_seconds": ("When the last result arrived.", lambda result: result.arrived_s),
    "case_median_seconds": ("Median time of one batch.", lambda result: _scaled(result.median_ms)),
    "case_low_seconds": ("Lower end of the median's interval.", lambda result: _scaled(result.low_ms)),
    "case_high_seconds": ("Upper end of the median's interval.", lambda result: _scaled(result.high_ms)),
    "case_energy_joules": ("Energy of one inference, gross.", lambda result: _scaled(result.energy_mj)),
    "case_energy_error_joules": ("Error bar of that energy.", lambda result: _scaled(result.energy_err_mj)),
    "case_check_passed": ("1 where the outputs were right.", lambda result: _passed(result.checked)),
}
VERDICT: _Gauges[Verdict] = {
    "case_slower": ("1 while the last result is slower than its baseline.", lambda said: said.answer == "slower"),
}


def add(store: Store) -> None:
    """Serve `/metrics`."""

    @app.get("/metrics")
    def metrics() -> PlainTextResponse:
        return PlainTextResponse("".join(f"{line}\n" for line in lines(store, time.time())), media_type=MEDIA_TYPE)


def lines(store: Store, now_s: float) -> Iterator[str]:
    """Yield the gauges of every device and of the last result of every case."""
    yield from _exposed(DEVICE, queries.fleet(store, now_s), _device_labels)
    yield from _exposed(CASE, _newest(store), _case_labels)
    yield from _exposed(VERDICT, _verdicts(store), _verdict_labels)


def _exposed(
    gauges: _Gauges[_Thing], things: Iterable[_Thing], labels: Callable[[_Thing], Mapping[str, object]]
) -> Iterator[str]:
    named = [(_written(labels(thing)), thing) for thing in things]
    for name, (text, value) in gauges.items():
        yield f"# HELP benchd_{name} {text}"
        yield f"# TYPE benchd_{name} gauge"
        for written, thing in named:
            found = value(thing)
            if found is not None:
                yield f"benchd_{name}{{{written}}} {float(found)!r}"


def _written(labels: Mapping[str, object]) -> str:
    escapes = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
    return ",".join(f'{name}="{str(value).translate(escapes)}"' for name, value in labels.items())


def _device_labels(device: Device) -> Mapping[str, object]:
    return {"device_id": device.device_id}


def _case_labels(result: Result) -> Mapping[str, object]:
    return {name: getattr(result, name) for name in ("device_id", "case_id", "model", "variant", "batch_size")}


def _verdict_labels(said: Verdict) -> Mapping[str, object]:
    return {"device_id": said.device_id, "case_id": said.case_id}


def _newest(store: Store) -> list[Result]:
    """Return the last result of every case on every device, however it ended."""
    table = store.tables["result"]
    place = func.row_number().over(partition_by=(table.c.device_id, table.c.case_id), order_by=table.c.arrived_s.desc())
    ranked = select(table.c.id, place.label("place")).subquery()
    last = table.c.id.in_(select(ranked.c.id).where(ranked.c.place == 1))
    wanted = select(*(table.c[name] for name in Result._fields)).where(last)
    with store.reading() as connection:
        return [Result(*row) for row in connection.execute(wanted)]


def _verdicts(store: Store) -> list[Verdict]:
    table = store.tables["document"]
    mine = (table.c.kind.startswith("latest/"), table.c.state.is_not(None))
    with store.reading() as connection:
        found = connection.execute(select(table.c.device_id, table.c.kind, table.c.state).where(*mine))
        return [Verdict(device_id, kind.removeprefix("latest/"), state) for device_id, kind, state in found]


def _scaled(thousandths: float | None) -> float | None:
    return None if thousandths is None else thousandths / 1e3


def _passed(checked: str | None) -> bool | None:
    return None if checked in (None, "void") else checked == "passed"
