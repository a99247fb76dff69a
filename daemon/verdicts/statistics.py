"""Statistics of run durations: intervals from block medians, percentiles and the stop rule; pure.

Neighbouring runs are correlated, so an interval from single runs would be far too narrow. Runs are grouped into blocks
instead, and the remaining correlation between block medians widens the interval (`block_estimate`).
tests/daemon/verdicts/test_statistics_coverage.py checks the coverage of the intervals through the complete rule.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from itertools import combinations, pairwise
from operator import mul
from statistics import NormalDist, median

import msgspec

LAG1_BOUND = 0.3
"""Blocks are merged if the bias-corrected lag-1 autocorrelation of their medians reaches this."""

STEADY_BLOCKS = 10
STEADY_SHARE = 0.005
NOISY_SHARE = 0.01
# rising minus falling pairs, of the 45 pairs of 10 blocks; noise alone exceeds this in a third of cases
STEADY_TREND = 11

WIDEST = 10.0
"""An interval whose ends differ by more than this factor says nothing about a time, and is not reported."""

_LAG1_BLOCKS = 8  # with fewer medians, a lag-1 coefficient is mere noise: the bias correction alone would double it
_MERGED_BLOCKS = 20  # with fewer blocks, the next lag-1 test would lose more than merging removes
_MAX_LAG1 = 0.95
_DOUBT = 1.25  # in standard errors: with 1, the coverage of `quick` is 97 % at AR 0.9; with 1.5 and spikes, 93 %
_CLEAR = 2.5  # number of standard errors that make a lag-1 coefficient clearly different from 0
_BLOCK_PIECES = 16
# looks are an eighth of the blocks apart, which is cheap, and reduces the chances of stopping by luck
_LOOK_SPACING = 8
_FEWEST_EFFECTIVE = 3.0  # below two degrees of freedom, the t quantile explodes without improving the coverage


class Interval(msgspec.Struct, frozen=True):
    """A two-sided confidence interval, in the unit of the underlying values."""

    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Return whether 0 is outside."""
        return not self.low <= 0.0 <= self.high


class StopRule(msgspec.Struct, frozen=True):
    """When a measuring loop may stop; `half_width` is relative to the median, and None means to run until the cap.

    A block has at least `min_block_runs` runs and lasts at least `min_block_s`. The cap overrides `min_blocks`.
    """

    min_blocks: int
    min_block_runs: int
    min_block_s: float
    cap_s: float
    half_width: float | None


STOP_RULES = {
    "quick": StopRule(5, 1, 0.25, 5.0, None),
    "standard": StopRule(20, 1, 0.5, 60.0, 0.01),
    "thorough": StopRule(20, 1, 0.5, 90.0, 0.005),
}
"""The stop rule of each preset."""


class BlockSummary(msgspec.Struct, frozen=True):
    """The result of a measuring loop. `half_width` is the achieved half-width, relative to `median_ns`.

    `median_ns` is the centre of `interval_ns` (`block_estimate`). `runs_per_block` is the length of the shortest block.
    `converged` means that the requested half-width was reached; it is never true if none was requested. `lag1` is None
    with fewer than three blocks or equal medians; `interval_ns` and `half_width` are None with fewer than two blocks.
    `ends` contains the number of runs up to the end of each block. `is_correlated` means that the blocks still depend
    on each other, so that the interval may be too narrow. `pieces_ns` are the medians of sixteenths of blocks, or
    single runs.
    """

    block_medians_ns: list[float]
    count: int
    runs: int
    runs_per_block: int
    lag1: float | None
    doublings: int
    half_width: float | None
    converged: bool
    stop_reason: str | None
    median_ns: float
    interval_ns: Interval | None
    ends: list[int]
    is_correlated: bool
    pieces_ns: list[float]


def lag1_autocorrelation(values: Sequence[float]) -> float | None:
    """Return the lag-1 autocorrelation, in [-1, 1]; None for fewer than three values or equal ones."""
    if len(values) < 3:
        return None
    centre = math.fsum(values) / len(values)
    deviations = [value - centre for value in values]
    total = math.fsum(deviation * deviation for deviation in deviations)
    if total == 0.0:
        return None
    return math.fsum(a * b for a, b in pairwise(deviations)) / total


