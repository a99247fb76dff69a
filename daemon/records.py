"""The vocabulary of benchd and its wire format: a Case defines what to measure, a Record is the result.

The types are frozen, except those the worker fills in, and their field names include units. msgspec encodes and decodes
the JSON; `docs/record.schema.json` is generated from these types. Readers ignore unknown fields, and every field added
later has a default, so that older records of the same major version stay readable.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import PurePath
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import UNSET, Struct, UnsetType

from benchd.daemon.errors import SchemaError, UsageError, unknown
from benchd.daemon.runtimes import BACKENDS, FILE_BACKENDS, PRECISIONS, RUNTIMES, Backend, Precision

SCHEMA = "benchd.record/1"
COMMONEST_CLASS = 0.9
"""If a class has more than this share of the images, the argmax proves nothing: a constant answer would agree too."""

PROFILED = "profiled"
"""The flag of a Record from a profile, which is shown but never ranked or compared."""

Kernels = Literal["torch", "custom"]
Direction = Literal["inference", "training"]
Scenario = Literal["single_stream", "offline", "periodic", "wake_up", "cold_start", "sustained", "server", "pipeline"]
BytesBy = Literal["torch", "streaming", "reading"]
ExponentialsBy = Literal["triton", "c", "c_avx512", "c_half", "c_avx512_half", "torch"]
Provider = Literal["cpu", "cuda", "tensorrt"]
Bound = Literal["matrix", "bytes", "exponentials"]
CheckVerdict = Literal["failed", "void", "passed"]
Status = Literal["ok", "failed", "timeout", "unsupported", "aborted"]
OptionValue = int | float | bool | str
_Float = Literal["float32", "float16", "bfloat16", "float64"]
_Whole = Literal["int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"]
Dtype = Literal[_Float, _Whole]

VERDICTS: tuple[CheckVerdict, ...] = get_args(CheckVerdict)
"""The verdicts of a check, worst first."""

KERNELS: tuple[Kernels, ...] = get_args(Kernels)
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
PROVIDERS: tuple[Provider, ...] = get_args(Provider)
NO_FILE = "files are exported in fp32, fp16 and int8 only"
NO_FP8 = (
    "benchd does not write FP8 files: only GPUs of compute capability 8.9 and newer run them, no Jetson Orin is one, "
    "and without such a GPU nothing can check that TensorRT accepts them; use tensorrt-int8 or tensorrt-fp16"
)
NO_EXECUTORCH = (
    "benchd does not write ExecuTorch programs: ExecuTorch 1.5 needs NumPy 2, which JetPack 6.2 lacks, and its XNNPACK "
    "backend rejects the weights of snn_onepass, which are channels-last; use onnxruntime"
)
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
SCENARIOS: tuple[Scenario, ...] = get_args(Scenario)
BACK_TO_BACK: tuple[Scenario, ...] = ("single_stream", "offline", "sustained", "pipeline")
PLAIN: tuple[Scenario, ...] = ("single_stream", "offline")
"""The scenarios that only repeat runs, so that every stretch of time is like any other."""

WITH_STREAMS: tuple[Scenario, ...] = ("single_stream", "server")


class Variant(Struct, frozen=True, order=True):
    """One way to deploy a model: runtime, number format and kernels."""

    backend: Backend = "eager"
    precision: Precision = "fp32"
    kernels: Kernels = "torch"

    def __post_init__(self) -> None:
        if self.precision == "int8" and self.backend in ("compile", "aoti", "cudagraph"):
            raise UsageError(
                f"{self.name}: int8 is already compiled; int8 also runs as onnxruntime-int8, tensorrt-int8, custom-int8"
            )
        if self.backend in FILE_BACKENDS and self.kernels == "custom":
            raise UsageError(f"{self.name}: {self.backend} runs standard ops only, so it cannot use custom kernels")
        if self.backend in (*FILE_BACKENDS, "aoti") and self.precision == "amp":
            raise UsageError(f"{self.name}: amp is torch.autocast and {self.backend} does not run PyTorch; use fp16")

    @property
    def name(self) -> str:
        """Return `[custom-][backend][-precision]` without `eager` and `fp32`; `eager` if all three are defaults."""
        return _variant_name(self.kernels, self.backend, self.precision)

    @property
    def label(self) -> str:
        """Return the name shown in tables, such as `eager-fp16` for `fp16`."""
        is_eager = self.name == self.precision and not self.needs_torchao
        return f"eager-{self.precision}" if is_eager else self.name

    @property
    def runs_nowhere(self) -> str | None:
        """Return why no machine can run this variant, None if some can; older records may contain such variants."""
        return None if self.precision in RUNTIMES[self.backend].precisions else NO_FILE

    @property
    def needs_torchao(self) -> bool:
        """Return whether this is int8 within PyTorch, quantised by torchao and compiled by inductor."""
        return (self.backend, self.precision, self.kernels) == ("eager", "int8", "torch")

    @property
    def built_on(self) -> Literal["torch", "custom", "custom-int8"]:
        """Return the `kernels` argument with which `benchd.models` builds the module."""
        return "custom-int8" if self.kernels == "custom" and self.precision == "int8" else self.kernels

    @classmethod
    def parse(cls, name: str) -> "Variant":
        """Return the variant with this name; raise UsageError that suggests the closest one."""
        variants = {variant.name: variant for variant in all_variants()}
        variants |= {variant.label: variant for variant in variants.values()}
        if name not in variants:
            if name.endswith("-fp8"):
                raise UsageError(f"{name}: {NO_FP8}")
            if name.partition("-")[0] == "executorch":
                raise UsageError(f"{name}: {NO_EXECUTORCH}")
            _explain_invalid(name)
            raise unknown("variant", name, usable_variants())
        return variants[name]


def _variant_name(kernels: Kernels, backend: Backend, precision: Precision) -> str:
    parts = ("" if kernels == "torch" else kernels, backend, precision)
    return "-".join(part for part in parts if part not in ("", "eager", "fp32")) or "eager"


def _combinations() -> Iterator[tuple[Kernels, Backend, Precision]]:
    return itertools.product(KERNELS, BACKENDS, PRECISIONS)


def _explain_invalid(name: str) -> None:
    """Raise UsageError with the reason if the name's parts are valid but cannot be combined."""
    for kernels, backend, precision in _combinations():
        if _variant_name(kernels, backend, precision) == name:
            Variant(backend, precision, kernels)


