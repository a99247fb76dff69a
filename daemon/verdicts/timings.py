"""Computes the statistics of run times that a record contains: percentiles, disturbed blocks and two levels; pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

import msgspec

from benchd.daemon.records import PERCENTILES, Level, ProcessResult, Timing
from benchd.daemon.verdicts import statistics
from benchd.daemon.verdicts.statistics import Interval, centre

LEAST_GAP = 0.02
"""The smallest relative gap between levels; a smaller jump matters no more than noise.

The mean of a few processes depends on how many of them are at each level, so its interval is wrong: with 5 processes,
where a fifth of all processes are 30 % slower, it contains the true mean in only 67 %. The levels are therefore
reported.
"""

SPREAD_FLOOR = 0.005
_SEPARATIONS = {3: 47.0, 4: 29.0, 5: 14.7, 6: 10.5, 7: 8.6}
_SEPARATION = 6.5
_RARE = 0.05


def timing(values_ns: Sequence[int], interval_ns: Interval | None, median_ns: float) -> Timing:
    """Return the statistics of one part; a percentile is None with too few runs."""
    ordered = sorted(float(value) for value in values_ns)
    mild, severe = statistics.tukey_outliers(ordered)
    summary = Timing(
        median_ms=median_ns / 1e6,
        low_ms=interval_ns.low / 1e6 if interval_ns else None,
        high_ms=interval_ns.high / 1e6 if interval_ns else None,
        mean_ms=math.fsum(ordered) / len(ordered) / 1e6,
        min_ms=ordered[0] / 1e6,
        max_ms=ordered[-1] / 1e6,
        runs=len(ordered),
        outliers_mild=mild,
        outliers_severe=severe,
    )
    return msgspec.structs.replace(summary, **_percentiles(ordered))


def _percentiles(ordered_ns: Sequence[float]) -> dict[str, float | None]:
    """Return the percentiles of ascending values in ms; None with too few values, or if the percentile is infinite."""
    percentiles = {name: statistics.backed_percentile(ordered_ns, q) for name, q in PERCENTILES.items()}
    percentiles["p99_upper_ms"] = statistics.percentile_upper_bound(ordered_ns, 99)
    return {
        name: value / 1e6 if value is not None and math.isfinite(value) else None for name, value in percentiles.items()
    }


def part_timing(values_ns: Sequence[int]) -> Timing:
    """Return the statistics of a part that the stop rule ignores; its blocks are tenths of the loop's runs."""
    median_ns, interval_ns = statistics.block_estimate(_tenths(values_ns))
    return timing(values_ns, interval_ns, median_ns)


def _tenths(values: Sequence[float]) -> list[float]:
    size = max(1, len(values) // 10)
    return [median(values[i : i + size]) for i in range(0, len(values) - size + 1, size)]


def request_timing(latencies_ns: Sequence[float]) -> Timing:
    """Return the statistics of requests in the order of their arrival; a dropped request has infinite latency.

    The median and the percentiles are those of all requests, the other statistics those of the answered ones. If none
    was dropped, the median is that of `part_timing`. If half or more were dropped, the median is that of the answered
    ones and has no interval.
    """
    answered = [int(value) for value in latencies_ns if math.isfinite(value)]
    ordered, medians = sorted(map(float, latencies_ns)), _tenths(latencies_ns)
    if all(map(math.isfinite, medians)):
        median_ns, interval_ns = statistics.block_estimate(medians)
        latency = timing(answered, interval_ns, median_ns)
    else:
        median_ns = median(ordered)
        latency = timing(answered, None, median_ns if math.isfinite(median_ns) else median(answered))
    return msgspec.structs.replace(latency, **_percentiles(ordered))


@dataclass(frozen=True)
class DisturbedBlocks:
    """The number of a case's disturbed blocks, the causes, and the median without and with these blocks."""

    disturbed: int
    blocks: int
    reasons: list[str]
    clean_ms: float
    as_experienced_ms: float


def disturbed(processes: Sequence[ProcessResult]) -> DisturbedBlocks | None:
    """Return what disturbed a case's processes, None if nothing did; processes with a time of 0 are left out."""
    interferences = [process.interference for process in processes if process.interference]
    comparable = [
        interference
        for interference in interferences
        if min(interference.clean.median_ms, interference.as_experienced.median_ms) > 0.0
    ]
    by_block = [reasons for interference in comparable for reasons in interference.reasons]
    if not any(by_block):
        return None
    return DisturbedBlocks(
        disturbed=sum(map(bool, by_block)),
        blocks=len(by_block),
        reasons=sorted({reason for reasons in by_block for reason in reasons}),
        clean_ms=centre([interference.clean.median_ms for interference in comparable]),
        as_experienced_ms=centre([interference.as_experienced.median_ms for interference in comparable]),
    )


def two_levels(times_ms: Sequence[float]) -> list[Level]:
    """Return the two levels of these positive times, the faster first; empty for a single level or fewer than 3 times.

    The sorted logarithms are split where that explains the largest part of their variance. There are two levels if the
    gap is at least `LEAST_GAP` and exceeds the spread within the levels (at least `SPREAD_FLOOR`) by a factor that
    times from a single Gaussian exceed in 1 % of cases (5 % for three). Fewer than a twentieth of the times are
    considered spikes, not a level.
    """
    ordered = sorted(math.log(value) for value in times_ms)
    count = len(ordered)
    if count < 3:
        return []
    middle = math.fsum(ordered) / count
    sums = list(accumulate(value - middle for value in ordered))
    size = max(range(1, count), key=lambda n: sums[n - 1] ** 2 / (n * (count - n)))
    fast, slow = ordered[:size], ordered[size:]
    gap = math.fsum(slow) / len(slow) - math.fsum(fast) / len(fast)
    squares = math.fsum((value - middle) ** 2 for value in ordered) - gap**2 * size * (count - size) / count
    spread = max(math.sqrt(max(squares, 0.0) / (count - 2)), SPREAD_FLOOR)
    is_rare = min(size, count - size) < max(1.0, _RARE * count)
    if is_rare or math.expm1(gap) < LEAST_GAP or gap < _SEPARATIONS.get(count, _SEPARATION) * spread:
        return []
    return [Level(math.exp(math.fsum(level) / len(level)), len(level) / count) for level in (fast, slow)]
