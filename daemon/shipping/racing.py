"""Decides after each round of a race which variants leave and which may win; pure functions.

A round is one fresh process of each remaining variant, so that differences within a round exclude slow changes of the
machine. From `FEW` rounds on, every decision uses a lower bound on how far one variant is behind another. The bounds of
all looks and pairs hold simultaneously with probability 1 - `ALPHA` (Bonferroni). The probability that the winner is
more than `min_effect` slower than the best is therefore at most `ALPHA`: either the best was found to be behind another
variant, or the winner to be within `min_effect` of it, and each requires a bound to fail. Before that, a variant leaves
only if it is further behind in every round than processes differ. tests/daemon/shipping/test_racing_error_rates.py
counts the errors in races with known times.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import NormalDist

from msgspec import Struct

from benchd.daemon.verdicts.effects import as_share, mean_and_variance
from benchd.daemon.verdicts.statistics import Interval, combine, student_t_quantile

ALPHA = 0.04
"""The probability that any bound in a race fails; the rest of 5 % is for the limits."""

LIMITS_ALPHA = 0.01
LOOKS = (1, 2, 3, 5, 8, 12, 18, 27, 40, 60)
"""The numbers of rounds after which variants may leave and the race may end."""

FEW = 8
"""In fewer rounds, all processes may be at the same level, and their spread is too uncertain for a bound."""

GAPS = {1: math.log(2.0), 2: math.log(1.6), 3: math.log(1.4), 5: math.log(1.4)}
"""After this many rounds, before `FEW`, a variant leaves if it is behind by this log ratio in each round.

Processes have been seen to jump between levels that differ by a factor of 1.3, and to differ by 20 % on a busy machine.
"""

PROMISED = 5
"""The number of fresh processes on which a winner's promise is based; verification runs at most as many."""

PROMISED_AT_MOST = 18
"""The maximum while its limits or its promise are undecided: five would reject a fifth of the winners that are 3
standard deviations within a limit."""

WIDEST_SHARE = 1.0
"""An interval wider than this share of its time says nothing about that time."""

AGAINST_FAR = 3
"""Number of fresh processes for a runner-up eliminated within `FEW` rounds; a closer one gets as many as the winner."""

LEAST_SPREAD = 0.002
"""A smaller spread of the differences is assumed to be due to chance."""


class Behind(Struct, frozen=True):
    """The share by which a variant is slower than another: the mean, and the interval on which the race relies.

    Before `FEW` rounds, the interval is the range over the rounds, later the bounds; `rounds` is the number of rounds.
    """

    than: str
    share: float
    interval: Interval
    rounds: int


class Look(Struct, frozen=True, kw_only=True):
    """The result of a look: variants that are `behind` and leave, and those that `may_win` (none until it is settled).

    Variants that may win are at most `min_effect` slower than any other remaining variant.
    """

    behind: dict[str, Behind] = {}
    may_win: list[str] = []


def look(times: Mapping[str, Sequence[float]], fit: Collection[str], field: int, min_effect: float) -> Look:
    """Return the conclusions from the rounds so far about the remaining variants, out of an initial number `field`.

    `times` contains the positive times of the same rounds for each variant. Only variants in `fit`, which are shown
    to meet the limits, can win or make another leave. The number of rounds must be in `LOOKS`.
    """
    rounds = len(next(iter(times.values())))
    logs = {name: [math.log(value) for value in values] for name, values in times.items()}
    means = {name: math.fsum(values) / rounds for name, values in logs.items()}
    best = min((name for name in times if name in fit), key=means.__getitem__, default=None)
    if best is None:
        return Look()
    against = {name: _behind(logs[name], logs[best], best, field) for name in times if name != best}
    behind = {name: lag for name, lag in against.items() if _is_behind(lag)}
    left = [name for name in times if name not in behind]
    decided = rounds >= FEW or len(left) == 1
    may_win = [name for name in left if name in fit and _within(name, left, logs, field, min_effect)] if decided else []
    return Look(behind=behind, may_win=may_win)


def _is_behind(lag: Behind) -> bool:
    return math.log1p(lag.interval.low) > GAPS.get(lag.rounds, 0.0)


def _within(name: str, left: Sequence[str], logs: Mapping[str, Sequence[float]], field: int, min_effect: float) -> bool:
    """Return whether no remaining variant is faster than `name` by `min_effect` or more."""
    others = (_behind(logs[other], logs[name], name, field) for other in left if other != name)
    return all(lag.interval.low > 1.0 / (1.0 + min_effect) - 1.0 for lag in others)