def all_variants() -> Iterator[Variant]:
    """Yield all valid variants, plain PyTorch first."""
    for kernels, backend, precision in _combinations():
        with suppress(UsageError):
            yield Variant(backend, precision, kernels)


def usable_variants() -> list[str]:
    """Return the names of the variants that some machine can run, plain PyTorch first."""
    return [variant.name for variant in all_variants() if variant.runs_nowhere is None]


PERCENTILE, QUEUE = 99.0, 32
"""The defaults of a load."""


class Load(Struct, frozen=True, kw_only=True):
    """The requests sent to a `server`: Poisson arrivals at `rate_hz`, each of one batch.

    A null rate requests the highest rate at which `percentile` percent meet the deadline. Up to `queue` requests may
    wait; a request that finds the queue full is dropped.
    """

    rate_hz: float | None = None
    deadline_ms: float | None = None
    percentile: float = PERCENTILE
    queue: int = QUEUE

    @property
    def words(self) -> list[str]:
        """Return the parts of a case_id that identify the load, without default values."""
        words = [f"rate={'highest' if self.rate_hz is None else f'{self.rate_hz:.12g}'}"]
        words += [f"deadline={self.deadline_ms:.12g}"] if self.deadline_ms else []
        words += [f"percentile={self.percentile:.12g}"] if self.percentile != PERCENTILE else []
        return words + ([f"queue={self.queue}"] if self.queue != QUEUE else [])

    @property
    def options(self) -> list[str]:
        """Return the load as command-line options."""
        words = ["--find-rate"] if self.rate_hz is None else ["--rate", f"{self.rate_hz:.12g}"]
        words += ["--deadline", f"{self.deadline_ms:.12g}ms"] if self.deadline_ms else []
        words += ["--percentile", f"{self.percentile:.12g}"] if self.percentile != PERCENTILE else []
        return words + (["--queue", str(self.queue)] if self.queue != QUEUE else [])


class Neighbour(Struct, frozen=True):
    """A case that runs at a rate in a separate process while the measured case is timed."""

    case_id: str
    rate_hz: float

    def __str__(self) -> str:
        return f"{self.case_id}:{self.rate_hz:.12g}Hz"


class Case(Struct, frozen=True):
    """A case to measure. `options` contains the options that differ from the catalog's defaults, sorted by name.

    `provider` is ONNX Runtime's, null for the device's default; `dla` is the DLA core of a Jetson that TensorRT uses,
    null for the GPU alone; `threads` is the number of CPU threads, null for all. `streams` is how many streams run the
    model at the same time, each with `threads` threads; null divides the CPUs among them. `load` is the load of a
    `server`, `beside` the neighbour that runs at the same time.
    """

    model: str
    variant: Variant = Variant()
    batch_size: int = 1
    options: dict[str, OptionValue] = {}
    direction: Direction = "inference"
    scenario: Scenario = "single_stream"
    seed: int = 0
    provider: Provider | None = None
    dla: int | None = None
    threads: int | None = None
    streams: int = 1
    load: Load | None = None
    beside: Neighbour | None = None

    @property
    def case_id(self) -> str:
        """Return a stable, readable name, safe as a file name and as an MQTT topic level."""
        parts = [self.model, self.variant.name, f"b{self.batch_size}"]
        parts += [f"{name}={_plain(value)}" for name, value in sorted(self.options.items())]
        parts += self.usage
        parts += [f"seed={self.seed}"] if self.seed else []
        parts += [f"provider={self.provider}"] if self.provider else []
        parts += [f"dla={self.dla}"] if self.dla is not None else []
        parts += [f"threads={self.threads}"] if self.threads else []
        parts += self.demand
        return ",".join(re.sub(r"[^A-Za-z0-9_.=-]", "_", part) for part in parts)

    @property
    def usage(self) -> list[str]:
        """Return the direction and the scenario, without default values."""
        return [word for word in (self.direction, self.scenario) if word not in ("inference", "single_stream")]

    @property
    def demand(self) -> list[str]:
        """Return the parts of a case_id for streams, load and neighbour; empty for one stream without the others."""
        words = [f"streams={self.streams}"] if self.streams > 1 else []
        words += self.load.words if self.load else []
        return words + ([f"beside={self.beside}"] if self.beside else [])


