"""Verdicts on two arms: how much B differs from A, and whether that is faster, slower, the same or undecided; pure.

Processes differ, runs differ more, and days differ too. So results in files are compared by the centres of what was
repeated: of days, or of runs if all are of one day. tests/daemon/verdicts/test_error_rates.py checks the error rates
through the complete rules.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import NormalDist, fmean, median
from typing import Literal

import msgspec

from benchd.daemon.records import ProcessResult
from benchd.daemon.verdicts.statistics import Interval, student_t_quantile

LOOKS = (7, 11, 15)
"""Numbers of pairs after which a live comparison may end."""

LOOK_ALPHA = 0.022
"""Error per look, of the two-sided test as of each one-sided one behind SAME: three looks together err in 5 %.

S. J. Pocock, Biometrika 64, 1977, who bounds the two-sided error; both are simulated with t.
"""

ALPHA = 0.05
MIN_EFFECT = 0.005
SAME_MARGIN = 0.01
RUNS_APART = 0.032
"""Standard deviation between runs of the same code, or between days, assumed if too few show it.

Up to 3 % every error stays below 5 %, although the degrees of freedom beside it are approximate.
"""

FEWEST_DEGREES = 2
"""With fewer degrees of freedom, as with two runs against one, the spread is unknown."""

MOST_DEGREES = 1e6  # of an error that is assumed and not estimated

COMMON = 0.5
"""The share of what differs over a run that rounds are trusted to remove; with 0.25 equal variants err in 5.3 %."""

FEWEST_PROCESSES = 3
"""With two processes per side the degrees of freedom of Welch's t may fall below 2."""

MOST_REPEATS = 200
"""The largest number of pairs, runs or days that an inconclusive verdict recommends."""

LIKELY = 0.8

Answer = Literal["faster", "slower", "same", "inconclusive"]
Unit = Literal["pairs", "processes", "runs", "days"]
Run = Sequence[float]
"""The medians of its processes."""

Days = Mapping[str, Sequence[Run]]
"""The runs of one side by the day that they are of."""


class Effect(msgspec.Struct, frozen=True):
    """How much B differs from A: the mean of log(B / A), its standard error and the degrees of freedom of its t.

    `unit` is what was repeated; `is_assumed` says that it was repeated too rarely to show how much it differs, and that
    `RUNS_APART` stands for that. `spread` is the standard deviation of one pair, or of one of B over one of A.
    """

    log_ratio: float
    error: float
    degrees: float
    spread: float
    unit: Unit
    is_assumed: bool = False

    @property
    def share(self) -> float:
        """Return B over A minus 1: 0.02 is 2 % slower."""
        return as_share(self.log_ratio)

    def interval(self, confidence: float) -> Interval:
        """Return the interval of `share`."""
        reach = student_t_quantile(0.5 + confidence / 2.0, self.degrees) * self.error
        return Interval(as_share(self.log_ratio - reach), as_share(self.log_ratio + reach))


def as_share(log_ratio: float) -> float:
    """Return B over A minus 1, of a factor of at most 1e13 either way: it stays finite, and above -1."""
    return math.expm1(max(-_LARGEST_LOG, min(log_ratio, _LARGEST_LOG)))


