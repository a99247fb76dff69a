"""Reads a torch.profiler Chrome trace as typed rows: kernels, copies, runtime calls, operators and annotations.

The file, plain or gzipped, is decoded in pieces, so that only the rows are in memory, never the whole text. Categories
and field names are those written by libkineto (output_json.cpp, CuptiActivity.h); a field that is absent is None.
"""

import gzip
import re
import zlib
from array import array
from collections.abc import Callable, Hashable, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar, overload

import msgspec
import numpy as np
from msgspec import Raw, Struct, field
from numpy.typing import NDArray

from benchd.daemon.errors import UsageError

Ints = NDArray[np.int64]
Row_co = TypeVar("Row_co", covariant=True)
Value = TypeVar("Value", bound=Hashable)

MISSING = -(2**63)  # represents None in a column

PIECE_BYTES = 4 * 2**20
MAX_EVENT_BYTES = 32 * 2**20  # an event can only be longer in a damaged file
MOST_CUTS = 16  # how many positions in a piece are tried as the end of an event

MODULE_RANGE = "nn.Module: "  # prefix of the name of a module's range
DATA_LOADER_RANGE = "enumerate(DataLoader)#"
DEVICE_COPY = "Memcpy DtoD"  # prefix of the name of a copy inside a GPU
END_OF_STEP = "benchd: end of step"  # a range in which benchd, not the model, waits for the device

_FIRST_EVENT = re.compile(rb'"traceEvents"\s*:\s*\[')
_LAST_EVENT = re.compile(rb'(.*\})\s*,\s*(?=\{\s*"(?:ph|name|cat|ts|dur|pid|tid|id|args)")', re.DOTALL)
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
    """A kernel with its launch configuration, shared by all kernels launched with it.

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


class Rows(Sequence[Row_co]):
    """Rows of one type as columns of integers, built on access: a million of them take 50 MB.

    A value common to many rows is stored once in `shared`, and its column contains the index.
    """

    def __init__(
        self, make: Callable[..., Row_co], columns: tuple[str, ...], shared: dict[str, "ValueTable[Any]"]
    ) -> None:
        self._make, self._columns, self.shared = make, columns, shared
        self._values = array("q")
        self.add = self._values.extend

    def __len__(self) -> int:
        return len(self._values) // len(self._columns)

    @overload
    def __getitem__(self, index: int) -> Row_co: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row_co]: ...

    def __getitem__(self, index: int | slice) -> Row_co | list[Row_co]:
        chosen = range(len(self))[index]
        return [self._row(place) for place in chosen] if isinstance(chosen, range) else self._row(chosen)

    def column(self, name: str) -> Ints:
        """Return one value of every row; MISSING stands for None, and an index in `shared` for a shared value."""
        return np.asarray(self._values, np.int64)[self._columns.index(name) :: len(self._columns)]

    def _row(self, index: int) -> Row_co:
        width = len(self._columns)
        given = zip(self._columns, self._values[index * width : (index + 1) * width], strict=True)
        return self._make(**{name: self._value(name, value) for name, value in given})

    def _value(self, name: str, value: int) -> Any:
        if name in self.shared:
            return self.shared[name].listed[value]
        return None if value == MISSING else value


class ValueTable(dict[Value, int]):
    """Values that are kept once: `shared[value]` is the value's index in `listed`, to which it is added if new."""

    def __init__(self) -> None:
        super().__init__()
        self.listed: list[Value] = []

    def __missing__(self, value: Value) -> int:
        self[value] = place = len(self)
        self.listed.append(value)
        return place


def column(rows: Sequence[Any], name: str) -> Ints:
    """Return one integer of every row as an array; MISSING stands for None."""
    if isinstance(rows, Rows):
        return rows.column(name)
    given = (getattr(row, name) for row in rows)
    return np.fromiter((MISSING if value is None else value for value in given), np.int64, len(rows))


def places(rows: Sequence[Any], name: str) -> tuple[Ints, list[Any]]:
    """Return the index of every row's value in the list of distinct values, and that list."""
    if isinstance(rows, Rows):
        return rows.column(name), rows.shared[name].listed
    shared: ValueTable[Any] = ValueTable()
    return np.fromiter((shared[getattr(row, name)] for row in rows), np.int64, len(rows)), shared.listed


def read(path: Path) -> Trace:
    """Return the trace in a file; raise UsageError if it is absent, damaged, truncated or not from torch.profiler."""
    events = _Events()
    try:
        with _opened(path) as file:
            events.trace.devices.extend(_read_events(file.read, events.take))
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"trace {path} cannot be read: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError) as error:
        raise UsageError(f"trace {path} is damaged, truncated or not from torch.profiler: {error}") from error
    return events.trace


def _opened(path: Path) -> gzip.GzipFile | BufferedReader:
    with path.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    return gzip.open(path) if is_gzip else path.open("rb")


class _Event(Struct, gc=False):
    """One entry of traceEvents. Its arguments are decoded once the category is known, because their types vary."""

    ph: str
    name: str = ""
    cat: str = ""
    ts: float = 0.0  # microseconds, as is `dur`
    dur: float = 0.0
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
    trace_events: list[_Event] = []
    device_properties: list[TracedGpu] = []


_EVENTS = msgspec.json.Decoder(list[_Event])
_FILE = msgspec.json.Decoder(_File)


