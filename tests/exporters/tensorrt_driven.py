"""What `test_tensorrt_bindings.py` runs in a process of its own for each version of the real bindings.

Every name of `exporters/tensorrt_api.pyi` is held against them, and `build` and `Engine` go through them over
libraries that answer as a test says. Here the memory of the device is the host's, and an engine doubles its input.
"""

import ctypes
import gc
import inspect
import re
import sys
import types
import typing
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tensorrt_bindings as trt
import torch
from manifests_made import manifest
from tensorrt_stub import BUILDER, RUNTIME, Stub, shape_at, text_at

from benchd.daemon.measuring.protocol import Golden, Tensor
from benchd.daemon.records import Case, Variant
from benchd.daemon.shipping import load_text
from benchd.daemon.worker.backends import tensorrt as backend
from benchd.daemon.worker.source import Source
from benchd.exporters import artifacts, tensorrt
from benchd.exporters.tensorrt import (
    BuildError,
    Engine,
    EngineError,
    ForeignPlan,
    OutOfMemory,
    TensorRtUnavailable,
)

MAJOR = int(trt.__version__.split(".")[0])
NETWORK, CONFIG, CACHE, TIMES, PLAN, ERROR, PROFILE, INPUT, ENGINE, CONTEXT, LAYER = range(3, 14)
NESTED = {"Severity": "ILogger.Severity"}
CPP_NAMES = {"IParserError": "ParserError"}
INT8 = 2
ONNX = Path("model.onnx")
BATCH = 4


# --- every name and signature -----------------------------------------------------------------------------------------


def drift(types_of_ours: types.ModuleType) -> list[str]:
    """Return what the real bindings lack or have otherwise, of the protocols in a module."""
    ours = {name: cls for name, cls in vars(types_of_ours).items() if getattr(cls, "_is_protocol", False)}
    ours = {name: cls for name, cls in ours.items() if cls.__module__ == types_of_ours.__name__ and name != "Logger"}
    return [difference for name, cls in ours.items() for difference in of_class(name, cls)]


def of_class(name: str, ours: type) -> list[str]:
    real: typing.Any = trt
    for part in [] if name == "TensorRT" else NESTED.get(name, name).split("."):
        if not hasattr(real, part):
            return [f"{name} is not there"]
        real = getattr(real, part)
    members = [*ours.__annotations__, *(n for n in vars(ours) if inspect.isfunction(vars(ours)[n]) and n[0] != "_")]
    differences = []
    for member in members:
        if hasattr(real, member):
            differences += of_member(f"{name}.{member}", getattr(real, member), ours, member)
        else:
            differences.append(f"{name}.{member} is not there")
    return differences


def of_member(where: str, real: object, ours: type, member: str) -> list[str]:
    function = vars(ours).get(member)
    if inspect.isfunction(function):
        return of_function(where, real, inspect.signature(function))
    wanted, given = ours.__annotations__[member], getattr(getattr(real, "fget", None), "__doc__", None)
    if wanted in {int, str} and given and result_name(given.rpartition(" -> ")[2]) != wanted.__name__:
        return [f"{where} is {given}"]
    return []


def of_function(where: str, real: object, ours: inspect.Signature) -> list[str]:
    constructs = inspect.isclass(real)
    text = (real.__init__ if constructs else real).__doc__ or ""
    forms = re.findall(r"^(?:\d+\. )?\w+\(self: [\w.]+(?:, )?(.*)\) -> (.+)$", text, re.MULTILINE)
    wanted = list(ours.parameters)[1:]
    for parameters, result in forms:
        names = re.findall(r"(?:^|, )(\w+): ", parameters)
        required = len(names) - len(re.findall(r" = ", parameters))
        fits = names[: len(wanted)] == wanted and required <= len(wanted)
        if fits and (constructs or result_name(result) == our_result(ours.return_annotation)):
            return []
    return [f"{where}{ours} is {forms or text}"]