def _plain(value: OptionValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class Sample(Struct, frozen=True, array_like=True):
    """One reading of one sensor. `t_ns` is CLOCK_MONOTONIC, the same clock in all processes of a machine."""

    t_ns: int
    metric: str
    value: float
    source: str
    rail: str = ""


THROTTLING = 0x04 | 0x08 | 0x20 | 0x40 | 0x80
"""NVML's bits for a power cap, a hardware slowdown, software and hardware thermal slowdowns, and a power brake."""


def throttles(reasons: float) -> bool:
    """Return whether a value of `gpu_throttle_reasons` indicates a lowered clock; even an idle GPU reports a reason."""
    return bool(int(reasons) & THROTTLING)


class Window(Struct, frozen=True):
    """A span of CLOCK_MONOTONIC: from the start of the first measured block to the end of the last."""

    start_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        """Return the length in seconds."""
        return (self.end_ns - self.start_ns) / 1e9


class Summary(Struct, frozen=True):
    """A sensor's readings within the window, in the unit that the metric's name ends in."""

    minimum: float
    mean: float
    maximum: float
    samples: int
    source: str


class Stages(Struct, frozen=True, kw_only=True):
    """The duration of each stage of a process; null if the stage was not reached."""

    spawn_s: float | None = None
    import_s: float | None = None
    build_s: float | None = None
    export_s: float | None = None
    load_s: float | None = None
    check_s: float | None = None
    accuracy_s: float | None = None
    first_run_s: float | None = None
    second_run_s: float | None = None
    idle_s: float | None = None
    warm_up_s: float | None = None
    measure_s: float | None = None
    probe_s: float | None = None


class WarmUp(Struct, frozen=True):
    """The runs before the measurement. `slope_share` is the drift over the last blocks as a share of the median."""

    runs: int
    seconds: float
    steady: bool
    slope_share: float | None = None


class RawFile(Struct, frozen=True):
    """The file of raw run times: little-endian int64 nanoseconds; its path is relative to the output folder."""

    path: str
    sha256: str
    count: int


class Timing(Struct, frozen=True, kw_only=True):
    """Run times of one quantity in one process, or in all processes of a case.

    The median and the percentiles of a `server` count dropped requests as later than any answer. If half were dropped,
    `median_ms` is that of the answered ones only; it has no interval, and is listed in the record's `missing`.
    """

    median_ms: float
    low_ms: float | None = None
    high_ms: float | None = None
    confidence: float = 0.95
    mean_ms: float
    min_ms: float
    max_ms: float
    p90_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None
    p99_upper_ms: float | None = None
    p999_ms: float | None = None
    runs: int
    outliers_mild: int = 0
    outliers_severe: int = 0
    interval_basis: Literal["within_process", "between_processes"] = "within_process"


PERCENTILES = {"p90_ms": 90.0, "p95_ms": 95.0, "p99_ms": 99.0, "p999_ms": 99.9}
"""The percentiles in a Timing."""


class Level(Struct, frozen=True):
    """One of two levels of times: the geometric mean of the times at this level, and their share."""

    ms: float
    share: float


class BlockStatistics(Struct, frozen=True, kw_only=True):
    """The blocks whose medians give the interval, and why measuring stopped.

    `bounds_ns` are the start of the first block and the end of each block, on CLOCK_MONOTONIC; `starts_ns` are the
    starts of the blocks if another process ran between them. `levels` are the two levels of the runs, averaged over
    parts of blocks, if they jump between two; `is_correlated` means that blocks still depend on one another.
    """

    count: int
    runs_per_block: int
    medians_ms: list[float]
    bounds_ns: list[int] = []
    starts_ns: list[int] = []
    lag1: float | None
    doublings: int
    half_width: float | None
    converged: bool
    stop_reason: str
    levels: list[Level] = []
    is_correlated: bool = False

    @property
    def is_interleaved(self) -> bool:
        """Return whether another process ran between the blocks."""
        return bool(self.starts_ns)

    @property
    def windows(self) -> list[Window]:
        """Return the window of each block."""
        starts_ns = self.starts_ns or self.bounds_ns[:-1]
        return [Window(start, end) for start, end in zip(starts_ns, self.bounds_ns[1:], strict=True)]


class Deadlines(Struct, frozen=True):
    """Frames at a fixed rate: how many were released, how many overran the next release, and the worst overrun."""

    rate_hz: int
    releases: int
    misses: int
    worst_lateness_ms: float


class Trial(Struct, frozen=True):
    """A rate that was tried in a search for the highest, and whether it meets the deadline with 99 % confidence."""

    rate_hz: float
    met: bool


class Requests(Struct, frozen=True, kw_only=True):
    """The requests of a `server`, each counted once: `asked` is the sum of `answered` (in time), `late` and `dropped`.

    Latency counts from a request's arrival. A `late` request missed the deadline; a `dropped` one found the queue full
    and has no latency. `met` says whether the deadline is met at the case's percentile, with 99 % confidence; it is
    null without a deadline, or if there are too few requests to decide. `arrivals_p` is the p-value of a
    Kolmogorov-Smirnov test of the arrivals against the requested process. `noticed_ms` is the median delay until an
    idle stream woke up for a request, which is part of the latency; null if no stream was idle. `busy_share` is the
    share of time spent answering. `trials` are the rates that a search tried.
    """

    rate_hz: float
    asked: int
    answered: int
    late: int
    dropped: int
    met: bool | None
    arrivals_p: float
    noticed_ms: float | None
    busy_share: float
    trials: list[Trial] = []


class NeighbourResult(Struct, frozen=True, kw_only=True):
    """The neighbour's frames that were released within the window; latency counts from the release.

    Of the `releases`, `misses` were not answered before the next one, or not at all; `timing` is null if there was no
    answer.
    """

    case_id: str
    rate_hz: float
    releases: int
    misses: int
    timing: Timing | None


class TimeSlice(Struct, frozen=True, kw_only=True):
    """A part of a sustained run, in seconds since its start: the median time of a run and the mean of each sensor."""

    start_s: float
    end_s: float
    median_ms: float
    telemetry: dict[str, float] = {}


class Memory(Struct, frozen=True, kw_only=True):
    """Peak memory of one worker process; `device_peak_bytes` is its allocation on the accelerator.

    `rss_peak_bytes` is the peak in the timed section, `worker_peak_bytes` that of the whole process, including build
    and check. For a CUDA graph, `device_peak_bytes` is torch's reservation, including the graph's pool; for ONNX
    Runtime and TensorRT, it is the driver's count of memory used until the end of the first runs, by this process or,
    if the record has the flag `device_memory_of_all`, by all processes.
    """

    rss_peak_bytes: int
    worker_peak_bytes: int | None = None
    device_peak_bytes: int | None = None


class Check(Struct, frozen=True, kw_only=True):
    """The agreement of a variant with its model in eager float64 on the same inputs; `note` explains a disagreement.

    Shares are relative to the largest exact answer; docs/measuring.md has the rules. `void` means that the number
    format cannot represent these weights, so that correct and wrong variants cannot be distinguished: such a check does
    not fail a run, and the variant is not shipped. `images_off` is how many images exceeded their limit, of which
    `images_off_allowed` are tolerated: all of them if the mean over the images is judged, with `tolerance` as its
    limit. `rounding_share` is the error from rounding alone, `spread_share` the distance between the answers to two
    images. `ties` is the number of images whose class float64 decides by less than two tolerances; above a
    `commonest_class_share` of 0.9, the argmax proves nothing. `reference` is float32 on the CPU for a user's model that
    cannot run in float64, and `note` gives the reason. `audited` is the number of answers from the timed section that
    were also compared. `outputs` lists the path and shape of each output for one input; `projections` are the exact
    answers to the first inputs, per output, projected on a few fixed random directions, which reveals different
    networks. `inputs_sha256` is the hash of these inputs and their batches; answers to different inputs are not
    comparable.
    """

    passed: bool
    void: bool = False
    rule: Literal["outputs", "codes", "argmax"]
    images: int
    max_abs_error: float
    error_share: float
    mean_error_share: float | None = None
    tolerance: float
    images_off: int = 0
    images_off_allowed: int = 0
    rounding_share: float | None = None
    spread_share: float | None = None
    argmax_disagreements: int | None
    ties: int = 0
    tie_disagreements: int = 0
    commonest_class_share: float | None = None
    flipped_share: float | None = None
    flipped_tolerance: float | None = None
    reference: Literal["float64", "float32"] = "float64"
    audited: int = 0
    outputs: list[str] = []
    projections: list[float] = []
    inputs_sha256: str = ""
    note: str = ""

    @property
    def verdict(self) -> CheckVerdict:
        """Return the verdict; only `failed` means that the variant is wrong."""
        return "passed" if self.passed else "void" if self.void else "failed"

    @property
    def typical_error_share(self) -> float:
        """Return the worst image's error, or the mean if that is judged or a single spike can change any answer."""
        by_mean = self.images_off > 0 and self.images_off_allowed > 0 and self.mean_error_share is not None
        return self.mean_error_share if by_mean and self.mean_error_share is not None else self.error_share

    @property
    def decided(self) -> int:
        """Return the number of images that are not ties in float64."""
        return self.images - self.ties

    @property
    def agreeing(self) -> int | None:
        """Return how many `decided` images get float64's class; None if that proves nothing about the variant."""
        if self.argmax_disagreements is None or (self.commonest_class_share or 0.0) > COMMONEST_CLASS:
            return None
        return self.decided - (self.argmax_disagreements - self.tie_disagreements)


TOP1 = "top-1"


class Accuracy(Struct, frozen=True, kw_only=True):
    """A variant's top-1 accuracy or the user's `metric`, and that of plain eager fp32 (`reference`) on the same items.

    `low` and `high` are the 95 % interval of `value`. `drop` is how much worse the variant is than plain fp32, with a
    95 % interval, which has width 0 for plain fp32 itself. For top-1, a share from 0 to 1, the intervals are Wilson's
    and Tango's; `gained` counts the items that only the variant gets right, `lost` those that only fp32 gets right. For
    a metric, they come from `draws` resamples of the items, on which variant and fp32 are compared (paired bootstrap).
    `data` names the items, and `data_sha256` is the hash of the targets and everything that the model read.
    """

    metric: str = TOP1
    better: Literal["higher", "lower"] = "higher"
    images: int
    value: float
    low: float
    high: float
    reference: float
    drop: float
    drop_low: float
    drop_high: float
    right: int | None = None
    reference_right: int | None = None
    gained: int | None = None
    lost: int | None = None
    draws: int | None = None
    data: str
    data_sha256: str

    @property
    def is_share(self) -> bool:
        """Return whether the values are shares of the items, printed as percentages."""
        return self.metric == TOP1


class InputSpec(Struct, frozen=True, omit_defaults=True):
    """One input of a user's model, without its batch axis; its text form is the syntax of `--input`.

    Without a `name` it is identified by position. A null `dtype` stands for float32 for a module, and for the file's
    own type for a file. `batch_axis` is the position of the batch among the sizes, null for an input that a whole batch
    shares. The values are drawn uniformly from `span` (lowest and highest), or are the `items` of `file`, whose content
    has the hash `sha256`; with neither, they are standard normal, or True and False.
    """

    name: str = ""
    dtype: Dtype | None = None
    shape: list[int] = []
    batch_axis: int | None = 0
    span: tuple[int | float, int | float] | None = None
    file: str = ""
    items: int = 0
    sha256: str = ""

    def __str__(self) -> str:
        sizes = list(map(str, self.shape))
        if self.batch_axis:
            sizes.insert(self.batch_axis, "N")
        text = f"@{self.file}" if self.file else "x".join(sizes)
        text = f"({text})" if self.batch_axis is None else text
        is_plain = text and (self.dtype is None or (self.dtype == DTYPES[0] and not self.file))
        typed = "" if is_plain else f"{self.dtype or DTYPES[0]}:"
        drawn = f"{'=' if self.is_constant else ':'}{self.numbers}" if self.span else ""
        return f"{self.name}{'=' if self.name else ''}{typed}{text}{drawn}"

    @property
    def numbers(self) -> str:
        """Return a description of the input's values, such as `0-999`."""
        if self.file:
            items = f"{self.items} items of " if self.items else ""
            return f"{items}{PurePath(self.file).name} (SHA-256 {self.sha256[:12]})"
        if self.span is None:
            return "0-1" if self.dtype == "bool" else "normal"
        low, high = self.span
        return f"{low}" if self.is_constant else f"{low}{'..' if low < 0 else '-'}{high}"

    @property
    def is_constant(self) -> bool:
        """Return whether the input is a single number that a whole batch shares."""
        return self.batch_axis is None and self.span is not None and self.span[0] == self.span[1]


ImageCount = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)] | Literal["full"]
"""The number of images in a data set on which accuracy is measured."""