def _behind(logs: Sequence[float], best: Sequence[float], than: str, field: int) -> Behind:
    differences = [mine - theirs for mine, theirs in zip(logs, best, strict=True)]
    rounds = len(differences)
    if rounds < FEW:
        low, high = map(as_share, (min(differences), max(differences)))
        return Behind(than, as_share(math.fsum(differences) / rounds), Interval(low, high), rounds)
    centre, variance = mean_and_variance(differences)
    error = max(math.sqrt(variance), LEAST_SPREAD) / math.sqrt(rounds)
    reach = student_t_quantile(1.0 - _per_bound(field), rounds - 1.0) * error
    return Behind(than, as_share(centre), Interval(as_share(centre - reach), as_share(centre + reach)), rounds)


def _per_bound(field: int) -> float:
    """Return the error rate of one bound, given one bound per other variant and look."""
    return ALPHA / (max(field - 1, 1) * sum(rounds >= FEW for rounds in LOOKS))


def needed_against(behind: Behind | None) -> int:
    """Return how many fresh processes the runner-up gets, given how far `behind` it is (None if it did not leave)."""
    return AGAINST_FAR if behind and behind.rounds < FEW else PROMISED


def is_vague(times_ms: Sequence[float]) -> bool:
    """Return whether the interval of the time of these processes is wider than the time itself."""
    centre_ms, interval = combine(times_ms)
    return interval is None or interval.high - interval.low > WIDEST_SHARE * centre_ms


def rounds_to_decide(times: Mapping[str, Sequence[float]], field: int, min_effect: float) -> int:
    """Return the approximate total of rounds that would separate these variants or show a tie within `min_effect`.

    The estimate is based on the spread so far, and requires at least three rounds.
    """
    means = {name: math.fsum(map(math.log, values)) / len(values) for name, values in times.items()}
    best, *others = sorted(times, key=means.__getitem__)
    quantile = NormalDist().inv_cdf(1.0 - _per_bound(field))
    return max((_rounds(times[best], times[other], quantile, min_effect) for other in others), default=0)


def _rounds(best: Sequence[float], other: Sequence[float], quantile: float, min_effect: float) -> int:
    centre, variance = mean_and_variance([math.log(b / a) for a, b in zip(best, other, strict=True)])
    # either to be ahead, or to be behind by at most `min_effect`
    effect = max(abs(centre), abs(centre + math.log1p(min_effect)))
    return max(FEW, math.ceil(max(variance, LEAST_SPREAD**2) * (quantile / max(effect, 1e-4)) ** 2))


def exceeds(values: Sequence[float], limit: float, bounds: int) -> bool | None:
    """Return whether a figure is shown to be above the limit (True) or within it (False); None if neither is shown.

    It is above if the lower bound of the mean exceeds the limit, where `bounds` and the looks share `LIMITS_ALPHA`; one
    or two processes must all exceed twice the limit. It is within if the 95 % bound for the next process is; one or two
    processes must all be at most half the limit.
    """
    if len(values) < 3:
        return True if min(values) > 2.0 * limit else False if max(values) <= limit / 2.0 else None
    centre, variance = mean_and_variance(list(map(math.log, values)))
    return _exceeds(centre, math.sqrt(variance), len(values), limit, bounds)


def rounds_to_judge(values: Sequence[float], limit: float, bounds: int) -> int | None:
    """Return the look at which values like these would be shown to be above or within the limit, or None."""
    if len(values) < 3:
        return next(rounds for rounds in LOOKS if rounds >= 3)
    centre, variance = mean_and_variance(list(map(math.log, values)))
    later = (rounds for rounds in LOOKS if rounds > len(values))
    return next((n for n in later if _exceeds(centre, math.sqrt(variance), n, limit, bounds) is not None), None)


def _exceeds(centre: float, deviation: float, count: int, limit: float, bounds: int) -> bool | None:
    """Return the result of `exceeds` for `count` values, from the mean and standard deviation of their logarithms."""
    spread, degrees = max(deviation, LEAST_SPREAD), count - 1.0
    reach = student_t_quantile(1.0 - LIMITS_ALPHA / (max(bounds, 1) * len(LOOKS)), degrees) * spread / math.sqrt(count)
    if centre - reach > math.log(limit):
        return True
    next_one = centre + student_t_quantile(0.95, degrees) * spread * math.sqrt(1.0 + 1.0 / count)
    return False if next_one <= math.log(limit) else None