def _read_events(read_some: Callable[[int], bytes], take: Callable[[_Event], None]) -> list[TracedGpu]:
    """Pass each event to `take` and return the devices in the header."""
    head, buffer = _split_head(read_some)
    while piece := read_some(PIECE_BYTES):
        events, buffer = _split_complete(buffer + piece)
        for event in events:
            take(event)
    tail = _FILE.decode(b'{"traceEvents":[' + buffer)
    for event in tail.trace_events:
        take(event)
    return head.device_properties + tail.device_properties


def _split_head(read_some: Callable[[int], bytes]) -> tuple[_File, bytes]:
    """Return the part before the first event, decoded, and the bytes read after it."""
    buffer = b""
    while len(buffer) < MAX_EVENT_BYTES and (piece := read_some(PIECE_BYTES)):
        buffer += piece
        if match := _FIRST_EVENT.search(buffer):
            return _FILE.decode(buffer[: match.start()].rstrip().rstrip(b",") + b"}"), buffer[match.end() :]
    raise msgspec.DecodeError("it contains no traceEvents" if buffer.strip() else "it is empty")


def _split_complete(buffer: bytes) -> tuple[list[_Event], bytes]:
    """Return the events that are complete in the buffer, and the rest.

    An apparent end of an event may be inside an event, in which case an earlier position may be the end.
    """
    end = len(buffer)
    cut: msgspec.DecodeError | None = None
    for _ in range(MOST_CUTS):
        match = _LAST_EVENT.match(buffer, 0, end)
        if not match:
            break
        try:
            return _EVENTS.decode(b"[" + match[1] + b"]"), buffer[match.end() :]
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError as error:
            end, cut = match.end(1), error
    if cut and len(buffer) > MAX_EVENT_BYTES:
        raise cut
    return [], buffer


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


_SPAN = ("start_ns", "duration_ns")
_CALL = (*_SPAN, "name", "thread")
_MEMORY = (*_SPAN, "name", "correlation", "external_id")


class _Events:
    """Sorts events into the rows of a Trace; equal names and launches are kept once."""

    def __init__(self) -> None:
        self._names: ValueTable[str] = ValueTable()
        self._launches: ValueTable[LaunchConfiguration] = ValueTable()
        named = {"name": self._names}
        self._kernels = Rows(
            Kernel,
            (*_SPAN, "launch", "device", "correlation", "external_id"),
            {"launch": self._launches},
        )
        self._memcpys, self._memsets = Rows(MemoryOperation, _MEMORY, named), Rows(MemoryOperation, _MEMORY, named)
        self._runtime_calls = Rows(RuntimeCall, (*_CALL, "correlation"), named)
        self._operators = Rows(TracedOperator, (*_CALL, "external_id"), named)
        self._annotations = Rows(Annotation, (*_CALL, "on_gpu"), named)
        self._memory_events = Rows(MemoryEvent, ("t_ns", "address", "bytes", "thread", "on_gpu"), {})
        self.trace = Trace(
            kernels=self._kernels,
            memcpys=self._memcpys,
            memsets=self._memsets,
            runtime_calls=self._runtime_calls,
            operators=self._operators,
            annotations=self._annotations,
            memory_events=self._memory_events,
        )
        self._by_category: dict[str, Callable[[_Event], None]] = {
            "kernel": self._kernel,
            "gpu_memcpy": lambda event: self._memory_operation(event, self._memcpys),
            "gpu_memset": lambda event: self._memory_operation(event, self._memsets),
            "cuda_runtime": self._runtime_call,
            "cuda_driver": self._runtime_call,
            "cpu_op": self._operator,
            "user_annotation": self._annotation,
            "gpu_user_annotation": self._annotation,
        }

    def take(self, event: _Event) -> None:
        if event.ph != "X":  # "X" is a complete event; the others are labels, arrows and marks
            if event.name == "[memory]":
                self._memory_event(event)
            return
        if add := self._by_category.get(event.cat):
            add(event)

    def _kernel(self, event: _Event) -> None:
        facts = _KERNEL_ARGUMENTS.decode(event.args)
        launch = self._launches[_launch(event.name, facts)]
        ids = (facts.device, facts.correlation, _or_missing(facts.external_id))
        self._kernels.add((event.start_ns, event.duration_ns, launch, *ids))

    def _memory_operation(self, event: _Event, rows: Rows[MemoryOperation]) -> None:
        facts = _CALL_ARGUMENTS.decode(event.args)
        ids = (facts.correlation, _or_missing(facts.external_id))
        rows.add((event.start_ns, event.duration_ns, self._names[event.name], *ids))

    def _runtime_call(self, event: _Event) -> None:
        correlation = _CALL_ARGUMENTS.decode(event.args).correlation
        values = (event.start_ns, event.duration_ns, self._names[event.name], event.thread, correlation)
        self._runtime_calls.add(values)

    def _operator(self, event: _Event) -> None:
        external_id = _or_missing(_ARGUMENTS.decode(event.args).external_id)
        values = (event.start_ns, event.duration_ns, self._names[event.name], event.thread, external_id)
        self._operators.add(values)

    def _annotation(self, event: _Event) -> None:
        on_gpu = event.cat == "gpu_user_annotation"
        values = (event.start_ns, event.duration_ns, self._names[event.name], event.thread, on_gpu)
        self._annotations.add(values)

    def _memory_event(self, event: _Event) -> None:
        facts = _MEMORY_EVENT_ARGUMENTS.decode(event.args)
        self._memory_events.add((event.start_ns, facts.address, facts.bytes, event.thread, facts.device_type != 0))


def _or_missing(value: int | None) -> int:
    return MISSING if value is None else value


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