class Option(Struct, frozen=True):
    """The command-line form of an annotated field: its help, the form of its value, its name and its unit.

    The name defaults to the field's. Types, defaults and bounds are the field's.
    """

    help: str
    metavar: str | None = None
    flag: str = ""
    unit: Literal["", "ms", "Hz"] = ""


class Inputs(Struct, frozen=True, kw_only=True):
    """A model's weights, its inputs and the criterion for its answers; null means random, or the model's own."""

    weights: Annotated[
        str | None,
        Option("A checkpoint (for a single model), or `demo` for the included trained weights.", "FILE|demo|random"),
    ] = None
    data: Annotated[
        str | None, Option("Real images; `demo` for the included digits.", "demo|cifar10:DIR|imagefolder:DIR")
    ] = None
    samples: Annotated[
        str | None,
        Option(
            "Your own inputs: named arrays with the items along the first axis, or a function that yields the items.",
            "FILE.npz|FILE.safetensors|FILE.py:FUNCTION",
            "--inputs",
        ),
    ] = None
    labels: Annotated[
        str | None, Option("Class labels of the images in --data: one path and one index per line.", "FILE")
    ] = None
    accuracy: Annotated[
        ImageCount | None, Option("Measure top-1 over all of --data, or over this many images.", "full|N")
    ] = None
    calibration: Annotated[
        str | None,
        Option(
            "Data that sets the int8 ranges; none of it may be in --data.",
            "demo|random|cifar10:DIR|imagefolder:DIR|FILE.npz",
        ),
    ] = None
    metric: Annotated[
        str | None,
        Option(
            "Replaces top-1: (answers, targets) -> number, or an object with update and compute.",
            "FILE.py:FUNCTION[:higher|lower]",
        ),
    ] = None

    @property
    def named(self) -> "Inputs":
        """Return the inputs, with files and folders reduced to their names, as stored in records."""
        values = msgspec.structs.asdict(self)
        names = ("weights", "data", "samples", "labels", "metric", "calibration")
        return Inputs(**values | {name: _last(values[name]) for name in names if values[name]})


