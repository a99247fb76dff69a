"""The seven simulated boards of `benchd demo`, and the messages that each would publish, second by second.

All times and powers are invented, as each record says in its ids, flags, environment and energy scope. The messages
start with the results of previous days, followed by telemetry and new results. Within a minute, one board is updated
and becomes slower, one is throttled, and one goes silent.
"""

import hashlib
import math
import random
import time
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Literal, NamedTuple

import msgspec
from msgspec import Struct

from benchd.daemon.delivery.connection import IncomingMessage
from benchd.daemon.delivery.messages import Event, Health, Info, Status, Telemetry
from benchd.daemon.delivery.topics import Kind, Topics
from benchd.daemon.records import (
    Case,
    Check,
    Energy,
    Environment,
    ProcessResult,
    Record,
    Sample,
    Timing,
    Variant,
    encode,
    wall_now,
)
from benchd.daemon.verdicts.compare import ADVISED_PROCESSES
from benchd.daemon.verdicts.statistics import combine

SIMULATED = "simulated"
TICK_S = 1.0
CASE_TICKS, HEALTH_TICKS = 5, 5
UPDATE_TICK, HOT_TICK, SILENT_TICK = 12, 20, 25  # ticks at which trouble begins on three boards
DAY_S = 86400.0
DAYS = 8  # number of days with results before the demo
NOISE, RUN_NOISE = 0.004, 0.001  # variation between the processes of a run, and between runs
WINDOW_S, RUNS = 10.0, 700
SLOWER, HOT_TIME, HOT_POWER, HOT_CLOCK = 1.09, 1.3, 0.7, 0.6  # factors for a bad update, and for a hot board

LOADS = {"eager": 0.62, "fp16": 0.58, "custom": 0.86, "tensorrt-fp16": 0.95}  # shares of a chip's power, by variant
VARIANTS = tuple(LOADS)
MODELS = ("vim_tiny", "snn_onepass", "snn_stbif_resnet18")
CASES = tuple(Case(model=model, variant=Variant.parse(name)) for model in MODELS for name in VARIANTS)

Trouble = Literal["", "slower", "silent", "throttled", "failed check"]
Software = dict[str, str]


class Chip(NamedTuple):
    """A kind of board. `times_ms` has a row per model, with a time per variant; an update replaces `old` by `new`."""

    name: str
    machine: str
    power_mode: str | None
    power_w: float
    clock_hz: float
    memory_gib: int
    times_ms: tuple[tuple[float, ...], ...]
    old: Software
    new: Software


JETPACKS: tuple[Software, Software] = (
    {"driver": "L4T 36.4.3", "l4t": "36.4.3", "jetpack": "6.2"},
    {"driver": "L4T 36.4.7", "l4t": "36.4.7", "jetpack": "6.2.1"},
)
NANO_MS = ((61.0, 39.0, 30.5, 21.4), (5.6, 5.2, 1.45, 2.3), (118.0, 84.0, 27.5, 36.0))
AGX_MS = ((24.1, 15.8, 10.9, 8.2), (3.9, 3.8, 0.62, 1.02), (41.0, 30.0, 8.9, 11.7))
DESKTOP_MS = ((8.8, 8.1, 2.31, 2.31), (1.9, 1.85, 0.14, 0.24), (12.4, 11.9, 1.75, 2.6))
ORIN_NANO = Chip("Orin Nano", "aarch64", "15W", 14.0, 625e6, 8, NANO_MS, *JETPACKS)
ORIN_AGX = Chip("Orin AGX", "aarch64", "MAXN", 42.0, 1300e6, 64, AGX_MS, *JETPACKS)
DESKTOP = Chip(
    "Desktop GPU", "x86_64", None, 220.0, 2500e6, 64, DESKTOP_MS, {"driver": "570.86.15"}, {"driver": "575.57.08"}
)


