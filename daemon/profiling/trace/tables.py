"""Computes a profile's tables from a trace: operators, steps, modules, kernels, GPUs and synchronisations."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchd.daemon.errors import Unsupported, UsageError, unknown
from benchd.daemon.profiling.profile import (
    Category,
    GpuUse,
    KernelRow,
    Module,
    Operator,
    StepTime,
    Synchronization,
    TorchProfile,
)
from benchd.daemon.profiling.trace import gpu_metrics
from benchd.daemon.profiling.trace.nesting import Nesting
from benchd.daemon.profiling.trace.trace import (
    DATA_LOADER_RANGE,
    DEVICE_COPY,
    END_OF_STEP,
    MODULE_RANGE,
    Ints,
    Kernel,
    LaunchConfiguration,
    MemoryOperation,
    Trace,
    TracedGpu,
    column,
    places,
)

# calls in which the host waits for the device; a plain cudaMemcpy blocks
_WAITS = re.compile(r"(?:cuda|cu)(?:Device|Ctx|Stream|Event)Synchronize(?:_v\d+)?|cudaMemcpy(?:2D|3D)?(?:_v\d+)?")

_COLUMNS: dict[str, Callable[[Operator], Any]] = {
    "name": attrgetter("name"),
    "calls": attrgetter("calls"),
    "self_cpu_ns": attrgetter("self_cpu_ns"),
    "self_cpu_share": attrgetter("self_cpu_ns"),
    "cpu_ns": attrgetter("cpu_ns"),
    "cpu_share": attrgetter("cpu_ns"),
    "cpu_mean_ns": lambda row: row.cpu_ns / row.calls,
    "self_device_ns": attrgetter("self_device_ns"),
    "self_device_share": attrgetter("self_device_ns"),
    "device_ns": attrgetter("device_ns"),
    "device_mean_ns": lambda row: row.device_ns / row.calls,
}
COLUMNS = tuple(_COLUMNS)
"""The columns that operators can be sorted by; a share is relative to the profile's `cpu_ns` or `device_ns`."""


def torch_profile(trace: Trace, name: str, is_cuda: bool) -> TorchProfile:
    """Return all tables of a trace, which is in the file `name`.

    Raises UsageError for a trace without calls, Unsupported for a trace of a CUDA run without kernels.
    """
    if not (trace.operators or trace.runtime_calls or trace.kernels):
        raise UsageError(f"trace {name} contains no operators and no kernels: nothing ran in the profiled steps")
    if is_cuda and (reason := trace.missing_kernels()):
        raise Unsupported(reason)
    gpus = _gpus(trace)  # computed before the nesting, which takes more memory
    nesting = Nesting(trace)
    kernels, memcpys, memsets = (_Work.of(rows, nesting) for rows in (trace.kernels, trace.memcpys, trace.memsets))
    work = _joined([kernels, memcpys, memsets])
    own_device_ns = _sums(work.launcher, work.end - work.start, len(nesting))
    device_ns = nesting.within(own_device_ns)
    return TorchProfile(
        trace=name,
        steps=_steps(trace, nesting, {"kernel": kernels, **_copies(trace, memcpys), "memset": memsets}),
        operators=sorted_by(
            _operators(nesting, own_device_ns, device_ns), "self_device_ns" if trace.kernels else "self_cpu_ns"
        ),
        modules=_modules(nesting, device_ns),
        kernels=_kernels(trace, kernels, nesting),
        gpus=gpus,
        synchronizations=_synchronizations(nesting, work),
        launches=len(_launches(nesting)),
        cpu_ns=int(nesting.self_ns.sum()),
        device_ns=int((work.end - work.start).sum()),
    )


def sorted_by(rows: Iterable[Operator], column: str) -> list[Operator]:
    """Return the rows, largest first, or alphabetically by name; raise UsageError for an unknown column."""
    if column not in _COLUMNS:
        raise unknown("column", column, COLUMNS)
    return sorted(rows, key=_COLUMNS[column], reverse=column != "name")


@dataclass(frozen=True)
class _Work:
    """Device work as columns; `launcher` is a call of the host, -1 if unknown."""

    start: Ints
    end: Ints
    launcher: Ints

    @classmethod
    def of(cls, rows: Sequence[Kernel | MemoryOperation], nesting: Nesting) -> "_Work":
        start = column(rows, "start_ns")
        return cls(start, start + column(rows, "duration_ns"), nesting.launchers(rows))

    def only(self, chosen: NDArray[np.bool_]) -> "_Work":
        """Return the chosen pieces."""
        return _Work(self.start[chosen], self.end[chosen], self.launcher[chosen])


