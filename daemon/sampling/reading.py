"""Computes a source's reading of a window: its energy, the uncertainty and the reasons for that; pure functions.

A counter is exact at its changes and linear in between. Power values are joined by straight lines, each value placed in
the middle of the time that it averages. The standard deviation includes the uncertainty from a sensor's update period,
resolution and noise. Samples cannot reveal a calibration error, a load exactly in phase with a sensor that does not
average, or bursts between all values. tests/daemon/sampling/test_energy_coverage.py measures how often an error bar of
COVERAGE standard deviations includes the exactly known energy; the constants below were tuned with it.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean, linear_regression, median, pstdev

from benchd.daemon.sampling.sources.protocol import PowerSource
from benchd.daemon.verdicts.statistics import percentile

COVERAGE = 2.0  # k, the number of standard deviations in an error bar
GAP_PERIODS = 2.5  # values further apart than this many periods have a gap between them
STALE_ODDS = 1e-6
GLITCH = 4.0  # a glitch is this many times larger, or smaller, than all other values of the sensor
GLITCH_SHARE = 0.01  # largest share of updates that can be glitches: anything more frequent is a load
NOTHING_SHARE = 0.1  # share of readings: a part that shows 0 W more often is off
OUTLIER, DIP = 3.0, 1.08  # multiples of the next largest excursion: for power values, and for counter steps
OUTLIERS = ((1,), (1, 1), (2,))  # possible groups of wrong values: a single one, two separate ones, or two in a row
LATEST_S, BEFORE_S = 2.5, 0.5  # largest delay of a sensor, and how long before the load its earlier power is looked up
LATE_SHARE = 0.8  # largest share of the window with late values: the remainder must show that the first values are late
RIPPLE = 0.6  # error at the window's edges, as a share of the steps between averages
# error from a load nearly in phase with the readings: a share of the power or of the steps, whichever is less
HIDDEN, HIDDEN_FACTOR = 0.12, 12.0

_UNIFORM = 1 / math.sqrt(12)  # standard deviation of a uniform distribution over its full width
_LOWER_THIRD = 0.609  # tercile of |x - y| for Gaussian x and y, divided by their standard deviation

Series = list[tuple[float, float]]  # seconds after the start of the window, value


class NoEnergy(Exception):
    """The reason why a source does not yield an energy: a name, a colon and the observed facts."""


@dataclass(frozen=True)
class Reading:
    """The energy with its standard deviation, the range of the power, and remaining doubts.

    `gap_s` is the time without values; `doubt_j` is the energy of a few outliers, and `alone` is set if they stand far
    out; `late_j` is the energy missing from the first values if they still show the power before the load; `glitches`
    is set if impossible values were dropped.
    """

    energy_j: float
    sd_j: float
    swing_w: float
    updates: int
    gap_s: float
    doubt_j: float
    alone: bool
    late_j: float = 0.0
    glitches: bool = False


@dataclass(frozen=True)
class _Run:
    """A value that stays the same for `span_s`, and the number of sensor updates in that time."""

    start_s: float
    watts: float
    span_s: float
    updates: int


def counted(series: Series, source: PowerSource, window_s: float, read_period_s: float) -> Reading:
    """Return the reading of an energy counter; raise NoEnergy if its values do not span the window or decreased."""
    # The first reading and repeated ones are not changes.
    changes = [after for before, after in pairwise(series) if after[1] != before[1]]
    times, span_sd_s = _change_times([t for t, _ in changes], source.period_s, read_period_s, window_s)
    used = _around(times, window_s)
    before = _rates(times[: used.start + 1], [value for _, value in changes[: used.start + 1]])
    earlier = [(t, rate) for t, rate in zip(times[1:], before, strict=False)]
    times, joules = times[used], [value for _, value in changes[used]]
    _require_rising(times, joules)
    watts = _rates(times, joules)
    energy_j = _at(times, joules, window_s) - _at(times, joules, 0.0)
    pace_s = max(source.period_s, read_period_s)
    runs = [_Run(t0, power_w, t1 - t0, 1) for (t0, t1), power_w in zip(pairwise(times), watts, strict=True)]
    doubt_j, alone = _doubt(runs, DIP)
    # Two time stamps of a fast counter are off by up to its period; stamps on a regular grid are already corrected.
    late_s = source.period_s / math.sqrt(2) if source.period_s < 2 * read_period_s else 0.0
    return Reading(
        energy_j=energy_j,
        sd_j=math.hypot(
            _edges_sd_j(times[:-1], times[1:], watts, window_s, pace_s),
            _ripple_sd_j(runs, pace_s, late_s / pace_s * energy_j / window_s),
            energy_j / window_s * span_sd_s,
        ),
        doubt_j=doubt_j,
        alone=alone,
        late_j=_late_j(earlier + list(zip(times[1:], watts, strict=True)), held_s(source, read_period_s), window_s),
        swing_w=max(watts) - min(watts),
        updates=bisect_right(times, window_s) - bisect_left(times, 0.0),
        gap_s=_gaps_s(times, pace_s, window_s),
    )


def _change_times(stamps: list[float], tick_s: float, read_s: float, window_s: float) -> tuple[list[float], float]:
    """Return when the counter changed, and the resulting error of the window's length (standard deviation, s).

    A change is seen up to one reading late. If changes are rarer than readings, they follow the sensor's own grid, and
    a line fitted to all time stamps locates that grid far better than a single stamp does.
    """
    as_seen = stamps, _UNIFORM * tick_s * math.sqrt(2)
    if len(stamps) < 4 or tick_s < 2 * read_s:
        return as_seen
    ticks = list(accumulate((max(1, round((b - a) / tick_s)) for a, b in pairwise(stamps)), initial=0))
    slope_s, start = linear_regression(ticks, stamps)
    line = [start + slope_s * tick for tick in ticks]
    scatter_s = pstdev(stamp - t for stamp, t in zip(stamps, line, strict=True))
    if scatter_s > read_s:  # the sensor has no regular grid
        return as_seen
    # Readings may drift relative to the grid, by at most one reading from the first change to the last.
    slope_sd = math.hypot(_UNIFORM * 2 * read_s, scatter_s * math.sqrt(12 / len(line))) / (line[-1] - line[0])
    return [t - read_s / 2 for t in line], slope_sd * window_s


def _rates(times: Sequence[float], joules: Sequence[float]) -> list[float]:
    return [(j1 - j0) / (t1 - t0) for (t0, j0), (t1, j1) in pairwise(zip(times, joules, strict=True))]


def held_s(source: PowerSource, read_period_s: float) -> float:
    """Return how long the load must continue before and after the window for this source."""
    return 2 * max(source.period_s, read_period_s) + source.averaging_s


def _require_rising(times: list[float], joules: list[float]) -> None:
    for t, (before, after) in zip(times[1:], pairwise(joules), strict=True):
        if after < before:
            raise NoEnergy(f"counter_reset: it fell by {before - after:.4g} J {t:.2f} s into the window")


def polled(series: Series, source: PowerSource, window_s: float, read_period_s: float) -> Reading:
    """Return the reading of a power sensor; raise NoEnergy if its values do not span the window or never changed."""
    # On average, a value is half a period old when read, and its averaging time is centred half of that time earlier.
    age_s = (source.period_s + source.averaging_s) / 2
    every = [(t - age_s, watts) for t, watts in series]
    clean = _without_glitches(every, source.period_s, read_period_s)
    used = _around([t for t, _ in clean], window_s)
    times, watts = [t for t, _ in clean[used]], [value for _, value in clean[used]]
    pace_s = max(source.period_s, read_period_s)
    all_runs, runs, inside = (
        _runs(points, source.period_s, read_period_s)
        for points in (clean, clean[used], [point for point in clean if 0.0 <= point[0] <= window_s])
    )
    if len(all_runs) == 1:
        raise NoEnergy(f"never_changed: {watts[0]:g} W in each of {len(clean)} readings, in the window and outside it")
    step_w = _resolution_w([run.watts for run in all_runs])
    stale_s = _stale_s(runs, all_runs, step_w)
    noise_w = _noise_sd_w(times, watts, source)
    doubt_j, alone = _doubt(runs, OUTLIER)
    return Reading(
        energy_j=_trapezoid(times, watts, window_s),
        sd_j=math.hypot(
            _unseen_sd_j(times, watts, source, read_period_s),
            _edges_sd_j(times, times, watts, window_s, max(pace_s, source.averaging_s)),
            _ripple_sd_j(runs, pace_s, math.sqrt(2) * noise_w) if source.averaging_s else 0.0,
            _UNIFORM * min(source.period_s, read_period_s) * (_at(times, watts, window_s) - _at(times, watts, 0.0)),
            max(noise_w * math.sqrt(window_s * pace_s), _missed_sd_j(runs, max(0.0, pace_s - source.averaging_s))),
            _UNIFORM * step_w * window_s,
        ),
        swing_w=max(watts) - min(watts),
        updates=sum(run.updates for run in inside) - round(stale_s / pace_s),
        gap_s=_gaps_s(times, pace_s, window_s) + stale_s,
        doubt_j=doubt_j,
        alone=alone,
        late_j=_late_j(clean, held_s(source, read_period_s), window_s),
        glitches=any(times[0] < t < times[-1] for t, _ in set(every) - set(clean)),
    )


def _runs(points: Series, period_s: float, read_s: float) -> list[_Run]:
    """Return the runs of equal values; the last one ends at its last reading."""
    runs = []
    firsts = [i for i, (_, watts) in enumerate(points) if i == 0 or watts != points[i - 1][1]]
    for first, following in pairwise([*firsts, len(points) - 1] if points else []):
        span_s = points[following][0] - points[first][0]
        updates = min(round(span_s / max(read_s, period_s)), following - first)
        runs.append(_Run(*points[first], span_s, max(1, updates)))
    return runs


def _without_glitches(every: Series, period_s: float, read_s: float) -> Series:
    """Return the points without occasional zeros and single updates far outside the range of all other values."""
    points = [point for point in every if point[1] > 0.0]
    points = points if len(points) >= (1 - NOTHING_SHARE) * len(every) else every
    runs = _runs(points, period_s, read_s)
    watts = sorted({run.watts for run in runs})
    if len(watts) < 3:
        return points
    wrong = {watts[-1]} if watts[-1] > GLITCH * max(watts[-2], 0.0) else set()
    wrong |= {watts[0]} if watts[0] * GLITCH < watts[1] else set()
    hits = [run for run in runs if run.watts in wrong]
    if len(hits) > max(len(wrong), GLITCH_SHARE * len(runs)) or any(run.span_s > period_s + read_s for run in hits):
        return points
    return [point for point in points if point[1] not in wrong]


def _missed_sd_j(runs: Sequence[_Run], unseen_s: float) -> float:
    """Return the uncertainty from bursts that some values include and others miss, counted as rare events.

    `unseen_s` is the time between two values that is not part of any average.
    """
    met = [nearer_w**2 * runs[place.start].span_s * unseen_s for nearer_w, _, place in _outside(runs, 1)]
    return math.sqrt(math.fsum(met) + max(met, default=0.0))


def _doubt(runs: Sequence[_Run], least: float) -> tuple[float, bool]:
    """Return the energy of the outliers, and whether they stand far out; 0 J if there are none.

    Outliers may be glitches, isolated bursts or counter resets. They exceed their neighbours by at least `least` times
    as much as any other values do, or by OUTLIER times as much if they stand far out.
    """
    doubts = [(0.0, False)]
    for sizes in OUTLIERS:
        left, nearer_w, energy_j = list(runs), math.inf, 0.0
        for size in sizes:
            further_w, farther_j, place = max(_outside(left, size), default=(0.0, 0.0, slice(0)))
            nearer_w, energy_j = min(nearer_w, further_w), energy_j + farther_j
            del left[place]
        next_w = max((watts for size in (1, 2) for watts, _, _ in _outside(left, size)), default=nearer_w)
        if nearer_w > least * next_w:
            doubts.append((energy_j, nearer_w > OUTLIER * next_w))
    return max(doubts)


def _outside(runs: Sequence[_Run], size: int) -> Iterator[tuple[float, float, slice]]:
    """Yield each group of `size` successive values outside the range of its neighbours, with its position as a slice.

    Before the position come the group's distance from the nearer neighbour (W) and its energy beyond the farther one
    (J).
    """
    for first in range(1, len(runs) - size):
        group, ends = runs[first : first + size], (runs[first - 1].watts, runs[first + size].watts)
        watts = [run.watts for run in group]
        nearer_w = max(min(watts) - max(ends), min(ends) - max(watts))
        if nearer_w > 0.0:
            farther_j = math.fsum(max(abs(run.watts - end) for end in ends) * run.span_s for run in group)
            yield nearer_w, farther_j, slice(first, first + size)


def _late_j(values: Series, held_s: float, window_s: float) -> float:
    """Return the energy missing from the first values of the window if they still show the power before the load.

    That is assumed if all of them are closer to that power than any later value: the sensor then has a longer delay or
    averaging time than its source states.
    """
    before = [watts for t, watts in values if -held_s - BEFORE_S < t < -held_s]
    inside = [watts for t, watts in values if 0.0 < t < window_s]
    if not before or not inside:
        return 0.0
    level_w = median(before)
    sign = math.copysign(1.0, fmean(inside) - level_w)
    risen = [sign * (watts - level_w) for watts in inside]
    highest_yet = list(accumulate(risen, max))
    lowest_later = list(accumulate(reversed(risen), min))[::-1]
    most = min(int(LATE_SHARE * len(inside)), sum(0.0 < t < LATEST_S for t, _ in values))
    first = max((n for n in range(1, most + 1) if highest_yet[n - 1] < lowest_later[n]), default=0)
    lacking_w = fmean(risen[first:]) - fmean(risen[:first]) if first else 0.0
    return lacking_w * first / len(risen) * window_s


def _ripple_sd_j(runs: Sequence[_Run], pace_s: float, noise_w: float) -> float:
    """Return the uncertainty at both edges from a load that varies within an average.

    The steps between averages, beyond those caused by `noise_w`, are a lower bound: averages hide a load in phase with
    them.
    """
    updates = sum(run.updates for run in runs)
    square = math.fsum((after.watts - before.watts) ** 2 for before, after in pairwise(runs)) / updates
    shown_w = math.sqrt(max(0.0, square - noise_w**2 * (1 + COVERAGE * math.sqrt(2 / updates))))
    mean_w = math.fsum(run.watts * run.span_s for run in runs) / math.fsum(run.span_s for run in runs)
    return math.hypot(RIPPLE * shown_w, min(HIDDEN_FACTOR * shown_w, HIDDEN * mean_w)) * pace_s


def _edges_sd_j(starts: list[float], ends: list[float], watts: list[float], window_s: float, pace_s: float) -> float:
    """Return the uncertainty from load steps near the window's edges, which may be on either side of an edge."""
    sides = []
    for edge in (0.0, window_s):
        near = watts[bisect_left(ends, edge - 1.5 * pace_s) : bisect_right(starts, edge + 1.5 * pace_s)]
        sides.append((max(near) - min(near)) * pace_s if near else 0.0)
    return _UNIFORM * math.hypot(*sides)