def file_of(text: str) -> str:
    """Return the FILE part of FILE or FILE.py:FUNCTION, with or without a suffix."""
    stem, dot_py, _ = text.partition(".py:")
    return f"{stem}.py" if dot_py else text


def _last(text: str) -> str:
    """Return the name of a file, or `imagefolder:NAME` for a folder."""
    scheme, colon, folder = text.partition(":")
    return f"{scheme}:{PurePath(folder).name}" if colon and "/" not in scheme else PurePath(text).name


HUB = "hf"


class UserModule(Struct, frozen=True, tag="module"):
    """A user's `FILE.py:function`, or `package.module:function` in `folder`, with inputs if it does not define them.

    `hf:ORG/NAME` is a net from the Hugging Face Hub, whose files are in `folder`.
    """

    path: str
    inputs: list[InputSpec] = []
    folder: str = ""

    @property
    def is_hub(self) -> bool:
        """Return whether this is a net from the Hub."""
        return self.where == HUB

    @property
    def where(self) -> str:
        """Return the file, or the dotted name of the module."""
        return self.path.rpartition(":")[0]

    @property
    def function(self) -> str:
        """Return the name of the function that builds the module."""
        return self.path.rpartition(":")[2]

    @property
    def package(self) -> str:
        """Return the package that the module belongs to, empty for a file."""
        return self.where.partition(".")[0] if self.folder else ""

    @property
    def name(self) -> str:
        """Return the name under which the module is imported."""
        return self.where if self.folder else PurePath(self.where).stem

    @property
    def model(self) -> str:
        """Return the model name in its records."""
        if self.is_hub:
            return self.path
        return f"own.{self.name.rpartition('.')[2] if self.folder else self.name}.{self.function}"

    @property
    def named(self) -> "UserModule":
        """Return the module without its folder, as stored in records."""
        return UserModule(self.path if self.folder else PurePath(self.path).name, self.inputs)


class UserNir(UserModule, frozen=True, tag="nir"):
    """A user's NIR file, from which a module is built."""

    @property
    def where(self) -> str:
        """Return the file."""
        return self.path

    @property
    def function(self) -> str:
        """Return an empty string, because no function builds the model."""
        return ""

    @property
    def model(self) -> str:
        """Return the model name in its records."""
        return f"own.{self.name}"

    @property
    def named(self) -> "UserNir":
        """Return the file without its folder, as stored in records."""
        return UserNir(PurePath(self.path).name, self.inputs)


class UserFile(Struct, frozen=True, tag="onnx"):
    """A user's ONNX file and its inputs; `batch_size` is its fixed batch size, null if it accepts any.

    `precision` is the format in which it computes, and `reference` the fp32 file from which a quantised one was made.
    """

    path: str
    inputs: list[InputSpec] = []
    batch_size: int | None = None
    precision: Precision = "fp32"
    reference: str | None = None

    @property
    def name(self) -> str:
        """Return the name of the file."""
        return PurePath(self.path).name

    @property
    def model(self) -> str:
        """Return the model name in its records."""
        return f"own.{PurePath(self.path).stem}"

    @property
    def named(self) -> "UserFile":
        """Return the file without its folder, as stored in records."""
        reference = self.reference and PurePath(self.reference).name
        return msgspec.structs.replace(self, path=self.name, reference=reference)


UserModel = UserModule | UserNir | UserFile

OF_MODULE = "of the module"
"""The value of `weights` for a module that creates its own."""


class ModelFacts(Struct, frozen=True, kw_only=True):
    """The model as built: all options, the shape of one input, its weights and its code.

    `inputs` describes the inputs of a user's model, unless it takes a single float32 array. `read` maps everything that
    the model was made from to short hashes: `benchd` for a catalogued model, the file for a user's ONNX file, and for a
    user's module the loaded source files, the files that these opened, and the environment variables that they mention,
    as `$NAME`.
    """

    options: dict[str, OptionValue]
    input_shape: list[int]
    inputs: list[InputSpec] = []
    parameters: int
    weights: str
    weights_sha256: str
    read: dict[str, str] = {}
    data: str


class Quantisation(Struct, frozen=True, kw_only=True):
    """How benchd quantised an int8 file: the number of int8 layers, and the other layers with the reasons.

    `exact` is how many of the `layers` read integers, such as spikes, so that only their weights are rounded. Errors
    compare the file with the fp32 file on calibration images, as shares of the largest output.
    """

    layers: int
    exact: int
    left_fp32: dict[str, str]
    calibration: str
    max_error_share: float
    mean_error_share: float


class ArtifactFacts(Struct, frozen=True, kw_only=True):
    """A file that a variant runs: its content, where and with which versions it was made, and how long that took.

    `reused` is set if the file existed before this process; `seconds` is then the time to find and verify it. `form` is
    the form of the scan, null for a model without a scan.
    """

    key: str
    format: str
    form: str | None = None
    bytes: int
    sha256: str
    made_at: str
    made_on: str
    versions: dict[str, str]
    reused: bool
    seconds: float
    note: str = ""
    quantisation: Quantisation | None = None


class RuntimeFacts(Struct, frozen=True, kw_only=True):
    """The runtime that executed a file, and its settings; a field that does not apply is null.

    `node_shares` is the share of nodes that each ONNX Runtime provider ran, or of layers that TensorRT put on the DLA
    or returned to the GPU; `typing` "weak" lets TensorRT choose each layer's number format; `build_s` is null if the
    engine already existed. `context_bytes` is the activation memory of one TensorRT execution context; two contexts
    alternate.
    """

    provider: str
    node_shares: dict[str, float] = {}
    threads: int | None = None
    typing: Literal["strong", "weak"] | None = None
    cuda_graph: bool | None = None
    build_s: float | None = None
    load_s: float | None = None
    engine_bytes: int | None = None
    workspace_bytes: int | None = None
    context_bytes: int | None = None
    notes: list[str] = []