def student_t_quantile(p: float, degrees: float) -> float:
    """Return the `p` quantile of Student's t; `degrees` is 1, or at least 2 and not necessarily an integer.

    It is exact for 1 and 2 degrees; otherwise it is the expansion of G. W. Hill, Algorithm 396, CACM 13 (10), 1970,
    with a relative error of at most 2e-5 from 3 degrees on, and 1.1e-3 between 2 and 3. Raises ValueError for other
    arguments.
    """
    if not (0.0 < p < 1.0 and (degrees == 1.0 or degrees >= 2.0)):
        raise ValueError(f"no t quantile for p={p}, degrees={degrees}: 0 < p < 1, degrees 1 or at least 2")
    if p < 0.5:
        return -student_t_quantile(1.0 - p, degrees)
    if degrees == 1.0:
        return math.tan(math.pi * (p - 0.5))
    if degrees == 2.0:
        return (2.0 * p - 1.0) / math.sqrt(2.0 * p * (1.0 - p))
    return _hill_quantile(2.0 * (1.0 - p), degrees)


def _hill_quantile(tails: float, n: float) -> float:
    a = 1.0 / (n - 0.5)
    b = 48.0 / a**2
    c = ((20700.0 * a / b - 98.0) * a - 16.0) * a + 96.36
    d = ((94.5 / (b + c) - 3.0) / b + 1.0) * math.sqrt(a * math.pi / 2.0) * n
    y = (d * tails) ** (2.0 / n)
    if y <= 0.05 + a:  # far out in the tail
        inner = 1.0 / (((n + 6.0) / (n * y) - 0.089 * d - 0.822) * (n + 2.0) * 3.0) + 0.5 / (n + 4.0)
        return math.sqrt(n * ((inner * y - 1.0) * (n + 1.0) / (n + 2.0) + 1.0 / y))
    x = NormalDist().inv_cdf(tails / 2.0)
    y = x * x
    if n < 5.0:
        c += 0.3 * (n - 4.5) * (x + 0.6)
    c += (((0.05 * d * x - 5.0) * x - 7.0) * x - 2.0) * x + b
    y = (((((0.4 * y + 6.3) * y + 36.0) * y + 94.5) / c - y - 3.0) / b + 1.0) * x
    return math.sqrt(n * math.expm1(a * y * y))


def mean_interval(values: Sequence[float], alpha: float = 0.05) -> Interval:
    """Return the t interval on the mean of at least two independent values, at the two-sided error `alpha`."""
    return _t_interval(values, len(values), alpha)


def block_estimate(block_medians: Sequence[float], effective: float | None = None) -> tuple[float, Interval | None]:
    """Return the centre and the 95 % interval of times from the medians of successive blocks, at least one.

    These are the mean and its t interval. If that interval would reach 0, which is impossible for a time, it is
    computed on logarithms instead, and the centre is the geometric mean, as in `combine`. The interval is None for a
    single median, if it would be wider than `WIDEST`, or if it would reach below 0 and a median is 0.

    Correlation lowers the effective number of medians: n becomes n (1 - r) / (1 + r) with the lag-1 autocorrelation r,
    as in Skart (Tafazzoli and Wilson, IIE Transactions 43, 2011), applied if r exceeds 1.25 standard errors. Fewer than
    eight medians are assumed to be independent. `effective` replaces the estimated number.
    """
    centre = math.fsum(block_medians) / len(block_medians)
    if len(block_medians) < 2:
        return centre, None
    effective = effective or _effective_count(block_medians)
    interval = _t_interval(block_medians, effective)
    if interval.low > 0.0:
        return centre, interval
    if min(block_medians) <= 0.0:
        return centre, None
    return on_logarithms(block_medians, effective)


def on_logarithms(values: Sequence[float], effective: float | None = None) -> tuple[float, Interval | None]:
    """Return the geometric mean of at least two positive values, and its 95 % t interval on logarithms, up to `WIDEST`.

    `effective` replaces the number of independent values, which their correlation lowers as in `block_estimate`.
    """
    logs = [math.log(value) for value in values]
    interval = _t_interval(logs, effective or _effective_count(logs))
    return math.exp(math.fsum(logs) / len(logs)), _from_logarithms(interval)


def _from_logarithms(interval: Interval) -> Interval | None:
    if interval.high - interval.low > math.log(WIDEST):
        return None
    return Interval(math.exp(interval.low), math.exp(interval.high))


