"""Computes the energy used in an exact window from the samples around it, with an error bar; pure functions.

Chooses the sources, judges each one's reading (`reading.py`) and subtracts the idle power.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import msgspec

from benchd.daemon.records import CrossCheck, Energy, Sample, Window
from benchd.daemon.sampling.reading import COVERAGE, NoEnergy, Reading, Series, counted, held_s, polled
from benchd.daemon.sampling.sources.protocol import PowerSource

GAPS_WIDEN, GAPS_REFUSE = 0.02, 0.10  # shares of the window
OUTLIER_SHARE = 0.2  # share of the error bar above which an outlier is flagged
DOUBT_REFUSE, LATE_REFUSE = 0.25, 0.05  # shares of the energy
FEWEST_UPDATES = {"energy_counter_j": 3, "power_w": 10}


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
    """Return the energy of the window, or why there is none, as a name such as `no_sensor` or `gaps`, then details.

    `sources` are in order of preference. `samples`, read every `read_period_s`, may be unsorted and contain duplicates;
    they start two sensor periods and an averaging time before the window and end as long after it, under the same load.
    Samples further away improve a counter's time stamps. `idle` contains one window before and one after, with the
    model loaded and the device idle. Raises ValueError for an empty window or no inferences.
    """
    if inferences < 1 or window.seconds <= 0.0:
        raise ValueError(f"energy of {inferences} inferences in {window.seconds:g} s")
    if not sources:
        return "no_sensor"
    outcomes = [_estimate(samples, source, window, read_period_s) for source in _of_one_scope(sources)]
    refusals = [estimate for estimate in outcomes if isinstance(estimate, str)]
    estimates = [estimate for estimate in outcomes if isinstance(estimate, _Estimate)]
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
    """Return the combined energy of a case's processes, or why it cannot be computed.

    Energies and idle powers are averaged over the windows; errors of different processes are assumed independent.
    """
    first, *others = energies
    for other in others:
        if (other.scope, other.source, other.metric) != (first.scope, first.source, first.metric):
            return f"sources_differ: {first.scope} by {first.source} and {other.scope} by {other.source}"
    if not others:
        return first
    joules = math.fsum(energy.energy_j for energy in energies)
    inferences = [energy.energy_j / energy.gross_per_inference_j for energy in energies]
    count = math.fsum(inferences)
    total = Energy(
        energy_j=joules,
        energy_err_j=math.hypot(*(energy.energy_err_j for energy in energies)),
        gross_per_inference_j=joules / count,
        scope=first.scope,
        source=first.source,
        metric=first.metric,
        sensor_period_s=max(energy.sensor_period_s for energy in energies),
        updates=sum(energy.updates for energy in energies),
        gap_share=max(energy.gap_share for energy in energies),
        flags=sorted({flag for energy in energies for flag in energy.flags}),
    )
    if any(energy.net_per_inference_j is None for energy in energies):
        return total
    weighted = [
        (inferences_of_one / count, energy) for inferences_of_one, energy in zip(inferences, energies, strict=True)
    ]
    return msgspec.structs.replace(
        total,
        net_per_inference_j=math.fsum(weight * (energy.net_per_inference_j or 0.0) for weight, energy in weighted),
        net_per_inference_err_j=math.hypot(
            *(weight * (energy.net_per_inference_err_j or 0.0) for weight, energy in weighted)
        ),
        idle_w=math.fsum(weight * (energy.idle_w or 0.0) for weight, energy in weighted),
        idle_drift_w=max(energy.idle_drift_w or 0.0 for energy in energies),
    )


def hold_s(sources: Sequence[PowerSource], read_period_s: float) -> float:
    """Return how long the load must continue around the window: two sensor periods and an averaging time."""
    return max((held_s(source, read_period_s) for source in sources), default=0.0)


def idle_s(sources: Sequence[PowerSource], read_period_s: float) -> float:
    """Return the idle time on each side that yields enough values of the preferred source; 0 without sources.

    Power may be updated only every second tick, because reading all rails of an Orin takes nearly a tick. A counter
    needs fewer values.
    """
    fewest = max(FEWEST_UPDATES.values()) + 2
    paces = (
        max(source.period_s, read_period_s if _is_counter(source) else 2 * read_period_s)
        for source in _of_one_scope(sources)[:1]
    )
    return max((fewest * pace_s for pace_s in paces), default=0.0)


def _is_counter(source: PowerSource) -> bool:
    return source.metric == "energy_counter_j"


def _of_one_scope(sources: Sequence[PowerSource]) -> list[PowerSource]:
    """Return the sources with the scope of the first total, or of the first source if none is a total, counters first.

    Parts are never added up, and never replace a total that was lost.
    """
    scope = next((source.scope for source in sorted(sources, key=lambda source: not source.total)), "")
    return sorted((source for source in sources if source.scope == scope), key=lambda source: not _is_counter(source))


def _series(samples: Sequence[Sample], source: PowerSource, window: Window) -> Series:
    """Return the source's samples sorted by time, without repeated time stamps."""
    key = (source.metric, source.source, source.rail)
    values = {sample.t_ns: sample.value for sample in samples if (sample.metric, sample.source, sample.rail) == key}
    return [((t_ns - window.start_ns) / 1e9, value) for t_ns, value in sorted(values.items())]


