"""Simulates the boards of `benchd demo`: the messages that each would publish, second by second.

They start with the results of previous days, followed by telemetry and new results. Within a minute, one board is
updated and becomes slower, one is throttled, and one goes silent.
"""

import math
import random
import time
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from typing import Literal

import msgspec
from msgspec import Struct

from benchd.daemon.delivery.connection import IncomingMessage
from benchd.daemon.delivery.messages import Event, Health, Info, Status, Telemetry
from benchd.daemon.delivery.topics import Kind, Topics
from benchd.daemon.records import Case, Environment, Record, Sample, encode, wall_now
from benchd.dashboard.demo.fleet import (
    CASES,
    HOT_CLOCK,
    NOISE,
    SIMULATED,
    VARIANTS,
    BoardPlan,
    Moment,
    environment,
    past,
    power_w,
    record,
)

TICK_S = 1.0
CASE_TICKS, HEALTH_TICKS = 5, 5
UPDATE_TICK, HOT_TICK, SILENT_TICK = 12, 20, 25  # ticks at which trouble begins on three boards
COOL_TICKS = 12  # ticks per minute in which a hot board recovers


def case_at(tick: int) -> Case:
    """Return the case that every board measures at a tick, cycling through the variants of a model."""
    return CASES[tick // CASE_TICKS % len(CASES)]


def ended_at(tick: int) -> tuple[Case, ...]:
    """Return the cases of the model whose last variant ends at this tick; usually there are none."""
    passed, rest = divmod(tick, CASE_TICKS * len(VARIANTS))
    first = (passed - 1) * len(VARIANTS) % len(CASES)
    return CASES[first : first + len(VARIANTS)] if passed and not rest else ()


def is_updated(device: BoardPlan, tick: int) -> bool:
    """Return whether the device runs its new setup at a tick."""
    return device.updated_days > 0 or (device.trouble == "slower" and tick >= UPDATE_TICK)


def is_hot(device: BoardPlan, tick: int) -> bool:
    """Return whether the device is throttled at a tick."""
    return device.trouble == "throttled" and tick >= HOT_TICK and (tick - HOT_TICK) % 60 < 60 - COOL_TICKS


def measured(device: BoardPlan, tick: int, chance: random.Random) -> list[Record]:
    """Return a device's results that end at a tick; an update is followed by its whole suite."""
    updates = device.trouble == "slower" and tick == UPDATE_TICK
    moment = Moment(time.time(), is_updated(device, tick), is_hot(device, tick))
    return [record(device, case, moment, chance) for case in (CASES if updates else ended_at(tick))]


def samples(device: BoardPlan, tick: int, chance: random.Random) -> Iterator[Sample]:
    """Yield the readings of a device's sensors at a tick."""
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


def health(tick: int) -> Health:
    """Return the health of a device that is measuring."""
    case = case_at(tick)
    return Health(
        t_wall=wall_now(),
        uptime_s=tick * TICK_S,
        activity="measuring",
        case_id=case.case_id,
        cases_left=len(CASES) - 1 - CASES.index(case),
    )


class Messages:
    """The messages that a device publishes, as they would arrive."""

    def __init__(self, device_id: str, boot_id: str = SIMULATED) -> None:
        self._topics, self._boot_id = Topics(device_id), boot_id

    def introduced(self, name: str, environment: Environment, tags: Iterable[str] = ()) -> list[IncomingMessage]:
        """Return the messages with the device's identity and online status."""
        info = Info(
            device_id=self._topics.device_id,
            boot_id=self._boot_id,
            name=name,
            site="demo",
            tags=list(tags),
            tool_version=version("benchd"),
            environment=environment,
            t_wall=wall_now(),
        )
        return [self.of("info", info), self.status("online")]

    def status(self, state: Literal["online", "offline"]) -> IncomingMessage:
        """Return the connection status message."""
        return self.of("status", Status(state=state, session=SIMULATED, boot_id=self._boot_id, t_wall=wall_now()))

    def result(self, body: bytes, run_id: str) -> IncomingMessage:
        """Return the message with a record."""
        return IncomingMessage(self._topics.result(run_id), body, time.time())

    def of(self, kind: Kind, said: Struct) -> IncomingMessage:
        """Return a message of this kind."""
        return IncomingMessage(self._topics.of(kind), msgspec.json.encode(said), time.time())


class SimulatedBoard:
    """A simulated device, including its past."""

    def __init__(self, device: BoardPlan) -> None:
        self._device, self._messages = device, Messages(device.device_id)
        self._chance = random.Random(device.device_id)  # noqa: S311 - no secret

    def past(self) -> Iterator[IncomingMessage]:
        """Yield the messages that it published before the demo began."""
        yield from self._introduced(0)
        yield from map(self._result, past(self._device, time.time(), self._chance))

    def tick(self, tick: int) -> Iterator[IncomingMessage]:
        """Yield the messages that it publishes at a tick."""
        device, messages = self._device, self._messages
        if device.trouble == "silent" and tick >= SILENT_TICK:
            yield from [messages.status("offline")] if tick == SILENT_TICK else []
            return
        case = case_at(tick)
        sensors = list(samples(device, tick, self._chance))
        yield messages.of("telemetry", Telemetry(case_id=case.case_id, samples=sensors))
        yield from map(self._result, measured(device, tick, self._chance))
        if is_updated(device, tick) != is_updated(device, tick - 1):
            detail = f"{SIMULATED}: {device.chip.new.driver}"
            yield messages.of("event", Event(event="updated", detail=detail, t_wall=wall_now(), boot_id=SIMULATED))
            yield from self._introduced(tick)
        if tick % HEALTH_TICKS == 0:
            yield messages.of("health", health(tick))

    def _introduced(self, tick: int) -> list[IncomingMessage]:
        device = self._device
        seen_now = environment(device, is_updated=is_updated(device, tick))
        return self._messages.introduced(f"{device.name} ({SIMULATED})", seen_now, [SIMULATED])

    def _result(self, record: Record) -> IncomingMessage:
        return self._messages.result(encode(record), record.run_id)
