"""Three simulated devices for `benchd demo`: python -m benchd.dashboard.demo.devices URL DEVICE_ID.

They publish what a service would, derived from each record of the real device with that id, and are marked as
simulated everywhere: in their ids and names, a tag, the flags of their records and the scope of their energy.
"""

import math
import random
import signal
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from importlib.metadata import version
from itertools import count
from typing import Literal, NamedTuple

import msgspec

from benchd.daemon.delivery.broker import Broker, Ended, parse_url
from benchd.daemon.delivery.messages import Health, Info, Status, Telemetry
from benchd.daemon.delivery.session import Session, Terms, connect
from benchd.daemon.delivery.topics import RESULT_QOS, Kind, Topics
from benchd.daemon.machine import environment
from benchd.daemon.records import Energy, Environment, ProcessResult, Record, Sample, Timing, decode, encode, wall_now
from benchd.daemon.verdicts.compare import ADVISED_PROCESSES
from benchd.daemon.verdicts.statistics import combine
from benchd.dashboard.feed import CONNECT_S, MAX_PACKET_BYTES

TICK_S = 1.0
LISTEN_S = 0.2  # within which a signal takes effect
RESULT_TICKS = 4  # between two results of a device
HEALTH_TICKS = 5
NOISE = 0.004
STEP_RUNS, STEP = 8, 1.12  # a degrading device is this much slower after this many runs of a case
HOT_TICKS = 60  # a hot device is throttled in the last quarter of each
SIMULATED = "simulated"


class Device(NamedTuple):
    """One device: its times are `factor` those of the real one."""

    name: str
    factor: float
    power_w: float
    clock_hz: float
    runs_hot: bool = False
    grows_slow: bool = False

    @property
    def device_id(self) -> str:
        """Return an id that shows that the device is simulated."""
        return f"{SIMULATED}-{self.name.lower().replace(' ', '-')}"


DEVICES = (
    Device("Orin Nano", 2.4, 8.0, 625e6, runs_hot=True),
    Device("Orin AGX", 0.8, 28.0, 1300e6, grows_slow=True),
    Device("Desktop GPU", 0.2, 160.0, 2500e6),
)


def derived(record: Record, device: Device, run: int, chance: random.Random) -> Record:
    """Return the record of the `run`-th run of a case on a simulated device; `record` was measured, with a timing."""
    if record.timing is None:
        raise ValueError(f"{record.key} has no timing to derive another from")
    level = device.factor * (STEP if device.grows_slow and run > STEP_RUNS else 1.0)
    factors = [level * chance.gauss(1.0, NOISE) for _ in range(ADVISED_PROCESSES)]
    processes = [ProcessResult(status="ok", timing=_timing(record.timing, factor)) for factor in factors]
    timing = _combined(record.timing, factors)
    return Record(
        run_id=uuid.uuid4().hex,
        suite_id=uuid.uuid4().hex,
        device_id=device.device_id,
        case_id=record.case_id,
        case=record.case,
        status="ok",
        t_wall=wall_now(),
        t_mono_ns=time.monotonic_ns(),
        boot_id=SIMULATED,
        tool_version=record.tool_version,
        environment=_environment(device, record.environment),
        preset=record.preset,
        model=record.model,
        timing=timing,
        throughput_per_s=record.case.batch_size * 1e3 / timing.median_ms,
        throughput_basis="batch_over_median",
        energy=_energy(device, timing.median_ms / record.case.batch_size),
        check=record.check,
        flags=[SIMULATED],
        missing={"x_of_floor": SIMULATED},
        processes=processes,
    )


def _timing(timing: Timing, factor: float) -> Timing:
    """Return the timing multiplied by `factor`."""
    changed = {
        name: value * factor
        for name, value in msgspec.structs.asdict(timing).items()
        if name.endswith("_ms") and value is not None
    }
    return msgspec.structs.replace(timing, **changed)


def _combined(timing: Timing, factors: list[float]) -> Timing:
    """Return the timing over processes slowed by these factors."""
    found = combine([timing.median_ms * factor for factor in factors], [None] * len(factors))
    whole = _timing(timing, found.centre / timing.median_ms)
    low_ms, high_ms = (found.interval.low, found.interval.high) if found.interval else (None, None)
    return msgspec.structs.replace(whole, low_ms=low_ms, high_ms=high_ms, interval_basis=found.basis)


def _environment(device: Device, real: Environment) -> Environment:
    name = f"{SIMULATED} {device.name}"
    return msgspec.structs.replace(real, fingerprint=device.device_id, board=name, gpu=name)


def _energy(device: Device, inference_ms: float) -> Energy:
    return Energy(
        energy_j=device.power_w,
        energy_err_j=0.02 * device.power_w,
        gross_per_inference_j=device.power_w * inference_ms / 1e3,
        scope=f"{SIMULATED} module input",
        source=SIMULATED,
        sensor_period_s=0.1,
        updates=10,
    )


def samples(device: Device, tick: int, chance: random.Random) -> Iterator[Sample]:
    """Yield what the sensors of a device would read at a tick."""
    hot = is_hot(device, tick)
    load = 0.9 + 0.1 * math.sin(tick / 7)
    values = {
        "power_w": device.power_w * load * (0.7 if hot else 1.0),
        "gpu_clock_hz": device.clock_hz * (0.6 if hot else 1.0),
        "gpu_temp_c": (82.0 if hot else 55.0) + 6.0 * load,
        "gpu_utilization_percent": 95.0 * load,
        "process_rss_bytes": 7e8 * load,
        "gpu_throttle_reasons": 0x20 if hot else 0,  # software thermal slowdown
    }
    for metric, value in values.items():
        noisy = value if metric == "gpu_throttle_reasons" else value * chance.gauss(1.0, NOISE)
        yield Sample(time.monotonic_ns(), metric, noisy, SIMULATED)