def _trapezoid(times: list[float], watts: list[float], window_s: float) -> float:
    """Return the area under the power curve in J, with the power interpolated at both window edges."""
    ends = [(t, _at(times, watts, t)) for t in (0.0, window_s)]
    inner = [(t, w) for t, w in zip(times, watts, strict=True) if 0.0 < t < window_s]
    return math.fsum((w0 + w1) / 2 * (t1 - t0) for (t0, w0), (t1, w1) in pairwise([ends[0], *inner, ends[1]]))


def _unseen_sd_j(times: list[float], watts: list[float], source: PowerSource, read_s: float) -> float:
    """Return the uncertainty from load steps between two values: in time outside all averages, and from late readings.

    If the load is in phase with the readings, all rises have the same error, as do all falls; one more may be unseen.
    """
    points = list(pairwise(zip(times, watts, strict=True)))
    repeats = sum(after == before for before, after in pairwise(watts)) / len(points)
    late_s = repeats * min(source.period_s, read_s) + pstdev(t1 - t0 for (t0, _), (t1, _) in points)
    rises = falls = most_w = 0.0
    for (t0, w0), (t1, w1) in points:
        unseen_s = late_s + max(0.0, max(t1 - t0, source.period_s) - source.averaging_s)
        rises += max(0.0, w1 - w0) * unseen_s
        falls += max(0.0, w0 - w1) * unseen_s
        most_w = max(most_w, abs(w1 - w0))
    another = most_w * max(0.0, max(read_s, source.period_s) - source.averaging_s)
    return _UNIFORM * math.hypot(rises + another, falls + another)