def result_name(text: str) -> str:
    """Return a result's type without the modules and namespaces it lies in."""
    name = re.sub(r"\w+(?:\.|::)", "", text.strip()).replace("List", "list")
    return CPP_NAMES.get(name, name)


def our_result(annotation: typing.Any) -> str:
    """Return our type by its name; what may be None is so in C++ without a word."""
    members = [part for part in typing.get_args(annotation) if part is not type(None)]
    if isinstance(annotation, types.UnionType):
        (annotation,) = members
    if isinstance(annotation, types.GenericAlias):
        return str(annotation)
    return "object" if annotation is object else getattr(annotation, "__name__", str(annotation))


def test_every_name_and_signature_we_use_is_there():
    stub = Path(tensorrt.__file__).with_name("tensorrt_api.pyi")
    ours = types.ModuleType("ours")
    exec(stub.read_text(), vars(ours))  # noqa: S102 - a stub has no code but its classes
    assert drift(ours) == []


def test_this_version_is_new_enough():
    tensorrt.require_version(trt.__version__)


# --- through the bindings ---------------------------------------------------------------------------------------------


def test_where_cuda_fails_the_builder_and_the_runtime_say_so(tmp_path):
    with pytest.raises(TensorRtUnavailable, match="TensorRT cannot start"):
        build(tmp_path)
    with pytest.raises(TensorRtUnavailable, match="TensorRT cannot start"):
        Engine(trt, tmp_path / "plan")


def refused(call, *arguments):
    with suppress(RuntimeError):
        call(*arguments)


