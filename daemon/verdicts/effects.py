"""Judges how much B differs from A, and whether that is faster, slower, the same or undecided; pure.

Processes differ, runs differ more, and days differ too. Results from files are therefore compared by day or, if all are
from the same day, by run. tests/daemon/verdicts/test_error_rates.py checks the error rates through the complete rules.
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
"""The numbers of pairs after which a live comparison can stop."""

LOOK_ALPHA = 0.022
"""The error rate per look, for the two-sided test and each one-sided test of SAME: 5 % over three looks.

The two-sided error is bounded according to S. J. Pocock, Biometrika 64, 1977; the tests simulate both kinds with
Student's t.
"""

ALPHA = 0.05
MIN_EFFECT = 0.005
SAME_MARGIN = 0.01
RUNS_APART = 0.032
"""The standard deviation between runs of the same code, or between days, assumed if there are too few to estimate it.

If the true one is at most 3 %, every error rate stays below 5 %, although the degrees of freedom are approximate.
"""

FEWEST_DEGREES = 2
"""With fewer degrees of freedom, for example for two runs against one, the spread is unknown."""

MOST_DEGREES = 1e6  # degrees of freedom of an assumed error

COMMON = 0.5
"""The smallest error from rounds, as a share of Welch's; with 0.25, 5.3 % of equal variants would seem different."""

FEWEST_PROCESSES = 3
"""With two processes per side, the degrees of freedom of Welch's t can fall below 2."""

MOST_REPEATS = 200
"""The largest number of pairs, runs or days that an inconclusive verdict recommends."""

LIKELY = 0.8

Answer = Literal["faster", "slower", "same", "inconclusive"]
Unit = Literal["pairs", "processes", "runs", "days"]
Run = Sequence[float]
"""The medians of the run's processes."""

Days = Mapping[str, Sequence[Run]]
"""The runs of one side, by day."""


class Effect(msgspec.Struct, frozen=True):
    """The difference of B from A: the mean of log(B / A), its standard error and the degrees of freedom of its t.

    `unit` is the repeated unit; `is_assumed` is set if there were too few repeats to estimate the spread, so that
    `RUNS_APART` is used. `spread` is the standard deviation of one pair, or of the ratio of one B to one A.
    """

    log_ratio: float
    error: float
    degrees: float
    spread: float
    unit: Unit
    is_assumed: bool = False

    @property
    def share(self) -> float:
        """Return B divided by A, minus 1: 0.02 is 2 % slower."""
        return as_share(self.log_ratio)

    def interval(self, confidence: float) -> Interval:
        """Return the interval of `share`."""
        reach = student_t_quantile(0.5 + confidence / 2.0, self.degrees) * self.error
        return Interval(as_share(self.log_ratio - reach), as_share(self.log_ratio + reach))


def as_share(log_ratio: float) -> float:
    """Return B divided by A, minus 1; the factor is limited to 1e13 either way so that the share is finite."""
    return math.expm1(max(-_LARGEST_LOG, min(log_ratio, _LARGEST_LOG)))