def _t_interval(values: Sequence[float], effective: float, alpha: float = 0.05) -> Interval:
    # The squared deviations divided by n (effective - 1) are an unbiased estimate of the variance of the mean, which
    # correlation increases while it reduces the observed spread. For independent values, it is the familiar s^2 / n.
    centre = math.fsum(values) / len(values)
    squares = math.fsum((value - centre) ** 2 for value in values)
    error = math.sqrt(squares / (len(values) * (effective - 1.0)))
    reach = student_t_quantile(1.0 - alpha / 2.0, effective - 1.0) * error
    return Interval(centre - reach, centre + reach)


def _effective_count(medians: Sequence[float], expected_lag1: float = 0.0, inflation: float = 1.0) -> float:
    # the correlation expected from the runs is used, unless that of the medians is clearly stronger
    count = float(len(medians))
    lag1 = _unbiased_lag1(medians)
    if lag1 is not None and lag1 > expected_lag1 + _DOUBT / math.sqrt(count):
        lag1 = min(lag1, _MAX_LAG1)
        inflation = max(inflation, (1.0 + lag1) / (1.0 - lag1))
    return max(count / inflation, min(count, _FEWEST_EFFECTIVE))


def _block_correlation(runs_lag1: float, length: float) -> tuple[float, float]:
    # Returns, for means of `length` successive values of an AR(1), their lag-1 autocorrelation, and the factor by which
    # the variance of the mean of many of them exceeds that of independent ones.
    if runs_lag1 == 0.0:
        return 0.0, 1.0
    decay = runs_lag1**length
    spread = length * (1.0 - runs_lag1**2) - 2.0 * runs_lag1 * (1.0 - decay)
    return runs_lag1 * (1.0 - decay) ** 2 / spread, length * (1.0 - runs_lag1**2) / spread


def _rank_lag1(values: Sequence[float]) -> float:
    # Ranks are used, because a few spikes would hide the correlation of all other runs; the sine converts Spearman's
    # coefficient to that of Gaussian noise. The result is 0 if it is within its standard error.
    count, ordered = len(values), sorted(values)
    from_below = {value: rank for rank, value in enumerate(ordered)}
    from_above = {value: rank for rank, value in enumerate(reversed(ordered))}
    ranks = [from_below[value] - from_above[value] for value in values]  # ranks, centred, and equal for ties
    total = sum(map(mul, ranks, ranks))
    if count < _LAG1_BLOCKS or total == 0:
        return 0.0
    lag1 = _without_bias(sum(map(mul, ranks, ranks[1:])) / total, count)
    if lag1 <= 1.0 / math.sqrt(count):
        return 0.0
    return min(2.0 * math.sin(math.pi * min(lag1, 1.0) / 6.0), _MAX_LAG1)


def _unbiased_lag1(values: Sequence[float]) -> float | None:
    lag1 = lag1_autocorrelation(values)
    return None if lag1 is None or len(values) < _LAG1_BLOCKS else _without_bias(lag1, len(values))


def _without_bias(lag1: float, count: int) -> float:
    # the estimate is low by (1 + 4 r) / n: Marriott and Pope, Biometrika 41, 1954
    return (lag1 + 1.0 / count) / (1.0 - 4.0 / count)


@cache
def minimum_samples(percentile: float) -> int:
    """Return the smallest sample size that supports a percentile (99 for p99) with 99 % confidence.

    This is the binomial early stopping of MLPerf's load generator: the second largest of n samples lies above the
    percentile with 99 % probability, so that no single run is decisive. Raises ValueError outside [1, 100).
    """
    tail = _tail(percentile)
    most = 2
    while not _backs(most, tail):
        most *= 2
    counts = range(2, most)
    return 2 + bisect_left(counts, True, key=lambda count: _backs(count, tail))


def _backs(count: int, tail: float) -> bool:
    """Return whether the second largest of `count` samples lies above the percentile with 99 % probability."""
    return math.fsum(_binomial(above, count, tail) for above in (0, 1)) <= 0.01


def percentile(sorted_values: Sequence[float], q: float) -> float:
    """Return the `q` percentile (99 for p99) of ascending values, interpolated between the two nearest.

    Raises ValueError if there are no values, and for `q` outside [1, 100).
    """
    if not sorted_values:
        raise ValueError("no values, so no percentile")
    below, share = divmod((1.0 - _tail(q)) * (len(sorted_values) - 1), 1.0)
    low = sorted_values[int(below)]
    high = sorted_values[min(int(below) + 1, len(sorted_values) - 1)]
    return low + share * (high - low)


def backed_percentile(sorted_values: Sequence[float], q: float) -> float | None:
    """Return the `q` percentile of ascending values, None if there are too few to support it (`minimum_samples`)."""
    return percentile(sorted_values, q) if len(sorted_values) >= minimum_samples(q) else None