def _noise_sd_w(times: list[float], watts: list[float], source: PowerSource) -> float:
    """Return the noise of single values, from the smaller steps between updates: larger steps are load changes."""
    # A value that is read more often than it is updated repeats, so compare with the previous update.
    stride = max(1, round(source.period_s * (len(times) - 1) / (times[-1] - times[0])))
    steps = sorted(abs(after - before) for before, after in zip(watts, watts[stride:], strict=False))
    return percentile(steps, 100 / 3) / _LOWER_THIRD if steps else 0.0


def _resolution_w(watts: list[float]) -> float:
    """Return the sensor's resolution in W as the greatest common divisor of its values."""
    return math.gcd(*(round(value * 1e6) for value in watts)) / 1e6


def _stale_s(runs: Sequence[_Run], all_runs: Sequence[_Run], step_w: float) -> float:
    """Return the longest time without a change of the value, or 0 if the changes at other times make it plausible.

    With a coarse sensor, the value may be constant for most of a window: other changes then span many steps or none.
    """
    longest = max(runs, key=lambda run: run.updates)
    brief = longest.span_s < math.fsum(run.span_s for run in runs) / 2
    evidence, least_w = (runs, 0.0) if brief else (all_runs, 1.5 * step_w)
    updates = sum(run.updates for run in evidence) - longest.updates
    moves = sum(abs(after.watts - before.watts) > least_w for before, after in pairwise(evidence))
    equal = max(1 - moves / (updates + 1), 1 / (updates + 2))
    return longest.span_s if equal ** (longest.updates - 2) < STALE_ODDS else 0.0


