"""Confidence intervals for shares: a single one, and the difference of two for the same items; pure.

Both are score intervals: they stay within their range, and have a width even if no difference was observed, as is usual
for a good variant. tests/daemon/verdicts/test_proportions.py checks their coverage by enumerating all outcomes.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from statistics import NormalDist

from benchd.daemon.verdicts.statistics import Interval

_Z = NormalDist().inv_cdf(0.975)  # for 95 % intervals
_PRECISION = 1e-9
_ROUNDING = 1e-12  # the rounding error of counts computed as shares times items
_MOST_ITEMS = 10**9


def wilson(successes: int, trials: int) -> Interval:
    """Return the 95 % interval of a share (E. B. Wilson, JASA 22, 1927); raise ValueError if there are no trials."""
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"no interval for {successes} of {trials}")
    share, weight = successes / trials, _Z * _Z / trials
    centre = (share + weight / 2) / (1 + weight)
    half = _Z * math.sqrt(share * (1 - share) / trials + weight / (4 * trials)) / (1 + weight)
    return Interval(max(0.0, centre - half), min(1.0, centre + half))


def paired_difference(first_only: float, second_only: float, items: float) -> Interval:
    """Return the 95 % interval of the first share minus the second, for shares of the same items.

    `first_only` counts the items only in the first share, `second_only` those only in the second: the off-diagonal
    cells of McNemar's table. It is the score interval of T. Tango, Statistics in Medicine 17, 1998. Counts need not be
    whole numbers. Raises ValueError if there are no items.
    """
    if min(first_only, second_only) < 0 or items < max(1, (first_only + second_only) * (1 - _ROUNDING)):
        raise ValueError(f"no interval for {first_only} and {second_only} differing items of {items}")
    estimate = (first_only - second_only) / items
    low = _where_zero(lambda d: _Z - _score(first_only, second_only, items, d), -1.0, estimate)
    high = _where_zero(lambda d: -_Z - _score(first_only, second_only, items, d), estimate, 1.0)
    return Interval(low, high)


def _score(first_only: float, second_only: float, items: float, difference: float) -> float:
    """Return Tango's score: how many standard errors the observed difference lies above the assumed one."""
    excess = first_only - second_only - items * difference
    b = (2 * items - first_only + second_only) * difference - first_only - second_only
    c = -second_only * difference * (1 - difference)
    likeliest = (math.sqrt(max(0.0, b * b - 8 * items * c)) - b) / (4 * items)
    variance = items * (2 * likeliest + difference * (1 - difference))
    return excess / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, excess) if excess else 0.0


def _where_zero(rising: Callable[[float], float], low: float, high: float) -> float:
    while high - low > _PRECISION:
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2


def items_needed(first_only: int, second_only: int, items: int, limit: float) -> int | None:
    """Return how many items would prove that the difference is below `limit`, if the shares stay the same.

    Returns None if no number would, because the difference itself is not below the limit.
    """
    if (first_only - second_only) / items >= limit:
        return None
    rates = first_only / items, second_only / items
    enough = items
    while not _is_below(*rates, enough, limit):
        enough *= 2
        if enough > _MOST_ITEMS:
            return None
    return 1 + bisect_left(range(1, enough), True, key=lambda count: _is_below(*rates, count, limit))


def _is_below(first_rate: float, second_rate: float, items: int, limit: float) -> bool:
    return paired_difference(first_rate * items, second_rate * items, items).high < limit
