"""Builds a TensorRT engine from an ONNX file, and runs it on device addresses; for TensorRT 10.3 and newer.

The file defines the precision, and networks are strongly typed: TensorRT computes in the file's types. A plan (a
serialised engine) works with one TensorRT version and one type of GPU; its engine name says how it was built.
"""

from __future__ import annotations

import importlib
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import msgspec
import torch

from benchd.daemon.machine import folders
from benchd.daemon.machine.installed import adding
from benchd.exporters import code
from benchd.exporters.tegra import is_tegra

if TYPE_CHECKING:
    from benchd.exporters.tensorrt_api import (
        Dims,
        IBuilderConfig,
        ICudaEngine,
        IExecutionContext,
        ILogger,
        INetworkDefinition,
        IProfiler,
        IProgressMonitor,
        OnnxParser,
        ParserError,
        TensorRT,
    )

Typing = Literal["strong", "weak"]
Shape = tuple[int, ...]
T = TypeVar("T")

OLDEST = (10, 3)
FLAGS = ("strongly_typed", "no_tf32", "detailed_profiling")  # requested by every build

_OUT_OF_MEMORY = re.compile(r"out ?of ?memory|allocator error|could not be allocated", re.IGNORECASE)
_ADVICE = (
    "close other programs, reduce --workspace, add swap, or build on another board of the same kind and use its "
    "files with --artifacts"
)
_NOT_IN_TIME = (
    "the engine was not built in time; its kernel timings are kept, so measure again, or build it first with "
    "`benchd export --to tensorrt`, which has no limit"
)
_ERRORS_SHOWN = 3


class TensorRtUnavailable(RuntimeError):
    """TensorRT cannot run here; the message says why and what to install."""


class BuildError(Exception):
    """TensorRT cannot build an engine from this file; the message quotes its parser or log."""


class OutOfMemory(BuildError):
    """The build needs more memory than is available; the message says what may help."""


class NoLayerOnDla(BuildError):
    """All layers would fall back to the GPU; the message names the file."""


class OutOfTime(BuildError):
    """The build stopped at its time limit; its timings are kept, and the message says so."""


class EngineError(Exception):
    """An engine rejects a shape, an address or a run; the message quotes its log."""


class ForeignPlan(EngineError):
    """The plan cannot be loaded by this TensorRT on this GPU; rebuilding it helps."""


class BuildRecipe(msgspec.Struct, frozen=True):
    """How a plan was built, as encoded in its name; with weak typing TensorRT chooses the types itself.

    `dla_share` is the share of layers that run on the DLA (None without a DLA); the others fell back to the GPU.
    """

    typing: Typing
    workspace_bytes: int
    dla_share: float | None = None


class EngineBuild(NamedTuple):
    """A finished build. `note` says why typing is weak, if it is."""

    recipe: BuildRecipe
    seconds: float
    note: str


def engine_facts(
    onnx_sha256: str,
    version: str,
    gpu_name: str,
    compute_capability: tuple[int, int],
    flags: Sequence[str],
    batch: int,
) -> dict[str, Any]:
    """Return the facts that determine an engine's key in `benchd.exporters.artifacts.ArtifactStore`."""
    return {
        "format": "plan",
        "onnx_sha256": onnx_sha256,
        "tensorrt": version,
        "gpu": gpu_name,
        "compute_capability": ".".join(map(str, compute_capability)),
        "flags": sorted(flags),
        "batch": batch,
        "code_sha256": code.sha256("exporters/tensorrt.py"),
    }


def gpu_name() -> str:
    """Return the current GPU's name and multiprocessor count: all Orins share a name, and power modes disable some."""
    return f"{torch.cuda.get_device_name()} {torch.cuda.get_device_properties('cuda').multi_processor_count} SM"