class Libraries:
    """Libraries that parse, build and run. A test changes what they answer, and reads what they were told."""

    def __init__(self) -> None:
        self.stub = Stub(MAJOR)
        self.parses = self.builds_strongly_typed = self.context_takes = True
        self.plan: bytes | None = b"a plan"
        self.name = ""
        self.dynamic = (-1, 3)
        self.flags: list[int] = []
        self.set_flags: list[int] = []
        self.cleared_flags: list[int] = []
        self.kept_times: list[bytes] = []
        self.profile: list[tuple[int, ...]] = []
        self.errors_of_build: list[str] = []
        self.dla_cores = 0
        self.on_dla: list[bool] = []
        self.put: list[tuple[str, int]] = []
        self.monitor = 0
        self.ended = False
        self.workspace_bytes = 2**33
        self.shape: tuple[int, ...] = ()
        self.addresses: dict[str, int] = {}
        self.profiler = 0
        self.streams: list[int] = []
        self._logger = trt.Logger()
        self._teach_builder()
        self._teach_parser()
        self._teach_config()
        self._teach_engine()

    def _object(self, kind, call):
        """Have what `call` calls give an object of this kind; return that object."""
        self.stub.teach(call, self.stub.object_of(kind))
        return call()

    def _teach_builder(self):
        self._builder = trt.Builder(self._logger)
        self._network = self._object(NETWORK, lambda: self._builder.create_network(0))
        self._config = self._object(CONFIG, self._builder.create_builder_config)
        self.stub.teach(lambda: self._builder.create_network(0), self._create_network)
        plan = self._object(PLAN, lambda: self._builder.build_serialized_network(self._network, self._config))
        self._teach_memory(plan, b"a plan")
        self.stub.teach(lambda: self._builder.build_serialized_network(self._network, self._config), self._build)
        tensor = self._object(INPUT, lambda: self._network.get_input(0))
        self.stub.teach(lambda: self._network.num_inputs, 1)
        self.stub.teach(lambda: tensor.name, self.stub.text("images"))
        self.stub.teach(lambda: tensor.shape, lambda *_: self.stub.dims(self.dynamic))
        self.stub.teach(lambda: setattr(self._network, "name", ""), self._set_name)
        self.stub.teach(lambda: self._builder.num_DLA_cores, lambda *_: self.dla_cores)
        self.stub.teach(lambda: self._network.num_layers, lambda *_: len(self.on_dla))
        self._layer = self._object(LAYER, lambda: self._network.get_layer(0))
        profile = self._object(PROFILE, self._builder.create_optimization_profile)
        dims = trt.Dims([1])
        self.stub.teach(lambda: refused(profile.set_shape, "images", dims, dims, dims), self._set_bound)

    def _teach_memory(self, memory, content):
        self.stub.teach(lambda: memory.nbytes, len(content))
        self.stub.teach(lambda: memory.dtype, INT8)
        self.stub.teach(lambda: memoryview(memory), self.stub.text(content.decode()))

    def _create_network(self, flags, *_):
        self.flags.append(flags)
        return self.stub.object_of(NETWORK)

    def _build(self, *_):
        for error in self.errors_of_build:
            self.stub.log_error(BUILDER, error)
        if not self.stub.goes_on(self.monitor, "Building", 1):
            return 0
        if self.flags[-1] and not self.builds_strongly_typed:
            self.stub.log_error(BUILDER, "strongly typed networks lack this")
            return 0
        return 0 if self.plan is None else self.stub.object_of(PLAN)

    def _set_name(self, name, *_):
        self.name = text_at(name)
        return 0

    def _set_bound(self, _, select, dims):
        self.profile.append(shape_at(dims))
        return 1

    def _teach_parser(self):
        parser = trt.OnnxParser(self._network, self._logger)
        self.stub.teach(lambda: parser.parse_from_file(""), lambda *_: int(self.parses))
        self.stub.teach(lambda: parser.num_errors, 1)
        error = self._object(ERROR, lambda: parser.get_error(0))
        texts = {"desc": "no importer", "node_name": "/scan/Pow_3", "node_operator": "Pow", "file": "/src/Parser.cpp"}
        for method, text in texts.items():
            self.stub.teach(getattr(error, method), self.stub.text(text))
        self.stub.teach(error.node, 12)
        self.stub.teach(error.line, 345)

    def _teach_config(self):
        cache = self._object(CACHE, lambda: self._config.create_timing_cache(b""))
        self.stub.teach(lambda: self._config.create_timing_cache(b""), self._create_cache)
        self.stub.teach(lambda: self._config.set_timing_cache(cache, ignore_mismatch=False), 1)
        self._object(CACHE, self._config.get_timing_cache)
        self._teach_memory(self._object(TIMES, cache.serialize), b"times of kernels")
        workspace = trt.MemoryPoolType.WORKSPACE
        self.stub.teach(lambda: self._config.set_memory_pool_limit(workspace, 0), self._set_workspace)
        self.stub.teach(lambda: self._config.get_memory_pool_limit(workspace), lambda *_: self.workspace_bytes)
        self.stub.teach(lambda: self._config.set_flag(trt.BuilderFlag.DEBUG), self._set_flag)
        self.stub.teach(lambda: self._config.clear_flag(trt.BuilderFlag.DEBUG), self._clear_flag)

        self.stub.teach(lambda: self._config.can_run_on_DLA(self._layer), lambda *_: self.on_dla.pop(0))
        dla = trt.DeviceType.DLA
        self.stub.teach(lambda: setattr(self._config, "default_device_type", dla), partial(self._put, "type"))
        self.stub.teach(lambda: setattr(self._config, "DLA_core", 0), partial(self._put, "core"))
        monitor = trt.IProgressMonitor()
        self.stub.teach(lambda: setattr(self._config, "progress_monitor", monitor), self._set_monitor)

    def _put(self, what, value, *_):
        self.put.append((what, value))
        return 0

    def _set_monitor(self, monitor, *_):
        self.monitor = monitor
        return 0

    def _create_cache(self, data, size, _):
        self.kept_times.append(ctypes.string_at(data, size) if size else b"")
        # another GPU's times give no cache
        return 0 if self.kept_times[-1] == b"of another GPU" else self.stub.object_of(CACHE)

    def _set_workspace(self, _, size, __):
        self.workspace_bytes = size
        return 0

    def _set_flag(self, flag, *_):
        self.set_flags.append(flag)
        return 0

    def _clear_flag(self, flag, *_):
        self.cleared_flags.append(flag)
        return 0

    def _teach_engine(self):
        runtime = trt.Runtime(self._logger)
        self.stub.teach(lambda: setattr(runtime, "DLA_core", 0), partial(self._put, "run on"))
        engine = self._object(ENGINE, lambda: runtime.deserialize_cuda_engine(b"a plan"))
        self.stub.teach(lambda: runtime.deserialize_cuda_engine(b"a plan"), self._deserialize)
        self.stub.teach(lambda: engine.num_io_tensors, 2)
        names = [self.stub.text("images"), self.stub.text("logits")]
        self.stub.teach(lambda: engine.get_tensor_name(0), lambda index, *_: names[index])
        self.stub.teach(
            lambda: engine.get_tensor_mode("images"),
            lambda name, *_: int(trt.TensorIOMode.INPUT if text_at(name) == "images" else trt.TensorIOMode.OUTPUT),
        )
        self.stub.teach(lambda: engine.get_tensor_dtype("images"), int(trt.DataType.HALF))
        self.stub.teach(lambda: engine.get_tensor_shape("images"), self.stub.dims((-1, 3)))
        self.stub.teach(lambda: engine.name, lambda *_: self.stub.text(self.name))
        self.stub.teach(lambda: engine.device_memory_size_v2, 4096)
        self.stub.teach(lambda: engine.num_aux_streams, 2)
        self._teach_context(self._object(CONTEXT, engine.create_execution_context))

    def _deserialize(self, data, size, _):
        if ctypes.string_at(data, size) == self.plan:
            return self.stub.object_of(ENGINE)
        self.stub.log_error(RUNTIME, "expecting compute 8.7 got compute 9.0, please rebuild")
        return 0

    def _teach_context(self, context):
        self.stub.teach(lambda: context.set_input_shape("images", trt.Dims([1])), self._set_input_shape)
        self.stub.teach(lambda: context.engine, self.stub.object_of(ENGINE))
        self.stub.teach(context.infer_shapes, 0)
        self.stub.teach(lambda: context.get_tensor_shape("logits"), lambda *_: self.stub.dims(self.shape))
        self.stub.teach(lambda: context.set_tensor_address("images", 0), self._set_address)
        self.stub.teach(lambda: context.execute_async_v3(0), self._run)
        self.stub.teach(lambda: setattr(context, "profiler", None), self._set_profiler)

    def _set_input_shape(self, _, dims, __):
        self.shape = shape_at(dims)
        return int(self.shape[0] <= BATCH)

    def _set_address(self, name, address, _):
        self.addresses[text_at(name)] = address
        return 1

    def _set_profiler(self, profiler, *_):
        self.profiler = profiler
        return 0

    def _run(self, stream, *_):
        self.streams.append(stream)
        if self.profiler:
            self.stub.report_layer(self.profiler, "/scan/Pow_3", 0.25)
        size = int(np.prod(self.shape))
        given, result = ((ctypes.c_int16 * size).from_address(self.addresses[name]) for name in ("images", "logits"))
        for i, value in enumerate(given):
            result[i] = 2 * value
        return int(self.context_takes)