def _copies(trace: Trace, memcpys: _Work) -> dict[Category, _Work]:
    place, names = places(trace.memcpys, "name")
    inside = np.array([name.startswith(DEVICE_COPY) for name in names], np.bool_)[place]
    return {"device_copy": memcpys.only(inside), "memcpy": memcpys.only(~inside)}


def _joined(parts: Sequence[_Work]) -> _Work:
    return _Work(
        *(np.concatenate([getattr(part, column) for part in parts]) for column in ("start", "end", "launcher"))
    )


def _sums(groups: Ints, values: Ints, count: int) -> Ints:
    """Return the sum of each group's values; group -1 is ignored."""
    known = groups >= 0
    return np.bincount(groups[known], values[known], count).astype(np.int64)


def _operators(nesting: Nesting, own_device_ns: Ints, device_ns: Ints) -> Iterator[Operator]:
    """Yield a row for each name; a call inside another of the same name only adds to `calls` and self times."""
    calls = nesting.kind != nesting.ANNOTATION
    count = len(nesting.names)
    names, outer = np.where(calls, nesting.name, -1), np.where(calls & nesting.outermost, nesting.name, -1)
    columns = (
        np.bincount(names[calls], minlength=count),
        _sums(outer, nesting.end - nesting.start, count),
        _sums(names, nesting.self_ns, count),
        _sums(outer, device_ns, count),
        _sums(names, own_device_ns, count),
    )
    for name, number, cpu, self_cpu, device, self_device in zip(
        nesting.names, *(sums.tolist() for sums in columns), strict=True
    ):
        if number:
            yield Operator(
                name=name,
                calls=number,
                cpu_ns=cpu,
                self_cpu_ns=self_cpu,
                device_ns=device,
                self_device_ns=self_device,
            )


def _modules(nesting: Nesting, device_ns: Ints) -> list[Module]:
    """Return a row for each module class, longest first; a module inside another of its class only counts as a call."""
    modules = []
    duration = nesting.end - nesting.start
    for number, name in enumerate(nesting.names):
        if name.startswith(MODULE_RANGE):
            calls = np.flatnonzero((nesting.name == number) & (nesting.kind == nesting.ANNOTATION))
            outer = calls[nesting.outermost[calls]]
            host, device = int(duration[outer].sum()), int(device_ns[outer].sum())
            modules.append(Module(name=name[len(MODULE_RANGE) :], calls=len(calls), host_ns=host, device_ns=device))
    return sorted(modules, key=lambda row: row.host_ns, reverse=True)


class _Coverage:
    """Spans, merged until none touch, for computing how much of a time range they cover."""

    def __init__(self, *spans: tuple[Ints, Ints]) -> None:
        start, end = (np.concatenate(columns) for columns in zip(*spans, strict=True))
        start.sort(kind="stable")  # fastest for parts that are already sorted
        end.sort(kind="stable")
        # no span is open at a start that follows as many ends as starts, so starts and ends can be sorted separately
        apart = start[1:] > end[:-1]
        self.start = np.concatenate([start[:1], start[1:][apart]])
        self.end = np.concatenate([end[:-1][apart], end[-1:]])
        self._before = np.concatenate([[0], np.cumsum(self.end - self.start)])

    def between(self, start: Ints, end: Ints) -> Ints:
        """Return how many nanoseconds of each [start, end) are covered."""
        return self._until(end) - self._until(start)

    def _until(self, t_ns: Ints) -> Ints:
        begun = np.searchsorted(self.start, t_ns, "right")
        if not len(self.start):
            return np.zeros_like(t_ns)
        ahead = np.where(begun > 0, np.maximum(self.end[begun - 1] - t_ns, 0), 0)
        covered: Ints = self._before[begun] - ahead
        return covered


def _steps(trace: Trace, nesting: Nesting, work: dict[Category, _Work]) -> list[StepTime]:
    """Return each step divided by category; when several are active, the time belongs to the first of them."""
    steps = trace.steps
    start = np.array([step.start_ns for step in steps], np.int64)
    end = np.array([step.end_ns for step in steps], np.int64)
    shares: list[dict[Category, int]] = [{} for _ in steps]
    union, before = _Coverage((start[:0], end[:0])), np.zeros_like(start)
    for category, spans_start, spans_end in _by_priority(nesting, work):
        union = _Coverage((union.start, union.end), (spans_start, spans_end))
        covered = union.between(start, end)
        for share, added in zip(shares, (covered - before).tolist(), strict=True):
            share[category] = added
        before = covered
    return [
        StepTime(
            number=step.number,
            duration_ns=step.duration_ns,
            by_category=share | {"other": step.duration_ns - sum(share.values())},
        )
        for step, share in zip(steps, shares, strict=True)
    ]


