"""Energy over an exact window from the samples around it, always with an error bar; pure.

A counter is exact at its changes and linear in between. Powers are joined by straight lines, each value placed in the
middle of the time that it covers. The error bar (95 %, k = 2) covers the uncertainty from a sensor's update period and
noise. Samples reveal neither a calibration error nor a load in exact step with a sensor that does not average.
tests/daemon/sampling/test_energy.py checks energy and bar against exactly known loads.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from statistics import linear_regression, median, pstdev

import msgspec

from benchd.daemon.records import CrossCheck, Energy, Sample, Window
from benchd.daemon.sampling.sources.protocol import PowerSource
from benchd.daemon.verdicts.statistics import percentile

COVERAGE = 2.0  # k, the standard deviations in an error bar
GAP_PERIODS = 2.5  # a larger distance means that values in between are missing
GAPS_WIDEN, GAPS_REFUSE = 0.02, 0.10  # shares of the window
STALE_ODDS = 1e-9
FEWEST_UPDATES = {"energy_counter_j": 3, "power_w": 10}

_UNIFORM = 1 / math.sqrt(12)  # standard deviation of a uniform distribution over its full width
_LOWER_THIRD = 0.609  # quantile of |differences| of Gaussian values over their standard deviation

_Series = list[tuple[float, float]]  # seconds after the start of the window, value


class _Refused(Exception):
    """Why a source gives no energy: a name, a colon, the observed facts."""


@dataclass(frozen=True)
class _Reading:
    """A source's reading of the window: the energy with its standard deviation, and the range of its power."""

    energy_j: float
    sd_j: float
    swing_w: float
    updates: int
    gap_s: float


@dataclass(frozen=True)
class _Estimate:
    source: PowerSource
    energy_j: float
    err_j: float
    updates: int
    gap_share: float
    flags: list[str]


def measure(
    samples: Sequence[Sample],
    sources: Sequence[PowerSource],
    window: Window,
    inferences: int,
    read_period_s: float,
    idle: tuple[Window, Window] | None = None,
) -> Energy | str:
    """Return the energy of the window, or why there is none: a name such as `no_sensor` or `gaps`, then the facts.

    `sources` come in order of preference; `samples`, read every `read_period_s`, in any order, duplicates allowed. They
    begin two sensor periods and an averaging time before the window and end as long after it, under the same load;
    samples further out improve a counter's time stamps. `idle` is one window before and one after, with the model
    loaded and the device idle. Raises ValueError for an empty window or no inferences.
    """
    if inferences < 1 or window.seconds <= 0.0:
        raise ValueError(f"energy of {inferences} inferences in {window.seconds:g} s")
    if not sources:
        return "no_sensor"
    found = [_estimate(samples, source, window, read_period_s) for source in _of_one_scope(sources)]
    refusals = [estimate for estimate in found if isinstance(estimate, str)]
    estimates = [estimate for estimate in found if isinstance(estimate, _Estimate)]
    if not estimates:
        return "; ".join(refusals)
    best, *others = estimates
    energy = Energy(
        energy_j=best.energy_j,
        energy_err_j=best.err_j,
        gross_per_inference_j=best.energy_j / inferences,
        scope=best.source.scope,
        source=best.source.source,
        metric=best.source.metric,
        sensor_period_s=best.source.period_s,
        updates=best.updates,
        gap_share=best.gap_share,
        flags=best.flags + refusals,
    )
    energy = _cross_checked(energy, others[0]) if others else energy
    return _net_of_idle(energy, samples, best.source, window, inferences, idle) if idle else energy


def combined(energies: Sequence[Energy]) -> Energy | str:
    """Return the combined energy of a case's processes, or why they cannot be combined.

    Energies and idle powers are means over the windows; the processes' errors are assumed independent.
    """
    first, *others = energies
    for other in others:
        if (other.scope, other.source, other.metric) != (first.scope, first.source, first.metric):
            return f"sources_differ: {first.scope} by {first.source} and {other.scope} by {other.source}"
    if not others:
        return first
    joules = math.fsum(energy.energy_j for energy in energies)
    count = math.fsum(energy.energy_j / energy.gross_per_inference_j for energy in energies)
    nets = [energy for energy in energies if energy.net_per_inference_j is not None]
    whole = len(nets) == len(energies)
    weights = [energy.energy_j / energy.gross_per_inference_j / count for energy in energies]
    return Energy(
        energy_j=joules,
        energy_err_j=math.hypot(*(energy.energy_err_j for energy in energies)),
        gross_per_inference_j=joules / count,
        net_per_inference_j=_weighted([energy.net_per_inference_j for energy in energies], weights) if whole else None,
        net_per_inference_err_j=math.hypot(
            *(w * (energy.net_per_inference_err_j or 0.0) for w, energy in zip(weights, energies, strict=True))
        )
        if whole
        else None,
        idle_w=_weighted([energy.idle_w for energy in energies], weights) if whole else None,
        idle_drift_w=max(energy.idle_drift_w or 0.0 for energy in energies) if whole else None,
        scope=first.scope,
        source=first.source,
        metric=first.metric,
        sensor_period_s=max(energy.sensor_period_s for energy in energies),
        updates=sum(energy.updates for energy in energies),
        gap_share=max(energy.gap_share for energy in energies),
        flags=sorted({flag for energy in energies for flag in energy.flags}),
    )


