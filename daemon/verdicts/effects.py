"""Verdicts on two arms: how much B differs from A, and whether that is faster, slower, the same or undecided; pure.

Processes differ, so a verdict uses process medians only. tests/daemon/verdicts/test_error_rates.py checks the error
rates through the complete rules.
"""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from benchd.daemon.verdicts.statistics import Interval, student_t_quantile

LOOKS = (7, 11, 15)
"""Numbers of pairs after which a live comparison may end."""

LOOK_ALPHA = 0.022
"""Two-sided error per look, so that three looks together err in 5 %: S. J. Pocock, Biometrika 64, 1977."""

ALPHA = 0.05
MIN_EFFECT = 0.005
SAME_MARGIN = 0.01
FEWEST_PROCESSES = 5

Answer = Literal["faster", "slower", "same", "inconclusive"]


class Effect(msgspec.Struct, frozen=True):
    """How much B differs from A: the mean of log(B / A), its standard error and the degrees of freedom of its t.

    `between_runs` is the part that variation between runs may explain, which the error does not cover.
    """

    log_ratio: float
    error: float
    degrees: float
    between_runs: float = 0.0

    @property
    def share(self) -> float:
        """Return B over A minus 1: 0.02 is 2 % slower."""
        return math.expm1(self.log_ratio)

    def interval(self, confidence: float) -> Interval:
        """Return the interval of `share`."""
        reach = student_t_quantile(0.5 + confidence / 2.0, self.degrees) * self.error
        return Interval(math.expm1(self.log_ratio - reach), math.expm1(self.log_ratio + reach))


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on B against A. `effect` is B over A minus 1; None, with the reason, if nothing was compared."""

    answer: Answer
    effect: float | None = None
    interval: Interval | None = None
    confidence: float | None = None
    reason: str = ""


def paired_effect(first: Sequence[float], second: Sequence[float]) -> Effect:
    """Return the effect from the process medians of A and of B, measured in pairs; at least two pairs, all positive."""
    _require_positive(first, second, fewest=2)
    logs = [math.log(b / a) for a, b in zip(first, second, strict=True)]
    centre, variance = _mean_and_variance(logs)
    return Effect(centre, math.sqrt(variance / len(logs)), len(logs) - 1.0)


def welch_effect(first: Sequence[float], second: Sequence[float], between_runs: float = 0.0) -> Effect:
    """Return the effect from process medians of A and of B, measured apart, by Welch's t on their logarithms.

    Takes at least three of each: with fewer the degrees of freedom may fall below 2.
    """
    _require_positive(first, second, fewest=3)
    (a, variance_a), (b, variance_b) = (_mean_and_variance([math.log(v) for v in arm]) for arm in (first, second))
    share_a, share_b = variance_a / len(first), variance_b / len(second)
    total = share_a + share_b
    spent = share_a**2 / (len(first) - 1) + share_b**2 / (len(second) - 1)
    degrees = total**2 / spent if spent else len(first) + len(second) - 2.0
    return Effect(b - a, math.sqrt(total), degrees, between_runs)


def further_run(runs: Sequence[Sequence[float]]) -> float:
    """Return how far one more run may deviate from these, as a log ratio; 0 for one run. A run is its process medians.

    This is the half-width of the 95 % prediction interval from the runs' own centres.
    """
    if len(runs) < 2:
        return 0.0
    _require_positive(*runs, fewest=1)
    _, variance = _mean_and_variance([math.fsum(map(math.log, run)) / len(run) for run in runs])
    return student_t_quantile(1.0 - ALPHA / 2.0, len(runs) - 1.0) * math.sqrt(variance * (1.0 + 1.0 / len(runs)))


def _require_positive(*arms: Sequence[float], fewest: int) -> None:
    if any(len(arm) < fewest or not all(math.isfinite(v) and v > 0.0 for v in arm) for arm in arms):
        raise ValueError(f"a comparison needs at least {fewest} positive times per side: {arms}")


def _mean_and_variance(values: Sequence[float]) -> tuple[float, float]:
    centre = math.fsum(values) / len(values)
    return centre, math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1)


def judge(effect: Effect, alpha: float = ALPHA, min_effect: float = MIN_EFFECT) -> Verdict:
    """Return the verdict on one effect at the two-sided error `alpha`.

    Faster or slower: the interval excludes 0, and the effect is at least `min_effect` and exceeds the variation between
    runs. Same: the 90 % interval lies within 1 % either way.
    """
    interval, narrow = effect.interval(1.0 - alpha), effect.interval(0.9)
    differs, exceeds_runs = _excludes_zero(interval), abs(effect.log_ratio) >= effect.between_runs
    answer: Answer = "inconclusive"
    reason = f"the interval contains 0 and reaches beyond {100 * SAME_MARGIN:g} %"
    if differs and exceeds_runs and abs(effect.share) >= min_effect:
        answer, reason = "slower" if effect.share > 0.0 else "faster", ""
    elif narrow.low > -SAME_MARGIN and narrow.high < SAME_MARGIN:
        answer, reason = "same", ""
    elif differs and exceeds_runs:
        reason = f"the difference is below the smallest that counts here, {100 * min_effect:.2g} %"
    elif differs:
        reason = f"the difference is below the run-to-run variation of A, {100 * math.expm1(effect.between_runs):.2g} %"
    return Verdict(answer=answer, effect=effect.share, interval=interval, confidence=1.0 - alpha, reason=reason)


def look(first: Sequence[float], second: Sequence[float], min_effect: float = MIN_EFFECT) -> Verdict | None:
    """Return the verdict of a live comparison after these pairs, None if more are needed."""
    if len(first) not in LOOKS:
        return None
    verdict = judge(paired_effect(first, second), LOOK_ALPHA, min_effect)
    return verdict if verdict.answer != "inconclusive" or len(first) == LOOKS[-1] else None


def judge_plan(
    effects: Sequence[Effect], min_effect: float = MIN_EFFECT, floors: Sequence[float] = ()
) -> list[Verdict]:
    """Return one verdict per effect, with a probability of at most 5 % for any false difference among all of them.

    `floors` are the noise floors of the effects' cases, which raise the smallest effect that counts.

    Compares p-values from the smallest up with 5 % over the number left (S. Holm, Scandinavian Journal of Statistics
    6, 1979). Here each step settles all below the current bound, and then the bound is computed again.
    """
    verdicts: dict[int, Verdict] = {}
    least = [max(min_effect, *floors[place : place + 1], 0.0) for place in range(len(effects))]
    while len(verdicts) < len(effects):
        left = [place for place in range(len(effects)) if place not in verdicts]
        judged = {place: judge(effects[place], ALPHA / len(left), least[place]) for place in left}
        differing = {place: verdict for place, verdict in judged.items() if _excludes_zero(verdict.interval)}
        verdicts |= differing or judged
    return [verdicts[place] for place in range(len(effects))]


def _excludes_zero(interval: Interval | None) -> bool:
    return interval is not None and not interval.low <= 0.0 <= interval.high
