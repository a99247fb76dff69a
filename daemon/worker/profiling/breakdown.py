"""Builds the rows of a breakdown, a tree of names, from the times of several runs, and the parts' costs and spikes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import TypeVar

from benchd.daemon.profiling.profile import LayerRow
from benchd.daemon.records import Probes
from benchd.daemon.verdicts import roofline
from benchd.daemon.worker.profiling import costs, spikes
from benchd.daemon.worker.profiling.segments import Path
from benchd.daemon.worker.profiling.spikes import Spikes
from benchd.models.cost import Cost

Of = TypeVar("Of")


def rows(
    runs: Sequence[Mapping[Path, int]],
    part_costs: Sequence[tuple[Path, Cost]],
    part_spikes: Sequence[tuple[Path, Spikes]],
    rates: Probes,
) -> list[LayerRow]:
    """Return a row for each part and each group of parts; a group precedes its parts.

    `runs` contain the nanoseconds of each part; costs and spikes may be in any order. A part's time is its median over
    the runs, with the shortest and longest as bounds; a group's times are sums over its parts. A group's own work is
    its part "... other".
    """
    complete = [dict(_with_own_parts(run)) for run in runs]
    every = {part: sorted(run[part] for run in complete) for part in complete[0]}
    whole_ns = sum(float(median(part_ns)) for part_ns in every.values())

    def row(path: Path) -> LayerRow:
        times = list(_under(path, every.items()))
        ns = sum(float(median(part_ns)) for part_ns in times)
        cost = costs.total(_under(path, part_costs))
        least = roofline.of(cost, rates)
        fired = spikes.total(_under(path, part_spikes))
        return LayerRow(
            name=path[-1],
            parent=path[-2] if len(path) > 1 else None,
            ns=ns,
            share=ns / whole_ns,
            low_ns=sum(low for low, *_ in times),
            high_ns=sum(high for *_, high in times),
            flops=cost.flops or None,
            bytes=cost.bytes or None,
            x_of_floor=ns / (1e6 * least.floor_ms) if least.floor_ms else None,
            binding=least.bound_by if least.floor_ms else None,
            spike_rate=fired.rate,
            wasted_spikes=fired.wasted if fired.chances else None,
            synaptic_operations=fired.operations,
            modelled_energy_j=fired.energy_j,
        )

    return [row(path) for path in _tree(every)]


def _with_own_parts(run: Mapping[Path, int]) -> Iterator[tuple[Path, int]]:
    groups = {path[:depth] for path in run for depth in range(1, len(path))}
    return (((*path, f"{path[-1]} other") if path in groups else path, ns) for path, ns in run.items())


def _tree(paths: Iterable[Path]) -> list[Path]:
    """Return the paths and their groups, each group before its parts, in the order in which a run reached them."""
    every = dict.fromkeys(path[:depth] for path in paths for depth in range(1, len(path) + 1))
    reached = {path: place for place, path in enumerate(every)}
    return sorted(every, key=lambda path: [reached[path[:depth]] for depth in range(1, len(path) + 1)])


def _under(path: Path, parts: Iterable[tuple[Path, Of]]) -> Iterator[Of]:
    return (value for part, value in parts if part[: len(path)] == path)
