"""The vocabulary of benchd and its wire format: a Case is what to measure, a Record what came of it.

Everything here is frozen. Units stand in the field names. JSON is made and read by msgspec; `docs/record.schema.json`
is generated from these types. Readers ignore fields they do not know, and every field added later has a default, so
that an older record of the same major version stays readable.
"""

import itertools
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal, get_args

import msgspec
from msgspec import Struct

from benchd.daemon.errors import SchemaError, UsageError, unknown

SCHEMA = "benchd.record/1"
COMMONEST_CLASS = 0.9
"""The share of images with one class beyond which the argmax says nothing: a constant answer would agree as well."""

PROFILED = "profiled"
"""The flag of a Record that a profile made: it is shown, and never ranked or compared."""

Backend = Literal["eager", "compile", "cudagraph", "onnxruntime", "tensorrt"]
Precision = Literal["fp32", "fp16", "bf16", "amp"]
Kernels = Literal["torch", "custom"]
Direction = Literal["inference", "training"]
Scenario = Literal["single_stream", "offline", "periodic", "wake_up", "cold_start", "sustained"]
ExponentialsBy = Literal["triton", "c", "torch"]
Provider = Literal["cpu", "cuda", "tensorrt"]
Bound = Literal["matrix", "bytes", "exponentials"]
CheckVerdict = Literal["failed", "void", "passed"]
Status = Literal["ok", "failed", "timeout", "unsupported", "aborted"]
OptionValue = int | float | bool | str
Dtype = Literal["float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"]

VERDICTS: tuple[CheckVerdict, ...] = ("failed", "void", "passed")
"""The verdicts of a check, the worst first."""

BACKENDS: tuple[Backend, ...] = ("eager", "compile", "cudagraph", "onnxruntime", "tensorrt")
FILE_BACKENDS: tuple[Backend, ...] = ("onnxruntime", "tensorrt")
KERNELS: tuple[Kernels, ...] = ("torch", "custom")
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "bf16", "amp")
DIRECTIONS: tuple[Direction, ...] = ("inference", "training")
PROVIDERS: tuple[Provider, ...] = ("cpu", "cuda", "tensorrt")
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
SCENARIOS: tuple[Scenario, ...] = ("single_stream", "offline", "periodic", "wake_up", "cold_start", "sustained")


class Variant(Struct, frozen=True, order=True):
    """One way to deploy a model: the runtime, the number format and whose kernels."""

    backend: Backend = "eager"
    precision: Precision = "fp32"
    kernels: Kernels = "torch"

    def __post_init__(self) -> None:
        if self.backend in ("onnxruntime", "tensorrt"):
            if self.kernels == "custom":
                raise UsageError(f"{self.name}: {self.backend} runs standard ops only, so no custom kernels reach it")
            if self.precision == "amp":
                raise UsageError(
                    f"{self.name}: amp is torch.autocast and {self.backend} does not run PyTorch; use fp16"
                )

    @property
    def name(self) -> str:
        """Return `[custom-][backend][-precision]`, `eager` and `fp32` left out; all three at their default: eager."""
        return _variant_name(self.kernels, self.backend, self.precision)

    @property
    def label(self) -> str:
        """Return the name as tables print it: `eager-fp16` for `fp16`."""
        return f"eager-{self.precision}" if self.name == self.precision else self.name

    @classmethod
    def parse(cls, name: str) -> "Variant":
        """Return the variant of this name; raise UsageError that names the closest one."""
        variants = {variant.name: variant for variant in all_variants()}
        variants |= {variant.label: variant for variant in variants.values()}
        if name not in variants:
            _explain_invalid(name)
            raise unknown("variant", name, [variant.name for variant in all_variants()])
        return variants[name]


def _variant_name(kernels: Kernels, backend: Backend, precision: Precision) -> str:
    parts = ("" if kernels == "torch" else kernels, backend, precision)
    return "-".join(part for part in parts if part not in ("", "eager", "fp32")) or "eager"


def _combinations() -> Iterator[tuple[Kernels, Backend, Precision]]:
    return itertools.product(KERNELS, BACKENDS, PRECISIONS)


def _explain_invalid(name: str) -> None:
    """Raise the reason of a name whose parts are valid but do not go together."""
    for kernels, backend, precision in _combinations():
        if _variant_name(kernels, backend, precision) == name:
            Variant(backend, precision, kernels)


def all_variants() -> Iterator[Variant]:
    """Yield every valid variant, plain PyTorch first."""
    for kernels, backend, precision in _combinations():
        with suppress(UsageError):
            yield Variant(backend, precision, kernels)