@pytest.fixture(scope="module")
def _libraries():
    libraries = Libraries()
    yield libraries
    libraries.stub.silence()


@pytest.fixture
def libraries(_libraries):
    """The libraries of this process with everything as in the beginning; one, because they are never unloaded."""
    fresh = vars(_libraries).copy()
    yield _libraries
    vars(_libraries).clear()
    vars(_libraries).update(fresh)
    for log in fresh.values():
        if isinstance(log, list):
            log.clear()


def build(folder, **changes):
    """Build the plan `folder/plan` with these arguments in the place of the usual ones."""
    arguments = {"workspace_bytes": None, "timing_cache": folder / "kept" / "times", "precision": "fp16"} | changes
    return tensorrt.build(trt, ONNX, folder / "plan", BATCH, **arguments)


def test_a_build_writes_the_plan_and_the_times_and_says_what_it_did(libraries, tmp_path):
    built = build(tmp_path, workspace_bytes=2**30)
    assert (tmp_path / "plan").read_bytes() == b"a plan"
    assert [path.read_bytes() for path in (tmp_path / "kept").iterdir()] == [b"times of kernels"]
    assert (built.recipe, built.note) == (tensorrt.BuildRecipe("strong", 2**30), "")
    assert built.seconds > 0
    assert libraries.flags == [1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)]
    assert libraries.profile == [(BATCH, 3)] * 3
    assert (libraries.set_flags, libraries.cleared_flags) == ([], [int(trt.BuilderFlag.TF32)])


