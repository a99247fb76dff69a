"""Finds the disturbed blocks of a measurement, their causes, and the result with and without them; pure functions.

A reading refers to the time since the previous one: counts and shares are for exactly that time, and a state may have
changed at any point in it. A reading applies to every block that overlaps this time, but a clock only to the block in
which it was read. A block without readings counts as undisturbed.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from statistics import fmean, median

from benchd.daemon.records import BlocksResult, Interference, Sample, Window, throttles
from benchd.daemon.verdicts.statistics import block_estimate

CLOCK_SHARE = 0.97
STEAL_PERCENT = 1.0  # one 10 ms tick in a half-second block on two CPUs


@dataclass(frozen=True)
class _Reading:
    since_ns: int
    t_ns: int
    value: float


_SINCE, _READ_AT = attrgetter("since_ns"), attrgetter("t_ns")  # both increase along a series


def assess(
    samples: Sequence[Sample], blocks: Sequence[Window], medians_ms: Sequence[float], device: str
) -> Interference:
    """Return the causes of disturbance in each block, and the medians with and without the disturbed blocks.

    Clocks and throttling are those of `device`, `cuda` or `cpu`; foreign GPU processes matter only for `cuda`.
    `samples` may be unsorted and contain duplicates. Raises ValueError without blocks or with a different number of
    medians.
    """
    if not blocks or len(blocks) != len(medians_ms):
        raise ValueError(f"{len(blocks)} blocks and {len(medians_ms)} medians")
    flagged = {
        "low_clock": _low_clock(samples, blocks, device),
        "steal": _steal(samples, blocks),
        "major_faults": _any(samples, blocks, "process_major_faults_per_s", _is_positive),
        "cpu_quota_throttled": _any(samples, blocks, "cpu_quota_stops", _is_positive),
        "throttled": _any(samples, blocks, throttling_of(device), throttles),
    }
    if device == "cuda":
        flagged["foreign_gpu_process"] = _any(samples, blocks, "gpu_foreign_processes", _is_positive)
    reasons = [sorted(name for name in flagged if i in flagged[name]) for i in range(len(blocks))]
    clean = [value for value, disturbances in zip(medians_ms, reasons, strict=True) if not disturbances]
    return Interference(
        reasons=reasons,
        clean=_result(clean or medians_ms),
        as_experienced=_result(medians_ms),
        all_flagged=not clean,
    )


def throttling_of(device: str) -> str:
    """Return the metric for the throttle reasons of this device, `cuda` or `cpu`."""
    return "gpu_throttle_reasons" if device == "cuda" else "cpu_throttle_reasons"


def _result(medians_ms: Sequence[float]) -> BlocksResult:
    centre_ms, interval = block_estimate(medians_ms)
    return BlocksResult(
        median_ms=centre_ms,
        low_ms=interval.low if interval else None,
        high_ms=interval.high if interval else None,
        blocks=len(medians_ms),
    )


def _low_clock(samples: Sequence[Sample], blocks: Sequence[Window], device: str) -> set[int]:
    """Return the blocks whose mean clock is below 97 % of the median block's, in any series of the device.

    For CPUs, only the mean over all cores is considered, because an idle cluster runs at a low clock.
    """
    metric = "gpu_clock_hz" if device == "cuda" else "cpu_clock_hz"
    low: set[int] = set()
    for rail, readings in _series(samples, metric):
        means = _means(readings, blocks, _read_in)
        if means and (device == "cuda" or not rail):
            typical_hz = median(list(means.values()))
            low |= {i for i, mean_hz in means.items() if mean_hz < CLOCK_SHARE * typical_hz}
    return low


def _steal(samples: Sequence[Sample], blocks: Sequence[Window]) -> set[int]:
    return {
        i
        for _, readings in _series(samples, "cpu_steal_percent")
        for i, percent in _means(readings, blocks, _touching).items()
        if percent > STEAL_PERCENT
    }


def _any(
    samples: Sequence[Sample], blocks: Sequence[Window], metric: str, disturbs: Callable[[float], bool]
) -> set[int]:
    """Return the blocks to which a disturbing reading applies."""
    return {
        i
        for _, readings in _series(samples, metric)
        for i, block in enumerate(blocks)
        if any(disturbs(reading.value) for reading in _touching(readings, block))
    }


def _is_positive(value: float) -> bool:
    return value > 0


def _means(
    readings: list[_Reading], blocks: Sequence[Window], select: Callable[[list[_Reading], Window], list[_Reading]]
) -> dict[int, float]:
    """Return the mean of each block's readings by block index, without the blocks that have none."""
    in_block = {i: select(readings, block) for i, block in enumerate(blocks)}
    return {i: fmean(reading.value for reading in mine) for i, mine in in_block.items() if mine}


def _read_in(readings: list[_Reading], block: Window) -> list[_Reading]:
    first, end = bisect_left(readings, block.start_ns, key=_READ_AT), bisect_right(readings, block.end_ns, key=_READ_AT)
    return readings[first:end] or _touching(readings, block)


def _touching(readings: list[_Reading], block: Window) -> list[_Reading]:
    first, end = bisect_right(readings, block.start_ns, key=_READ_AT), bisect_left(readings, block.end_ns, key=_SINCE)
    return readings[first:end]


def _series(samples: Sequence[Sample], metric: str) -> Iterable[tuple[str, list[_Reading]]]:
    """Yield the rail and the readings, sorted by time, for each source of the metric."""
    series: dict[tuple[str, str], dict[int, float]] = {}
    for sample in samples:
        if sample.metric == metric:
            series.setdefault((sample.source, sample.rail), {})[sample.t_ns] = sample.value
    for (_, rail), values in series.items():
        points = sorted(values.items())
        steps = pairwise([points[0], *points])  # the first reading has no duration
        yield rail, [_Reading(t0, t1, value) for (t0, _), (t1, value) in steps]