def _weighted(values: Sequence[float | None], weights: Sequence[float]) -> float:
    return math.fsum(weight * (value or 0.0) for value, weight in zip(values, weights, strict=True))


def hold_s(sources: Sequence[PowerSource], read_period_s: float) -> float:
    """Return how long the load must continue around the window: two sensor periods and an averaging time."""
    return max((2 * max(source.period_s, read_period_s) + source.averaging_s for source in sources), default=0.0)


def idle_s(sources: Sequence[PowerSource], read_period_s: float) -> float:
    """Return the idle time before and after that gives enough values of each source; 0 without sources."""
    fewest = max(FEWEST_UPDATES.values()) + 2
    return max((fewest * max(source.period_s, read_period_s) for source in sources), default=0.0)


def _is_counter(source: PowerSource) -> bool:
    return source.metric == "energy_counter_j"


def _of_one_scope(sources: Sequence[PowerSource]) -> list[PowerSource]:
    """Return the sources with the scope of the first total, else of the first source, counters first.

    Parts are never added up, and never replace a lost total.
    """
    scope = next((source for source in sources if source.total), sources[0]).scope
    return sorted((source for source in sources if source.scope == scope), key=lambda source: not _is_counter(source))


def _series(samples: Sequence[Sample], source: PowerSource, window: Window) -> _Series:
    """Return the source's samples sorted by time, each stamp once."""
    key = (source.metric, source.source, source.rail)
    values = {sample.t_ns: sample.value for sample in samples if (sample.metric, sample.source, sample.rail) == key}
    return [((t_ns - window.start_ns) / 1e9, value) for t_ns, value in sorted(values.items())]


def _estimate(samples: Sequence[Sample], source: PowerSource, window: Window, read_period_s: float) -> _Estimate | str:
    """Return the source's estimate for the window, or why there is none."""
    read = _counted if _is_counter(source) else _polled
    read_period_s = read_period_s if source.stamp_s is None else source.stamp_s
    try:
        return _judge(
            read(_series(samples, source, window), source, window.seconds, read_period_s),
            source,
            window.seconds,
            read_period_s,
        )
    except _Refused as refused:
        return f"{refused} ({source.source} {source.rail or source.scope}, {source.metric})"


def _judge(reading: _Reading, source: PowerSource, window_s: float, read_period_s: float) -> _Estimate:
    """Return the energy with its bar after the rules on missing values and short windows; raise _Refused."""
    share, fewest = reading.gap_s / window_s, FEWEST_UPDATES[source.metric]
    if reading.updates < fewest:
        raise _Refused(f"too_few_updates: {reading.updates} in {window_s:.3g} s, at least {fewest} needed")
    if share > GAPS_REFUSE:
        raise _Refused(f"gaps: {100 * share:.0f} % of the window without a new value")
    shortest_s = _shortest_window_s(source, read_period_s)
    err_j = COVERAGE * reading.sd_j * max(1.0, shortest_s / window_s)
    if share > GAPS_WIDEN:
        err_j += reading.swing_w * reading.gap_s
    flags = ["gaps"] * (share > 0.0) + ["short_window"] * (window_s < shortest_s)
    return _Estimate(source, reading.energy_j, err_j, reading.updates, share, flags)


def _shortest_window_s(source: PowerSource, read_period_s: float) -> float:
    """Return the shortest window with enough values for the bar; below it the bar grows in proportion."""
    pace_s = max(source.period_s, read_period_s, source.averaging_s)
    if _is_counter(source):
        return max(3 * pace_s, 0.3)
    return max((20 if source.averaging_s else 50) * pace_s, 2.0)


