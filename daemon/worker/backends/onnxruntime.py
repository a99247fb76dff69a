"""ONNX Runtime on the CPU, CUDA or TensorRT provider; inputs and outputs stay in torch's memory, bound by address."""

import hashlib
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchd.daemon.errors import Unsupported
from benchd.daemon.machine import folders
from benchd.daemon.records import RuntimeFacts
from benchd.daemon.runtimes import Precision
from benchd.daemon.worker import onnx_answers
from benchd.daemon.worker.backends import LayerRun, LoadedModel
from benchd.daemon.worker.backends.cudagraph import SLOTS
from benchd.daemon.worker.source import Source, answer, paths
from benchd.daemon.worker.structures import Batch, Tensors, cast, float_type, like, values
from benchd.exporters import sessions
from benchd.exporters.artifacts import Artifact
from benchd.exporters.sessions import Node, Provider

_DTYPES = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(double)": torch.float64,
    "tensor(int64)": torch.int64,
    "tensor(int32)": torch.int32,
    "tensor(int16)": torch.int16,
    "tensor(int8)": torch.int8,
    "tensor(uint64)": torch.uint64,
    "tensor(uint32)": torch.uint32,
    "tensor(uint16)": torch.uint16,
    "tensor(uint8)": torch.uint8,
    "tensor(bool)": torch.bool,
}

# the operators that replace quantised Conv, Gemm and MatMul if they run in integers
_INTEGER = {
    "QLinearConv",
    "ConvInteger",
    "QGemm",
    "QLinearMatMul",
    "MatMulInteger",
    "MatMulIntegerToFloat",
    "DynamicQuantizeMatMul",
}
_ENGINE_FOLDERS = 16
_BINDINGS = 1024  # more than the batches in a pool; each image of a data set has a new address


def file(source: Source, precision: Precision, device: torch.device, batch: int) -> Artifact:
    """Return the file that `load` opens, exporting it if it does not exist."""
    return source.onnx(precision, batch, "cpu" if device.type == "cpu" else "cuda")


def load(source: Source, precision: Precision, device: torch.device, example: Batch) -> LoadedModel:
    """Return the file, ready to run on this device's provider, and on no other."""
    artifact = file(source, precision, device, len(example))
    provider: Provider = source.provider or ("cuda" if device.type == "cuda" else "cpu")
    options = _options(provider, artifact, example)
    start = time.monotonic()
    try:
        session = sessions.open_session(artifact.path, provider, threads=torch.get_num_threads(), options=options)
        load_s = time.monotonic() - start
        kind = _BoundSession if onnx_answers.are_numbers(session) else _Fed
        bound = kind(session, source, paths(artifact), device, example)
        is_int8 = precision == "int8" and provider != "tensorrt"  # TensorRT follows the file's types
        is_profiled = is_int8 or provider != "cpu"
        nodes = sessions.profiled(artifact.path, provider, bound.feeds(example), options) if is_profiled else []
    except sessions.SessionError as error:
        raise Unsupported(str(error)) from error
    facts = RuntimeFacts(
        provider=session.get_providers()[0],
        node_shares=_shares(nodes) or {sessions.PROVIDERS[provider]: 1.0},
        threads=torch.get_num_threads(),
        typing="strong" if provider == "tensorrt" else None,
        load_s=load_s,
        notes=[_in_integers(nodes, artifact, provider)] if is_int8 else [],
    )
    by_address = bound if isinstance(bound, _BoundSession) else None
    # a GPU reads copies, whose addresses recur; numbers drawn for each run have new addresses
    bind = by_address.bind if by_address and device.type == "cpu" and source.encode is None else None
    reuse = by_address.reuse if by_address else None
    layer_times = partial(_layer_times, artifact, provider, options, bound, example)
    return LoadedModel(bound, bound.dtype, device, None, runtime=facts, layer_times=layer_times, bind=bind, reuse=reuse)


def _layer_times(
    artifact: Artifact,
    provider: Provider,
    options: dict[str, Any],
    bound: "_BoundSession | _Fed",
    example: Batch,
    runs: int,
    *inputs: Tensor,
) -> list[list[LayerRun]]:
    """Return the nodes of each of several runs, in a separate session that saves its optimised file."""
    from benchd.daemon.worker import onnx_layers  # noqa: PLC0415 - reads the file, which most runs need not

    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder, "optimised.onnx") if provider != "tensorrt" else None  # whose nodes are engines
        timed = sessions.timed(
            artifact.path, provider, bound.feeds(like(example, inputs)), options, runs, torch.get_num_threads(), saved
        )
        covers = onnx_layers.covered(artifact.path, saved) if saved else {}
    return [[LayerRun(node.name, ms, node.operator, covers.get(node.name, ())) for node, ms in run] for run in timed]