class Board(NamedTuple):
    """A board. It was updated `updated_days` before the demo, if at all; `trouble` occurs during the demo."""

    name: str
    chip: Chip
    trouble: Trouble = ""
    updated_days: int = 0

    @property
    def device_id(self) -> str:
        """Return an id that shows that the board is simulated."""
        return f"{SIMULATED}-{self.name.lower().replace(' ', '-')}"

    def is_updated(self, tick: int) -> bool:
        """Return whether the board runs its new setup at a tick."""
        return self.updated_days > 0 or (self.trouble == "slower" and tick >= UPDATE_TICK)

    def is_hot(self, tick: int) -> bool:
        """Return whether the board is throttled at a tick."""
        return self.trouble == "throttled" and tick >= HOT_TICK

    def power_w(self, case: Case, *, hot: bool) -> float:
        """Return the power while the board measures a case."""
        return self.chip.power_w * LOADS[case.variant.name] * (HOT_POWER if hot else 1.0)

    def environment(self, *, updated: bool) -> Environment:
        """Return the board's identity before or after its update."""
        chip, name = self.chip, f"{SIMULATED} {self.chip.name}"
        software = chip.new if updated else chip.old
        return Environment(
            fingerprint=hashlib.sha256(f"{chip.name} {software}".encode()).hexdigest()[:16],
            machine=chip.machine,
            os=SIMULATED,
            kernel=SIMULATED,
            board=name,
            soc=None,
            cpu_model=SIMULATED,
            cpu_count=8,
            cpu_governor=None,
            cpu_max_hz=None,
            memory_bytes=chip.memory_gib * 2**30,
            device="cuda",
            gpu=name,
            power_mode=chip.power_mode,
            clocks_locked=True,
            threads=8,
            driver=software["driver"],
            jetpack=software.get("jetpack"),
            l4t=software.get("l4t"),
        )


BOARDS = (
    Board("Orin Nano 1", ORIN_NANO, updated_days=3),
    Board("Orin Nano 2", ORIN_NANO, "failed check"),
    Board("Orin Nano 3", ORIN_NANO, "silent"),
    Board("Orin AGX 1", ORIN_AGX, updated_days=3),
    Board("Orin AGX 2", ORIN_AGX, "slower"),
    Board("Desktop GPU 1", DESKTOP),
    Board("Desktop GPU 2", DESKTOP, "throttled"),
)


def past(board: Board, now_s: float, chance: random.Random) -> Iterator[Record]:
    """Yield a board's results from previous days, oldest first."""
    for days in range(DAYS, 0, -1):
        for number, case in enumerate(CASES):
            at_s = now_s - days * DAY_S + 60.0 * number
            yield record(board, case, at_s, chance, updated=days <= board.updated_days)


def measured(board: Board, tick: int, chance: random.Random) -> list[Record]:
    """Return a board's results that end at a tick; an update is followed by its whole suite."""
    ended = [_case_at(tick - 1)] if tick and tick % CASE_TICKS == 0 else []
    cases = CASES if board.trouble == "slower" and tick == UPDATE_TICK else ended
    updated, hot = board.is_updated(tick), board.is_hot(tick)
    return [record(board, case, time.time(), chance, updated=updated, hot=hot) for case in cases]


def record(
    board: Board, case: Case, at_s: float, chance: random.Random, *, updated: bool = False, hot: bool = False
) -> Record:
    """Return the record of a run of a case at the Unix time `at_s`."""
    time_ms = board.chip.times_ms[MODELS.index(case.model)][VARIANTS.index(case.variant.name)]
    time_ms *= (SLOWER if updated and board.trouble == "slower" else 1.0) * (HOT_TIME if hot else 1.0)
    time_ms *= chance.gauss(1.0, RUN_NOISE)
    medians_ms = [time_ms * chance.gauss(1.0, NOISE) for _ in range(ADVISED_PROCESSES)]
    median_ms, interval = combine(medians_ms)
    low_ms, high_ms = (interval.low, interval.high) if interval else (None, None)
    power_w = board.power_w(case, hot=hot) * chance.gauss(1.0, RUN_NOISE)
    fails = board.trouble == "failed check" and case.case_id.startswith("vim_tiny,tensorrt")
    return Record(
        run_id=f"{chance.getrandbits(128):032x}",
        suite_id=f"{SIMULATED}-{at_s:.0f}",
        device_id=board.device_id,
        case_id=case.case_id,
        case=case,
        status="ok",
        t_wall=f"{datetime.fromtimestamp(at_s, timezone.utc):%Y-%m-%dT%H:%M:%SZ}",
        t_mono_ns=int(at_s * 1e9),
        boot_id=SIMULATED,
        tool_version=version("benchd"),
        environment=board.environment(updated=updated),
        preset="standard",
        kernels_ran="triton" if case.variant.kernels == "custom" else None,
        timing=_timing(median_ms, low_ms, high_ms),
        throughput_per_s=case.batch_size * 1e3 / median_ms,
        throughput_basis="batch_over_median",
        energy=Energy(
            energy_j=power_w * WINDOW_S,
            energy_err_j=0.02 * power_w * WINDOW_S,
            gross_per_inference_j=power_w * median_ms / 1e3 / case.batch_size,
            scope=f"{SIMULATED} module input",
            source=SIMULATED,
            sensor_period_s=0.1,
            updates=100,
        ),
        check=_check(case, fails=fails),
        flags=[SIMULATED, *["throttled"] * hot],
        missing={"x_of_floor": SIMULATED, "memory": SIMULATED},
        processes=[ProcessResult(status="ok", timing=_timing(ms, None, None)) for ms in medians_ms],
    )


