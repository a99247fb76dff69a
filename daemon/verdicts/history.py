"""Where the speed of a case shifted between runs: new levels in a series of medians; pure."""

import math
from collections.abc import Sequence
from itertools import accumulate

from benchd.daemon.verdicts.effects import ALPHA, MIN_EFFECT
from benchd.daemon.verdicts.statistics import student_t_quantile

FEWEST_RUNS = 4
"""The least number of runs in a level."""


def shifts(medians_ms: Sequence[float]) -> list[int]:
    """Return the indices at which a new level begins, in order; the medians are in order of time.

    A median that is not positive is not a time and is skipped.

    Binary segmentation: each span is split where the two sides differ most, if Student's t exceeds a bound corrected
    for the number of places tried (Bonferroni), and each side is examined again. Runs count as independent.
    """
    places = [i for i, value in enumerate(medians_ms) if value > 0.0]
    logs = [math.log(medians_ms[i]) for i in places]
    found: list[int] = []
    spans = [(0, len(logs))]
    while spans:
        start, end = spans.pop()
        place = _shift(logs[start:end])
        if place is not None:
            found.append(start + place)
            spans += [(start, start + place), (start + place, end)]
    return [places[i] for i in sorted(found)]


def _shift(logs: Sequence[float]) -> int | None:
    """Return where the two sides of a span differ most, None if the difference is within noise."""
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
    return place if abs(step) > reach and abs(math.expm1(step)) >= MIN_EFFECT else None
