"""Finds shifts in the speed of a case between runs: where new levels begin in a series of medians; pure."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from benchd.daemon.verdicts.effects import ALPHA, MIN_EFFECT, as_share
from benchd.daemon.verdicts.statistics import student_t_quantile

FEWEST_RUNS = 4
"""The smallest number of runs that can form a level."""

MOST_LAG1 = 0.9
"""An upper limit on the estimated correlation between successive runs, from which shifts must stand out."""


def shifts(medians_ms: Sequence[float]) -> list[int]:
    """Return the indices at which new levels begin, ascending; the medians are in order of time.

    A median that is not positive cannot be a time and is skipped.

    Binary segmentation proposes levels: each span is split where the two sides differ most, if Student's t exceeds a
    bound corrected for the number of places tried (Bonferroni), and each side is examined again. This assumes
    independent runs, so a drift becomes a staircase. The weakest proposals are therefore dropped until all others stand
    out from the correlation that remains between successive runs.
    """
    places = [i for i, value in enumerate(medians_ms) if value > 0.0]
    logs = [math.log(medians_ms[i]) for i in places]
    proposals = _proposed(logs)
    while proposals:
        strengths = _strengths(logs, proposals)
        weak = sorted(strength for strength in strengths if strength < 1.0)
        if not weak:
            break
        most = weak[len(weak) // 10]  # a tenth of them at once, because a series of thousands has hundreds
        proposals = [place for place, strength in zip(proposals, strengths, strict=True) if strength > most]
    return [places[i] for i in proposals]


def _strengths(logs: Sequence[float], places: Sequence[int]) -> list[float]:
    """Return the size of each shift as a multiple of the smallest that stands out; 0 for a shift below MIN_EFFECT."""
    count, levels = len(logs), [logs[begin:end] for begin, end in pairwise([0, *places, len(logs)])]
    means = [math.fsum(level) / len(level) for level in levels]
    left = [value - mean for level, mean in zip(levels, means, strict=True) for value in level]
    squares = math.fsum(value * value for value in left)
    degrees = count - len(levels)
    reach = student_t_quantile(1.0 - ALPHA / (2.0 * (count - 2 * FEWEST_RUNS + 1)), degrees)
    reach *= math.sqrt(squares / degrees) * _inflation(left, squares, len(levels))
    strengths = []
    for (before, after), (mean, next_mean) in zip(pairwise(levels), pairwise(means), strict=True):
        step = next_mean - mean
        least = reach * math.sqrt(1 / len(before) + 1 / len(after))
        counts = abs(as_share(step)) >= MIN_EFFECT
        strengths.append(0.0 if not counts else abs(step) / least if least else math.inf)
    return strengths


def _inflation(left: Sequence[float], squares: float, levels: int) -> float:
    """Return the factor by which correlation may widen the spread of a level difference: sqrt((1 + r) / (1 - r)).

    `r` is an upper bound on the lag-1 autocorrelation of the residuals, whose estimate is low by about (2 + 4 r) / n
    per fitted level. The constants are the smallest that keep false shifts below 5 % for correlations up to 0.9.
    """
    count = len(left)
    lag1 = math.fsum(a * b for a, b in pairwise(left)) / squares if squares else 0.0
    most = MOST_LAG1 - 1.4 / count
    fitted = 1.0 - 4.0 * levels / count
    upper = (lag1 + 2.0 * levels / count) / fitted + 1.5 / math.sqrt(count) if fitted > 0.05 else most
    upper = min(max(upper, 0.0), most)
    return math.sqrt((1.0 + upper) / (1.0 - upper))


def _proposed(logs: Sequence[float]) -> list[int]:
    """Return where levels would begin if the runs were independent, ascending."""
    places: list[int] = []
    spans = [(0, len(logs))]
    while spans:
        start, end = spans.pop()
        place = _shift(logs[start:end])
        if place is not None:
            places.append(start + place)
            spans += [(start, start + place), (start + place, end)]
    return sorted(places)


def _shift(logs: Sequence[float]) -> int | None:
    """Return the place where the two sides of a span differ most; None if the difference is within the noise."""
    count = len(logs)
    places = range(FEWEST_RUNS, count - FEWEST_RUNS + 1)
    if not places:
        return None
    centre = math.fsum(logs) / count
    centred = [value - centre for value in logs]
    sums, squares = list(accumulate(centred)), math.fsum(value * value for value in centred)
    # the centred values sum to 0, so the sum before a place determines both means and the variance they explain
    place = max(places, key=lambda n: sums[n - 1] ** 2 * count / (n * (count - n)))
    step = -sums[place - 1] * count / (place * (count - place))
    left = max(squares - sums[place - 1] ** 2 * count / (place * (count - place)), 0.0)
    error = math.sqrt(left / (count - 2) * count / (place * (count - place)))
    reach = student_t_quantile(1.0 - ALPHA / (2.0 * len(places)), count - 2.0) * error
    return place if abs(step) > reach and abs(as_share(step)) >= MIN_EFFECT else None