def _by_priority(nesting: Nesting, work: dict[Category, _Work]) -> Iterator[tuple[Category, Ints, Ints]]:
    for category, spans in work.items():
        yield category, spans.start, spans.end
    loads = np.array([name.startswith(DATA_LOADER_RANGE) for name in nesting.names], np.bool_)[nesting.name]
    hosts: list[tuple[Category, NDArray[np.bool_]]] = [
        ("runtime", nesting.kind == nesting.RUNTIME),
        ("data_loader", loads & (nesting.kind == nesting.ANNOTATION)),
        ("cpu", nesting.kind == nesting.OPERATOR),
    ]
    for category, calls in hosts:
        yield category, nesting.start[calls], nesting.end[calls]


@dataclass(frozen=True)
class _LaunchGroup:
    """All kernels of one launch configuration."""

    launch: LaunchConfiguration
    occupancy: gpu_metrics.LaunchOccupancy | None
    calls: int
    total_ns: int
    min_ns: int
    max_ns: int

    @property
    def estimated(self) -> float | None:
        """Return the unrounded occupancy, or the trace's whole percent if it cannot be computed."""
        return self.occupancy.estimated if self.occupancy else gpu_metrics.traced_occupancy(self.launch)


def _kernels(trace: Trace, work: _Work, nesting: Nesting) -> list[KernelRow]:
    if not trace.kernels:
        return []
    by_name: dict[str, list[_LaunchGroup]] = {}
    group, launches = places(trace.kernels, "launch")
    for launched in _launched(trace, launches, group, work.end - work.start):
        by_name.setdefault(launched.launch.name, []).append(launched)
    operators = _launching_operators([launch.name for launch in launches], group, work, nesting)
    rows = [_kernel_row(name, alike, operators.get(name)) for name, alike in by_name.items()]
    return sorted(rows, key=lambda row: row.total_ns, reverse=True)


def _launched(
    trace: Trace, launches: Sequence[LaunchConfiguration], group: Ints, duration: Ints
) -> Iterator[_LaunchGroup]:
    order = np.argsort(group, kind="stable")
    bounds = np.searchsorted(group[order], np.arange(len(launches)))
    numbers = column(trace.kernels, "device")[order[bounds]].tolist()
    spread = [reduce.reduceat(duration[order], bounds).tolist() for reduce in (np.add, np.minimum, np.maximum)]
    for launch, number, calls, *times in zip(launches, numbers, np.bincount(group).tolist(), *spread, strict=True):
        yield _LaunchGroup(launch, gpu_metrics.occupancy(launch, trace.device(number)), calls, *times)


def _launching_operators(names: Sequence[str], group: Ints, work: _Work, nesting: Nesting) -> dict[str, str]:
    """Return, for each kernel name, the operator that launched it most often, if any did."""
    known = work.launcher >= 0
    launchers = work.launcher[known]
    by_operator = nesting.kind[launchers] == nesting.OPERATOR
    pairs = group[known][by_operator] * len(nesting.names) + nesting.name[launchers[by_operator]]
    counted: dict[str, Counter[str]] = {}
    for pair, count in zip(*(values.tolist() for values in np.unique(pairs, return_counts=True)), strict=True):
        number, operator = divmod(pair, len(nesting.names))
        counted.setdefault(names[number], Counter())[nesting.names[operator]] += count
    return {name: operators.most_common(1)[0][0] for name, operators in counted.items()}


def _kernel_row(name: str, alike: Sequence[_LaunchGroup], operator: str | None) -> KernelRow:
    calls, total_ns = sum(group.calls for group in alike), sum(group.total_ns for group in alike)
    longest = max(alike, key=lambda group: group.total_ns)
    return KernelRow(
        name=name,
        calls=calls,
        total_ns=total_ns,
        mean_ns=total_ns / calls,
        min_ns=min(group.min_ns for group in alike),
        max_ns=max(group.max_ns for group in alike),
        blocks_per_sm=mean((group.launch.blocks_per_sm, group.total_ns) for group in alike),
        registers=longest.launch.registers,
        shared_bytes=longest.launch.shared_bytes,
        estimated_occupancy=mean((group.estimated, group.total_ns) for group in alike),
        limits=list(longest.occupancy.limits) if longest.occupancy else [],
        tensor_cores=gpu_metrics.uses_tensor_cores_by_name(name),
        tensor_cores_by="name",
        operator=operator,
    )