def packages(_: LoadedModel) -> dict[str, str]:
    """Return the packages needed to run the file where it is deployed."""
    return sessions.installed()


def _options(provider: Provider, artifact: Artifact, example: Batch) -> dict[str, Any]:
    if provider == "cuda":
        return dict(sessions.CUDA_OPTIONS)
    if provider == "tensorrt":
        # the binding accepts the strings True and False, but not 1 and 0; with trt_fp16_enable or trt_int8_enable, the
        # network would be weakly typed, and float32 layers in the file might run in fp16
        return {"trt_engine_cache_enable": "True", "trt_engine_cache_path": str(_engines(artifact, example))}
    return {}


def _engines(artifact: Artifact, example: Batch) -> Path:
    """Return the folder for the TensorRT provider's engines of this file at these sizes; the oldest ones are deleted.

    The provider identifies engines by names in the graph, not by weights, so each file needs a separate folder, and so
    does each number of multiprocessors, which a Jetson's power mode changes. For a file with open sizes, the provider
    would widen a stored engine to every size used, so that batch 1 would run on an engine tuned for 1 to 8.
    """
    root = folders.cache() / "onnxruntime-tensorrt"
    # without a GPU, ONNX Runtime will report what is missing
    of_gpu = torch.cuda.get_device_properties("cuda").multi_processor_count if torch.cuda.is_available() else 0
    made_for = artifact.metadata.sha256, of_gpu, [tuple(value.shape) for value in values(example)]
    folder = root / hashlib.sha256(repr(made_for).encode()).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    folder.touch()
    others = sorted((entry for entry in root.iterdir() if entry.is_dir()), key=lambda entry: entry.stat().st_mtime_ns)
    for oldest in others[:-_ENGINE_FOLDERS]:
        shutil.rmtree(oldest)
    return folder


def _shares(nodes: Sequence[Node]) -> dict[str, float]:
    counts = Counter(node.provider for node in nodes)
    return {name: count / len(nodes) for name, count in sorted(counts.items())}


def _in_integers(nodes: Sequence[Node], artifact: Artifact, provider: Provider) -> str:
    """Return the products that ran in integers; raise Unsupported if none did.

    ONNX Runtime silently computes a quantised Conv or Gemm in float32 if its bias or output is float, and always on
    CUDA.
    """
    # distinct nodes, because a loop runs a node many times
    ran = Counter(node.operator for node in set(nodes) if node.operator in _INTEGER)
    if not ran:
        advice = (
            "a Conv or Gemm needs a quantised output and bias; use openvino-int8, or a file made for this CPU with "
            "benchd export --precision int8"
            if provider == "cpu"
            else "use tensorrt-int8, or onnxruntime-int8 with --provider tensorrt"
        )
        raise Unsupported(f"{artifact.path.name}: {sessions.PROVIDERS[provider]} computes none of it in int8: {advice}")
    return f"products in int8: {', '.join(f'{count} {name}' for name, count in ran.most_common())}"


class _Fed:
    """A session that returns strings or maps and runs on arrays; each run converts its outputs to numbers."""

    def __init__(
        self, session: Any, source: Source, paths: Mapping[str, str], device: torch.device, example: Batch
    ) -> None:
        self._session, self._source, self._device, self._paths = session, source.for_runs(), device, paths
        self._names = [value.name for value in session.get_inputs()]
        self.dtype = float_type([_dtype(value) for value in session.get_inputs()])

    def feeds(self, example: Batch) -> dict[str, np.ndarray]:
        """Return the session's inputs for this batch."""
        return self._arrays(values(cast(example, self.dtype)))

    def __call__(self, *given: Tensor) -> Batch:
        """Return the outputs."""
        answers = self._session.run(None, self._arrays(self._source.inputs(*given)))
        outputs = {
            name: torch.as_tensor(onnx_answers.numbers(value), device=self._device)
            for name, value in zip(self._paths, answers, strict=True)
        }
        return answer(outputs, self._paths)

    def _arrays(self, inputs: Sequence[Tensor]) -> dict[str, np.ndarray]:
        return {name: value.cpu().numpy() for name, value in zip(self._names, inputs, strict=True)}