# times from other sources, and two runs against one in a long plan, would exceed the range of a float
_LARGEST_LOG = 30.0


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on B compared with A. `effect` is B divided by A, minus 1; None, with the reason, if there is none.

    `reason` says why the verdict is inconclusive and what would settle it, or in what way a difference is qualified.
    """

    answer: Answer
    effect: float | None = None
    interval: Interval | None = None
    confidence: float | None = None
    reason: str = ""


def ratio(first: ProcessResult, second: ProcessResult) -> float:
    """Return the second process's time divided by the first's; raise ValueError unless both were timed.

    Interleaved blocks are compared round by round, because the median of the ratios is robust to a disturbance of only
    one side. For processes measured one after the other, it is the ratio of their medians.
    """
    a, b = first.blocks, second.blocks
    if a and b and a.is_interleaved and b.is_interleaved:
        rounds = zip(a.medians_ms, b.medians_ms, strict=False)  # one side may have fewer
        return math.exp(median([math.log(late / early) for early, late in rounds]))
    if first.timing is None or second.timing is None:
        raise ValueError("a ratio needs two timed processes")
    return second.timing.median_ms / first.timing.median_ms


def paired_effect(ratios: Sequence[float]) -> Effect:
    """Return the effect from B's time divided by A's in each of at least two pairs."""
    _require_positive(ratios, fewest=2)
    return _of_pairs([math.log(ratio) for ratio in ratios])


def _of_pairs(logs: Sequence[float]) -> Effect:
    centre, variance = mean_and_variance(logs)
    return Effect(centre, math.sqrt(variance / len(logs)), len(logs) - 1.0, math.sqrt(variance), "pairs")


def rounds_effect(first: Sequence[float], second: Sequence[float]) -> Effect:
    """Return the effect from processes of A and B that ran in rounds: the first of each, then the second of each, ...

    A slow change, such as heating, affects a whole round and cancels in its ratio. The order within a round is random,
    so a few rounds may all have the same order; the error is therefore at least `COMMON` times Welch's, which includes
    the whole drift.
    """
    all_of_both = welch_effect(first, second)
    pairs = _of_pairs([math.log(b) - math.log(a) for a, b in zip(first, second, strict=True)])
    return msgspec.structs.replace(pairs, error=max(pairs.error, COMMON * all_of_both.error))


def welch_effect(first: Sequence[float], second: Sequence[float]) -> Effect:
    """Return the effect from the process medians of one run each of A and B, using Welch's t on their logarithms.

    At least three of each are needed. If their numbers differ, the smaller one determines the degrees of freedom: with
    Welch's own, the error rate would be 7 % for three processes against fifteen.
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
    """Return the effect from several runs of A and of B.

    A single day does not reveal the variation between days, nor a single run that between runs. The values compared are
    therefore the centres of days, or of runs if both sides have only the same single day: Student's t with a variance
    pooled over both sides, which assumes equal spread. With a single B, it is the prediction interval from A's values.
    With too few values to estimate the spread, `RUNS_APART` or the observed spread is used, whichever is larger, in
    addition to the spread within runs or days.
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
        # added because the variance of the centres is too small if one side has fewer values per centre
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
    """Return the log times of each side, grouped by the repeated unit, and the name of the unit."""
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

    B is faster or slower if the interval excludes 0 and the effect is at least `min_effect`. It is the same if two
    one-sided tests, each at `same_alpha`, exclude a change of 1 %, or of `min_effect` if that is larger.
    """
    interval, narrow = effect.interval(1.0 - alpha), effect.interval(1.0 - 2.0 * same_alpha)
    answer: Answer = "inconclusive"
    decided = _ASSUMED if effect.is_assumed else ""
    if interval.excludes_zero and abs(effect.share) >= min_effect:
        answer, reason = "slower" if effect.share > 0.0 else "faster", decided
    elif narrow.low > -_margin(min_effect) and narrow.high < _margin(min_effect):
        answer, reason = "same", decided
    else:
        reason = _undecided(effect, interval, alpha, min_effect)
    return Verdict(answer=answer, effect=effect.share, interval=interval, confidence=1.0 - alpha, reason=reason)


_ASSUMED = f"runs from a single day: the variation between days is unknown, so {100 * RUNS_APART:g} % is assumed"


def _margin(min_effect: float) -> float:
    """Return the change that SAME excludes: `min_effect`, or 1 % if that is larger."""
    return max(SAME_MARGIN, min_effect)