def mean(weighted: Iterable[tuple[float | None, float]]) -> float | None:
    """Return the weighted mean of the values that are known; None if there are none, or no weight."""
    known = [(value, weight) for value, weight in weighted if value is not None]
    weight = sum(known_weight for _, known_weight in known)
    return sum(value * known_weight for value, known_weight in known) / weight if weight else None


def _gpus(trace: Trace) -> list[GpuUse]:
    return [_gpu(trace.device(number), metrics) for number, metrics in gpu_metrics.by_device(trace).items()]


def _gpu(device: TracedGpu, metrics: gpu_metrics.GpuMetrics) -> GpuUse:
    major, minor = device.compute_major, device.compute_minor
    return GpuUse(
        name=device.name or f"GPU {device.id}",
        compute_capability=None if major is None else f"{major}.{minor or 0}",
        utilization=metrics.utilization,
        sm_efficiency=metrics.sm_efficiency,
        estimated_occupancy=metrics.estimated_occupancy,
        tensor_core_share_by_name=metrics.tensor_core_share_by_name,
        long_waits_share=metrics.long_waits_share,
    )


def _runtime_calls(nesting: Nesting, wanted: Iterable[bool]) -> Ints:
    """Return the runtime calls with a wanted name; `wanted` has one entry per name."""
    by_name = np.fromiter(wanted, np.bool_, len(nesting.names))
    return np.flatnonzero(by_name[nesting.name] & (nesting.kind == nesting.RUNTIME))


def _launches(nesting: Nesting) -> Ints:
    return _runtime_calls(nesting, ("Launch" in name for name in nesting.names))


def _synchronizations(nesting: Nesting, work: _Work) -> list[Synchronization]:
    """Return the model's waits, ignoring gaps after benchd's own waits."""
    calls = _runtime_calls(nesting, (bool(_WAITS.fullmatch(name)) for name in nesting.names))
    idle_ns, launches_after = _idle_after(nesting, calls, work), _launches_after(nesting, calls)
    sums: dict[tuple[str, str | None], Counter[str]] = {}
    for call, idle, launches in zip(calls.tolist(), idle_ns, launches_after.tolist(), strict=True):
        if nesting.parent[call] >= 0 and nesting.names[nesting.name[nesting.parent[call]]] == END_OF_STEP:
            continue
        operators = [enclosing for enclosing in nesting.around(call) if nesting.kind[enclosing] == nesting.OPERATOR]
        key = nesting.names[nesting.name[call]], nesting.names[nesting.name[operators[-1]]] if operators else None
        waited = int(nesting.end[call] - nesting.start[call])
        sums.setdefault(key, Counter()).update(calls=1, waited_ns=waited, idle_after_ns=idle, launches_after=launches)
    rows = [Synchronization(name=name, operator=operator, **figures) for (name, operator), figures in sums.items()]
    return sorted(rows, key=lambda row: row.waited_ns, reverse=True)


def _idle_after(nesting: Nesting, calls: Ints, work: _Work) -> list[int]:
    """Return how long the device was idle because of each wait; of several waits in one gap, only the first counts.

    Without the wait, the next launch would have come earlier by at most the duration of the call.
    """
    busy = _Coverage((work.start, work.end))
    idle = [0] * len(calls)
    counted: set[int] = set()
    for place in np.argsort(nesting.end[calls], kind="stable").tolist():
        begun, ended = nesting.start[calls[place]], nesting.end[calls[place]]
        next_busy = int(np.searchsorted(busy.start, ended, "right"))
        drained = 0 < next_busy < len(busy.start) and busy.end[next_busy - 1] <= ended
        if drained and next_busy not in counted:
            counted.add(next_busy)
            idle[place] = int(min(busy.start[next_busy] - busy.end[next_busy - 1], ended - begun))
    return idle


def _launches_after(nesting: Nesting, calls: Ints) -> Ints:
    """Return how many launches follow each wait on its thread, up to the next wait there."""
    launches = _launches(nesting)
    last = np.searchsorted(nesting.thread, nesting.thread[calls], "right")
    following = np.minimum(np.append(calls[1:], len(nesting)), last)
    following_launches: Ints = np.searchsorted(launches, following) - np.searchsorted(launches, calls)
    return following_launches
