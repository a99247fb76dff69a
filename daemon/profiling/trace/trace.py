"""Reads a torch.profiler Chrome trace as typed rows: kernels, copies, runtime calls, operators and annotations.

The file, plain or gzipped, is decoded in pieces, so that only the rows are in memory, never the whole text. Categories
and field names are those written by libkineto (output_json.cpp, CuptiActivity.h); a field that is absent is None.
"""

import gzip
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import lru_cache
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Raw, Struct, field
from numpy.typing import NDArray

from benchd.daemon.errors import UsageError

Ints = NDArray[np.int64]
Value = TypeVar("Value", bound=Hashable)

MISSING = -(2**63)  # represents None in a column

PIECE_BYTES = 4 * 2**20
BETWEEN = b"\n  },\n  {"  # between two events as libkineto writes them; a string cannot contain a line break

MODULE_RANGE = "nn.Module: "  # prefix of the name of a module's range
DATA_LOADER_RANGE = "enumerate(DataLoader)#"
DEVICE_COPY = "Memcpy DtoD"  # prefix of the name of a copy inside a GPU
END_OF_STEP = "benchd: end of step"  # a range in which benchd, not the model, waits for the device

_STEP = re.compile(r"ProfilerStep#(\d+)")
_LIMITS = {"WARPS": "warps", "REGS": "registers", "SMEM": "shared memory", "BLOCKS": "blocks", "BARRIERS": "barriers"}

COUNTERS_CURE = (
    "profile as root or load the driver with NVreg_RestrictProfilingToAdminUsers=0 (in a container, CAP_SYS_ADMIN)"
)


class TracedGpu(Struct, frozen=True, rename="camel"):
    """A GPU of the traced machine, from the trace's header; `id` is the `device` of the rows."""

    id: int
    name: str = ""
    compute_major: int | None = None
    compute_minor: int | None = None
    num_sms: int | None = None
    max_threads_per_multiprocessor: int | None = None


class _Span(Struct, frozen=True, gc=False, kw_only=True):
    """A span in nanoseconds on the trace's own clock."""

    start_ns: int
    duration_ns: int

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


class LaunchConfiguration(Struct, frozen=True, gc=False, kw_only=True):
    """A kernel with its launch configuration.

    `registers` are per thread, `shared_bytes` static and dynamic per block. `estimated_occupancy_percent` is the
    trace's whole number, computed from the launch and never measured; None if its calculator failed.
    `active_blocks_per_sm` and `limits` come from the same calculator, in traces from 2026 on.
    """

    name: str
    grid: tuple[int, int, int] | None
    block: tuple[int, int, int] | None
    registers: int | None
    shared_bytes: int | None
    blocks_per_sm: float | None
    estimated_occupancy_percent: float | None
    active_blocks_per_sm: int | None
    limits: tuple[str, ...]


class Kernel(_Span, frozen=True, gc=False, kw_only=True):
    """One run of a kernel. `correlation` is the id of its runtime call, `external_id` the id of its operator."""

    launch: LaunchConfiguration
    device: int
    correlation: int
    external_id: int | None


class MemoryOperation(_Span, frozen=True, gc=False, kw_only=True):
    """A memcpy or a memset on a GPU; the name gives the direction."""

    name: str
    correlation: int
    external_id: int | None


class RuntimeCall(_Span, frozen=True, gc=False, kw_only=True):
    """A call of the CUDA runtime or driver on a CPU thread."""

    name: str
    thread: int
    correlation: int


class TracedOperator(_Span, frozen=True, gc=False, kw_only=True):
    """A PyTorch operator on a CPU thread."""

    name: str
    thread: int
    external_id: int | None


class Annotation(_Span, frozen=True, gc=False, kw_only=True):
    """A `record_function` range on a CPU thread or, with `on_gpu`, the span of the kernels launched in it."""

    name: str
    thread: int
    on_gpu: bool


class MemoryEvent(Struct, frozen=True, gc=False, kw_only=True):
    """Memory allocated (`bytes` above 0) or freed at an address, as recorded by `profile_memory`."""

    t_ns: int
    address: int
    bytes: int
    thread: int
    on_gpu: bool


class TracedStep(_Span, frozen=True, gc=False, kw_only=True):
    """One active step of the profiler, as it ran on the CPU."""

    number: int


