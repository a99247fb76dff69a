"""Attributes a change of time to layers by matching and comparing the layer profiles of two sides; pure.

A profiler slows down what it times, so the change itself is taken from the unprofiled times, and the profiles only
attribute it. Runtimes fuse and rename layers differently, so layers are matched by the original nodes that they cover.
The effect that a process, a clock or a thread count has on all layers equally is each round's median ratio, and a layer
is reported for the time that it adds beyond that.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from statistics import fmean, median

import msgspec
from msgspec import Struct

from benchd.daemon.records import LayerTime, ProcessResult
from benchd.daemon.verdicts.effects import ALPHA, mean_and_variance
from benchd.daemon.verdicts.statistics import Interval, mean_interval, student_t_quantile

BETWEEN = "between the layers"
FEWEST_ROUNDS = 3
FEWEST_LAYERS = 4
"""With fewer large layers, a common change cannot be distinguished from that of a single layer."""

LEAST_SHARE, LEAST_MS = 0.01, 0.005
"""As a share of the total time, and as a time: smaller layers do not count towards the common change."""

LEAST_PART, LEAST_BETWEEN = 0.05, 0.2
"""Shares of the total change below which a layer, or the time between layers and in the profiler, is not reported."""

MOST_OF_ONE = 0.5
"""A share of the total change: if a layer adds more beyond the common change, not all layers changed equally."""


class Round(Struct, frozen=True):
    """One process per side: its unprofiled time per run, and each layer's time under a profiler."""

    first_ms: float
    second_ms: float
    first: list[LayerTime]
    second: list[LayerTime]


class LayerChange(Struct, frozen=True, kw_only=True):
    """Layers that cover common nodes, and the ms per run that they add beyond the change common to all layers.

    `share` is relative to the total change, with E. C. Fieller's interval, or None if that is unbounded.
    """

    name: str
    note: str
    added_ms: float
    interval_ms: Interval
    share: float
    share_interval: Interval | None


class LayerVerdict(Struct, frozen=True, kw_only=True):
    """Where a change of `added_ms` per run comes from: the `changes`, largest first, or all `layers` equally.

    `common` is the relative change shared by all layers, None if it is within the noise or there are too few layers.
    """

    added_ms: float
    interval_ms: Interval
    layers: int
    changes: list[LayerChange] = []
    alike: bool = False
    common: float | None = None

    @property
    def sentence(self) -> str:
        """Return the verdict as text for human readers."""
        total = f"{abs(self.added_ms):.3g} ms {'slower' if self.added_ms > 0 else 'faster'}"
        common = "" if self.common is None else f"all layers {100 * self.common:+.1f} %"
        if self.alike:
            return f"{total}: {common} alike, so probably the clocks, the threads or the machine"
        if not self.changes:
            return f"{total}: no layer stands out from the noise{common and f'; {common}'}"
        parts = [
            f"{change.added_ms:+.3g} ms {change.name}{change.note and f' ({change.note})'}" for change in self.changes
        ]
        return f"{total}: {', '.join(parts)}; {f'in addition {common}' if common else 'the rest within noise'}"


class _Group(Struct, frozen=True):
    """The names of layers on both sides that do the same work, and how their times differ."""

    name: str
    first: frozenset[str]
    second: frozenset[str]
    note: str


def rounds(
    first: Sequence[ProcessResult], second: Sequence[ProcessResult], ratios: Sequence[float] = ()
) -> list[Round]:
    """Return the processes of both sides in pairs; a live comparison's ratio determines the second one's time."""
    pairs = []
    for place, (a, b) in enumerate(zip(first, second, strict=False)):
        if a.timing and b.timing:
            second_ms = a.timing.median_ms * ratios[place] if ratios else b.timing.median_ms
            pairs.append(Round(a.timing.median_ms, second_ms, a.layers, b.layers))
    return pairs


def judge(rounds: Sequence[Round]) -> LayerVerdict | None:
    """Return where the change of time comes from; None if it is within the noise or a side has no layers."""
    if len(rounds) < FEWEST_ROUNDS or not all(pair.first and pair.second for pair in rounds):
        return None
    added = [pair.second_ms - pair.first_ms for pair in rounds]
    interval_ms = mean_interval(added)
    if not interval_ms.excludes_zero:
        return None
    groups = _groups(rounds[0].first, rounds[0].second)
    before = [[_sum_ms(pair.first, group.first) for group in groups] for pair in rounds]
    after = [[_sum_ms(pair.second, group.second) for group in groups] for pair in rounds]
    least_ms = max(LEAST_MS, LEAST_SHARE * fmean(pair.first_ms for pair in rounds))
    shared = [_shared(*sides, least_ms) for sides in zip(before, after, strict=True)]
    beyond = [
        [late - early * math.exp(factor) for early, late in zip(*sides, strict=True)]
        for *sides, factor in zip(before, after, shared, strict=True)
    ]
    between = [step - sum(late) + sum(early) for step, early, late in zip(added, before, after, strict=True)]
    columns = [*(list(column) for column in zip(*beyond, strict=True)), between]
    changes = sorted(_standing_out([*groups, _Group(BETWEEN, frozenset(), frozenset(), "")], columns, added), key=_size)
    common = math.expm1(fmean(shared)) if mean_interval(shared).excludes_zero else None
    change = fmean(added)
    verdict = LayerVerdict(added_ms=change, interval_ms=interval_ms, layers=len(groups), changes=changes, common=common)
    if common is None or any(abs(layer_change.added_ms) > MOST_OF_ONE * abs(change) for layer_change in changes):
        return verdict
    of_all = fmean(sum(early) for early in before) * common
    return msgspec.structs.replace(verdict, alike=True) if of_all / change > MOST_OF_ONE else verdict


