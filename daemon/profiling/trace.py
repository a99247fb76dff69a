"""A Chrome trace of torch.profiler as typed rows: kernels, copies, runtime calls, operators and annotations.

The file, plain or gzipped, is decoded in pieces, so that memory holds the rows and never the whole text. Categories and
names of fields are those that libkineto writes (output_json.cpp, CuptiActivity.h); what a maker leaves out is None.
"""

import gzip
import re
import zlib
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path

import msgspec
from msgspec import Raw, Struct, field

from benchd.daemon.errors import UsageError

PIECE_BYTES = 4 * 2**20
MAX_EVENT_BYTES = 32 * 2**20  # beyond it the file is damaged and not merely long

_FIRST_EVENT = re.compile(rb'"traceEvents"\s*:\s*\[')
_LAST_EVENT = re.compile(rb'(.*\})\s*,\s*(?=\{\s*"(?:ph|name|cat|ts|dur|pid|tid|id|args)")', re.DOTALL)
_STEP = re.compile(r"ProfilerStep#(\d+)")
_LIMITS = {"WARPS": "warps", "REGS": "registers", "SMEM": "shared memory", "BLOCKS": "blocks", "BARRIERS": "barriers"}

COUNTERS_CURE = (
    "profile as root or load the driver with NVreg_RestrictProfilingToAdminUsers=0 (in a container, CAP_SYS_ADMIN)"
)


class Device(Struct, frozen=True, rename="camel"):
    """A GPU of the traced machine, from the trace's header; `id` is the `device` of the rows."""

    id: int
    name: str = ""
    compute_major: int | None = None
    compute_minor: int | None = None
    num_sms: int | None = None
    max_threads_per_multiprocessor: int | None = None


class _Span(Struct, frozen=True, gc=False, kw_only=True):
    """Times are nanoseconds on the trace's own clock."""

    start_ns: int
    duration_ns: int

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


class Launch(Struct, frozen=True, gc=False, kw_only=True):
    """A kernel with its launch configuration; all kernels that were launched alike share one.

    `registers` are per thread, `shared_bytes` static and dynamic per block. `estimated_occupancy_percent` is the
    trace's whole number, computed from the launch and never measured; None where its calculator failed.
    `active_blocks_per_sm` and `limits` are that calculator's, in traces from 2026 on.
    """

    name: str
    grid: tuple[int, int, int] | None
    block: tuple[int, int, int] | None
    registers: int | None
    shared_bytes: int | None
    blocks_per_sm: float | None
    warps_per_sm: float | None
    estimated_occupancy_percent: float | None
    active_blocks_per_sm: int | None
    limits: tuple[str, ...]


class Kernel(_Span, frozen=True, gc=False, kw_only=True):
    """One run of a kernel. `correlation` is that of the runtime call, `external_id` that of the operator behind it."""

    launch: Launch
    device: int
    stream: int
    correlation: int
    external_id: int | None


class MemoryOperation(_Span, frozen=True, gc=False, kw_only=True):
    """A memcpy or a memset on a GPU; the name says from where to where."""

    name: str
    device: int
    stream: int
    correlation: int
    bytes: int | None


class RuntimeCall(_Span, frozen=True, gc=False, kw_only=True):
    """A call of the CUDA runtime or driver on a CPU thread."""

    name: str
    thread: int
    correlation: int


class Operator(_Span, frozen=True, gc=False, kw_only=True):
    """An operator of PyTorch on a CPU thread."""

    name: str
    thread: int
    external_id: int | None


class Annotation(_Span, frozen=True, gc=False, kw_only=True):
    """A `record_function` range on a CPU thread or, with `on_gpu`, the span of the kernels launched in it."""

    name: str
    thread: int
    on_gpu: bool


class Step(_Span, frozen=True, gc=False, kw_only=True):
    """One active step of the profiler, as the CPU ran it."""

    number: int