_LARGEST_LOG = 30.0  # foreign times, and two runs against one in a long plan, reach further than a float


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on B against A. `effect` is B over A minus 1; None, with the reason, if nothing was compared.

    The `reason` tells why it is inconclusive and what would decide, or what a difference is restricted to.
    """

    answer: Answer
    effect: float | None = None
    interval: Interval | None = None
    confidence: float | None = None
    reason: str = ""


def ratio(first: ProcessResult, second: ProcessResult) -> float:
    """Return the second process's time over the first's, both timed.

    Interleaved blocks are compared two by two, and the median of that is robust to what hit only one of two; processes
    measured one after the other have only their own medians.
    """
    a, b = first.blocks, second.blocks
    if a and b and a.is_interleaved and b.is_interleaved:
        rounds = zip(a.medians_ms, b.medians_ms, strict=False)  # one side may need fewer
        return math.exp(median([math.log(late / early) for early, late in rounds]))
    if first.timing is None or second.timing is None:
        raise ValueError("a ratio needs two timed processes")
    return second.timing.median_ms / first.timing.median_ms


def paired_effect(ratios: Sequence[float]) -> Effect:
    """Return the effect from B's time over A's in each of at least two pairs."""
    _require_positive(ratios, fewest=2)
    return _of_pairs([math.log(ratio) for ratio in ratios])


def _of_pairs(logs: Sequence[float]) -> Effect:
    centre, variance = mean_and_variance(logs)
    return Effect(centre, math.sqrt(variance / len(logs)), len(logs) - 1.0, math.sqrt(variance), "pairs")


def rounds_effect(first: Sequence[float], second: Sequence[float]) -> Effect:
    """Return the effect from the processes of A and B that ran in rounds: the first of both, then the second, and on.

    What changes slowly, as heat does, is common to a round and leaves its ratio. The order within each is drawn, so few
    rounds may all have the same one; the error is therefore at least `COMMON` of Welch's, which has all of the drift.
    """
    all_of_both = welch_effect(first, second)
    pairs = _of_pairs([math.log(b) - math.log(a) for a, b in zip(first, second, strict=True)])
    return msgspec.structs.replace(pairs, error=max(pairs.error, COMMON * all_of_both.error))


def welch_effect(first: Sequence[float], second: Sequence[float]) -> Effect:
    """Return the effect from the process medians of one run of A and of B, by Welch's t on their logarithms.

    Takes at least three of each. If their numbers differ, the smaller one gives the degrees of freedom: Welch's, for
    three processes against fifteen, err in 7 %.
    """
    _require_positive(first, second, fewest=FEWEST_PROCESSES)
    (a, variance_a), (b, variance_b) = (mean_and_variance([math.log(v) for v in arm]) for arm in (first, second))
    share_a, share_b = variance_a / len(first), variance_b / len(second)
    total, squares = share_a + share_b, share_a**2 + share_b**2
    fewest = min(len(first), len(second)) - 1.0
    is_welch = len(first) == len(second) and squares > 0.0
    error = math.sqrt(total)
    return Effect(b - a, error, fewest * total**2 / squares if is_welch else fewest, error, "processes")


def runs_effect(first: Days, second: Days) -> Effect:
    """Return the effect from the runs of A and of B.

    What differs between days does not show within one, nor what differs between runs within one of these. So the
    centres of days count, or of runs if both sides are of the same single day: Student's t with the variance of both
    sides pooled, which takes them to spread alike. For one of B it is the prediction from A's. If they are too few to
    show their spread, `RUNS_APART` stands for it, or what they show if that is more, beside what is seen within them.
    """
    _require_positive(*chain(*first.values(), *second.values()), fewest=1)
    sides, unit = _units(first, second)
    centres = [[fmean(values) for values in side] for side in sides]
    a, b = map(fmean, centres)
    degrees = len(sides[0]) + len(sides[1]) - 2
    squares = math.fsum((centre - middle) ** 2 for side, middle in zip(centres, (a, b), strict=True) for centre in side)
    of_units = 1.0 / len(sides[0]) + 1.0 / len(sides[1])
    within, spare = _within(sides)
    inverse = [fmean(1.0 / len(values) for values in side) for side in sides]
    actual = sum(share / len(side) for share, side in zip(inverse, sides, strict=True))
    if degrees >= FEWEST_DEGREES:
        # what the variance of the centres misses if one side's have fewer values
        within_sides = (
            of_units / degrees * sum(share * (len(side) - 1) for share, side in zip(inverse, sides, strict=True))
        )
        error = math.sqrt(squares / degrees * of_units + max(actual - within_sides, 0.0) * within)
        return Effect(b - a, error, degrees, error * math.sqrt(2.0 / of_units), unit)
    assumed, estimated = max(RUNS_APART**2, squares / max(degrees, 1)) * of_units, within * actual
    error = math.sqrt(assumed + estimated)
    free = error**4 / (assumed**2 / MOST_DEGREES + estimated**2 / max(spare, 1))  # B. L. Welch, F. E. Satterthwaite
    return Effect(b - a, error, max(free, FEWEST_DEGREES), error * math.sqrt(2.0 / of_units), unit, is_assumed=True)


def _units(first: Days, second: Days) -> tuple[list[list[list[float]]], Unit]:
    """Return the logarithms of each side by what counts as repeated, and the name of that."""
    sides = [[[[math.log(time) for time in run] for run in day] for day in side.values()] for side in (first, second)]
    if len({*first, *second}) == 1:
        return [side[0] for side in sides], "runs"
    if all(len(day) == 1 for side in sides for day in side):
        return [[day[0] for day in side] for side in sides], "days"
    return [[[fmean(run) for run in day] for day in side] for side in sides], "days"


def _within(sides: Sequence[Sequence[Sequence[float]]]) -> tuple[float, int]:
    """Return the pooled variance within runs or days, and its degrees of freedom."""
    spare = sum(len(values) - 1 for side in sides for values in side)
    squares = math.fsum((value - fmean(values)) ** 2 for side in sides for values in side for value in values)
    return squares / max(spare, 1), spare


def _require_positive(*arms: Sequence[float], fewest: int) -> None:
    if any(len(arm) < fewest or not all(math.isfinite(v) and v > 0.0 for v in arm) for arm in arms):
        raise ValueError(f"a comparison needs at least {fewest} positive times per side: {arms}")


def mean_and_variance(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of at least two values and their sample variance."""
    centre = math.fsum(values) / len(values)
    return centre, math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1)


def judge(effect: Effect, alpha: float = ALPHA, min_effect: float = MIN_EFFECT, same_alpha: float = ALPHA) -> Verdict:
    """Return the verdict on one effect at the two-sided error `alpha`.

    Faster or slower: the interval excludes 0, and the effect is at least `min_effect`. Same: two one-sided tests, each
    at `same_alpha`, exclude a change of 1 %, or of `min_effect` if that is more.
    """
    interval, narrow = effect.interval(1.0 - alpha), effect.interval(1.0 - 2.0 * same_alpha)
    answer: Answer = "inconclusive"
    decided = _ASSUMED if effect.is_assumed else ""
    if _excludes_zero(interval) and abs(effect.share) >= min_effect:
        answer, reason = "slower" if effect.share > 0.0 else "faster", decided
    elif narrow.low > -_margin(min_effect) and narrow.high < _margin(min_effect):
        answer, reason = "same", decided
    else:
        reason = _undecided(effect, interval, alpha, min_effect)
    return Verdict(answer=answer, effect=effect.share, interval=interval, confidence=1.0 - alpha, reason=reason)