class Case(Struct, frozen=True, kw_only=True):
    """What to measure. `options` holds those that differ from the catalog's defaults, sorted by name.

    `provider` is that of ONNX Runtime, null for the device's own; `threads` the CPU threads, null for all of them.
    """

    model: str
    variant: Variant = Variant()
    batch_size: int = 1
    options: dict[str, OptionValue] = {}
    direction: Direction = "inference"
    scenario: Scenario = "single_stream"
    seed: int = 0
    provider: Provider | None = None
    threads: int | None = None

    @property
    def case_id(self) -> str:
        """Return a stable readable name that is safe as a file name and as an MQTT topic level."""
        parts = [self.model, self.variant.name, f"b{self.batch_size}"]
        parts += [f"{name}={_plain(value)}" for name, value in sorted(self.options.items())]
        parts += [self.direction] if self.direction != "inference" else []
        parts += [self.scenario] if self.scenario != "single_stream" else []
        parts += [f"seed={self.seed}"] if self.seed else []
        parts += [f"provider={self.provider}"] if self.provider else []
        parts += [f"threads={self.threads}"] if self.threads else []
        return ",".join(re.sub(r"[^A-Za-z0-9_.=-]", "_", part) for part in parts)


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
"""NVML's bits for the power cap, hardware slowdown, software and hardware thermal slowdown, and the power brake."""


def throttles(reasons: float) -> bool:
    """Say whether a sample of `gpu_throttle_reasons` holds the clock down: an idle GPU has a reason too."""
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
    """A sensor's readings inside the window, in the unit of the metric's name."""

    minimum: float
    mean: float
    maximum: float
    samples: int
    source: str


class Stages(Struct, frozen=True, kw_only=True):
    """How long each stage of one process took; null where the stage was not reached."""

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
    """The runs before the measured ones. `slope_share` is the drift over the last blocks as a share of the median."""

    runs: int
    seconds: float
    steady: bool
    slope_share: float | None = None


class RawFile(Struct, frozen=True):
    """Where the raw run times lie: little-endian int64 nanoseconds, path relative to the output folder."""

    path: str
    sha256: str
    count: int


class Timing(Struct, frozen=True, kw_only=True):
    """Run times of one quantity over one process, or over all processes of a case."""

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
    runs: int
    outliers_mild: int = 0
    outliers_severe: int = 0
    interval_basis: Literal["within_process", "between_processes"] = "within_process"


class BlockStatistics(Struct, frozen=True, kw_only=True):
    """The blocks on whose medians the interval stands, and why measuring stopped.

    `bounds_ns` are the start of the first and the ends of all, on CLOCK_MONOTONIC.
    """

    count: int
    runs_per_block: int
    medians_ms: list[float]
    bounds_ns: list[int] = []
    lag1: float | None
    doublings: int
    half_width: float | None
    converged: bool
    stop_reason: str


class Deadlines(Struct, frozen=True):
    """Frames at a fixed rate: how many were released, how many missed the next release, and the latest end after it."""

    rate_hz: int
    releases: int
    misses: int
    worst_lateness_ms: float


class TimeSlice(Struct, frozen=True, kw_only=True):
    """A part of a sustained run, in seconds after its start: the median run and the mean of each sensor."""

    start_s: float
    end_s: float
    median_ms: float
    telemetry: dict[str, float] = {}


class Memory(Struct, frozen=True, kw_only=True):
    """Peak memory of one worker process; `device_peak_bytes` is what torch allocated on the accelerator.

    Of a CUDA graph it is what torch reserved there, the graph's own pool included; where ONNX Runtime or TensorRT
    allocated, by how much the accelerator's free memory shrank until the first runs were done.
    """

    rss_peak_bytes: int
    device_peak_bytes: int | None = None


class Check(Struct, frozen=True, kw_only=True):
    """How a variant agrees with the same model in eager float64 on the same inputs; `note` says in words why not.

    Shares are of the largest exact answer; docs/measuring.md has the rules. `void` says that the number format cannot
    carry these weights, so that no variant of it can be told from a wrong one: that neither fails a run nor ships.
    `images_off` passed `tolerance`, and `images_off_allowed` may. `rounding_share` is what rounding alone does,
    `spread_share` how far the answers to two images lie apart. `ties` are images that float64 decides by less than two
    tolerances; beyond a `commonest_class_share` of 0.9 the argmax says nothing. `reference` is float32, on the CPU, for
    a user's own model that float64 cannot run, and then `note` says why. `audited` counts answers of the timed section
    that were compared too.
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
    note: str = ""

    @property
    def verdict(self) -> CheckVerdict:
        """Return what it came to; only `failed` found the variant wrong."""
        return "passed" if self.passed else "void" if self.void else "failed"

    @property
    def typical_error_share(self) -> float:
        """Return the error of the worst image, or the mean one of a network in which a spike may carry it anywhere."""
        by_mean = self.images_off > 0 and self.images_off_allowed > 0 and self.mean_error_share is not None
        return self.mean_error_share if by_mean and self.mean_error_share is not None else self.error_share

    @property
    def decided(self) -> int:
        """Return how many images float64 does not decide by a tie."""
        return self.images - self.ties

    @property
    def agreeing(self) -> int | None:
        """Return how many of `decided` get float64's class; None if that says nothing about the variant."""
        if self.argmax_disagreements is None or (self.commonest_class_share or 0.0) > COMMONEST_CLASS:
            return None
        return self.decided - (self.argmax_disagreements - self.tie_disagreements)