class Occupancy(Struct, frozen=True, kw_only=True):
    """The share of a GPU's warps that a case fills, 0 to 1, by three different measures.

    `theoretical` is the occupancy that registers, shared memory and block size allow; `estimated`, from a trace, also
    accounts for grid sizes; both are means over kernel time. `measured` was counted by the hardware over a window of
    runs, including the gaps between launches, so that it is lower if the GPU waits. `limits` is the share of kernel
    time by limiting resource. `utilization` is the share of time with a kernel running.
    """

    theoretical: float | None
    estimated: float | None
    measured: float | None
    measured_missing: str = ""
    limits: dict[str, float] = {}
    utilization: float
    sm_efficiency: float | None = None
    kernels: int
    without_occupancy: int = 0


class CrossCheck(Struct, frozen=True, kw_only=True):
    """The energy for the same window and scope from the second-best source, with its error bar."""

    energy_j: float
    energy_err_j: float
    source: str
    metric: str


class Energy(Struct, frozen=True, kw_only=True):
    """The energy used during the window with its error bar (95 %, k = 2), and what exactly was measured.

    `metric` shows whether `source` is a counter or was polled. `updates` is the number of its values in the window;
    `gap_share` is the share of the window without readings. Net energy excludes `idle_w`, the mean of the idle power
    before and after, which differ by `idle_drift_w`. `flags` are caveats for the reader, such as `sources_disagree`.
    """

    energy_j: float
    energy_err_j: float
    gross_per_inference_j: float
    net_per_inference_j: float | None = None
    net_per_inference_err_j: float | None = None
    idle_w: float | None = None
    idle_drift_w: float | None = None
    scope: str
    source: str
    metric: str = ""
    sensor_period_s: float
    updates: int
    gap_share: float = 0.0
    cross_check: CrossCheck | None = None
    flags: list[str] = []


class BlocksResult(Struct, frozen=True, kw_only=True):
    """The mean of a set of block medians and, for at least two blocks, its 95 % interval."""

    median_ms: float
    low_ms: float | None
    high_ms: float | None
    blocks: int


class Interference(Struct, frozen=True, kw_only=True):
    """The disturbances of each block, and the result without and with the disturbed blocks.

    `reasons` has one list per block, which is empty if the block was undisturbed. If all blocks were disturbed,
    `all_flagged` is true and `clean` equals `as_experienced`.
    """

    reasons: list[list[str]]
    clean: BlocksResult
    as_experienced: BlocksResult
    all_flagged: bool


class SamplerReport(Struct, frozen=True, kw_only=True):
    """CPU time and timing accuracy of the sampler process during the window."""

    sources: list[str]
    cpu_s: float
    period_s: float
    period_p99_error: float | None
    samples: int
    failures: dict[str, str] = {}


class Probes(Struct, frozen=True, kw_only=True):
    """The peak rates probed right after a timed section, in the same process, at its clocks and with its threads.

    For a copy, both the bytes read and the bytes written are counted; `copy_by` is its fastest form: torch's, one whose
    stores bypass the caches, or reading alone. `matrix_dtype` is the type of the products: the case's, or float32 if
    that is faster. `exponentials_by` is the fastest form of the exponential; forms ending in `half` are only as exact
    as half precision and are used only for that. `cache_bytes` is the size of the last-level cache.
    """

    copy_bytes_per_s: float
    copy_by: BytesBy = "torch"
    matrix_flops_per_s: float
    matrix_dtype: str
    exponentials_per_s: float
    exponentials_by: ExponentialsBy
    cache_bytes: int | None = None


class Floor(Struct, frozen=True, kw_only=True):
    """The roofline of a case: the shortest time one run could take at the probed rates, and the work in it.

    A device copies, multiplies and computes exponentials at the same time, so `floor_ms` is the longest of the three
    times, and `bound_by` says which one. Copies between host and device are not included. `synaptic_flops` are the
    products of a spiking network at its measured spike rate, and replace the dense `matrix_flops` in `matrix_ms`.
    `reference_because` says why a run may be faster, which makes the time a reference instead of a bound. For a model
    outside the catalog, only products are counted, and `uncounted` lists the operations without a formula.
    """

    floor_ms: float
    bound_by: Bound
    matrix_ms: float
    bytes_ms: float
    exponentials_ms: float
    matrix_flops: int
    synaptic_flops: float | None = None
    elementwise_flops: int
    bytes: int
    parameters_bytes: int
    exponentials: int
    reference_because: str | None = None
    uncounted: list[str] = []


class NeuroBench(Struct, frozen=True, kw_only=True):
    """NeuroBench's metrics for one pass of the plain model in float32, in operations per sample.

    Sparsities are the shares of zeros among the weights, and among the outputs of activations and neurons, null if
    there are none. `effective_macs` are multiply-accumulates of two non-zero numbers; `effective_acs` are those of
    calls whose inputs are all -1, 0 or 1. `scaled_acs` is the part of `effective_macs` with spikes of a different
    height, which a fixed weight absorbs. `dense_operations` include zeros. `membrane_updates` is null if the potentials
    are not visible. The layers in `uncounted` are excluded from every metric.
    """

    footprint_bytes: int
    connection_sparsity: float | None
    activation_sparsity: float | None
    effective_macs: float
    effective_acs: float
    scaled_acs: float
    dense_operations: float
    membrane_updates: float | None = None
    uncounted: list[str] = []


class WorkCount(Struct, frozen=True, kw_only=True):
    """The work of one run of a batch in float32, counted while a module ran: 2 operations per multiply-add.

    `bytes` is the size of the parameters, each counted once, plus the inputs and the outputs. `uncounted` lists the
    operations without a formula.
    """

    matrix_flops: int
    bytes: int
    parameters_bytes: int
    is_convolved: bool
    uncounted: list[str] = []


class LayerTime(Struct, frozen=True, kw_only=True):
    """A layer as executed by its runtime: the median time, in ms, of its `calls` in one run under a profiler.

    `covers` lists the modules, or the nodes of the original file, that it computes; empty if only its own name is
    known.
    """

    name: str
    ms: float
    kind: str = ""
    calls: float = 1
    covers: list[str] = []


