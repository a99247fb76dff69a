"""Finds which calls on a CPU thread were made inside which others, and which of them launched the device's work."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from benchd.daemon.profiling.trace.trace import Ints, Kernel, MemoryOperation, Trace, column, places


class Nesting:
    """All calls of the host as a forest, each parent directly followed by its children.

    Call i has `parent[i]` (-1 for none), `stop[i]` (the first later call that is not inside), `name[i]` (an index into
    `names`) and `kind[i]`; `outermost[i]` is set if no enclosing call has its name.
    """

    ANNOTATION, OPERATOR, RUNTIME = range(3)

    def __init__(self, trace: Trace) -> None:
        # of two calls with equal start and length, the one listed first is the outer one
        listed = (trace.annotations, trace.operators, trace.runtime_calls)
        start, duration, thread = (
            np.concatenate([column(rows, name) for rows in listed]) for name in ("start_ns", "duration_ns", "thread")
        )
        kind = np.repeat(np.arange(3, dtype=np.int8), [len(rows) for rows in listed])
        of_gpu = np.flatnonzero(column(trace.annotations, "on_gpu"))
        order = np.lexsort((-duration, start, thread))
        order = order[~np.isin(order, of_gpu)]
        self.start, self.thread, self.kind = start[order], thread[order], kind[order]
        self.end = self.start + duration[order]
        identities = (column(trace.operators, "external_id"), column(trace.runtime_calls, "correlation"))
        self._identity = np.concatenate([np.zeros(len(trace.annotations), np.int64), *identities])[order]
        names, self.names = places([*chain.from_iterable(listed)], "name")
        self.name = names[order].astype(np.int32)
        self.parent, self.stop, self.outermost = self._nest()

    def __len__(self) -> int:
        return len(self.start)

    @cached_property
    def self_ns(self) -> Ints:
        """Return the time of each call without the calls inside it."""
        inside = self.parent >= 0
        parents = self.parent[inside]
        # rounding may make a child end after its parent
        inner_ns = np.minimum(self.end[inside], self.end[parents]) - self.start[inside]
        own: Ints = self.end - self.start - np.bincount(parents, inner_ns, len(self)).astype(np.int64)
        return own

    def within(self, own_ns: Ints) -> Ints:
        """Return, for each call, the sum of `own_ns` over the call and all calls inside it."""
        summed = np.concatenate([[0], np.cumsum(own_ns)])
        total: Ints = summed[self.stop] - summed[:-1]
        return total

    def around(self, call: int) -> Iterator[int]:
        """Yield the call and its enclosing calls, from the inside out."""
        while call >= 0:
            yield call
            call = int(self.parent[call])

    def at(self, thread: int, t_ns: int) -> int:
        """Return the innermost call on a thread at this moment, -1 if there is none."""
        first, last = np.searchsorted(self.thread, [thread, thread + 1])
        call = int(first + np.searchsorted(self.start[first:last], t_ns, "right")) - 1
        return (
            next((enclosing for enclosing in self.around(call) if self.end[enclosing] > t_ns), -1)
            if call >= first
            else -1
        )

    def launchers(self, work: Sequence[Kernel | MemoryOperation]) -> Ints:
        """Return the operator that launched each piece of device work, else the call around the launch, else -1."""
        operators = self._find(self.OPERATOR, column(work, "external_id"))
        calls = self._find(self.RUNTIME, column(work, "correlation"))
        return np.where((operators < 0) & (calls >= 0), self.parent[calls], operators)

    def _find(self, kind: int, wanted: Ints) -> Ints:
        """Return the call of this kind for each wanted identity, -1 if there is none."""
        calls = np.flatnonzero((self.kind == kind) & (self._identity > 0))
        if not len(calls):
            return np.full(len(wanted), -1)
        calls = calls[np.argsort(self._identity[calls], kind="stable")]
        identities = self._identity[calls]
        place = np.minimum(np.searchsorted(identities, wanted), len(calls) - 1)
        return np.where(identities[place] == wanted, calls[place], -1)

    def _nest(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.bool_]]:
        count = len(self)
        parent, stop, outermost = (
            np.full(count, -1, np.int32),
            np.full(count, count, np.int32),
            np.ones(count, np.bool_),
        )
        # memoryviews yield plain integers: twice as fast as numpy's, without the memory of a list
        parents, stops, outer = parent.data, stop.data, outermost.data
        names, ends, threads = self.name.data, self.end.data, self.thread.data
        open_calls: list[int] = []
        open_names = [0] * len(self.names)
        for call, start in enumerate(self.start.data):
            while open_calls and (ends[open_calls[-1]] <= start or threads[open_calls[-1]] != threads[call]):
                done = open_calls.pop()
                stops[done] = call
                open_names[names[done]] -= 1
            if open_calls:
                parents[call] = open_calls[-1]
            name = names[call]
            outer[call] = not open_names[name]
            open_names[name] += 1
            open_calls.append(call)
        return parent, stop, outermost