def percentile_upper_bound(sorted_values: Sequence[float], q: float) -> float | None:
    """Return the smallest of the ascending values that exceeds the true `q` percentile with 99 % confidence.

    This is distribution-free, because the count above the true percentile is binomial. It is None if even the largest
    value is too small.
    """
    count, tail = len(sorted_values), _tail(q)
    odds, above = 0.0, 0
    while above < count:
        odds += _binomial(above, count, tail)
        if odds > 1.0 - 0.99:
            break
        above += 1
    return float(sorted_values[count - above]) if above else None


def median_interval(values: Sequence[float]) -> Interval | None:
    """Return the distribution-free 95 % interval of the median of independent values, None for fewer than six."""
    ordered, odds, rank = sorted(values), 0.0, 0
    while (odds := odds + _binomial(rank, len(ordered), 0.5)) <= 0.025:
        rank += 1
    return Interval(ordered[rank - 1], ordered[-rank]) if rank else None


def deadline_is_met(misses: int, requests: int, percentile: float) -> bool | None:
    """Return whether the share of missed deadlines is at most 100 - `percentile` percent; None with too few requests.

    Each answer holds with 99 % confidence, as in MLPerf's early stopping, which assumes independent misses.
    """
    if misses <= most_misses(requests, percentile):
        return True
    return False if misses >= failing_misses(requests, percentile) else None


def most_misses(requests: int, percentile: float) -> int:
    """Return the most misses among `requests` for which `deadline_is_met` is true; -1 if it never is."""
    tail, allowed = _tail(percentile), -1
    odds = _binomial(0, requests, tail)
    while odds <= 0.01:
        allowed += 1
        odds += _binomial(allowed + 1, requests, tail)
    return allowed


def failing_misses(requests: int, percentile: float) -> int:
    """Return the fewest misses among `requests` for which `deadline_is_met` is false."""
    tail, misses = _tail(percentile), 1
    odds = _binomial(0, requests, tail)
    while odds < 0.99:
        odds += _binomial(misses, requests, tail)
        misses += 1
    return misses


def exponential_p(gaps: Sequence[float], mean: float) -> float:
    """Return the p-value of a Kolmogorov-Smirnov test of the gaps against the exponential law with this mean.

    At least one gap is needed. The limiting law with the correction of M. A. Stephens, JRSS B 32, 1970, is accurate to
    0.01 from 20 values on.
    """
    count, ordered = len(gaps), sorted(gaps)
    below = [-math.expm1(-gap / mean) for gap in ordered]
    distance = max(max((i + 1) / count - share, share - i / count) for i, share in enumerate(below))
    reach = (math.sqrt(count) + 0.12 + 0.11 / math.sqrt(count)) * distance
    if reach < 0.2:  # here the series converges slowly, and p is 1 to ten digits
        return 1.0
    return min(1.0, 2.0 * math.fsum((-1) ** (k - 1) * math.exp(-2.0 * (k * reach) ** 2) for k in range(1, 50)))


def _tail(percentile: float) -> float:
    if not 1.0 <= percentile < 100.0:
        raise ValueError(f"percentile {percentile}: give it in percent, at least 1 and below 100, such as 99.9")
    return (100.0 - percentile) / 100.0


def _binomial(successes: int, trials: int, p: float) -> float:
    log_choices = math.lgamma(trials + 1) - math.lgamma(successes + 1) - math.lgamma(trials - successes + 1)
    return math.exp(log_choices + successes * math.log(p) + (trials - successes) * math.log1p(-p))


def tukey_outliers(values: Sequence[float]) -> tuple[int, int]:
    """Return how many values lie 1.5 to 3 interquartile ranges outside the quartiles (mild), or further (severe)."""
    if not values:
        return 0, 0
    ordered = sorted(values)
    low, high = percentile(ordered, 25.0), percentile(ordered, 75.0)
    excess = [max(low - value, value - high) for value in ordered]
    severe = sum(distance > 3.0 * (high - low) for distance in excess)
    return sum(distance > 1.5 * (high - low) for distance in excess) - severe, severe


