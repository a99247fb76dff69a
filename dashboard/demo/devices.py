"""The simulated boards of `benchd demo`: python -m benchd.dashboard.demo.devices URL.

They publish what services would: first the results of the days before, then telemetry and new results. Within a minute
one board is updated and slower, one is throttled, and one goes silent.
"""

import math
import random
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from importlib.metadata import version
from itertools import count
from typing import Literal

import msgspec

from benchd.daemon.delivery.broker import Broker, Ended, parse_url
from benchd.daemon.delivery.messages import Event, Health, Info, Status, Telemetry
from benchd.daemon.delivery.session import Session, Terms, connect
from benchd.daemon.delivery.topics import RESULT_QOS, Kind, Topics
from benchd.daemon.records import Case, Record, Sample, encode, wall_now
from benchd.dashboard.demo.fleet import (
    CASES,
    DEVICES,
    HOT_CLOCK,
    NOISE,
    SIMULATED,
    VARIANTS,
    Device,
    Moment,
    environment,
    past,
    power_w,
    record,
)
from benchd.dashboard.feed import CONNECT_S

TICK_S = 1.0
CASE_TICKS, HEALTH_TICKS = 5, 5
UPDATE_TICK, HOT_TICK, SILENT_TICK = 12, 20, 25  # of the boards whose trouble it is
COOL_TICKS = 12  # of each minute, in which a hot board recovers