class Accuracy(Struct, frozen=True, kw_only=True):
    """How often a variant names the right class, and plain eager fp32 on the same images; shares are from 0 to 1.

    `low` and `high` are the 95 % interval of `top1` (Wilson). `gained` counts the images that only the variant gets
    right and `lost` those that only fp32 does. `drop` is fp32's share less the variant's, with the 95 % interval of a
    paired difference (Tango); plain fp32 itself has none. `data` says which images these are, and `data_sha256` covers
    all that the model read with its labels.
    """

    images: int
    right: int
    top1: float
    low: float
    high: float
    reference_right: int
    reference_top1: float
    gained: int
    lost: int
    drop: float
    drop_low: float
    drop_high: float
    data: str
    data_sha256: str


class InputSpec(Struct, frozen=True, omit_defaults=True):
    """One input of a user's own model, without the batch that leads it; its text is what `--input` takes.

    Without a `name` it is given by its place. A `dtype` of None is float32 for a module, and a file's own for a file.
    """

    name: str = ""
    dtype: Dtype | None = None
    shape: list[int] = []

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.shape))
        is_plain = self.dtype in (None, "float32") and self.shape
        return f"{self.name}{'=' if self.name else ''}{'' if is_plain else f'{self.dtype or DTYPES[0]}:'}{sizes}"


OF_MODULE = "of the module"
"""The `weights` of a module that made its own."""


class ModelFacts(Struct, frozen=True, kw_only=True):
    """The model as it was built: all options, the shape of one input, which weights and which code.

    `inputs` describes those of a user's own model if it reads more than one array of float32. `code_sha256` is over the
    source of benchd's models, kernels and exporters; for a user's module over its file and what it imports that is not
    installed; for a user's ONNX file over the file. Null in older records.
    """

    options: dict[str, OptionValue]
    input_shape: list[int]
    inputs: list[InputSpec] = []
    parameters: int
    weights: str
    weights_sha256: str
    code_sha256: str | None = None
    data: str


class ArtifactFacts(Struct, frozen=True, kw_only=True):
    """A file that a variant runs: what it is, where and with which versions it was made, and how long it took here.

    `reused` says that it was there before this process, so that `seconds` is the time to find and verify it. `form` is
    that of the scan, null for a model that has none.
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


class RuntimeFacts(Struct, frozen=True, kw_only=True):
    """What ran a file, and how: null where it does not apply.

    `node_shares` is the share of nodes that each provider of ONNX Runtime ran; `typing` "weak" leaves the number format
    of a layer to TensorRT; `build_s` is null where the engine was there before.
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
    notes: list[str] = []


class Occupancy(Struct, frozen=True, kw_only=True):
    """How much of a GPU's warps a case fills, 0 to 1, by three different measures.

    `theoretical` is what kernels could fill by their registers, shared memory and blocks; `estimated` the same as far
    as their grids were large enough, from a trace; both are means over kernel time. `measured` is what the hardware
    counted over a window of runs, the gaps between launches included: it is lower where the GPU waits. `limits` is the
    share of kernel time by what held it back. `utilization` is the share of time with a kernel.
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
    """The energy over the same window and scope by the second-best source, with its error bar."""

    energy_j: float
    energy_err_j: float
    source: str
    metric: str


class Energy(Struct, frozen=True, kw_only=True):
    """Energy over the window with its error bar (95 %, k = 2), and what exactly was measured.

    `metric` says whether `source` counted or was polled. `updates` counts its distinct values in the window and
    `gap_share` how much of the window it left out. Net is without `idle_w`, the mean of idle before and after, which
    differ by `idle_drift_w`. `flags` name what a reader has to know, such as `sources_disagree`.
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
    """What a set of block medians says: their mean and, from two blocks on, its 95 % interval."""

    median_ms: float
    low_ms: float | None
    high_ms: float | None
    blocks: int