class Trace(Struct, frozen=True, kw_only=True):
    """All rows in the order of the file; `other` counts the events of categories that are not read."""

    devices: list[Device] = []
    kernels: list[Kernel] = []
    memcpys: list[MemoryOperation] = []
    memsets: list[MemoryOperation] = []
    runtime_calls: list[RuntimeCall] = []
    operators: list[Operator] = []
    annotations: list[Annotation] = []
    other: dict[str, int] = {}

    @property
    def steps(self) -> list[Step]:
        """Return the profiler's steps by number; none where the profile had no schedule."""
        found = [(_STEP.fullmatch(row.name), row) for row in self.annotations if not row.on_gpu]
        steps = [
            Step(start_ns=row.start_ns, duration_ns=row.duration_ns, number=int(match[1]))
            for match, row in found
            if match
        ]
        return sorted(steps, key=lambda step: step.number)

    def missing_kernels(self) -> str | None:
        """Return why the trace of a run on CUDA is of no use, None where it holds kernels; not for runs on a CPU."""
        if self.kernels:
            return None
        launches = sum("Launch" in call.name for call in self.runtime_calls)
        return (
            f"the trace holds {launches} launches and no kernel: CUPTI was not allowed to read the GPU or is another "
            f"CUDA's; {COUNTERS_CURE}, and take other CUDA versions out of LD_LIBRARY_PATH"
        )


def read(path: Path) -> Trace:
    """Return the trace in a file; raise UsageError for one that is absent, damaged, cut short or no such trace."""
    rows = _Rows()
    try:
        with _opened(path) as file:
            rows.trace.devices.extend(_read_events(file.read, rows.take))
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"trace {path} cannot be read: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"trace {path} is damaged, cut short or not of torch.profiler: {error}") from error
    return rows.trace


def _opened(path: Path) -> gzip.GzipFile | BufferedReader:
    with path.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    return gzip.open(path) if is_gzip else path.open("rb")


class _Event(Struct, gc=False):
    """One entry of traceEvents. Its arguments are decoded once the category is known: other makers use other types."""

    ph: str
    name: str = ""
    cat: str = ""
    ts: float = 0.0  # microseconds, as is `dur`
    dur: float = 0.0
    pid: int | str = 0
    tid: int | str = 0
    args: Raw = Raw(b"{}")

    def span(self) -> dict[str, int]:
        return {"start_ns": round(self.ts * 1000), "duration_ns": round(self.dur * 1000)}

    @property
    def thread(self) -> int:
        return self.tid if isinstance(self.tid, int) else 0


class _File(Struct, rename="camel"):
    trace_events: list[_Event] = []
    device_properties: list[Device] = []


_EVENTS = msgspec.json.Decoder(list[_Event])
_FILE = msgspec.json.Decoder(_File)


def _read_events(read_some: Callable[[int], bytes], take: Callable[[_Event], None]) -> list[Device]:
    """Give each event to `take` and return the devices of the header."""
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
    """Return what stands before the first event, and the bytes read from there on."""
    buffer = b""
    while len(buffer) < MAX_EVENT_BYTES and (piece := read_some(PIECE_BYTES)):
        buffer += piece
        if found := _FIRST_EVENT.search(buffer):
            return _FILE.decode(buffer[: found.start()].rstrip().rstrip(b",") + b"}"), buffer[found.end() :]
    raise msgspec.DecodeError("it holds no traceEvents" if buffer.strip() else "it is empty")


def _split_complete(buffer: bytes) -> tuple[list[_Event], bytes]:
    """Return the events that are complete in the buffer, and the rest.

    What looks like the end of an event may lie inside one; then nothing is taken and the next piece brings another.
    """
    found = _LAST_EVENT.match(buffer)
    try:
        return (_EVENTS.decode(b"[" + found[1] + b"]"), buffer[found.end() :]) if found else ([], buffer)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        if len(buffer) > MAX_EVENT_BYTES:
            raise
        return [], buffer


class _Calculated(Struct, gc=False, rename="camel"):
    active_blocks_per_multiprocessor: int | None = None
    limiting_factors: str = ""


class _Arguments(Struct, gc=False):
    """What the rows keep of an event's arguments, by category."""

    external_id: int | None = field(name="External id", default=None)


class _CallArguments(_Arguments, gc=False):
    correlation: int = 0


class _MemoryArguments(_CallArguments, gc=False):
    device: int = 0
    stream: int = 0
    bytes: int | None = None


class _KernelArguments(_CallArguments, gc=False):
    device: int = 0
    stream: int = 0
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    registers: int | None = field(name="registers per thread", default=None)
    shared_bytes: int | None = field(name="shared memory", default=None)
    blocks_per_sm: float | str | None = field(name="blocks per SM", default=None)  # "inf" on an unknown device
    warps_per_sm: float | str | None = field(name="warps per SM", default=None)
    percent: float | None = field(name="est. achieved occupancy %", default=None)
    percent_of_old: float | None = field(name="theoretical occupancy %", default=None)  # until May 2021
    occupancy: _Calculated = field(default_factory=_Calculated)


