"""Turns one step of a trace into the frames of an icicle: nested calls, with equal paths merged."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from benchd.daemon.profiling.profile import Frame, median_step
from benchd.daemon.profiling.trace.nesting import Nesting
from benchd.daemon.profiling.trace.trace import Kernel, MemoryOperation, Trace, TracedStep, column

SMALLEST_SHARE = 0.002
"""Calls with a smaller share of the whole are omitted, because they are too small to see."""


def icicle(trace: Trace) -> list[Frame]:
    """Return the frames of the median step, each after its parent; none for a trace without steps.

    They show device time under the operators that launched the work, if there is any; otherwise host time, in which
    concurrent threads add up.
    """
    if not trace.steps:
        return []
    step = median_step(trace.steps)
    nested = Nesting(_only(trace, step))
    tree = _Tree(f"step {step.number}")
    places = _places(tree, nested, step)
    work = list(_device_work(trace, step))
    for row, call in zip(work, nested.launchers(work).tolist(), strict=True):
        if call >= 0:
            name = row.launch.name if isinstance(row, Kernel) else row.name
            tree.own_ns[tree.child(places[call], name)] += row.duration_ns
    if not work:
        for place, self_ns in zip(places, nested.self_ns.tolist(), strict=True):
            tree.own_ns[place] += self_ns
    return tree.frames()


def _device_work(trace: Trace, step: TracedStep) -> Iterator[Kernel | MemoryOperation]:
    """Yield the device's work from the step's start on; work launched by an earlier step has no launcher here."""
    for rows in (trace.kernels, trace.memcpys, trace.memsets):
        later: Sequence[int] = np.flatnonzero(column(rows, "start_ns") >= step.start_ns).tolist()
        yield from (rows[place] for place in later)


def _only(trace: Trace, step: TracedStep) -> Trace:
    """Return the host's part of one step."""

    def within(rows: Sequence[Any]) -> list[Any]:
        start_ns = column(rows, "start_ns")
        inside = (start_ns >= step.start_ns) & (start_ns < step.end_ns)
        return [rows[place] for place in np.flatnonzero(inside).tolist()]

    return msgspec.structs.replace(
        trace,
        annotations=within(trace.annotations),
        operators=within(trace.operators),
        runtime_calls=within(trace.runtime_calls),
    )


class _Tree:
    """Places in order of creation, each parent before its children; place 0 is the whole."""

    def __init__(self, name: str) -> None:
        self._places: dict[tuple[int, str], int] = {}
        self._parents: list[int | None] = [None]
        self._names = [name]
        self.own_ns = [0]

    def child(self, parent: int, name: str) -> int:
        """Return the place of `name` under `parent`."""
        place = self._places.setdefault((parent, name), len(self._names))
        if place == len(self._names):
            self._names.append(name)
            self._parents.append(parent)
            self.own_ns.append(0)
        return place

    def frames(self) -> list[Frame]:
        """Return the visible frames, each with the time of everything inside it."""
        total_ns = list(self.own_ns)
        for place, parent in reversed(list(enumerate(self._parents))):
            if parent is not None:
                total_ns[parent] += total_ns[place]
        numbers: dict[int | None, int | None] = {None: None}
        frames: list[Frame] = []
        for place, parent in enumerate(self._parents):
            if total_ns[place] >= SMALLEST_SHARE * total_ns[0]:
                numbers[place] = len(frames)
                frames.append(Frame(self._names[place], numbers[parent], total_ns[place]))
        return frames


def _places(tree: _Tree, nested: Nesting, step: TracedStep) -> list[int]:
    """Return the place of each call; the step's own range is the whole."""
    places: list[int] = []
    for parent, number in zip(nested.parent.tolist(), nested.name.tolist(), strict=True):
        name = nested.names[number]
        inside = places[parent] if parent >= 0 else 0
        places.append(0 if name == f"ProfilerStep#{step.number}" else tree.child(inside, name))
    return places
