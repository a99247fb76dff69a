"""Computes the firing rate at which a spiking net takes as long as its counterpart without spikes, from several sweeps.

Between two rates, the ratio of the times is interpolated only if the same kernels ran at both: kernels that skip zeros
become slower as the rate rises, others do not, and a switch between them causes a step. The curve for one set of
kernels is assumed to be non-decreasing. All values are logarithms of ratios of consecutive measurements, which cancel
disturbances common to both.
"""

import math
import random
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from statistics import fmean, median

from benchd.daemon.profiling.profile import BreakEven, Crossing, RatePoint, RateTimes, Sweep

DRAWS = 500
_Curve = list[tuple[float, float, str]]  # rate, logarithm of the ratio, kernels
_Rows = Sequence[Sequence[float]]  # for each process, the logarithms by rate


def conclude(sweeps: Sequence[Sweep]) -> BreakEven:
    """Return the combined result of the sweeps of one or more processes."""
    columns = list(zip(*(sweep.points for sweep in sweeps), strict=True))
    rates = [(column[0].rate, column[0].kernels) for column in columns]
    rows = [[_log_ratio(point) for point in sweep.points] for sweep in sweeps]
    halves = [_curve(rates[first::2], [row[first::2] for row in rows]) for first in (0, 1)]
    crossings = [_curve_crossing(half) for half in halves]
    across = zip(crossings, reversed(halves), strict=True)
    own = _point([sweep.own for sweep in sweeps])
    return BreakEven(
        ann=sweeps[0].ann,
        time_steps=sweeps[0].time_steps,
        processes=len(sweeps),
        points=[_point(column) for column in columns],
        own=own,
        predicted=math.exp(_at(own.rate, _curve(rates, rows))),
        time=_crossing(rates, rows),
        halves=crossings,
        halves_differ=max(
            (abs(math.expm1(_at(crossing.rate, other))) for crossing, other in across if crossing.rate), default=None
        ),
        energy=_energy(sweeps, rates),
    )


def _energy(sweeps: Sequence[Sweep], rates: Sequence[tuple[float, str]]) -> Crossing | None:
    """Return the crossing of the energies, from rates at which all processes measured them; None for fewer than two."""
    every = [[(point.joules, point.ann_joules) for point in sweep.points] for sweep in sweeps]
    places = [place for place in range(len(rates)) if all(all(row[place]) for row in every)]
    rows = [[math.log(snn / ann) for snn, ann in (row[place] for place in places) if snn and ann] for row in every]
    return _crossing([rates[place] for place in places], rows) if len(places) > 1 else None


def _point(column: Sequence[RateTimes]) -> RatePoint:
    return RatePoint(
        rate=column[0].rate,
        ns=median(median(point.ns) for point in column),
        ann_ns=median(median(point.ann_ns) for point in column),
        ratio=math.exp(median(map(_log_ratio, column))),
        kernels=column[0].kernels,
    )


def _log_ratio(point: RateTimes) -> float:
    return median(math.log(ns / ann_ns) for ns, ann_ns in zip(point.ns, point.ann_ns, strict=True))


def _curve(rates: Sequence[tuple[float, str]], rows: _Rows) -> _Curve:
    columns = zip(rates, zip(*rows, strict=True), strict=True)
    return list(_rising([(rate, median(column), kernels) for (rate, kernels), column in columns]))


def _rising(curve: Sequence[tuple[float, float, str]]) -> Iterator[tuple[float, float, str]]:
    """Yield the points, with falling runs of the same kernels replaced by their means."""
    for _, same in groupby(curve, key=lambda point: point[2]):
        points, pools = list(same), list[list[float]]()
        for _, value, _ in points:
            pools.append([value])
            while len(pools) > 1 and fmean(pools[-2]) > fmean(pools[-1]):
                last = pools.pop()
                pools[-1] += last
        levels = [fmean(pool) for pool in pools for _ in pool]
        yield from ((rate, level, kernels) for (rate, _, kernels), level in zip(points, levels, strict=True))


def _at(rate: float, curve: _Curve) -> float:
    """Return the logarithm of the ratio at a rate; at a switch of kernels, the nearer point's."""
    for (low, before, kernels), (high, after, others) in pairwise(curve):
        if low <= rate <= high:
            share = (rate - low) / (high - low)
            return before + (after - before) * (share if kernels == others else round(share))
    return curve[-1][1]


def _curve_crossing(curve: _Curve) -> Crossing:
    """Return where the curve crosses; at a switch of kernels, the midpoint between the two rates."""
    if curve[0][1] > 0:
        return Crossing(answer="always slower")
    for (low, before, kernels), (high, after, others) in pairwise(curve):
        if before <= 0 < after:
            share = -before / (after - before) if kernels == others else 0.5
            return Crossing(answer="crosses", rate=low + share * (high - low))
    return Crossing(answer="always faster")


def _crossing(rates: Sequence[tuple[float, str]], rows: _Rows) -> Crossing:
    """Return the crossing with its interval, from bootstrap draws of whole processes."""
    estimate = _curve_crossing(_curve(rates, rows))
    drawn = random.Random(0)  # noqa: S311 - the same draws for the same sweeps
    crossings = (_curve_crossing(_curve(rates, drawn.choices(rows, k=len(rows)))).rate for _ in range(DRAWS))
    crossing = sorted(rate for rate in crossings if rate is not None)
    without = 1 - len(crossing) / DRAWS
    if estimate.rate is None or len(rows) < 3 or not crossing:
        return Crossing(answer=estimate.answer, rate=estimate.rate, without=without)
    low, high = (crossing[round(share * (len(crossing) - 1))] for share in (0.025, 0.975))
    return Crossing(answer=estimate.answer, rate=estimate.rate, low=low, high=high, without=without)