class ProcessResult(Struct, kw_only=True):
    """One worker process of a case, from spawn to exit; the worker fills it in as it runs.

    `cpus` are the CPUs shared with the other process of its pair, empty if it could use all CPUs. `layers` is a profile
    taken after the timed section, if requested.
    """

    status: Status
    reason: str | None = None
    stages: Stages = Stages()
    warm_up: WarmUp | None = None
    timing: Timing | None = None
    parts: dict[str, Timing] = {}
    blocks: BlockStatistics | None = None
    window: Window | None = None
    idle: list[Window] = []
    memory: Memory | None = None
    raw: dict[str, RawFile] = {}
    throughput_per_s: float | None = None
    energy: Energy | None = None
    interference: Interference | None = None
    telemetry: dict[str, Summary] = {}
    sampler: SamplerReport | None = None
    probes: Probes | None = None
    deadlines: list[Deadlines] = []
    requests: Requests | None = None
    beside: NeighbourResult | None = None
    timeline: list[TimeSlice] = []
    cpus: list[int] = []
    layers: list[LayerTime] = []

    @property
    def measured_s(self) -> float:
        """Return how long the process was measured: its window, without the blocks of the other process."""
        if self.blocks and self.blocks.is_interleaved:
            return sum(window.seconds for window in self.blocks.windows)
        return self.window.seconds if self.window else 0.0


class Environment(Struct, frozen=True, kw_only=True):
    """The hardware and software that a case ran on, which must be equal in two records for them to be comparable.

    `fingerprint` contains two hashes: one of everything that stays the same between runs on an unchanged machine, and
    one of benchd itself, so that a baseline outlives an upgrade. The first excludes `threads` (the model may set its
    own), the thermal state before the first case (`temperature_c` by zone, `cooling` with the level of each active
    device), the `load` average of the last minute, the `command` line and the CPUs in `affinity`. `allocator` contains
    benchd's settings for a worker's heap, `variables` the environment variables that affect a worker's computation,
    null if unknown; `software` identifies the sources of the worker's libraries and kernels, and `system` contains the
    settings of kernel, firmware and cgroup. Folder paths are removed from all values, because they may differ between
    equal machines.
    """

    fingerprint: str
    machine: str
    os: str
    kernel: str
    board: str | None
    soc: str | None
    cpu_model: str
    cpu_count: int
    cpu_governor: str | None
    cpu_max_hz: float | None
    memory_bytes: int
    device: str
    gpu: str | None
    driver: str | None
    power_mode: str | None
    clocks_locked: bool | None
    threads: int | None
    allocator: dict[str, str] = {}
    versions: dict[str, str] = {}
    cpu_flags: list[str] = []
    swap_bytes: int = 0
    jetpack: str | None = None
    l4t: str | None = None
    power_limit_w: float | None = None
    gpu_governor: str | None = None
    gpu_max_hz: float | None = None
    temperature_c: dict[str, float] = {}
    cooling: dict[str, int] = {}
    variables: dict[str, str] | None = None
    software: dict[str, str] = {}
    system: dict[str, str] = {}
    load: float | None = None
    command: str = ""
    affinity: str | None = None

    @property
    def is_tegra(self) -> bool:
        """Return whether this is a Jetson; in a container, the L4T version may be missing."""
        return "tegra" in f"{self.soc} {self.kernel}"

    @property
    def comparable_part(self) -> str:
        """Return the part of the fingerprint without benchd itself."""
        return self.fingerprint.partition("-")[0]


class Record(Struct, frozen=True, kw_only=True):
    """Everything that is known about one measured case: one JSON line, one MQTT payload, one row of every table.

    A value that was not measured is null, and `missing` maps the field's name to the reason. `t_wall` is UTC in RFC
    3339 and only serves as a label; order and durations are based on `t_mono_ns` (CLOCK_MONOTONIC) within one
    `boot_id`. `limits` are the effective ones, from the preset, the configuration or the command line. `own` and
    `inputs` are as requested, with files and folders reduced to their names, so that `bench-once --case` can repeat the
    measurement. `log` and `seq`, the line number in that log counted from 1, are set when the record is written to a
    file.
    """

    run_id: str
    suite_id: str
    device_id: str
    case_id: str
    case: Case
    status: Status
    t_wall: str
    t_mono_ns: int
    boot_id: str
    tool_version: str
    environment: Environment
    schema: str = SCHEMA
    reason: str | None = None
    preset: str = ""
    limits: dict[str, float | None] = {}
    own: UserModel | None = None
    inputs: Inputs = Inputs()
    model: ModelFacts | None = None
    artifacts: list[ArtifactFacts] = []
    runtime: RuntimeFacts | None = None
    kernels_ran: str | None = None
    timing: Timing | None = None
    parts: dict[str, Timing] = {}
    throughput_per_s: float | None = None
    throughput_basis: Literal["measured", "batch_over_median"] | None = None
    deadlines: list[Deadlines] = []
    requests: Requests | None = None
    beside: NeighbourResult | None = None
    energy: Energy | None = None
    telemetry: dict[str, Summary] = {}
    memory: Memory | None = None
    occupancy: Occupancy | None = None
    check: Check | None = None
    accuracy: Accuracy | None = None
    neurobench: NeuroBench | None = None
    x_of_floor: float | None = None
    floor: Floor | None = None
    probes: Probes | None = None
    flags: list[str] = []
    missing: dict[str, str] = {}
    processes: list[ProcessResult] = []
    log: str | UnsetType = UNSET
    seq: int | UnsetType = UNSET

    @property
    def key(self) -> str:
        """Return the delivery key, by which a record that is delivered twice is stored only once."""
        return f"{self.device_id}:{self.run_id}"


def ending(telemetry: Mapping[str, Summary], suffix: str) -> dict[str, Summary]:
    """Return the metrics whose name, without its rail, ends in `suffix`, such as `_clock_hz` or `_temp_c`."""
    return {name: summary for name, summary in telemetry.items() if name.partition("@")[0].endswith(suffix)}


def of_range(environment: Environment, telemetry: Mapping[str, Summary]) -> tuple[float, float] | None:
    """Return the mean clock of the measured device and its maximum, in Hz; None if either is unknown."""
    is_cpu = environment.device == "cpu"
    most = environment.cpu_max_hz if is_cpu else environment.gpu_max_hz
    clock = telemetry.get("cpu_clock_hz" if is_cpu else "gpu_clock_hz")
    return (clock.mean, most) if clock and most else None


def _non_finite(value: Any, path: str) -> str | None:
    """Return the path of the first number that is NaN or infinite, else None."""
    if isinstance(value, float):
        return None if math.isfinite(value) else path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return next(filter(None, (_non_finite(item, f"{path}.{key}") for key, item in items)), None)


def wall_now(timespec: str = "milliseconds") -> str:
    """Return the current time as a label, in UTC and RFC 3339."""
    return wall_text(datetime.now(timezone.utc), timespec)


