"""The statistics of run times as a record has them; pure."""

import math
from collections.abc import Sequence
from statistics import median

import msgspec

from benchd.daemon.records import PERCENTILES, Timing
from benchd.daemon.verdicts import statistics
from benchd.daemon.verdicts.statistics import Interval


def timing(values_ns: Sequence[int], interval_ns: Interval | None, median_ns: float) -> Timing:
    """Return the statistics of one part; a percentile is null with too few runs."""
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
    """Return the percentiles of ascending values in ms, None for one with too few values or beyond all that end."""
    percentiles = {name: statistics.backed_percentile(ordered_ns, q) for name, q in PERCENTILES.items()}
    percentiles["p99_upper_ms"] = statistics.percentile_upper_bound(ordered_ns, 99)
    return {
        name: value / 1e6 if value is not None and math.isfinite(value) else None for name, value in percentiles.items()
    }


def part_timing(values_ns: Sequence[int]) -> Timing:
    """Return the statistics of a part that did not decide the stop: its blocks are tenths of the loop's runs."""
    median_ns, interval_ns = statistics.block_estimate(_tenths(values_ns))
    return timing(values_ns, interval_ns, median_ns)


def _tenths(values: Sequence[float]) -> list[float]:
    """Return the medians of successive tenths."""
    size = max(1, len(values) // 10)
    return [median(values[i : i + size]) for i in range(0, len(values) - size + 1, size)]


def request_timing(latencies_ns: Sequence[float]) -> Timing:
    """Return the statistics of requests in the order of their arrival; one that was dropped is infinitely late.

    The median and the percentiles are those of all requests, the rest is of the answered ones. Without a drop it is
    that of a part. If half of them or more were dropped the median is that of the answered ones, without an interval.
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