def test_a_quantised_file_is_built_in_the_types_that_it_states(libraries, tmp_path):
    assert build(tmp_path, precision="int8").recipe.typing == "strong"
    assert libraries.flags == [1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)]
    assert libraries.set_flags == []


def test_without_a_limit_the_workspace_is_tensorrts_own(libraries, tmp_path):
    assert build(tmp_path).recipe.workspace_bytes == 2**33


def test_a_static_file_needs_no_profile(libraries, tmp_path):
    libraries.dynamic = (2, 3)
    build(tmp_path)
    assert not libraries.profile


def test_only_the_batch_may_be_dynamic(libraries, tmp_path):
    libraries.dynamic = (-1, -1)
    with pytest.raises(BuildError, match=r"input images .* only the batch may be dynamic"):
        build(tmp_path)


def test_a_parser_error_names_the_node_its_operator_and_the_line(libraries, tmp_path):
    libraries.parses = False
    with pytest.raises(BuildError, match=r"TensorRT cannot read model.onnx: ") as raised:
        build(tmp_path)
    assert "node /scan/Pow_3 (Pow): no importer [Parser.cpp:345]" in str(raised.value)


def test_no_plan_is_an_error_with_what_the_log_said_last(libraries, tmp_path):
    libraries.plan, libraries.errors_of_build = None, ["first", "second", "third", "no implementation for node"]
    with pytest.raises(BuildError) as raised:
        build(tmp_path)
    assert str(raised.value) == "TensorRT could not build the engine: second; third; no implementation for node"
    assert not (tmp_path / "plan").exists()
    assert len(libraries.flags) == (2 if MAJOR == 10 else 1)


def test_a_build_without_memory_says_what_may_help_and_is_not_tried_again(libraries, tmp_path):
    error = "Error Code 1: Cuda Runtime (out of memory)"
    libraries.plan, libraries.errors_of_build = None, [error, "no implementation for node"]
    with pytest.raises(OutOfMemory, match="out of memory while building; close other programs") as raised:
        build(tmp_path)
    assert error in str(raised.value)
    assert len(libraries.flags) == 1


@pytest.mark.skipif(MAJOR != 10, reason="weak typing went with TensorRT 10")
@pytest.mark.parametrize(
    ("precision", "flags"), [("fp32", []), ("fp16", ["FP16"]), ("bf16", ["BF16"]), ("int8", ["INT8"])]
)
def test_a_strongly_typed_build_that_fails_is_tried_weakly_and_says_so(libraries, tmp_path, precision, flags):
    libraries.builds_strongly_typed = False
    built = build(tmp_path, precision=precision)
    assert built.recipe.typing == "weak"
    assert "strongly typed networks lack this" in built.note
    assert libraries.set_flags == [int(getattr(trt.BuilderFlag, flag)) for flag in flags]
    assert Engine(trt, tmp_path / "plan").recipe.typing == "weak"


def test_layers_are_put_on_the_dla_and_the_share_of_those_that_can_run_there_is_kept(libraries, tmp_path):
    libraries.dla_cores, libraries.on_dla = 2, [True, True, False, True]
    build(tmp_path, dla=1)
    assert libraries.put == [("type", int(trt.DeviceType.DLA)), ("core", 1)]
    assert libraries.set_flags == [int(trt.BuilderFlag.GPU_FALLBACK)]
    assert Engine(trt, tmp_path / "plan", 1).recipe.dla_share == 0.75
    assert libraries.put[2:] == [("run on", 1)]


