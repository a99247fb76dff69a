"""Two levels in times that should have one: some processes, or parts of one, are slower by a jump; pure.

A mean over levels is a mean over how often each was drawn, so its interval from few draws does not hold: with 5
processes, a fifth of which are 30 % slower, it covers the mean of all processes in 67 %. What is seen is named instead.
"""

import math
from collections.abc import Sequence
from itertools import accumulate

from benchd.daemon.records import Level, Record
from benchd.daemon.verdicts import doubts
from benchd.daemon.verdicts.results import process_medians_ms

LEAST_GAP = 0.02
"""The smallest relative gap between levels; below it, a jump matters no more than noise."""

SPREAD_FLOOR = 0.005
_SEPARATIONS = {3: 47.0, 4: 29.0, 5: 14.7, 6: 10.5, 7: 8.6}
_SEPARATION = 6.5
_RARE = 0.05


def found(times_ms: Sequence[float]) -> list[Level]:
    """Return the two levels of these positive times, the faster first; empty if they have one, or are fewer than three.

    The sorted logarithms are split where that explains most of their variance. Two levels: the gap is at least
    `LEAST_GAP`, and so many times the spread within the levels (at least `SPREAD_FLOOR`) as equal Gaussian times reach
    in 1 % (in 5 % for three). Fewer than a twentieth of the times are spikes, no level.
    """
    ordered = sorted(math.log(value) for value in times_ms)
    count = len(ordered)
    if count < 3:
        return []
    centre = math.fsum(ordered) / count
    sums = list(accumulate(value - centre for value in ordered))
    size = max(range(1, count), key=lambda n: sums[n - 1] ** 2 / (n * (count - n)))
    fast, slow = ordered[:size], ordered[size:]
    gap = math.fsum(slow) / len(slow) - math.fsum(fast) / len(fast)
    squares = math.fsum((value - centre) ** 2 for value in ordered) - gap**2 * size * (count - size) / count
    spread = max(math.sqrt(max(squares, 0.0) / (count - 2)), SPREAD_FLOOR)
    is_rare = min(size, count - size) < max(1.0, _RARE * count)
    if is_rare or math.expm1(gap) < LEAST_GAP or gap < _SEPARATIONS.get(count, _SEPARATION) * spread:
        return []
    return [Level(math.exp(math.fsum(level) / len(level)), len(level) / count) for level in (fast, slow)]


def words(record: Record) -> str | None:
    """Return the levels between which the record's processes jump, or else the runs of one; None without any."""
    among, subject = found(process_medians_ms([record])), "the processes"
    if not among:
        among = next((process.blocks.levels for process in record.processes if process.blocks), [])
        subject = "the time of a process"
    if not among:
        return None
    shares = " and ".join(f"{level.ms:.4g} ms ({100 * level.share:.0f} % of {subject})" for level in among)
    cause = doubts.words(doubts.busy([record])) or "the cause is not known"
    return f"{record.case_id}: jumps between {shares}: {cause}; the interval may not cover the median of their mix"