class Trace(Struct, frozen=True, kw_only=True):
    """All rows, in file order."""

    devices: list[TracedGpu] = []
    kernels: Sequence[Kernel] = ()
    memcpys: Sequence[MemoryOperation] = ()
    memsets: Sequence[MemoryOperation] = ()
    runtime_calls: Sequence[RuntimeCall] = ()
    operators: Sequence[TracedOperator] = ()
    annotations: Sequence[Annotation] = ()
    memory_events: Sequence[MemoryEvent] = ()

    @property
    def steps(self) -> list[TracedStep]:
        """Return the profiler's steps by number; none if the profile had no schedule."""
        place, names = places(self.annotations, "name")
        numbers = {at: int(match[1]) for at, name in enumerate(names) if (match := _STEP.fullmatch(name))}
        steps = [
            TracedStep(start_ns=row.start_ns, duration_ns=row.duration_ns, number=numbers[int(place[at])])
            for at in np.flatnonzero(np.isin(place, list(numbers))).tolist()
            if not (row := self.annotations[at]).on_gpu
        ]
        return sorted(steps, key=lambda step: step.number)

    def device(self, number: int) -> TracedGpu:
        """Return the GPU with this number, with only its id if the header lacks it."""
        return next((device for device in self.devices if device.id == number), TracedGpu(id=number))

    def missing_kernels(self) -> str | None:
        """Return why the trace of a CUDA run is unusable; None if it has kernels or is from a CPU run."""
        if self.kernels:
            return None
        launches = sum("Launch" in call.name for call in self.runtime_calls)
        return (
            f"the trace has {launches} launches but no kernels: CUPTI was not allowed to read the GPU or comes "
            f"from a different CUDA version; {COUNTERS_CURE}, and remove other CUDA versions from LD_LIBRARY_PATH"
        )


def column(rows: Sequence[Any], name: str) -> Ints:
    """Return one integer of every row as an array; MISSING stands for None."""
    given = (getattr(row, name) for row in rows)
    return np.fromiter((MISSING if value is None else value for value in given), np.int64, len(rows))


def places(rows: Sequence[Any], name: str) -> tuple[Ints, list[Any]]:
    """Return the index of every row's value in the list of distinct values, and that list."""
    place_of: dict[Hashable, int] = {}
    of_rows = (place_of.setdefault(getattr(row, name), len(place_of)) for row in rows)
    return np.fromiter(of_rows, np.int64, len(rows)), list(place_of)


def read(path: Path) -> Trace:
    """Return the trace in a file; raise UsageError if it is absent, damaged, truncated or not from torch.profiler."""
    try:
        with _opened(path) as file:
            return _trace(_pieces(file))
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"trace {path} cannot be read: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"trace {path} is damaged, truncated or not from torch.profiler: {error}") from error


def _opened(path: Path) -> gzip.GzipFile | BufferedReader:
    with path.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    return gzip.open(path) if is_gzip else path.open("rb")


_Microseconds = Annotated[float, Meta(ge=-9e15, le=9e15)]  # in nanoseconds, a 64-bit integer


class _Event(Struct, gc=False):
    """One entry of traceEvents. Its arguments are decoded once the category is known, because their types vary."""

    ph: str
    name: str = ""
    cat: str = ""
    ts: _Microseconds = 0.0
    dur: _Microseconds = 0.0
    pid: int | str = 0
    tid: int | str = 0
    args: Raw = Raw(b"{}")

    @property
    def start_ns(self) -> int:
        return round(self.ts * 1000)

    @property
    def duration_ns(self) -> int:
        return round(self.dur * 1000)

    @property
    def thread(self) -> int:
        return self.tid if isinstance(self.tid, int) else 0


class _File(Struct, rename="camel"):
    trace_events: list[_Event]
    device_properties: list[TracedGpu] = []


_FILE = msgspec.json.Decoder(_File)


def _pieces(file: gzip.GzipFile | BufferedReader) -> Iterator[_File]:
    """Yield the content in pieces of whole events; one piece if the file is not laid out as libkineto does."""
    rest = b""
    while piece := file.read(PIECE_BYTES):
        events, is_cut, rest = (rest + piece).rpartition(BETWEEN)
        if is_cut:
            yield _FILE.decode(events + b"}]}")
            rest = b'{"traceEvents":[{' + rest
    yield _FILE.decode(rest)


class _CalculatedOccupancy(Struct, gc=False, rename="camel"):
    active_blocks_per_multiprocessor: int | None = None
    limiting_factors: str = ""


class _Arguments(Struct, gc=False):
    """The arguments of an event that the rows keep, by category."""

    external_id: int | None = field(name="External id", default=None)


class _CallArguments(_Arguments, gc=False):
    correlation: int = 0


class _KernelArguments(_CallArguments, gc=False):
    device: int = 0
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    registers: int | None = field(name="registers per thread", default=None)
    shared_bytes: int | None = field(name="shared memory", default=None)
    blocks_per_sm: float | str | None = field(name="blocks per SM", default=None)  # "inf" for an unknown device
    percent: float | None = field(name="est. achieved occupancy %", default=None)
    occupancy: _CalculatedOccupancy = field(default_factory=_CalculatedOccupancy)


