"""Compares a model's variants by latency and energy on each kind of board, with one point for all its boards."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from benchd.daemon.records import Case, Variant
from benchd.daemon.verdicts.figures import unbeaten
from benchd.dashboard.answers import Kind, Newest
from benchd.dashboard.messages import Result


class Group(NamedTuple):
    """Comparable results: the same kind of board, energy scope, direction, scenario and demand."""

    kind: Kind
    scope: str
    work: str


class Figure(NamedTuple):
    """A value with its error bar: the interval on one board, the minimum and maximum on several."""

    value: float
    low: float
    high: float


class Point(NamedTuple):
    """A variant on `boards` boards; the energy is None without a sensor.

    `why` says why it cannot win there; it is empty if it can.
    """

    label: str
    variant: Variant
    boards: int
    latency_ms: Figure
    energy_mj: Figure | None
    why: str


def groups(newest: Iterable[Newest]) -> dict[Group, list[Point]]:
    """Return the points of each group, largest number of boards first; failed results have no point."""
    measured: dict[Group, dict[tuple[str, Variant, bool], list[Newest]]] = defaultdict(lambda: defaultdict(list))
    for entry in newest:
        result, kind, case, why = entry
        if result.status == "ok" and result.median_ms:
            work = " ".join([*case.usage, *case.demand])
            group = Group(kind, (result.energy_scope or "") if result.energy_mj is not None else "", work)
            measured[group][_label(case), case.variant, why is None].append(entry)
    by_group = {
        group: [_point(label, variant, of) for (label, variant, _), of in points.items()]
        for group, points in measured.items()
    }
    return dict(sorted(by_group.items(), key=_order))


def _label(case: Case) -> str:
    """Return the other parts that identify a model's case in a group."""
    own = msgspec.structs.replace(
        case, direction="inference", scenario="single_stream", streams=1, load=None, beside=None
    )
    _, _, *others = own.case_id.split(",")
    return " ".join([case.variant.label, *others])


def _order(item: tuple[Group, list[Point]]) -> tuple[int, Kind, str, bool, str]:
    group, points = item
    return -max(point.boards for point in points), group.kind, group.work, not group.scope, group.scope


def _point(label: str, variant: Variant, newest: Sequence[Newest]) -> Point:
    """Return the fleet's median with its range, or one board's value with its interval."""
    results = [entry.result for entry in newest]
    energies = [(result.energy_mj, result.energy_err_mj or 0.0) for result in results if result.energy_mj is not None]
    times = [_timed(result) for result in results]
    return Point(
        label=label,
        variant=variant,
        boards=len({result.device_id for result in results}),
        latency_ms=_together(times),
        energy_mj=_together([Figure(value, value - error, value + error) for value, error in energies])
        if energies
        else None,
        why="; ".join(dict.fromkeys(entry.why for entry in newest if entry.why)),
    )


def _timed(result: Result) -> Figure:
    value_ms = result.median_ms or 0.0
    low_ms, high_ms = result.low_ms, result.high_ms
    return Figure(value_ms, value_ms if low_ms is None else low_ms, value_ms if high_ms is None else high_ms)


def _together(figures: Sequence[Figure]) -> Figure:
    values = [figure.value for figure in figures]
    return figures[0] if len(figures) == 1 else Figure(median(values), min(values), max(values))


def front(points: Sequence[Point]) -> list[Point]:
    """Return the points that can win and are not beaten in both latency and energy, fastest first."""
    able = [
        (candidate.latency_ms.value, candidate.energy_mj.value, candidate)
        for candidate in points
        if candidate.energy_mj and not candidate.why
    ]
    return [point for _, _, point in unbeaten(able)]