def _counted(series: _Series, source: PowerSource, window_s: float, read_period_s: float) -> _Reading:
    # Neither the first reading nor a repeated one is a change.
    changes = [after for before, after in pairwise(series) if after[1] != before[1]]
    times, span_sd_s = _change_times([t for t, _ in changes], source.period_s, read_period_s, window_s)
    used = _around(times, window_s)
    times, joules = times[used], [value for _, value in changes[used]]
    _require_rising(times, joules)
    watts = [(j1 - j0) / (t1 - t0) for (t0, j0), (t1, j1) in pairwise(zip(times, joules, strict=True))]
    energy_j = _at(times, joules, window_s) - _at(times, joules, 0.0)
    pace_s = max(source.period_s, read_period_s)
    return _Reading(
        energy_j=energy_j,
        sd_j=math.hypot(_edges_sd_j(times[:-1], times[1:], watts, window_s, pace_s), energy_j / window_s * span_sd_s),
        swing_w=max(watts) - min(watts),
        updates=bisect_right(times, window_s) - bisect_left(times, 0.0),
        gap_s=_gaps_s(times, pace_s, window_s),
    )


def _change_times(stamps: list[float], tick_s: float, read_s: float, window_s: float) -> tuple[list[float], float]:
    """Return when the counter changed, and the error of the window's length by these times (sd, s).

    A change is seen up to one reading late. If changes are rarer than readings, they follow the sensor's own grid, and
    a line fitted through all stamps locates that grid far better than a single stamp.
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
    # Readings may drift against the grid, by at most one reading from the first change to the last.
    slope_sd = math.hypot(_UNIFORM * 2 * read_s, scatter_s * math.sqrt(12 / len(line))) / (line[-1] - line[0])
    return [t - read_s / 2 for t in line], slope_sd * window_s


def _require_rising(times: list[float], joules: list[float]) -> None:
    for t, (before, after) in zip(times[1:], pairwise(joules), strict=True):
        if after < before:
            raise _Refused(f"counter_reset: it fell by {before - after:.4g} J {t:.2f} s into the window")


def _polled(series: _Series, source: PowerSource, window_s: float, read_period_s: float) -> _Reading:
    # A value is on average half a period old when read, and the centre of its averaging time lies half of that earlier.
    age_s = (source.period_s + source.averaging_s) / 2
    used = _around([t - age_s for t, _ in series], window_s)
    times, watts = [t - age_s for t, _ in series[used]], [value for _, value in series[used]]
    pace_s = max(source.period_s, read_period_s)
    inside = watts[bisect_left(times, 0.0) : bisect_right(times, window_s)]
    return _Reading(
        energy_j=_trapezoid(times, watts, window_s),
        sd_j=math.hypot(
            _unseen_sd_j(times, watts, source, read_period_s),
            _edges_sd_j(times, times, watts, window_s, max(pace_s, source.averaging_s)),
            _UNIFORM * min(source.period_s, read_period_s) * (_at(times, watts, window_s) - _at(times, watts, 0.0)),
            _noise_sd_w(times, watts, source) * math.sqrt(window_s * pace_s),
            _UNIFORM * _resolution_w(watts) * window_s,
        ),
        swing_w=max(watts) - min(watts),
        updates=len(list(groupby(inside))),
        gap_s=_gaps_s(times, pace_s, window_s) + _stale_s(times, watts, pace_s),
    )


def _edges_sd_j(starts: list[float], ends: list[float], watts: list[float], window_s: float, pace_s: float) -> float:
    """Return the uncertainty from load steps near the window's edges: the side on which they fell is unknown."""
    sides = []
    for edge in (0.0, window_s):
        near = watts[bisect_left(ends, edge - 1.5 * pace_s) : bisect_right(starts, edge + 1.5 * pace_s)]
        sides.append((max(near) - min(near)) * pace_s if near else 0.0)
    return _UNIFORM * math.hypot(*sides)


def _trapezoid(times: list[float], watts: list[float], window_s: float) -> float:
    """Return the area under the powers, in J, with both window edges interpolated."""
    ends = [(t, _at(times, watts, t)) for t in (0.0, window_s)]
    inner = [(t, w) for t, w in zip(times, watts, strict=True) if 0.0 < t < window_s]
    return math.fsum((w0 + w1) / 2 * (t1 - t0) for (t0, w0), (t1, w1) in pairwise([ends[0], *inner, ends[1]]))


def _unseen_sd_j(times: list[float], watts: list[float], source: PowerSource, read_s: float) -> float:
    """Return the uncertainty from load steps between two values: time that no average covers, and late readings.

    Under a load in step with the readings, all rises have the same error, and so do all falls.
    """
    points = list(pairwise(zip(times, watts, strict=True)))
    repeats = sum(after == before for before, after in pairwise(watts)) / len(points)
    late_s = repeats * min(source.period_s, read_s) + pstdev(t1 - t0 for (t0, _), (t1, _) in points)
    rises = falls = 0.0
    for (t0, w0), (t1, w1) in points:
        unseen_s = late_s + max(0.0, max(t1 - t0, source.period_s) - source.averaging_s)
        rises += max(0.0, w1 - w0) * unseen_s
        falls += max(0.0, w0 - w1) * unseen_s
    return _UNIFORM * math.hypot(rises, falls)