class _MemoryEventArguments(Struct, gc=False):
    address: int = field(name="Addr", default=0)
    bytes: int = field(name="Bytes", default=0)
    device_type: int = field(name="Device Type", default=0)  # 0 is the host (c10/core/DeviceType.h)


_ARGUMENTS = msgspec.json.Decoder(_Arguments)
_CALL_ARGUMENTS = msgspec.json.Decoder(_CallArguments)
_KERNEL_ARGUMENTS = msgspec.json.Decoder(_KernelArguments)
_MEMORY_EVENT_ARGUMENTS = msgspec.json.Decoder(_MemoryEventArguments)


def _kernel(event: _Event) -> Kernel:
    facts = _KERNEL_ARGUMENTS.decode(event.args)
    return Kernel(
        start_ns=event.start_ns,
        duration_ns=event.duration_ns,
        launch=_shared(_launch(event.name, facts)),
        device=facts.device,
        correlation=facts.correlation,
        external_id=facts.external_id,
    )


def _memory_operation(event: _Event) -> MemoryOperation:
    facts = _CALL_ARGUMENTS.decode(event.args)
    return MemoryOperation(
        start_ns=event.start_ns,
        duration_ns=event.duration_ns,
        name=_shared(event.name),
        correlation=facts.correlation,
        external_id=facts.external_id,
    )


def _runtime_call(event: _Event) -> RuntimeCall:
    return RuntimeCall(
        start_ns=event.start_ns,
        duration_ns=event.duration_ns,
        name=_shared(event.name),
        thread=event.thread,
        correlation=_CALL_ARGUMENTS.decode(event.args).correlation,
    )


def _operator(event: _Event) -> TracedOperator:
    return TracedOperator(
        start_ns=event.start_ns,
        duration_ns=event.duration_ns,
        name=_shared(event.name),
        thread=event.thread,
        external_id=_ARGUMENTS.decode(event.args).external_id,
    )


def _annotation(event: _Event) -> Annotation:
    return Annotation(
        start_ns=event.start_ns,
        duration_ns=event.duration_ns,
        name=_shared(event.name),
        thread=event.thread,
        on_gpu=event.cat == "gpu_user_annotation",
    )


def _memory_event(event: _Event) -> MemoryEvent:
    facts = _MEMORY_EVENT_ARGUMENTS.decode(event.args)
    return MemoryEvent(
        t_ns=event.start_ns,
        address=facts.address,
        bytes=facts.bytes,
        thread=event.thread,
        on_gpu=facts.device_type != 0,
    )


_ROWS: dict[str, tuple[str, Callable[[_Event], Any]]] = {
    "kernel": ("kernels", _kernel),
    "gpu_memcpy": ("memcpys", _memory_operation),
    "gpu_memset": ("memsets", _memory_operation),
    "cuda_runtime": ("runtime_calls", _runtime_call),
    "cuda_driver": ("runtime_calls", _runtime_call),
    "cpu_op": ("operators", _operator),
    "user_annotation": ("annotations", _annotation),
    "gpu_user_annotation": ("annotations", _annotation),
}
"""The field of a Trace, and the function that makes its rows, by category."""


def _trace(pieces: Iterable[_File]) -> Trace:
    rows: dict[str, list[Any]] = defaultdict(list)
    for piece in pieces:
        rows["devices"] += piece.device_properties
        for event in piece.trace_events:
            if event.ph == "X" and event.cat in _ROWS:  # a complete event; the others are labels, arrows and marks
                kind, make = _ROWS[event.cat]
                rows[kind].append(make(event))
            elif event.name == "[memory]":
                rows["memory_events"].append(_memory_event(event))
    return Trace(**rows)


@lru_cache(maxsize=2**14)
def _shared(value: Value) -> Value:
    """Return the first of equal values, so that rows share it."""
    return value


def _launch(name: str, facts: _KernelArguments) -> LaunchConfiguration:
    percent = facts.percent
    factors = facts.occupancy.limiting_factors.split("|")
    return LaunchConfiguration(
        name=name,
        grid=facts.grid,
        block=facts.block,
        registers=facts.registers,
        shared_bytes=facts.shared_bytes,
        blocks_per_sm=_finite(facts.blocks_per_sm),
        estimated_occupancy_percent=None if percent is None or percent < 0 else percent,
        active_blocks_per_sm=facts.occupancy.active_blocks_per_multiprocessor,
        limits=tuple(_LIMITS.get(factor, factor.lower()) for factor in factors if factor not in ("", "none")),
    )


def _finite(value: float | str | None) -> float | None:
    return None if isinstance(value, str) else value