class Interference(Struct, frozen=True, kw_only=True):
    """What disturbed which block, and the result without and with the disturbed ones.

    `reasons` holds those of each block, none where it was undisturbed. Where all were disturbed `all_flagged` says so
    and `clean` is `as_experienced`.
    """

    reasons: list[list[str]]
    clean: BlocksResult
    as_experienced: BlocksResult
    all_flagged: bool


class SamplerReport(Struct, frozen=True, kw_only=True):
    """What the sampler process cost and how well it kept time during the window."""

    sources: list[str]
    cpu_s: float
    period_s: float
    period_p99_error: float | None
    samples: int
    failures: dict[str, str] = {}


class Probes(Struct, frozen=True, kw_only=True):
    """What the device reached right after a timed section, in its process, at its clocks and with its threads.

    A copy counts what it reads and what it writes. `matrix_dtype` is the type of the products, the case's own or
    float32 where that is faster; `exponentials_by` says whose exponential was the fastest at hand.
    """

    copy_bytes_per_s: float
    matrix_flops_per_s: float
    matrix_dtype: str
    exponentials_per_s: float
    exponentials_by: ExponentialsBy


class Floor(Struct, frozen=True, kw_only=True):
    """The least time that one run of the case could take at the probed rates, and what it has to do in it.

    A device copies, multiplies and takes exponentials at the same time, so that the longest of the three times stands
    as `floor_ms` and `bound_by` names it. Copies between host and device are not part of it.
    """

    floor_ms: float
    bound_by: Bound
    matrix_ms: float
    bytes_ms: float
    exponentials_ms: float
    matrix_flops: int
    elementwise_flops: int
    bytes: int
    parameters_bytes: int
    exponentials: int


class ProcessResult(Struct, kw_only=True):
    """One worker process of a case, from spawn to exit; the worker fills it while it goes on."""

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
    timeline: list[TimeSlice] = []


class Environment(Struct, frozen=True, kw_only=True):
    """The machine and the software under a case: what two records must share to be comparable.

    `fingerprint` hashes all of it but what may differ between two runs on an unchanged machine, such as the thermal
    state before the first case: `temperature_c` by zone, and `cooling` with the level of each device that cools now.
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


class Record(Struct, frozen=True, kw_only=True):
    """All that is known of one measured case: one JSON line, one MQTT payload, one row of every table.

    A value that was not measured is null and `missing` gives the reason by the field's name. `t_wall` is UTC in
    RFC 3339 and only a label; order and durations come from `t_mono_ns` (CLOCK_MONOTONIC) within one `boot_id`.
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
    model: ModelFacts | None = None
    artifacts: list[ArtifactFacts] = []
    runtime: RuntimeFacts | None = None
    kernels_ran: str | None = None
    timing: Timing | None = None
    parts: dict[str, Timing] = {}
    throughput_per_s: float | None = None
    throughput_basis: Literal["measured", "batch_over_median"] | None = None
    deadlines: list[Deadlines] = []
    energy: Energy | None = None
    telemetry: dict[str, Summary] = {}
    clocks: dict[str, Summary] = {}
    temperature: dict[str, Summary] = {}
    memory: Memory | None = None
    occupancy: Occupancy | None = None
    check: Check | None = None
    accuracy: Accuracy | None = None
    x_of_floor: float | None = None
    floor: Floor | None = None
    probes: Probes | None = None
    flags: list[str] = []
    missing: dict[str, str] = {}
    processes: list[ProcessResult] = []

    def __post_init__(self) -> None:
        path = _non_finite(msgspec.to_builtins(self), "record")
        if path:
            raise ValueError(f"{path} is not a finite number; a value that was not measured is null with a reason")

    @property
    def key(self) -> str:
        """Return the delivery key: the same record delivered twice is stored once."""
        return f"{self.device_id}:{self.run_id}"


def _non_finite(value: Any, path: str) -> str | None:
    """Return the path of the first number that is NaN or infinite."""
    if isinstance(value, float):
        return None if math.isfinite(value) else path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return next((found for key, item in items if (found := _non_finite(item, f"{path}.{key}"))), None)


def encode(record: Record) -> bytes:
    """Return the record as one line of JSON without the line's end."""
    return msgspec.json.encode(record)


def decode(data: bytes) -> Record:
    """Return the record in `data`; raise SchemaError for another major version or for anything else."""
    try:
        schema = msgspec.json.decode(data, type=_Header).schema
        if schema != SCHEMA and not schema.startswith(f"{SCHEMA}."):
            raise SchemaError(f"record of schema {schema!r}; this version reads {SCHEMA!r}")
        return msgspec.json.decode(data, type=Record)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, UsageError) as error:
        raise SchemaError(f"not a benchd record: {error}") from error


class _Header(Struct):
    schema: str


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a Record, as published in docs/record.schema.json."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(Record)}