def _timing(median_ms: float, low_ms: float | None, high_ms: float | None) -> Timing:
    return Timing(
        median_ms=median_ms,
        low_ms=low_ms,
        high_ms=high_ms,
        mean_ms=1.002 * median_ms,
        min_ms=0.98 * median_ms,
        max_ms=1.2 * median_ms,
        p99_ms=1.05 * median_ms,
        runs=RUNS,
        interval_basis="between_processes",
    )


def _check(case: Case, *, fails: bool) -> Check:
    is_half = case.variant.precision == "fp16"
    return Check(
        passed=not fails,
        rule="outputs",
        images=64,
        max_abs_error=4.1 if fails else 0.01 if is_half else 1e-5,
        error_share=0.31 if fails else 1e-3 if is_half else 1e-6,
        tolerance=2e-2 if is_half else 1e-4,
        images_off=57 if fails else 0,
        argmax_disagreements=41 if fails else 0,
    )


def _case_at(tick: int) -> Case:
    """Return the case that every board measures at a tick."""
    return CASES[tick // CASE_TICKS % len(CASES)]


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
    """The messages of a simulated board."""

    def __init__(self, board: Board) -> None:
        self._board, self._messages = board, Messages(board.device_id)
        self._chance = random.Random(board.device_id)  # noqa: S311 - no secret

    def past(self) -> Iterator[IncomingMessage]:
        """Yield the messages that it published before the demo began."""
        yield from self._introduced(0)
        yield from map(self._result, past(self._board, time.time(), self._chance))

    def tick(self, tick: int) -> Iterator[IncomingMessage]:
        """Yield the messages that it publishes at a tick."""
        board, messages, case = self._board, self._messages, _case_at(tick)
        if board.trouble == "silent" and tick >= SILENT_TICK:
            yield from [messages.status("offline")] if tick == SILENT_TICK else []
            return
        yield messages.of("telemetry", Telemetry(case_id=case.case_id, samples=list(self._samples(tick, case))))
        yield from map(self._result, measured(board, tick, self._chance))
        if board.is_updated(tick) != board.is_updated(tick - 1):
            detail = f"{SIMULATED}: {board.chip.new['driver']}"
            yield messages.of("event", Event(event="updated", detail=detail, t_wall=wall_now(), boot_id=SIMULATED))
            yield from self._introduced(tick)
        if tick % HEALTH_TICKS == 0:
            left = len(CASES) - 1 - CASES.index(case)
            health = Health(
                t_wall=wall_now(),
                uptime_s=tick * TICK_S,
                activity="measuring",
                case_id=case.case_id,
                cases_left=left,
            )
            yield messages.of("health", health)

    def _samples(self, tick: int, case: Case) -> Iterator[Sample]:
        """Yield the readings of the board's sensors."""
        hot, load = self._board.is_hot(tick), 0.9 + 0.1 * math.sin(tick / 7)
        values = {
            "power_w": self._board.power_w(case, hot=hot),
            "gpu_clock_hz": self._board.chip.clock_hz * (HOT_CLOCK if hot else 1.0),
            "gpu_temp_c": (82.0 if hot else 55.0) + 6.0 * load,
            "gpu_utilization_percent": 95.0 * load,
            "process_rss_bytes": 7e8 * load,
        }
        for metric, value in values.items():
            yield Sample(time.monotonic_ns(), metric, value * self._chance.gauss(1.0, NOISE), SIMULATED)
        # software thermal slowdown
        yield Sample(time.monotonic_ns(), "gpu_throttle_reasons", 0x20 if hot else 0, SIMULATED)

    def _introduced(self, tick: int) -> list[IncomingMessage]:
        board = self._board
        environment = board.environment(updated=board.is_updated(tick))
        return self._messages.introduced(f"{board.name} ({SIMULATED})", environment, [SIMULATED])

    def _result(self, record: Record) -> IncomingMessage:
        return self._messages.result(encode(record), record.run_id)