_ARGUMENTS = msgspec.json.Decoder(_Arguments)
_CALL_ARGUMENTS = msgspec.json.Decoder(_CallArguments)
_MEMORY_ARGUMENTS = msgspec.json.Decoder(_MemoryArguments)
_KERNEL_ARGUMENTS = msgspec.json.Decoder(_KernelArguments)


class _Rows:
    """Sorts events into the rows of a Trace; equal names and launches are kept once."""

    def __init__(self) -> None:
        self.trace = Trace(
            devices=[], kernels=[], memcpys=[], memsets=[], runtime_calls=[], operators=[], annotations=[], other={}
        )
        self._names: dict[str, str] = {}
        self._launches: dict[Launch, Launch] = {}
        self._by_category: dict[str, Callable[[_Event], None]] = {
            "kernel": self._kernel,
            "gpu_memcpy": lambda event: self.trace.memcpys.append(self._memory_operation(event)),
            "gpu_memset": lambda event: self.trace.memsets.append(self._memory_operation(event)),
            "cuda_runtime": self._runtime_call,
            "cuda_driver": self._runtime_call,
            "cpu_op": self._operator,
            "user_annotation": self._annotation,
            "gpu_user_annotation": self._annotation,
        }

    def take(self, event: _Event) -> None:
        if event.ph != "X":  # a complete event; the others are labels, arrows and marks
            return
        add = self._by_category.get(event.cat)
        if add is None:
            self.trace.other[event.cat] = self.trace.other.get(event.cat, 0) + 1
        else:
            add(event)

    def _name(self, event: _Event) -> str:
        return self._names.setdefault(event.name, event.name)

    def _kernel(self, event: _Event) -> None:
        facts = _KERNEL_ARGUMENTS.decode(event.args)
        launch = _launch(self._name(event), facts)
        row = Kernel(
            launch=self._launches.setdefault(launch, launch),
            device=facts.device,
            stream=facts.stream,
            correlation=facts.correlation,
            external_id=facts.external_id,
            **event.span(),
        )
        self.trace.kernels.append(row)

    def _memory_operation(self, event: _Event) -> MemoryOperation:
        facts = _MEMORY_ARGUMENTS.decode(event.args)
        return MemoryOperation(
            name=self._name(event),
            device=facts.device,
            stream=facts.stream,
            correlation=facts.correlation,
            bytes=facts.bytes,
            **event.span(),
        )

    def _runtime_call(self, event: _Event) -> None:
        correlation = _CALL_ARGUMENTS.decode(event.args).correlation
        row = RuntimeCall(name=self._name(event), thread=event.thread, correlation=correlation, **event.span())
        self.trace.runtime_calls.append(row)

    def _operator(self, event: _Event) -> None:
        external_id = _ARGUMENTS.decode(event.args).external_id
        row = Operator(name=self._name(event), thread=event.thread, external_id=external_id, **event.span())
        self.trace.operators.append(row)

    def _annotation(self, event: _Event) -> None:
        on_gpu = event.cat == "gpu_user_annotation"
        row = Annotation(name=self._name(event), thread=event.thread, on_gpu=on_gpu, **event.span())
        self.trace.annotations.append(row)


def _launch(name: str, facts: _KernelArguments) -> Launch:
    percent = facts.percent_of_old if facts.percent is None else facts.percent
    factors = facts.occupancy.limiting_factors.split("|")
    return Launch(
        name=name,
        grid=facts.grid,
        block=facts.block,
        registers=facts.registers,
        shared_bytes=facts.shared_bytes,
        blocks_per_sm=_finite(facts.blocks_per_sm),
        warps_per_sm=_finite(facts.warps_per_sm),
        estimated_occupancy_percent=None if percent is None or percent < 0 else percent,
        active_blocks_per_sm=facts.occupancy.active_blocks_per_multiprocessor,
        limits=tuple(_LIMITS.get(factor, factor.lower()) for factor in factors if factor not in ("", "none")),
    )


def _finite(value: float | str | None) -> float | None:
    return None if isinstance(value, str) else value