def _estimate(samples: Sequence[Sample], source: PowerSource, window: Window, read_period_s: float) -> _Estimate | str:
    """Return the source's estimate for the window, or why there is none."""
    read = counted if _is_counter(source) else polled
    read_period_s = read_period_s if source.stamp_s is None else source.stamp_s
    try:
        reading = read(_series(samples, source, window), source, window.seconds, read_period_s)
        return _judge(reading, source, window.seconds, read_period_s)
    except NoEnergy as refused:
        return f"{refused} ({source.source} {source.rail or source.scope}, {source.metric})"


def _judge(reading: Reading, source: PowerSource, window_s: float, read_period_s: float) -> _Estimate:
    """Return the energy and its error bar; raise NoEnergy if values are too few, late or outlying, or gaps too many."""
    share, fewest = reading.gap_s / window_s, FEWEST_UPDATES[source.metric]
    if reading.updates < fewest:
        raise NoEnergy(f"too_few_updates: {reading.updates} in {window_s:.3g} s, at least {fewest} needed")
    if share > GAPS_REFUSE:
        raise NoEnergy(f"gaps: {100 * share:.0f} % of the window without a new value")
    if reading.late_j > LATE_REFUSE * reading.energy_j:
        raise NoEnergy(f"late: {reading.late_j:.3g} J are uncertain: its first values may predate the load")
    if reading.doubt_j > DOUBT_REFUSE * reading.energy_j:
        raise NoEnergy(f"outliers: {reading.doubt_j:.3g} J depend on a few values that stand out")
    shortest_s = _shortest_window_s(source, read_period_s)
    err_j = COVERAGE * reading.sd_j * max(1.0, shortest_s / window_s) + reading.doubt_j + reading.late_j
    if share > GAPS_WIDEN:
        err_j += reading.swing_w * reading.gap_s
    flags = ["gaps"] * (share > 0.0) + ["short_window"] * (window_s < shortest_s) + ["glitch"] * reading.glitches
    flags += ["outlier"] * (reading.alone and reading.doubt_j > OUTLIER_SHARE * err_j)
    flags += ["late"] * (reading.late_j > OUTLIER_SHARE * err_j)
    return _Estimate(source, reading.energy_j, err_j, reading.updates, share, flags)


def _shortest_window_s(source: PowerSource, read_period_s: float) -> float:
    """Return the shortest window with enough values for the error bar, which widens in proportion for shorter ones."""
    pace_s = max(source.period_s, read_period_s, source.averaging_s)
    if _is_counter(source):
        return max(3 * pace_s, 0.3)
    return max((20 if source.averaging_s else 50) * pace_s, 2.0)


def _cross_checked(energy: Energy, second: _Estimate) -> Energy:
    """Add the second-best source; if the two differ by more than their error bars, widen the bar to cover both."""
    apart_j = abs(second.energy_j - energy.energy_j)
    disagree = apart_j > second.err_j + energy.energy_err_j
    return msgspec.structs.replace(
        energy,
        energy_err_j=apart_j + second.err_j if disagree else energy.energy_err_j,
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
    """Add the energy above idle: the baseline is the mean of before and after, its error half their difference."""
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
    """Return the median power, or the counter's mean power; None with too few values or a counter that decreased."""
    inside = [(t, value) for t, value in _series(samples, source, span) if 0.0 <= t <= span.seconds]
    values = [value for _, value in inside]
    if len(values) < FEWEST_UPDATES[source.metric] or (_is_counter(source) and values != sorted(values)):
        return None
    return (values[-1] - values[0]) / (inside[-1][0] - inside[0][0]) if _is_counter(source) else median(values)
