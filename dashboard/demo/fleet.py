"""The fleet of `benchd demo`: seven simulated boards of three kinds, their measurements, and their troubles.

All times and powers here are invented, as each record says in its ids, flags, environment and energy scope. Power is
the energy of an inference times the rate.
"""

import hashlib
import random
from collections.abc import Iterator
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Literal, NamedTuple

from benchd.daemon.records import Case, Check, Energy, Environment, ProcessResult, Record, Timing, Variant
from benchd.daemon.verdicts.compare import ADVISED_PROCESSES
from benchd.daemon.verdicts.statistics import combine

SIMULATED = "simulated"
VARIANTS = ("eager", "fp16", "custom", "tensorrt-fp16")
LOADS = dict(zip(VARIANTS, (0.62, 0.58, 0.86, 0.95), strict=True))  # shares of a chip's power
DAY_S = 86400.0
DAYS = 8  # number of days with results before the demo
NOISE, RUN_NOISE = 0.004, 0.001  # variation between the processes of a run, and between runs
WINDOW_S, RUNS = 10.0, 700

Trouble = Literal["", "slower", "silent", "throttled", "failed check"]


class SystemSoftware(NamedTuple):
    """The system software of a board; `l4t` and `jetpack` are None with a desktop driver."""

    driver: str
    l4t: str | None = None
    jetpack: str | None = None


class Chip(NamedTuple):
    """A kind of board. `times_ms` contains VARIANTS' times by model; an update replaces the setup `old` by `new`."""

    name: str
    machine: str
    power_mode: str | None
    power_w: float
    clock_hz: float
    memory_gib: int
    times_ms: dict[str, tuple[float, float, float, float]]
    old: SystemSoftware
    new: SystemSoftware


class BoardPlan(NamedTuple):
    """A board. It was updated `updated_days` before the demo, if at all; `trouble` occurs during the demo."""

    name: str
    chip: Chip
    trouble: Trouble = ""
    updated_days: int = 0

    @property
    def device_id(self) -> str:
        """Return an id that shows that the device is simulated."""
        return f"{SIMULATED}-{self.name.lower().replace(' ', '-')}"


class Moment(NamedTuple):
    """The Unix time at which a board measures, and its state at that time."""

    at_s: float
    is_updated: bool = False
    is_hot: bool = False


JETPACKS = SystemSoftware("L4T 36.4.3", "36.4.3", "6.2"), SystemSoftware("L4T 36.4.7", "36.4.7", "6.2.1")
DRIVERS = SystemSoftware("570.86.15"), SystemSoftware("575.57.08")
ORIN_NANO = Chip(
    "Orin Nano",
    "aarch64",
    "15W",
    14.0,
    625e6,
    8,
    {
        "vim_tiny": (61.0, 39.0, 30.5, 21.4),
        "snn_onepass": (5.6, 5.2, 1.45, 2.3),
        "snn_stbif_resnet18": (118.0, 84.0, 27.5, 36.0),
    },
    *JETPACKS,
)
ORIN_AGX = Chip(
    "Orin AGX",
    "aarch64",
    "MAXN",
    42.0,
    1300e6,
    64,
    {
        "vim_tiny": (24.1, 15.8, 10.9, 8.2),
        "snn_onepass": (3.9, 3.8, 0.62, 1.02),
        "snn_stbif_resnet18": (41.0, 30.0, 8.9, 11.7),
    },
    *JETPACKS,
)
DESKTOP = Chip(
    "Desktop GPU",
    "x86_64",
    None,
    220.0,
    2500e6,
    64,
    {
        "vim_tiny": (8.8, 8.1, 2.31, 2.31),
        "snn_onepass": (1.9, 1.85, 0.14, 0.24),
        "snn_stbif_resnet18": (12.4, 11.9, 1.75, 2.6),
    },
    *DRIVERS,
)
DEVICES = (
    BoardPlan("Orin Nano 1", ORIN_NANO, updated_days=3),
    BoardPlan("Orin Nano 2", ORIN_NANO, "failed check"),
    BoardPlan("Orin Nano 3", ORIN_NANO, "silent"),
    BoardPlan("Orin AGX 1", ORIN_AGX, updated_days=3),
    BoardPlan("Orin AGX 2", ORIN_AGX, "slower"),
    BoardPlan("Desktop GPU 1", DESKTOP),
    BoardPlan("Desktop GPU 2", DESKTOP, "throttled"),
)
CASES = tuple(Case(model=model, variant=Variant.parse(name)) for model in ORIN_NANO.times_ms for name in VARIANTS)
SLOWER, HOT_TIME, HOT_POWER, HOT_CLOCK = 1.09, 1.3, 0.7, 0.6  # factors for a bad update, and for a hot board