def is_hot(device: Device, tick: int) -> bool:
    """Return whether the device is throttled at a tick."""
    return device.runs_hot and tick % HOT_TICKS >= 0.75 * HOT_TICKS


class Publisher:
    """One device and its connection. `records` are the newest of the real device, by case."""

    def __init__(self, device: Device, broker: Broker, records: dict[str, Record]) -> None:
        self._device, self._records = device, records
        self._topics = Topics(device.device_id)
        self._chance = random.Random(device.device_id)  # noqa: S311 - no secret
        self._runs: Counter[str] = Counter()
        self._case_id = ""
        will = self._topics.of("status"), self._status("offline")
        self._session = _session(broker, device.device_id, Terms(will=will))
        self._retain("status", self._status("online"))
        self._retain("info", msgspec.json.encode(self._info()))

    def tick(self, tick: int) -> None:
        """Publish what is due at a tick; raise Ended if the broker is gone."""
        self._session.step(wait_s=0.0)
        self._session.take_acknowledged()
        telemetry = Telemetry(case_id=self._case_id, samples=list(samples(self._device, tick, self._chance)))
        self._session.publish(self._topics.of("telemetry"), msgspec.json.encode(telemetry), 0)
        if tick % RESULT_TICKS == 0 and self._records:
            self._publish_next()
        if tick % HEALTH_TICKS == 0:
            self._retain("health", msgspec.json.encode(self._health(tick)))

    def close(self) -> None:
        """Publish `offline` and disconnect."""
        self._retain("status", self._status("offline"))
        self._session.close()

    def _publish_next(self) -> None:
        """Publish a result of the next case."""
        self._case_id = min(sorted(self._records), key=lambda case_id: self._runs[case_id])
        self._runs[self._case_id] += 1
        record = derived(self._records[self._case_id], self._device, self._runs[self._case_id], self._chance)
        self._session.publish(self._topics.result(record.run_id), encode(record), RESULT_QOS)

    def _retain(self, kind: Kind, body: bytes) -> None:
        self._session.publish(self._topics.of(kind), body, RESULT_QOS, retain=True)

    def _status(self, state: Literal["online", "offline"]) -> bytes:
        status = Status(
            state=state, session=1, boot_id=SIMULATED, instance=self._device.device_id, held_s=0.0, t_wall=wall_now()
        )
        return msgspec.json.encode(status)

    def _info(self) -> Info:
        return Info(
            device_id=self._device.device_id,
            boot_id=SIMULATED,
            name=f"{self._device.name} ({SIMULATED})",
            site="demo",
            tags=[SIMULATED],
            tool_version=version("benchd"),
            environment=_environment(self._device, environment.describe("cpu", None)),
            suites=[],
            catalogue_sha256="",
            t_wall=wall_now(),
        )

    def _health(self, tick: int) -> Health:
        return Health(
            t_wall=wall_now(),
            uptime_s=tick * TICK_S,
            rss_bytes=0,
            activity="measuring" if self._case_id else "idle",
            case_id=self._case_id or None,
            cases_left=0,
            next_suite=None,
            next_suite_in_s=None,
            waiting_for=None if self._case_id else "a first record of the real device",
            problem=None,
            outbox_pending=0,
            outbox_unstored=0,
            outbox_refused=0,
            outbox_bytes=0,
            last_acknowledged_s=None,
            telemetry_dropped=0,
            disk_free_bytes=0,
        )


def _session(broker: Broker, client_id: str, terms: Terms) -> Session:
    session = connect(broker, client_id, time.monotonic() + CONNECT_S, terms)
    session.endure()
    return session


def _listen(session: Session, records: dict[str, Record], stop: threading.Event, until_s: float) -> None:
    """Keep the records of the real device up to date until a monotonic time, or `stop`."""
    while not stop.is_set() and (wait_s := until_s - time.monotonic()) > 0:
        session.step(wait_s=min(wait_s, LISTEN_S))
        arrived = session.take_received()
        for record in (decode(one.body) for one in arrived):
            if record.status == "ok" and record.timing:
                records[record.case_id] = record
        session.acknowledge(arrived)


def run(url: str, device_id: str) -> None:
    """Publish until SIGTERM or SIGINT; raise Ended if the broker cannot be reached or goes away."""
    stop = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: stop.set())
    broker, records = parse_url(url), dict[str, Record]()
    with ExitStack() as stack:
        terms = Terms(max_packet_bytes=MAX_PACKET_BYTES)
        listener = stack.enter_context(closing(_session(broker, f"{SIMULATED}-listener", terms)))
        listener.subscribe([(f"{Topics(device_id).root}result/+", RESULT_QOS)])
        publishers = [stack.enter_context(closing(Publisher(device, broker, records))) for device in DEVICES]
        for tick in count():
            for publisher in publishers:
                publisher.tick(tick)
            _listen(listener, records, stop, time.monotonic() + TICK_S)
            if stop.is_set():
                return


if __name__ == "__main__":
    try:
        run(*sys.argv[1:])
    except Ended as end:
        sys.exit(str(end))