def _size(change: LayerChange) -> float:
    return -abs(change.added_ms)


def _shared(before: Sequence[float], after: Sequence[float], least_ms: float) -> float:
    """Return the unweighted median log ratio of the layers of at least `least_ms`; 0 if there are too few."""
    ratios = [math.log(late / early) for early, late in zip(before, after, strict=True) if min(early, late) >= least_ms]
    return median(ratios) if len(ratios) >= FEWEST_LAYERS else 0.0


def _standing_out(
    groups: Sequence[_Group], columns: Sequence[Sequence[float]], added: Sequence[float]
) -> Iterator[LayerChange]:
    """Yield the groups whose change is large enough and beyond the noise, with a joint error rate of 5 % (S. Holm)."""
    left = dict(enumerate(columns))
    while True:
        alpha = ALPHA / max(len(left), 1)
        clear = [place for place, column in left.items() if mean_interval(column, alpha).excludes_zero]
        if not clear:
            return
        for place in clear:
            column = left.pop(place)
            least = LEAST_PART if groups[place].name != BETWEEN else LEAST_BETWEEN
            if abs(fmean(column)) >= least * abs(fmean(added)):
                yield LayerChange(
                    name=groups[place].name,
                    note=groups[place].note,
                    added_ms=fmean(column),
                    interval_ms=mean_interval(column),
                    share=fmean(column) / fmean(added),
                    share_interval=_ratio_interval(column, added),
                )


def _ratio_interval(parts: Sequence[float], wholes: Sequence[float]) -> Interval | None:
    """Return the interval of the ratio of two paired means by Fieller's theorem, None if it is unbounded."""
    count = len(parts)
    (x, var_x), (y, var_y) = mean_and_variance(parts), mean_and_variance(wholes)
    covariance = sum((a - x) * (b - y) for a, b in zip(parts, wholes, strict=True)) / (count - 1)
    weight = student_t_quantile(1.0 - ALPHA / 2.0, count - 1.0) ** 2 / count
    a, b, c = y * y - weight * var_y, x * y - weight * covariance, x * x - weight * var_x
    root = b * b - a * c
    if a <= 0.0 or root < 0.0:
        return None
    return Interval((b - math.sqrt(root)) / a, (b + math.sqrt(root)) / a)


def _sum_ms(layers: Iterable[LayerTime], names: frozenset[str]) -> float:
    return math.fsum(layer.ms for layer in layers if layer.name in names)


@dataclass
class _Covering:
    nodes: set[str]
    sides: tuple[list[LayerTime], list[LayerTime]]


def _groups(first: Sequence[LayerTime], second: Sequence[LayerTime]) -> list[_Group]:
    """Return the layers of both sides by common nodes: a fused layer and its parts on the other side are a group.

    Layers without common nodes are matched by kind, in order, without crossings; the rest are new or gone.
    """
    coverings: list[_Covering] = []
    for side, layers in enumerate((first, second)):
        for layer in layers:
            # a runtime's own name depends on the layer's position, and changes with the number of layers in front of it
            joined = _Covering({*layer.covers} or ({layer.name} if not layer.kind else set()), ([], []))
            touching = [covering for covering in coverings if covering.nodes & joined.nodes]
            for covering in touching:
                joined.nodes |= covering.nodes
                joined.sides[0].extend(covering.sides[0])
                joined.sides[1].extend(covering.sides[1])
            joined.sides[side].append(layer)
            coverings = [covering for covering in coverings if covering not in touching] + [joined]
    both = [_group(*covering.sides) for covering in coverings if all(covering.sides)]
    alone = [[covering.sides[side] for covering in coverings if not covering.sides[1 - side]] for side in (0, 1)]
    kinds = [["+".join(layer.kind for layer in part) for part in side] for side in alone]
    matched = SequenceMatcher(a=kinds[0], b=kinds[1], autojunk=False).get_matching_blocks()
    pairs = [(block.a + step, block.b + step) for block in matched for step in range(block.size)]
    both += [_group(alone[0][a], alone[1][b]) for a, b in pairs]
    gone = [part for place, part in enumerate(alone[0]) if place not in {a for a, _ in pairs}]
    new = [part for place, part in enumerate(alone[1]) if place not in {b for _, b in pairs}]
    return both + [_group(part, []) for part in gone] + [_group([], part) for part in new]


def _group(first: Sequence[LayerTime], second: Sequence[LayerTime]) -> _Group:
    heaviest = max(first or second, key=lambda layer: layer.ms)
    name = heaviest.covers[0] if heaviest.covers else heaviest.name
    return _Group(
        name,
        frozenset(layer_time.name for layer_time in first),
        frozenset(layer_time.name for layer_time in second),
        _note(first, second),
    )


def _note(first: Sequence[LayerTime], second: Sequence[LayerTime]) -> str:
    before, after = (" + ".join(layer.kind or layer.name for layer in side) for side in (first, second))
    if not first:
        return f"new: {after}"
    if not second:
        return f"gone: {before}"
    if before != after and any(layer.kind for layer in (*first, *second)):
        return f"{before} became {after}"
    counts = [sum(layer.calls for layer in side) for side in (first, second)]
    return f"runs {counts[1]:g} times, not {counts[0]:g}" if counts[0] != counts[1] else ""