def test_a_machine_without_such_a_core_and_a_network_without_a_layer_for_it_are_refused(libraries, tmp_path):
    with pytest.raises(TensorRtUnavailable, match=r"DLA core 0 does not exist: TensorRT [\d.]+ finds 0"):
        build(tmp_path, dla=0)
    libraries.dla_cores, libraries.on_dla = 1, [False] * 4
    with pytest.raises(tensorrt.NoLayerOnDla, match=r"no layer of model.onnx can run on the DLA"):
        build(tmp_path, dla=0)
    with pytest.raises(TensorRtUnavailable, match=r"DLA core 1 does not exist: TensorRT [\d.]+ finds 1"):
        build(tmp_path, dla=1)


def test_a_build_that_ends_itself_at_its_limit_keeps_its_times_and_is_not_tried_again(libraries, tmp_path):
    with pytest.raises(tensorrt.OutOfTime, match=r"not built in time; its kernel timings are kept"):
        build(tmp_path, limit_s=0.0)
    assert (tmp_path / "kept" / "times").read_bytes() == b"times of kernels"
    assert not (tmp_path / "plan").exists()
    assert len(libraries.flags) == 1


def test_kept_times_are_used_and_those_of_another_gpu_are_not(libraries, tmp_path):
    cache = tmp_path / "times"
    cache.write_bytes(b"earlier times")
    build(tmp_path, timing_cache=cache)
    cache.write_bytes(b"of another GPU")
    build(tmp_path, timing_cache=cache)
    assert libraries.kept_times == [b"earlier times", b"of another GPU", b""]
    assert cache.read_bytes() == b"times of kernels"


@pytest.fixture
def engine(libraries, tmp_path):
    build(tmp_path, workspace_bytes=2**30)
    return Engine(trt, tmp_path / "plan")


def test_an_engine_tells_its_tensors_and_how_it_was_built(engine):
    assert (engine.inputs, engine.outputs) == (["images"], ["logits"])
    assert (engine.dtype("images"), engine.shapes(4)) == ("HALF", {"images": (4, 3)})
    assert (engine.device_memory_bytes, engine.aux_streams) == (4096, 2)
    assert engine.recipe == tensorrt.BuildRecipe("strong", 2**30)


def test_a_context_runs_on_the_addresses_it_was_given(libraries, engine):
    given, result = np.arange(12, dtype=np.int16), np.zeros(12, np.int16)
    context = engine.context()
    assert context.set_shapes({"images": (4, 3)}) == {"logits": (4, 3)}
    context.bind({"images": given.ctypes.data, "logits": result.ctypes.data})
    context.run(7)
    assert result.tolist() == (2 * given).tolist()
    assert libraries.streams == [7]


def test_what_an_engine_refuses_is_an_error(libraries, engine):
    context = engine.context()
    with pytest.raises(EngineError, match=r"refuses images \(9, 3\)"):
        context.set_shapes({"images": (9, 3)})
    values = np.zeros(6, np.int16)
    context.set_shapes({"images": (2, 3)})
    context.bind({"images": values.ctypes.data, "logits": values.ctypes.data})
    libraries.context_takes = False
    with pytest.raises(EngineError, match="refuses the run"):
        context.run(7)


def test_layers_are_timed_in_each_run_after_one_to_warm_up(libraries, engine):
    values, context = np.zeros(6, np.int16), engine.context()
    context.set_shapes({"images": (2, 3)})
    context.bind(dict.fromkeys(("images", "logits"), values.ctypes.data))
    assert context.layer_times(7, runs=2) == [[("/scan/Pow_3", 0.25)]] * 2
    assert libraries.streams == [7, 7, 7]


def test_a_plan_of_another_gpu_or_of_nobody_is_told_apart_from_a_failure(libraries, engine, tmp_path):
    (tmp_path / "plan").write_bytes(b"of another GPU")
    with pytest.raises(ForeignPlan, match=r"for another GPU: expecting compute 8.7 got compute 9.0"):
        Engine(trt, tmp_path / "plan")
    (tmp_path / "plan").write_bytes(b"a plan")
    libraries.name = "trtexec's own"
    with pytest.raises(ForeignPlan, match="does not say how it was built"):
        Engine(trt, tmp_path / "plan")