def case_at(tick: int) -> Case:
    """Return what every board measures at a tick: the variants of a model in turn."""
    return CASES[tick // CASE_TICKS % len(CASES)]


def ended_at(tick: int) -> tuple[Case, ...]:
    """Return the cases of the model whose last variant ends at a tick: none at most ticks."""
    passed, rest = divmod(tick, CASE_TICKS * len(VARIANTS))
    first = (passed - 1) * len(VARIANTS) % len(CASES)
    return CASES[first : first + len(VARIANTS)] if passed and not rest else ()


def is_updated(device: Device, tick: int) -> bool:
    """Return whether the device runs its new setup at a tick."""
    return device.updated_days > 0 or (device.trouble == "slower" and tick >= UPDATE_TICK)


def is_hot(device: Device, tick: int) -> bool:
    """Return whether the device is throttled at a tick."""
    return device.trouble == "throttled" and tick >= HOT_TICK and (tick - HOT_TICK) % 60 < 60 - COOL_TICKS


def measured(device: Device, tick: int, chance: random.Random) -> list[Record]:
    """Return the results of a device that end at a tick; an update is followed by its whole suite."""
    updates = device.trouble == "slower" and tick == UPDATE_TICK
    moment = Moment(time.time(), is_updated(device, tick), is_hot(device, tick))
    return [record(device, case, moment, chance) for case in (CASES if updates else ended_at(tick))]


def samples(device: Device, tick: int, chance: random.Random) -> Iterator[Sample]:
    """Yield what the sensors of a device would read at a tick."""
    hot, load = is_hot(device, tick), 0.9 + 0.1 * math.sin(tick / 7)
    values = {
        "power_w": power_w(device, case_at(tick), is_hot=hot),
        "gpu_clock_hz": device.chip.clock_hz * (HOT_CLOCK if hot else 1.0),
        "gpu_temp_c": (82.0 if hot else 55.0) + 6.0 * load,
        "gpu_utilization_percent": 95.0 * load,
        "process_rss_bytes": 7e8 * load,
        "gpu_throttle_reasons": 0x20 if hot else 0,  # software thermal slowdown
    }
    for metric, value in values.items():
        noisy = value if metric == "gpu_throttle_reasons" else value * chance.gauss(1.0, NOISE)
        yield Sample(time.monotonic_ns(), metric, noisy, SIMULATED)


class Publisher:
    """One device and its connection, from its past on."""

    def __init__(self, device: Device, broker: Broker) -> None:
        self._device, self._topics = device, Topics(device.device_id)
        self._chance = random.Random(device.device_id)  # noqa: S311 - no secret
        self._session = _session(broker, device.device_id, Terms(will=(self._topics.of("status"), _status("offline"))))
        self._is_there = True
        self._retain("info", msgspec.json.encode(self._info(0)))
        self._retain("status", _status("online"))
        self._send(past(device, time.time(), self._chance))

    def tick(self, tick: int) -> None:
        """Publish what is due at a tick; raise Ended if the broker is gone."""
        if self._device.trouble == "silent" and tick == SILENT_TICK:
            self.close()
        if not self._is_there:
            return
        self._session.step(wait_s=0.0)
        self._session.take_acknowledged()
        telemetry = Telemetry(case_id=case_at(tick).case_id, samples=list(samples(self._device, tick, self._chance)))
        self._session.publish(self._topics.of("telemetry"), msgspec.json.encode(telemetry), 0)
        self._send(measured(self._device, tick, self._chance))
        if is_updated(self._device, tick) != is_updated(self._device, tick - 1):
            self._tell_update(tick)
        if tick % HEALTH_TICKS == 0:
            self._retain("health", msgspec.json.encode(_health(tick)))

    def close(self) -> None:
        """Publish `offline` and disconnect."""
        if self._is_there:
            self._is_there = False
            self._retain("status", _status("offline"))
            self._session.close()

    def _send(self, records: Iterable[Record]) -> None:
        """Publish results, no faster than the broker takes them."""
        for one in records:
            while not self._session.free:
                self._session.step()
                self._session.take_acknowledged()
            self._session.publish(self._topics.result(one.run_id), encode(one), RESULT_QOS)

    def _tell_update(self, tick: int) -> None:
        setup = self._device.chip.new
        event = Event(event="updated", detail=f"{SIMULATED}: {setup.driver}", t_wall=wall_now(), boot_id=SIMULATED)
        self._session.publish(self._topics.of("event"), msgspec.json.encode(event), RESULT_QOS)
        self._retain("info", msgspec.json.encode(self._info(tick)))

    def _retain(self, kind: Kind, body: bytes) -> None:
        self._session.publish(self._topics.of(kind), body, RESULT_QOS, retain=True)

    def _info(self, tick: int) -> Info:
        return Info(
            device_id=self._device.device_id,
            boot_id=SIMULATED,
            name=f"{self._device.name} ({SIMULATED})",
            site="demo",
            tags=[SIMULATED],
            tool_version=version("benchd"),
            environment=environment(self._device, is_updated=is_updated(self._device, tick)),
            suites=[],
            catalogue_sha256="",
            t_wall=wall_now(),
        )


def _status(state: Literal["online", "offline"]) -> bytes:
    status = Status(state=state, session=1, boot_id=SIMULATED, instance=SIMULATED, held_s=0.0, t_wall=wall_now())
    return msgspec.json.encode(status)


def _health(tick: int) -> Health:
    return Health(
        t_wall=wall_now(),
        uptime_s=tick * TICK_S,
        rss_bytes=0,
        activity="measuring",
        case_id=case_at(tick).case_id,
        cases_left=len(CASES) - 1 - CASES.index(case_at(tick)),
        next_suite=None,
        next_suite_in_s=None,
        waiting_for=None,
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


def _await_collector(broker: Broker, stop: threading.Event) -> None:
    """Send one result until a collector confirms it: none is there to be given the past before."""
    topics, chance = Topics(DEVICES[0].device_id), random.Random(SIMULATED)  # noqa: S311 - no secret
    first = next(past(DEVICES[0], time.time() - TICK_S, chance))
    with closing(_session(broker, f"{SIMULATED}-first", Terms())) as session:
        session.subscribe([(f"{topics.root}ack/+", RESULT_QOS)])
        while not session.take_received() and not stop.is_set():
            session.publish(topics.result(first.run_id), encode(first), RESULT_QOS)
            session.take_acknowledged()
            session.step(wait_s=TICK_S)
            stop.wait(TICK_S / 5)
            session.step(wait_s=0.0)


def run(url: str) -> None:
    """Publish until SIGTERM or SIGINT; raise Ended if the broker cannot be reached or goes away."""
    stop = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: stop.set())
    broker = parse_url(url)
    _await_collector(broker, stop)
    with ExitStack() as stack:
        publishers = [stack.enter_context(closing(Publisher(device, broker))) for device in DEVICES]
        for tick in count():
            for publisher in publishers:
                publisher.tick(tick)
            if stop.wait(TICK_S):
                return


if __name__ == "__main__":
    try:
        run(*sys.argv[1:])
    except Ended as end:
        sys.exit(str(end))