def steady(block_medians_with_times: Sequence[tuple[float, float]]) -> tuple[bool, float | None]:
    """Return whether warm-up has settled, and the drift over the last 10 blocks as a share of the median.

    Pairs (median, time) are in order of time. The share is the signed Theil-Sen slope times the span, divided by the
    median. Warm-up has settled if the drift is below 0.5 % either way, or if it is below 1 % and no larger than often
    results from noise alone, judged by the number of pairs that rise or fall (Kendall). Returns (False, None) for fewer
    than 10 blocks.
    """
    blocks = block_medians_with_times[-STEADY_BLOCKS:]
    if len(blocks) < STEADY_BLOCKS:
        return False, None
    slopes = [(late[0] - early[0]) / (late[1] - early[1]) for early, late in combinations(blocks, 2)]
    share = median(slopes) * (blocks[-1][1] - blocks[0][1]) / median([value for value, _ in blocks])
    trend = abs(sum((slope > 0) - (slope < 0) for slope in slopes))
    return abs(share) < (NOISY_SHARE if trend <= STEADY_TREND else STEADY_SHARE), share


class Blocks:
    """The runs of one measuring loop, grouped into blocks, and the decision to stop.

    Call `add` after each run and, if it returns that a block has ended, `stop_reason`. Every value is kept; blocks are
    merged, never trimmed, and the last one absorbs an incomplete block. The correlation between medians is assessed
    twice: by their own lag-1 coefficient, and by the part of the runs' coefficient that remains between blocks, as in
    an AR(1). With `is_odd`, a block has an odd number of runs: the median of two is their mean, which one stall moves.
    """

    def __init__(self, rule: StopRule, *, is_odd: bool = False) -> None:
        self._rule, self._is_odd = rule, is_odd
        self._min_block_ns = rule.min_block_s * 1e9
        self._values = array("d")
        self._ends: list[int] = []  # ends of the blocks before any merging, as indices into the values
        self._block_start = 0
        self._block_ns = 0.0
        self._doublings = 0
        self._merged_medians: list[float] = []
        self._pieces: list[float] = []  # medians of sixteenths of blocks, or single runs if a block has fewer
        self._cut_blocks = 0
        self._next_look = self._fewest = max(rule.min_blocks, _LAG1_BLOCKS)
        self._converged = False
        self._stop_reason: str | None = None

    @property
    def values_ns(self) -> Sequence[float]:
        """Return the duration of every run, in order."""
        return self._values

    def add(self, run_duration_ns: float) -> bool:
        """Add one run's duration and return whether it ended a block; cheap enough to call between timed runs."""
        self._values.append(run_duration_ns)
        self._block_ns += run_duration_ns
        count = len(self._values) - self._block_start
        if (
            self._block_ns < self._min_block_ns
            or count < self._rule.min_block_runs
            or (self._is_odd and count % 2 == 0)
        ):
            return False
        self._block_start = len(self._values)
        self._block_ns = 0.0
        self._ends.append(self._block_start)
        return True

    def stop_reason(self, elapsed_s: float) -> str | None:
        """Return "half_width" or "cap" if measuring should stop after `elapsed_s`, else None; call at block ends."""
        capped = elapsed_s >= self._rule.cap_s
        if self._half_width_reached(capped):
            self._converged, self._stop_reason = True, "half_width"
        elif capped:
            self._stop_reason = "cap"
        return self._stop_reason

    def summary(self) -> BlockSummary:
        """Return the result so far; raise ValueError before the first run."""
        medians, runs_lag1 = self._medians(), self._runs_lag1()
        median_ns, interval = block_estimate(medians, self._effective(medians, runs_lag1))
        return BlockSummary(
            block_medians_ns=medians,
            count=len(medians),
            runs=len(self._values),
            runs_per_block=min(end - start for start, end in self._spans()),
            lag1=lag1_autocorrelation(medians),
            doublings=self._doublings,
            half_width=_relative_half_width(self._interval(medians, runs_lag1)),
            converged=self._converged,
            stop_reason=self._stop_reason,
            ends=[end for _, end in self._spans()],
            median_ns=median_ns,
            interval_ns=interval,
            is_correlated=self._is_correlated(medians, runs_lag1),
            pieces_ns=list(self._pieces),
        )

    def _half_width_reached(self, capped: bool) -> bool:
        target = self._rule.half_width
        due = target is not None and len(self._ends) >= self._next_look
        if not (due or capped):
            return False
        self._next_look = len(self._ends) + 1 + len(self._ends) // _LOOK_SPACING
        runs_lag1, medians = self._runs_lag1(), self._medians()
        while not (settled := self._uncorrelated(medians, runs_lag1)) and self._merge():
            medians = self._medians()
        half_width = _relative_half_width(self._interval(medians, runs_lag1))
        settled = settled and len(self._ends) >= self._fewest
        return settled and target is not None and half_width is not None and half_width <= target

    def _uncorrelated(self, medians: Sequence[float], runs_lag1: float) -> bool:
        # Correlated medians pass a single test by luck, and stopping at the first success favours such luck: with only
        # the medians' own coefficient, coverage at AR 0.9 falls to 90 %.
        measured, expected = self._lag1s(medians, runs_lag1)
        return abs(measured) < LAG1_BOUND and expected < LAG1_BOUND

    def _is_correlated(self, medians: Sequence[float], runs_lag1: float) -> bool:
        # shown to readers, so unlike `_uncorrelated` it must not cast doubt on independent blocks: of 20, 30 % exceed
        # the bound
        measured, expected = self._lag1s(medians, runs_lag1)
        return expected >= LAG1_BOUND or measured >= max(LAG1_BOUND, _CLEAR / math.sqrt(len(medians)))

    def _lag1s(self, medians: Sequence[float], runs_lag1: float) -> tuple[float, float]:
        # the medians' own coefficient, 0 if there are too few, and the remainder of the runs' coefficient between
        # blocks
        expected, _ = _block_correlation(runs_lag1, len(self._pieces) / len(medians))
        return _unbiased_lag1(medians) or 0.0, expected

    def _merge(self) -> bool:
        if len(self._ends) >> (self._doublings + 1) < max(self._rule.min_blocks, _MERGED_BLOCKS):
            return False
        self._doublings += 1
        self._merged_medians.clear()
        return True

    def _interval(self, medians: Sequence[float], runs_lag1: float) -> Interval | None:
        if len(medians) < 2:
            return None
        return _t_interval(medians, self._effective(medians, runs_lag1))

    def _effective(self, medians: Sequence[float], runs_lag1: float) -> float:
        return _effective_count(medians, *_block_correlation(runs_lag1, len(self._pieces) / len(medians)))

    def _runs_lag1(self) -> float:
        for start, end in pairwise([0, *self._ends][self._cut_blocks :]):
            count = min(_BLOCK_PIECES, end - start)
            edges = [start + (end - start) * piece // count for piece in range(count + 1)]
            self._pieces.extend(median(self._values[a:b]) for a, b in pairwise(edges))
        self._cut_blocks = len(self._ends)
        return _rank_lag1(self._pieces)

    def _medians(self) -> list[float]:
        spans = self._spans()
        for start, end in spans[len(self._merged_medians) : -1]:
            self._merged_medians.append(median(self._values[start:end]))
        return [*self._merged_medians, median(self._values[slice(*spans[-1])])]

    def _spans(self) -> list[tuple[int, int]]:
        width = 1 << self._doublings
        inner_ends = self._ends[width - 1 :: width][:-1]
        return list(pairwise([0, *inner_ends, len(self._values)]))


def _relative_half_width(interval: Interval | None) -> float | None:
    return None if interval is None else (interval.high - interval.low) / (interval.high + interval.low)


def combine(process_medians: Sequence[float]) -> tuple[float, Interval | None]:
    """Return the centre of the process medians of a case in one run, and the 95 % interval for such a median.

    The centre is the geometric mean. A confidence interval for it would assume independent processes, but the processes
    of a run share slow effects: it would contain the mean of many runs in only 35 to 54 % if successive processes have
    a correlation of 0.9. The interval is therefore a prediction interval for one more process (Student's t on
    logarithms): n processes of one run are assumed to reveal no more about other runs than a single process does. It is
    None for a single process, and if wider than `WIDEST`.

    Raises ValueError if there are no processes or if a median is not positive.
    """
    if not process_medians or min(process_medians) <= 0.0:
        raise ValueError(f"combine needs positive medians: {process_medians}")
    if len(process_medians) == 1:
        return process_medians[0], None
    logs, count = [math.log(value) for value in process_medians], len(process_medians)
    middle = math.fsum(logs) / count
    variance = math.fsum((value - middle) ** 2 for value in logs) / (count - 1)
    reach = student_t_quantile(0.975, count - 1.0) * math.sqrt(variance * (1.0 + 1.0 / count))
    return math.exp(middle), _from_logarithms(Interval(middle - reach, middle + reach))


def centre(process_medians: Sequence[float]) -> float:
    """Return the centre of a case's process medians, as computed by `combine`, whose errors are also raised."""
    return combine(process_medians)[0]