def _undecided(effect: Effect, interval: Interval, alpha: float, min_effect: float) -> str:
    """Return why the effect is neither a difference nor SAME, and what would settle it."""
    if effect.is_assumed:
        return f"{_ASSUMED}; measure each side on several days, or use benchd compare --live"
    if interval.excludes_zero:
        return f"the difference is real, but below the smallest that counts here, {100 * min_effect:.2g} %"
    repeats = deciding_repeats(effect, alpha, min_effect)
    number = f"about {repeats}" if repeats else f"more than {MOST_REPEATS}"
    low, high = 100 * interval.low, 100 * interval.high
    neither = f"so neither a difference nor sameness within {100 * _margin(min_effect):g} % is shown"
    why = f"the change is {low:+.2g} to {high:+.2g} %, {neither}; {number} {effect.unit}"
    if effect.unit == "pairs":
        return f"{why} would settle it (benchd compare --live --pairs)"
    return f"{why} per side would settle it, or use benchd compare --live"


def deciding_repeats(effect: Effect, alpha: float = ALPHA, min_effect: float = MIN_EFFECT) -> int | None:
    """Return how many pairs, runs or days per side would probably settle it at this spread; None beyond MOST_REPEATS.

    They do if, in 4 of 5 cases, the effect that they show is large or small enough. The observed effect is assumed to
    be normally distributed around the present one, with the errors of both and the upper quartile of the true spread
    given the observed one.
    """
    sides = 1.0 if effect.unit == "pairs" else 2.0
    done = int(effect.degrees / sides) + 1
    counts = range(done + 1, MOST_REPEATS + 1)
    place = bisect_left(counts, LIKELY, key=lambda n: _deciding(effect, n, sides * (n - 1.0), alpha, min_effect))
    return counts[place] if place < len(counts) else None


def _deciding(effect: Effect, repeats: int, degrees: float, alpha: float, min_effect: float) -> float:
    """Return the probability that `repeats` repetitions find a difference or exclude one."""
    chi_ratio = (1.0 - 2.0 / (9.0 * effect.degrees) - 0.674 * math.sqrt(2.0 / (9.0 * effect.degrees))) ** 1.5
    # the lower quartile of chi, by the approximation of E. B. Wilson and M. Hilferty
    error = effect.spread / chi_ratio / math.sqrt(repeats)
    distribution = NormalDist(effect.log_ratio, math.hypot(effect.error, error) or 1e-12)
    beyond = max(student_t_quantile(1.0 - alpha / 2.0, degrees) * error, math.log1p(min_effect))
    within = min(max(math.log1p(_margin(min_effect)) - student_t_quantile(1.0 - ALPHA, degrees) * error, 0.0), beyond)
    return (
        1.0
        - (distribution.cdf(beyond) - distribution.cdf(-beyond))
        + (distribution.cdf(within) - distribution.cdf(-within))
    )


def look(ratios: Sequence[float], min_effect: float = MIN_EFFECT, comparisons: int = 1) -> Verdict | None:
    """Return the verdict of a live comparison after these pairs' ratios, None if more are needed.

    With several `comparisons`, the error is divided among them (C. E. Bonferroni), for a total of 5 %.
    """
    if len(ratios) not in LOOKS:
        return None
    verdict = judge(paired_effect(ratios), LOOK_ALPHA / comparisons, min_effect, LOOK_ALPHA)
    return verdict if verdict.answer != "inconclusive" or len(ratios) == LOOKS[-1] else None


def judge_plan(effects: Sequence[Effect], min_effect: float = MIN_EFFECT) -> list[Verdict]:
    """Return one verdict per effect, such that the probability of any false difference among them is at most 5 %.

    The p-values, smallest first, are compared with 5 % divided by the number left (S. Holm, Scandinavian Journal of
    Statistics 6, 1979). Each step here settles all effects below the current bound, then recomputes the bound.
    """
    verdicts: dict[int, Verdict] = {}
    while len(verdicts) < len(effects):
        left = [place for place in range(len(effects)) if place not in verdicts]
        judged = {place: judge(effects[place], ALPHA / len(left), min_effect) for place in left}
        differing = {place: one for place, one in judged.items() if one.interval and one.interval.excludes_zero}
        verdicts |= differing or judged
    return [verdicts[place] for place in range(len(effects))]