class _BoundSession:
    """A session as a function of as many inputs as the example has; two sets of outputs are overwritten alternately.

    The inputs and outputs of a run are bound once for each address of the inputs. All bindings share the outputs: a run
    that wrote nothing would return a different input's answer, which cannot be right by chance. Outputs whose sizes are
    known only after a run, such as detected boxes, and empty ones are bound without an address and copied after the
    run.
    """

    def __init__(
        self, session: Any, source: Source, paths: Mapping[str, str], device: torch.device, example: Batch
    ) -> None:
        self._session, self._source, self._device, self._paths = session, source.for_runs(), device, paths
        self._names = [value.name for value in session.get_inputs()]
        self.dtype = float_type([_dtype(value) for value in session.get_inputs()])
        dtypes = [(value.name, _dtype(value)) for value in session.get_outputs()]
        varies = isinstance(example, Tensors) and example.lengths
        known = {size for value in session.get_inputs() for size in value.shape if size and not varies}
        answers = session.run(None, self.feeds(example))
        self._open = {
            value.name
            for value, answered in zip(session.get_outputs(), answers, strict=True)
            if not (answered.size and all(isinstance(size, int) or size in known for size in value.shape))
        }
        outputs = [(name, dtype, array.shape) for (name, dtype), array in zip(dtypes, answers, strict=True)]
        self._outputs = [
            {name: torch.empty(shape, dtype=dtype, device=device) for name, dtype, shape in outputs}
            for _ in range(SLOTS)
        ]
        self._answers = [answer(slot, paths) for slot in self._outputs]
        self._bindings: dict[tuple[object, ...], list[Any]] = {}
        self._newest = 0

    def feeds(self, example: Batch) -> dict[str, np.ndarray]:
        """Return the session's inputs for this batch."""
        inputs = self._inputs(values(cast(example, self.dtype)))
        return {name: value.cpu().numpy() for name, value in zip(self._names, inputs, strict=True)}

    def __call__(self, *given: Tensor) -> Batch:
        """Return the outputs."""
        inputs = self._inputs(given)
        self._newest = (self._newest + 1) % len(self._outputs)
        binding = self._bound(inputs)[self._newest]
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # the session computes on its own stream
        self._session.run_with_iobinding(binding)
        return self._read(binding) if self._open else self._answers[self._newest]

    def reuse(self) -> None:
        """Use only one set of outputs from now on."""
        del self._outputs[1:]

    def bind(self, batch: Batch) -> None:
        """Bind a batch that later runs read at its present address."""
        self._bound(self._inputs(values(batch)))

    def _bound(self, inputs: Sequence[Tensor]) -> list[Any]:
        """Return a binding for each slot."""
        key = tuple((value.data_ptr(), value.shape) for value in inputs)
        bindings = self._bindings.get(key)
        if bindings is None:
            if len(self._bindings) >= _BINDINGS:
                self._bindings.clear()
            bindings = self._bindings[key] = [self._binding(inputs, outputs) for outputs in self._outputs]
        return bindings

    def _binding(self, inputs: Sequence[Tensor], outputs: Mapping[str, Tensor]) -> Any:
        binding = self._session.io_binding()
        for name, value in zip(self._names, inputs, strict=True):
            binding.bind_input(name, *_place(value))
        for name, output in outputs.items():
            binding.bind_output(name, *([] if name in self._open else _place(output)))
        return binding

    def _read(self, binding: Any) -> Batch:
        """Return the answer with copies of the open outputs, which are rebound for the next run's sizes."""
        outputs = dict(self._outputs[self._newest])
        for name, output in zip(outputs, binding.get_outputs(), strict=True):
            if name in self._open:
                outputs[name] = torch.from_numpy(output.numpy()).to(self._device)
                binding.bind_output(name)
        return answer(outputs, self._paths)

    def _inputs(self, given: Sequence[Tensor]) -> list[Tensor]:
        return [value.contiguous() for value in self._source.inputs(*given)]


def _place(value: Tensor) -> tuple[str, int, type, tuple[int, ...], int]:
    """Return device, device number, element type, shape and address, as required by a binding."""
    element = torch.empty(0, dtype=value.dtype).numpy().dtype.type
    return value.device.type, value.device.index or 0, element, tuple(value.shape), value.data_ptr()


def _dtype(value: Any) -> torch.dtype:
    if value.type not in _DTYPES:
        raise Unsupported(f"{value.name} in the file is a {value.type}, but must be a tensor of plain numbers")
    return _DTYPES[value.type]