_ASSUMED = f"runs of one day: the variation between days is unknown, so {100 * RUNS_APART:g} % is assumed"


def _margin(min_effect: float) -> float:
    """Return the change that SAME excludes: one that counts, or a smaller one that matters to nobody."""
    return max(SAME_MARGIN, min_effect)


def _undecided(effect: Effect, interval: Interval, alpha: float, min_effect: float) -> str:
    """Return why the effect is neither a difference nor the same, and what would decide."""
    if effect.is_assumed:
        return f"{_ASSUMED}; runs of several days per side show it, or benchd compare --live decides"
    if _excludes_zero(interval):
        return f"the difference is real, but below the smallest that counts here, {100 * min_effect:.2g} %"
    repeats = deciding_repeats(effect, alpha, min_effect)
    number = f"about {repeats}" if repeats else f"more than {MOST_REPEATS}"
    low, high = 100 * interval.low, 100 * interval.high
    same = f"the same within {100 * _margin(min_effect):g} %"
    why = f"the noise leaves {low:+.2g} to {high:+.2g} %, neither a difference nor {same}; {number} {effect.unit}"
    if effect.unit == "pairs":
        return f"{why} would decide (--pairs)"
    return f"{why} per side would decide, or benchd compare --live"


def deciding_repeats(effect: Effect, alpha: float = ALPHA, min_effect: float = MIN_EFFECT) -> int | None:
    """Return how many pairs, runs or days per side would probably decide at this spread; None beyond MOST_REPEATS.

    They would if the effect that they will show, which is normal around this one with the errors of both, is large or
    small enough in 4 of 5 cases, at the upper quartile of the spread behind the one seen.
    """
    sides = 1.0 if effect.unit == "pairs" else 2.0
    taken = int(effect.degrees / sides) + 1
    counts = range(taken + 1, MOST_REPEATS + 1)
    place = bisect_left(counts, LIKELY, key=lambda n: _deciding(effect, n, sides * (n - 1.0), alpha, min_effect))
    return counts[place] if place < len(counts) else None


def _deciding(effect: Effect, repeats: int, degrees: float, alpha: float, min_effect: float) -> float:
    """Return the probability that so many repetitions find a difference or find none."""
    chi_ratio = (1.0 - 2.0 / (9.0 * effect.degrees) - 0.674 * math.sqrt(2.0 / (9.0 * effect.degrees))) ** 1.5
    # the lower quartile of chi, as E. B. Wilson and M. Hilferty approximate it
    error = effect.spread / chi_ratio / math.sqrt(repeats)
    shown = NormalDist(effect.log_ratio, math.hypot(effect.error, error) or 1e-12)
    beyond = max(student_t_quantile(1.0 - alpha / 2.0, degrees) * error, math.log1p(min_effect))
    within = min(max(math.log1p(_margin(min_effect)) - student_t_quantile(1.0 - ALPHA, degrees) * error, 0.0), beyond)
    return 1.0 - (shown.cdf(beyond) - shown.cdf(-beyond)) + (shown.cdf(within) - shown.cdf(-within))


def look(ratios: Sequence[float], min_effect: float = MIN_EFFECT, comparisons: int = 1) -> Verdict | None:
    """Return the verdict of a live comparison after pairs of these ratios, None if more are needed.

    Each of several `comparisons` gets its part of the error (C. E. Bonferroni), so that all together err in 5 %.
    """
    if len(ratios) not in LOOKS:
        return None
    verdict = judge(paired_effect(ratios), LOOK_ALPHA / comparisons, min_effect, LOOK_ALPHA)
    return verdict if verdict.answer != "inconclusive" or len(ratios) == LOOKS[-1] else None


def judge_plan(effects: Sequence[Effect], min_effect: float = MIN_EFFECT) -> list[Verdict]:
    """Return one verdict per effect, with a probability of at most 5 % for any false difference among all of them.

    Compares p-values from the smallest up with 5 % over the number left (S. Holm, Scandinavian Journal of Statistics
    6, 1979). Here each step settles all below the current bound, and then the bound is computed again.
    """
    verdicts: dict[int, Verdict] = {}
    while len(verdicts) < len(effects):
        left = [place for place in range(len(effects)) if place not in verdicts]
        judged = {place: judge(effects[place], ALPHA / len(left), min_effect) for place in left}
        differing = {place: verdict for place, verdict in judged.items() if _excludes_zero(verdict.interval)}
        verdicts |= differing or judged
    return [verdicts[place] for place in range(len(effects))]


def _excludes_zero(interval: Interval | None) -> bool:
    return interval is not None and not interval.low <= 0.0 <= interval.high