def test_a_context_goes_before_the_engine_and_that_before_the_runtime(libraries, tmp_path):
    build(tmp_path)
    context = Engine(trt, tmp_path / "plan").context()
    assert context.set_shapes({"images": (1, 3)}) == {"logits": (1, 3)}
    libraries.stub.called.clear()
    del context
    gc.collect()
    assert [kind for kind, _ in libraries.stub.called] == [CONTEXT, ENGINE, RUNTIME]


def run_text(code):
    """Run the lines of LOAD.md as a user does."""
    names = {}
    try:
        exec(code, names)  # noqa: S102
    finally:
        if "golden" in names:
            names["golden"].close()


class Orin:
    """What torch says of a GPU, and the memory of the host in its place."""

    cuda_stream = 7

    @staticmethod
    def put(patch):
        answers = {"get_device_name": "Orin", "get_device_capability": (8, 7), "synchronize": None}
        for name, answer in (answers | {"current_stream": Orin}).items():
            patch.setattr(torch.cuda, name, lambda answer=answer: answer)
        properties = types.SimpleNamespace(multi_processor_count=8)
        patch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


def test_a_given_plan_is_loaded_and_one_that_is_refused_is_built_once(libraries, tmp_path, monkeypatch):
    Orin.put(monkeypatch)
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path / "cache"))
    build(tmp_path)
    (tmp_path / "model.onnx").write_bytes(b"a model")
    onnx, store = artifacts.given(tmp_path / "model.onnx"), tmp_path / "store"
    source = Source(torch.nn.Identity(), torch.zeros(1, 3), "net", {}, "", "outputs", store, engine=tmp_path / "plan")
    _, artifact, built, _ = backend._engine(trt, source, onnx, "fp16", 4)
    assert (artifact.path, built, source.built["model.plan"]) == (tmp_path / "plan", None, tmp_path / "plan")
    (tmp_path / "plan").write_bytes(b"of another GPU")
    _, artifact, built, notes = backend._engine(trt, source, onnx, "fp16", 4)
    assert built
    assert notes[0].startswith("rebuilt, because plan was built by a TensorRT other than")
    assert source.built.keys() == {"model.plan", "timing.cache"}
    _, again, built, notes = backend._engine(trt, source, onnx, "fp16", 4)
    assert (again.path, built, notes[0].startswith("rebuilt, ")) == (artifact.path, None, True)


def test_the_lines_of_load_md_run_a_plan_and_find_other_answers(libraries, tmp_path, monkeypatch, capsys):
    Orin.put(monkeypatch)
    build(tmp_path)
    (tmp_path / "plan").rename(tmp_path / "model.plan")
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    monkeypatch.chdir(tmp_path)
    given = np.arange(12, dtype=np.int16).view(np.float16).reshape(4, 3)  # so small that twice the bits are twice it
    code = load_text.code(
        manifest(
            case=Case(model="net", batch_size=4, variant=Variant.parse("tensorrt-fp16")),
            inputs=[Tensor("images", "float16", [4, 3])],
            outputs=[Tensor("logits", "float16", [4, 3])],
            golden=Golden(1, 4, {"logits": 1e-3}),
        )
    )
    np.savez("golden.npz", **{"input0:images": given, "exact0:logits": 2.0 * given.astype(np.float64)})
    run_text(code)
    assert (capsys.readouterr().out, libraries.streams) == ("the answers match the golden ones\n", [7])
    np.savez("golden.npz", **{"input0:images": given, "exact0:logits": 3.0 * given.astype(np.float64)})
    with pytest.raises(AssertionError, match="answers differ from the golden ones"):
        run_text(code)
    Path("model.plan").write_bytes(b"of another GPU")
    with pytest.raises(AssertionError, match="build it again from"):
        run_text(code)