def _around(times: list[float], window_s: float) -> slice:
    """Return the slice of times within the window and up to two on each side; raise NoEnergy if one side has none."""
    first, last = bisect_right(times, 0.0) - 1, bisect_left(times, window_s)
    if not times:
        raise NoEnergy("no_samples: nothing was read")
    if first < 0:
        raise NoEnergy(f"not_covered: the first value is from {times[0]:.3g} s into the window")
    if last == len(times):
        raise NoEnergy(f"not_covered: the last value is from {window_s - times[-1]:.3g} s before the window's end")
    return slice(max(0, first - 1), last + 2)


def _gaps_s(times: list[float], pace_s: float, window_s: float) -> float:
    """Return the time within the window between values that are too far apart."""
    gaps = [(a, b) for a, b in pairwise(times) if b - a > GAP_PERIODS * pace_s]
    return math.fsum(max(0.0, min(b, window_s) - max(a, 0.0)) for a, b in gaps)


def _at(times: list[float], values: list[float], t: float) -> float:
    """Return the linearly interpolated value at `t`, which must be within the times."""
    after = max(1, bisect_left(times, t))
    (t0, t1), (v0, v1) = times[after - 1 : after + 1], values[after - 1 : after + 1]
    return v0 + (v1 - v0) * (t - t0) / (t1 - t0)