def _noise_sd_w(times: list[float], watts: list[float], source: PowerSource) -> float:
    """Return the noise of single values, from the smaller steps between updates: larger steps are load changes."""
    # A value read faster than it is updated repeats: compare with the previous update.
    stride = max(1, round(source.period_s * (len(times) - 1) / (times[-1] - times[0])))
    steps = sorted(abs(after - before) for before, after in zip(watts, watts[stride:], strict=False))
    return percentile(steps, 100 / 3) / _LOWER_THIRD if steps else 0.0


def _resolution_w(watts: list[float]) -> float:
    """Return the smallest observed step: a steady power is constantly off by up to half of it."""
    return min((abs(b - a) for a, b in pairwise(watts) if a != b), default=0.0)


def _stale_s(times: list[float], watts: list[float], pace_s: float) -> float:
    """Return the longest time without a change of the value, 0 if its other changes make that plausible."""
    runs = [len(list(run)) for _, run in groupby(watts)]
    starts = [times[i] for i in accumulate(runs[:-1], initial=0)] + [times[-1]]
    longest_s = max(b - a for a, b in pairwise(starts))
    others = (times[-1] - times[0] - longest_s) / pace_s
    odds = min(len(runs) / max(others, 1.0), 0.95)
    return longest_s if (1 - odds) ** (longest_s / pace_s) < STALE_ODDS else 0.0


def _around(times: list[float], window_s: float) -> slice:
    """Return the slice of times around the window, with two (or one) on each side; raise _Refused for none."""
    first, last = bisect_right(times, 0.0) - 1, bisect_left(times, window_s)
    if not times:
        raise _Refused("no_samples: nothing was read")
    if first < 0:
        raise _Refused(f"not_covered: the first value is from {times[0]:.3g} s into the window")
    if last == len(times):
        raise _Refused(f"not_covered: the last value is from {window_s - times[-1]:.3g} s before the window's end")
    return slice(max(0, first - 1), last + 2)


def _gaps_s(times: list[float], pace_s: float, window_s: float) -> float:
    """Return the time of the window that lies between values too far apart."""
    gaps = [(a, b) for a, b in pairwise(times) if b - a > GAP_PERIODS * pace_s]
    return math.fsum(max(0.0, min(b, window_s) - max(a, 0.0)) for a, b in gaps)


def _at(times: list[float], values: list[float], t: float) -> float:
    """Return the linearly interpolated value at `t`, which lies within the times."""
    after = max(1, bisect_left(times, t))
    (t0, t1), (v0, v1) = times[after - 1 : after + 1], values[after - 1 : after + 1]
    return v0 + (v1 - v0) * (t - t0) / (t1 - t0)


def _cross_checked(energy: Energy, second: _Estimate) -> Energy:
    """Add the second-best source; if the two differ by more than both bars, neither can be trusted."""
    disagree = abs(second.energy_j - energy.energy_j) > second.err_j + energy.energy_err_j
    return msgspec.structs.replace(
        energy,
        cross_check=CrossCheck(
            energy_j=second.energy_j,
            energy_err_j=second.err_j,
            source=second.source.source,
            metric=second.source.metric,
        ),
        flags=energy.flags + ["sources_disagree"] * disagree,
    )


def _net_of_idle(
    energy: Energy,
    samples: Sequence[Sample],
    source: PowerSource,
    window: Window,
    inferences: int,
    idle: tuple[Window, Window],
) -> Energy:
    """Add the energy above idle. The baseline is the mean of before and after, with half their difference as error."""
    before_w, after_w = (_idle_w(samples, source, span) for span in idle)
    if before_w is None or after_w is None:
        return msgspec.structs.replace(energy, flags=[*energy.flags, "no_idle_baseline"])
    idle_w, drift_w = (before_w + after_w) / 2, abs(after_w - before_w)
    return msgspec.structs.replace(
        energy,
        net_per_inference_j=(energy.energy_j - idle_w * window.seconds) / inferences,
        net_per_inference_err_j=math.hypot(energy.energy_err_j, drift_w / 2 * window.seconds) / inferences,
        idle_w=idle_w,
        idle_drift_w=drift_w,
    )


def _idle_w(samples: Sequence[Sample], source: PowerSource, span: Window) -> float | None:
    """Return the median power, or the counter's mean; None for too few values or a counter that decreased."""
    inside = [(t, value) for t, value in _series(samples, source, span) if 0.0 <= t <= span.seconds]
    values = [value for _, value in inside]
    if len(values) < FEWEST_UPDATES[source.metric] or (_is_counter(source) and values != sorted(values)):
        return None
    return (values[-1] - values[0]) / (inside[-1][0] - inside[0][0]) if _is_counter(source) else median(values)