def past(device: BoardPlan, now_s: float, chance: random.Random) -> Iterator[Record]:
    """Yield a device's results from previous days, oldest first."""
    for days in range(DAYS, 0, -1):
        moment = Moment(now_s - days * DAY_S, is_updated=days <= device.updated_days)
        for number, case in enumerate(CASES):
            yield record(device, case, moment._replace(at_s=moment.at_s + 60.0 * number), chance)


def record(device: BoardPlan, case: Case, moment: Moment, chance: random.Random) -> Record:
    """Return the record of one run of a case."""
    centre_ms = _time_ms(device, case, moment) * chance.gauss(1.0, RUN_NOISE)
    timing, processes = _timings(centre_ms, chance)
    number = f"{chance.getrandbits(128):032x}"
    return Record(
        run_id=number,
        suite_id=f"{SIMULATED}-{moment.at_s:.0f}",
        device_id=device.device_id,
        case_id=case.case_id,
        case=case,
        status="ok",
        t_wall=f"{datetime.fromtimestamp(moment.at_s, timezone.utc):%Y-%m-%dT%H:%M:%SZ}",
        t_mono_ns=int(moment.at_s * 1e9),
        boot_id=SIMULATED,
        tool_version=version("benchd"),
        environment=environment(device, is_updated=moment.is_updated),
        preset="standard",
        kernels_ran="triton" if case.variant.kernels == "custom" else None,
        timing=timing,
        throughput_per_s=case.batch_size * 1e3 / timing.median_ms,
        throughput_basis="batch_over_median",
        energy=_energy(power_w(device, case, is_hot=moment.is_hot) * chance.gauss(1.0, RUN_NOISE), case, timing),
        check=_check(case, fails=device.trouble == "failed check" and case.case_id.startswith("vim_tiny,tensorrt")),
        flags=[SIMULATED, *["throttled"] * moment.is_hot],
        missing={"x_of_floor": SIMULATED, "memory": SIMULATED},
        processes=processes,
    )


def power_w(device: BoardPlan, case: Case, *, is_hot: bool) -> float:
    """Return the power of a device while it measures a case."""
    return device.chip.power_w * LOADS[case.variant.name] * (HOT_POWER if is_hot else 1.0)


def environment(device: BoardPlan, *, is_updated: bool) -> Environment:
    """Return a device's identity before or after its update."""
    chip, name = device.chip, f"{SIMULATED} {device.chip.name}"
    setup = chip.new if is_updated else chip.old
    return Environment(
        fingerprint=hashlib.sha256(f"{chip.name} {setup}".encode()).hexdigest()[:16],
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
        driver=setup.driver,
        power_mode=chip.power_mode,
        clocks_locked=True,
        threads=8,
        jetpack=setup.jetpack,
        l4t=setup.l4t,
    )


def _time_ms(device: BoardPlan, case: Case, moment: Moment) -> float:
    time_ms = device.chip.times_ms[case.model][VARIANTS.index(case.variant.name)]
    slower = SLOWER if moment.is_updated and device.trouble == "slower" else 1.0
    return time_ms * slower * (HOT_TIME if moment.is_hot else 1.0)


def _timings(expected_ms: float, chance: random.Random) -> tuple[Timing, list[ProcessResult]]:
    """Return the timing over all processes, and that of each process."""
    medians_ms = [expected_ms * chance.gauss(1.0, NOISE) for _ in range(ADVISED_PROCESSES)]
    centre_ms, interval = combine(medians_ms)
    low_ms, high_ms = (interval.low, interval.high) if interval else (None, None)
    processes = [ProcessResult(status="ok", timing=_timing(median_ms, None, None)) for median_ms in medians_ms]
    return _timing(centre_ms, low_ms, high_ms, max(medians_ms)), processes


def _timing(median_ms: float, low_ms: float | None, high_ms: float | None, slowest_ms: float = 0.0) -> Timing:
    return Timing(
        median_ms=median_ms,
        low_ms=low_ms,
        high_ms=high_ms,
        mean_ms=1.002 * median_ms,
        min_ms=0.98 * median_ms,
        max_ms=1.2 * median_ms,
        p99_ms=1.05 * max(median_ms, slowest_ms),
        runs=RUNS,
        interval_basis="between_processes",
    )


def _energy(power: float, case: Case, timing: Timing) -> Energy:
    return Energy(
        energy_j=power * WINDOW_S,
        energy_err_j=0.02 * power * WINDOW_S,
        gross_per_inference_j=power * timing.median_ms / 1e3 / case.batch_size,
        scope=f"{SIMULATED} module input",
        source=SIMULATED,
        sensor_period_s=0.1,
        updates=100,
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