def default_workspace_bytes(root: Path = Path("/")) -> int | None:
    """Return min(1 GiB, 25 % of available memory) on a Tegra, whose GPU shares the CPU's memory; else None (no limit).

    Raises OSError or ValueError if a Tegra's /proc/meminfo cannot be parsed.
    """
    if not is_tegra(root):
        return None
    available = re.search(r"^MemAvailable:\s*(\d+) kB$", (root / "proc/meminfo").read_text(), re.MULTILINE)
    if available is None:
        raise ValueError(f"{root / 'proc/meminfo'} has no MemAvailable")
    return min(2**30, int(available[1]) * 1024 // 4)


def timing_cache_path(version: str, gpu_name: str) -> Path:
    """Return the path of the kernel timings that are kept between builds, for this TensorRT on this GPU."""
    return folders.cache() / "tensorrt" / (re.sub(r"[^A-Za-z0-9.]+", "_", f"{version}-{gpu_name}") + ".timing")


def load() -> TensorRT:
    """Return the tensorrt module; raise TensorRtUnavailable with what to do.

    Never call TensorRT without a working CUDA device, because its runtime would crash the process.
    """
    if not torch.cuda.is_available():
        raise TensorRtUnavailable("TensorRT needs a CUDA device")
    try:
        trt: TensorRT = importlib.import_module("tensorrt")
    except ImportError as error:
        raise TensorRtUnavailable(
            f"TensorRT's Python package cannot be imported ({error}): {adding('gpu')}, or on a Jetson sudo "
            "apt install python3-libnvinfer and an environment that sees the system's packages"
        ) from error
    require_version(trt.__version__)
    return trt


def require_version(version: str) -> None:
    """Raise TensorRtUnavailable for TensorRT older than 10.3, which has a different API."""
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise TensorRtUnavailable(f"TensorRT {version} is too old; benchd needs {OLDEST[0]}.{OLDEST[1]} or newer")


def build(
    trt: TensorRT,
    onnx: Path,
    plan: Path,
    batch: int,
    *,
    workspace_bytes: int | None,
    timing_cache: Path,
    precision: str,
    dla: int | None = None,
    limit_s: float = math.inf,
) -> EngineBuild:
    """Build the engine of `onnx` for the current GPU, write it to `plan` and kernel timings to `timing_cache`.

    A dynamic batch in the file becomes `batch`.
    If a strongly typed build fails on TensorRT 10, a weakly typed one in `precision` replaces it, and the result says
    so. With `dla`, layers are built for that DLA core, except layers that only the GPU supports. The build stops after
    `limit_s`. Raises BuildError, including OutOfMemory, OutOfTime and NoLayerOnDla, and TensorRtUnavailable if TensorRT
    does not start or has no such core.
    """
    start = time.monotonic()
    note = ""

    def attempt(typing: Typing) -> BuildRecipe:
        builder = _Build(trt, onnx, batch, workspace_bytes, timing_cache, dla, start + limit_s)
        return builder.write(plan, typing, precision)

    try:
        recipe = attempt("strong")
    except BuildError as error:
        if isinstance(error, OutOfMemory | OutOfTime) or not hasattr(trt.BuilderFlag, "FP16"):
            raise
        note = f"weakly typed, because a strongly typed build fails: {error}"
        recipe = attempt("weak")
    return EngineBuild(recipe, time.monotonic() - start, note)


class _Build:
    """One attempt; keeps alive the TensorRT objects that depend on each other."""

    def __init__(
        self,
        trt: TensorRT,
        onnx: Path,
        batch: int,
        workspace_bytes: int | None,
        timing_cache: Path,
        dla: int | None,
        until_s: float,
    ) -> None:
        self._trt, self._onnx, self._batch = trt, onnx, batch
        self._workspace_bytes, self._timing_cache, self._dla = workspace_bytes, timing_cache, dla
        self._errors: list[str] = []
        self._logger = _logger(trt, self._errors)
        self._builder = _started(lambda: trt.Builder(self._logger), self._errors)
        self._late: list[str] = []
        self._monitor = _monitor(trt, until_s, self._late)
        if dla is not None and dla >= (cores := self._builder.num_DLA_cores):
            raise TensorRtUnavailable(
                f"DLA core {dla} does not exist: TensorRT {trt.__version__} finds {cores} on this machine"
            )

    def write(self, plan: Path, typing: Typing, precision: str) -> BuildRecipe:
        strong = 1 << int(self._trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        network = self._builder.create_network(strong if typing == "strong" else 0)
        parser = self._trt.OnnxParser(network, self._logger)  # owns the weights until the plan is built
        self._parse(parser)
        config = self._config(network)
        if typing == "weak" and precision != "fp32":
            config.set_flag(getattr(self._trt.BuilderFlag, precision.upper()))
        workspace_bytes = config.get_memory_pool_limit(self._trt.MemoryPoolType.WORKSPACE)
        recipe = BuildRecipe(typing, workspace_bytes, self._dla_share(network, config))
        network.name = msgspec.json.encode(recipe).decode()
        plan.write_bytes(self._serialized(network, config))
        return recipe

    def _parse(self, parser: OnnxParser) -> None:
        if not parser.parse_from_file(str(self._onnx)):
            errors = [parser_error(parser.get_error(i)) for i in range(parser.num_errors)] or self._errors
            raise BuildError(f"TensorRT cannot read {self._onnx.name}: {'; '.join(errors) or 'no reason given'}")

    def _config(self, network: INetworkDefinition) -> IBuilderConfig:
        config = self._builder.create_builder_config()
        config.profiling_verbosity = self._trt.ProfilingVerbosity.DETAILED
        config.progress_monitor = self._monitor
        config.clear_flag(self._trt.BuilderFlag.TF32)  # on by default, but less precise than fp32
        if self._workspace_bytes is not None:
            config.set_memory_pool_limit(self._trt.MemoryPoolType.WORKSPACE, self._workspace_bytes)
        if self._dla is not None:
            config.default_device_type = self._trt.DeviceType.DLA
            config.DLA_core = self._dla
            config.set_flag(self._trt.BuilderFlag.GPU_FALLBACK)
        self._set_timing_cache(config)
        self._set_profile(network, config)
        return config

    def _dla_share(self, network: INetworkDefinition, config: IBuilderConfig) -> float | None:
        """Return the share of layers that can run on the DLA; raise NoLayerOnDla for none: only the GPU would run."""
        if self._dla is None:
            return None
        able = [config.can_run_on_DLA(network.get_layer(i)) for i in range(network.num_layers)]
        if not any(able):
            raise NoLayerOnDla(f"no layer of {self._onnx.name} can run on the DLA: all would fall back to the GPU")
        return sum(able) / len(able)

    def _set_timing_cache(self, config: IBuilderConfig) -> None:
        """Start from the kept timings, or from none if they are damaged or from another GPU, which only costs time."""
        stored = self._timing_cache.read_bytes() if self._timing_cache.exists() else b""
        for content in dict.fromkeys((stored, b"")):
            timing = config.create_timing_cache(content)
            if timing is not None and config.set_timing_cache(timing, ignore_mismatch=False):
                return
        raise _failure(self._errors)

    def _set_profile(self, network: INetworkDefinition, config: IBuilderConfig) -> None:
        shapes = dict(_dynamic_inputs(network))
        if not shapes:
            return
        profile = self._builder.create_optimization_profile()
        for name, shape in shapes.items():
            only = self._trt.Dims(_with_batch(shape, self._batch))
            profile.set_shape(name, only, only, only)
        config.add_optimization_profile(profile)

    def _serialized(self, network: INetworkDefinition, config: IBuilderConfig) -> memoryview:
        try:
            plan = self._builder.build_serialized_network(network, config)
        except MemoryError as error:
            raise _out_of_memory(str(error)) from error
        times = memoryview(config.get_timing_cache().serialize())
        folders.replace(self._timing_cache, [times])  # even a failed build has timed kernels
        if plan is None and self._late:
            raise OutOfTime(_NOT_IN_TIME)
        if plan is None:
            raise _failure(self._errors)
        return memoryview(plan)


def parser_error(error: ParserError) -> str:
    """Return one line with the node's name, its operator, the problem and its location in the parser's source."""
    node = error.node_name() or f"number {error.node()}"
    return f"node {node} ({error.node_operator()}): {error.desc()} [{Path(error.file()).name}:{error.line()}]"


def _dynamic_inputs(network: INetworkDefinition) -> Iterator[tuple[str, Shape]]:
    """Yield name and shape of each input with a dynamic dimension; raise BuildError if that cannot be the batch."""
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        shape = _shape(tensor.shape)
        if shape.count(-1) > 1:
            raise BuildError(
                f"input {tensor.name} {shape} has several dynamic dimensions; only the batch may be dynamic"
            )
        if -1 in shape:
            yield tensor.name, shape


def _shape(dims: Dims) -> Shape:
    return tuple(dims[i] for i in range(len(dims)))


def _with_batch(shape: Sequence[int], batch: int) -> Shape:
    return tuple(batch if size < 0 else size for size in shape)


def _failure(errors: Sequence[str]) -> BuildError:
    """Return the error of a build without a plan: TensorRT gives the reason only in its log."""
    for line in errors:
        if _OUT_OF_MEMORY.search(line):
            return _out_of_memory(line)
    return BuildError(f"TensorRT could not build the engine: {_last(errors)}")


def _out_of_memory(message: str) -> OutOfMemory:
    return OutOfMemory(f"out of memory while building; {_ADVICE} (TensorRT: {message})")


def _last(errors: Sequence[str]) -> str:
    return "; ".join(errors[-_ERRORS_SHOWN:]) or "its log does not name an error"


# pybind11 requires subclasses of TensorRT's classes, which exist only after its import


def _logger(trt: TensorRT, errors: list[str]) -> ILogger:
    """Return a logger that appends errors to the list and drops all other messages."""
    severe = (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR)

    def log(_: object, severity: object, message: str) -> None:
        if severity in severe:
            errors.append(message.strip())

    return type("ErrorLog", (trt.ILogger,), {"log": log})()


def _layer_times(trt: TensorRT, rows: list[tuple[str, float]]) -> IProfiler:
    """Return a profiler that appends each layer's name and milliseconds to the list."""

    def report_layer_time(_: object, layer_name: str, ms: float) -> None:
        rows.append((layer_name, float(ms)))

    return type("LayerTimes", (trt.IProfiler,), {"report_layer_time": report_layer_time})()


def _monitor(trt: TensorRT, until_s: float, late: list[str]) -> IProgressMonitor:
    """Return a monitor that stops a build at `until_s` on the monotonic clock, and then appends the phase to `late`."""

    def step_complete(_: object, phase_name: str, _step: int) -> bool:
        if time.monotonic() >= until_s:
            late.append(phase_name)
        return not late

    def ignore(*_: object) -> None: ...

    methods = {"step_complete": step_complete, "phase_start": ignore, "phase_finish": ignore}
    return type("Deadline", (trt.IProgressMonitor,), methods)()


def _started(create: Callable[[], T], errors: Sequence[str]) -> T:
    """Return the result of `create`; pybind11 raises TypeError if TensorRT returns nothing, as with an old driver."""
    try:
        return create()
    except TypeError as error:
        raise TensorRtUnavailable(f"TensorRT cannot start: {_last(errors)}") from error


class Engine:
    """A plan loaded on the current CUDA device and ready to run; raises ForeignPlan or TensorRtUnavailable.

    `inputs` and `outputs` are its tensor names in the file's order, and `errors` the errors in its log. `dla` is the
    core of a plan that was built for one.
    """

    def __init__(self, trt: TensorRT, plan: Path, dla: int | None = None) -> None:
        self.trt = trt
        self.errors: list[str] = []
        self._logger = _logger(trt, self.errors)
        self._runtime = _started(lambda: trt.Runtime(self._logger), self.errors)
        if dla is not None:
            self._runtime.DLA_core = dla
        self._engine = self._deserialized(plan)
        self.recipe = _recipe(plan, self._engine)
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        self.inputs = [name for name in names if self._engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        self.outputs = [name for name in names if name not in self.inputs]

    def _deserialized(self, plan: Path) -> ICudaEngine:
        engine = self._runtime.deserialize_cuda_engine(plan.read_bytes())
        if engine is None:
            raise ForeignPlan(
                f"{plan.name} was built by a TensorRT other than {self.trt.__version__} or for a different GPU: "
                f"{_last(self.errors)}"
            )
        return engine

    @property
    def device_memory_bytes(self) -> int:
        """Return the memory that one context uses for activations."""
        return self._engine.device_memory_size_v2

    @property
    def aux_streams(self) -> int:
        """Return the number of streams, in addition to the caller's, that run the engine's layers."""
        return self._engine.num_aux_streams

    def dtype(self, name: str) -> str:
        """Return TensorRT's name of the tensor's type, such as FLOAT or HALF."""
        return self._engine.get_tensor_dtype(name).name

    def shapes(self, batch: int) -> dict[str, Shape]:
        """Return the input shapes; `batch` is used where the file leaves it dynamic."""
        return {name: _with_batch(_shape(self._engine.get_tensor_shape(name)), batch) for name in self.inputs}

    def context(self) -> Context:
        """Return a context with its own memory, which runs one call at a time, independently of other contexts."""
        context = self._engine.create_execution_context()
        if context is None:
            raise EngineError(f"TensorRT cannot create a context: {_last(self.errors)}")
        return Context(self, context)


class Context:
    """An engine's state for one run: set shapes, then addresses, then run. Made by `Engine.context`.

    Each method raises EngineError if TensorRT rejects the call.
    """

    def __init__(self, engine: Engine, context: IExecutionContext) -> None:
        self._context = context  # first, to be destroyed first: the engine and the profiler outlive it
        self._engine = engine
        self._profiler: IProfiler | None = None

    def set_shapes(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Set the shapes of all inputs by name and return those of all outputs."""
        for name, shape in shapes.items():
            self._require(self._context.set_input_shape(name, self._engine.trt.Dims(shape)), f"{name} {shape}")
        missing = self._context.infer_shapes()
        self._require(not missing, f"shapes without {', '.join(missing)}")
        return {name: _shape(self._context.get_tensor_shape(name)) for name in self._engine.outputs}

    def bind(self, addresses: Mapping[str, int]) -> None:
        """Set the device addresses of all inputs and outputs, whose memory must outlive this context."""
        for name, address in addresses.items():
            self._require(self._context.set_tensor_address(name, address), f"the address of {name}")

    def run(self, stream: int) -> None:
        """Enqueue one run on the CUDA stream with this handle, not the default one, on which TensorRT synchronises."""
        self._require(self._context.execute_async_v3(stream), "the run")

    def layer_times(self, stream: int, runs: int) -> list[list[tuple[str, float]]]:
        """Return each layer's name and milliseconds in each of `runs`, after one to warm up.

        From here on each run waits for its end, so the context must not be used for anything else.
        """
        rows: list[tuple[str, float]] = []
        self._profiler = self._context.profiler = _layer_times(self._engine.trt, rows)
        times: list[list[tuple[str, float]]] = []
        for _ in range(1 + runs):
            rows.clear()
            self.run(stream)
            times.append(list(rows))
        return times[1:]

    def _require(self, accepted: bool, action: str) -> None:
        if not accepted:
            raise EngineError(f"TensorRT refuses {action}: {_last(self._engine.errors)}")


def _recipe(plan: Path, engine: ICudaEngine) -> BuildRecipe:
    try:
        return msgspec.json.decode(engine.name, type=BuildRecipe)
    except msgspec.MsgspecError as error:
        raise ForeignPlan(f"{plan.name} does not say how it was built: {error}") from error