def wall_text(moment: datetime, timespec: str = "milliseconds") -> str:
    """Return a time as a label, in UTC and RFC 3339."""
    return moment.isoformat(timespec=timespec).replace("+00:00", "Z")


def unix_s(t_wall: str) -> float | None:
    """Return the Unix time of a `t_wall`; None if it is not a time in RFC 3339."""
    try:
        moment = datetime.fromisoformat(t_wall.replace("Z", "+00:00"))
    except ValueError:
        return None
    return moment.timestamp() if moment.tzinfo else None


def encode(record: Record) -> bytes:
    """Return the record as one line of JSON without a line break; raise ValueError for a number that is not finite."""
    path = _non_finite(msgspec.to_builtins(record), "record")
    if path:
        raise ValueError(f"{path} is not a finite number; a value that was not measured is null with a reason")
    return msgspec.json.encode(record)


def decode(data: bytes) -> Record:
    """Return the record in `data`; raise SchemaError for a different major version or bad data."""
    try:
        schema = msgspec.json.decode(data, type=_Header).schema
        if schema != SCHEMA and not schema.startswith(f"{SCHEMA}."):
            raise SchemaError(f"record of schema {schema!r}; this version reads {SCHEMA!r}")
        record = msgspec.json.decode(data, type=Record)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, UsageError) as error:
        raise SchemaError(f"not a benchd record: {error}") from error
    if words := contradiction(record):
        raise SchemaError(f"not a benchd record, because its parts contradict each other: {words}")
    return record


_ASCENDING: dict[type[Struct], tuple[tuple[str | int, ...], ...]] = {
    Case: ((1, "batch_size"), (1, "streams"), (1, "threads")),
    Memory: ((0, "rss_peak_bytes"), (0, "worker_peak_bytes"), (0, "device_peak_bytes")),
    Timing: (
        (0, "min_ms"),
        (0, "confidence", 1),
        (1, "runs"),
        (0, "outliers_mild", "runs"),
        (0, "outliers_severe", "runs"),
        ("min_ms", "p90_ms", "p95_ms", "p99_ms", "p999_ms", "max_ms"),
        ("min_ms", "median_ms", "max_ms"),
        ("min_ms", "mean_ms", "max_ms"),
        ("low_ms", "median_ms", "high_ms"),
        ("p99_ms", "p99_upper_ms", "max_ms"),
    ),
    BlocksResult: (("low_ms", "median_ms", "high_ms"),),
    Window: (("start_ns", "end_ns"),),
    Energy: ((0, "energy_err_j"), (0, "gap_share", 1)),
    Accuracy: (("low", "value", "high"), ("drop_low", "drop", "drop_high"), ("right", "images")),
    Check: (
        (0, "tie_disagreements", "ties", "images"),
        (0, "tie_disagreements", "argmax_disagreements", "images"),
        (0, "images_off", "images"),
        (0, "mean_error_share", "error_share"),
        (0, "max_abs_error"),
        (0, "tolerance"),
        (0, "audited"),
        (0, "commonest_class_share", 1),
        (0, "flipped_share", 1),
    ),
    Deadlines: (("misses", "releases"),),
}
"""Fields and numbers that must be in ascending order, by type; null fields are skipped."""

# allows for rounding: means of equal numbers differ, and an interval of shares ends at 0 only to within about 1e-17
_SLACK = 1e-9

FLAGS = frozenset(
    (
        *("busy_machine", "cpu_quota_throttled", "foreign_gpu_process", "low_clock", "major_faults", "steal"),
        *("clock_below_range", "clock_not_set", "correlated_blocks", "probes_moved", "throttled", "two_levels"),
        *(
            "device_memory_of_all",
            "faster_than_floor",
            "files_changed",
            "one_in_flight",
            "other_threads",
            "output_changed",
            "shared_cpus",
        ),
        *("reference_fp32", "repeated_input_faster", "repeated_input_untested", "rss_peak_since_start"),
        *("provider_fallback", "warm_up_not_steady", "usage_error", "weak_typing"),
        *("mqtt", "profiled", "service", "simulated"),
    )
)
"""The flags of a record; a later minor version may add some."""


def contradiction(record: Record) -> str | None:
    """Return which parts of a record contradict each other, or None."""
    if record.case_id != record.case.case_id:
        return f"case_id {record.case_id[:80]} does not match its case, {record.case.case_id}"
    if unix_s(record.t_wall) is None:
        return f"t_wall {record.t_wall[:40]!r} is not an RFC 3339 time"
    if record.schema == SCHEMA and (unknown := sorted(set(record.flags) - FLAGS)):
        return f"{unknown[0][:40]!r} is not a known flag"
    if record.check and record.check.passed and record.check.void:
        return "check.passed and check.void are both true"
    if record.status == "ok" and any(process.status != "ok" for process in record.processes):
        return "status is ok, but a process is not"
    return next((f"{path}{words}" for path, part in _parts("", record) if (words := _disorder(part))), None)


def _parts(path: str, holder: Struct) -> Iterator[tuple[str, Struct]]:
    """Yield the parts of a record with an entry in `_ASCENDING`, each with the prefix of its fields' paths."""
    for name in holder.__struct_fields__:
        value = getattr(holder, name)
        named = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, part in named or (("", value),):
            if not isinstance(part, Struct):  # the items of a list or a dict all have the same type
                break
            where = f"{path}{name}.{key}." if named else f"{path}{name}."
            if type(part) in _ASCENDING:
                yield where, part
            if isinstance(part, ProcessResult | Interference | NeighbourResult):
                yield from _parts(where, part)


def _disorder(part: Struct) -> str | None:
    """Return which field of a part is below one that it must not be below, or None."""
    for names in _ASCENDING[type(part)]:
        known = [(name, getattr(part, name) if isinstance(name, str) else name) for name in names]
        known = [(name, value) for name, value in known if value is not None]
        for (low, below), (high, above) in itertools.pairwise(known):
            if below > above + _SLACK * max(1.0, 1e-3 * abs(above)):
                return f"{_named(high, above)} is below {_named(low, below)}"
    return None


def _named(name: str | int, value: float) -> str:
    return f"{name} {value:g}" if isinstance(name, str) else str(name)


class _Header(Struct):
    schema: str


def json_schema(kind: Any = Record) -> dict[str, Any]:
    """Return the JSON Schema of a Record, as published in docs/record.schema.json, or of another type."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(kind)}
