"""OpenVINO on the CPU, from the ONNX file; inputs and outputs stay in torch's memory, bound by address."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchd.daemon.errors import Unsupported
from benchd.daemon.records import RuntimeFacts
from benchd.daemon.runtimes import OPENVINO_FORMATS, Precision, openvino_settings
from benchd.daemon.worker.backends import LayerRun, LoadedModel
from benchd.daemon.worker.backends.cudagraph import SLOTS
from benchd.daemon.worker.source import Source, answer, paths
from benchd.daemon.worker.structures import Batch, float_type, values
from benchd.exporters.artifacts import Artifact

_INT8 = {"i8", "u8"}
_LOWER = {"f16", "bf16"}
_PRODUCTS = ("Convolution", "Deconvolution", "FullyConnected", "MatMul")
_NO_COMPUTATION = ("Const", "Input", "Output", "Reorder")


def file(source: Source, precision: Precision, device: torch.device, batch: int) -> Artifact:
    """Return the file that `load` opens, exporting it if it does not exist; fp16 and bf16 use the fp32 file."""
    written: Precision = "int8" if precision == "int8" else "fp32"
    if source.own and precision == "fp16":
        from benchd.daemon.measuring import user_onnx  # noqa: PLC0415 - onnx is not needed for files of the store

        written = user_onnx.precision(source.own)
    return source.onnx(written, batch, "cpu_without_scan")


def load(source: Source, precision: Precision, device: torch.device, example: Batch) -> LoadedModel:
    """Return the file, compiled for this CPU; raise Unsupported if it does not run in this precision."""
    artifact = file(source, precision, device, len(example))
    openvino, start = _openvino(), time.monotonic()
    try:
        core = openvino.Core()
        model = core.read_model(artifact.path)
        shapes = [list(value.shape) for value in source.inputs(*values(example))]
        model.reshape(dict(zip(model.inputs, shapes, strict=True)))
        settings = openvino_settings(precision) | {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
        settings |= {} if source.is_alone else {"ENABLE_CPU_PINNING": False}  # all models are pinned to the same CPUs
        bound = _BoundModel(openvino, core.compile_model(model, "CPU", settings), source, paths(artifact))
    except RuntimeError as error:  # the only exception raised by its binding
        raise Unsupported(f"{artifact.path.name}: OpenVINO cannot run it: {_reason(error)}") from error
    computed = _computed(bound.compiled, precision)
    facts = RuntimeFacts(
        provider=f"OpenVINO {openvino.__version__.partition('-')[0]}",
        threads=torch.get_num_threads(),
        load_s=time.monotonic() - start,
        notes=[f"layers by number format: {', '.join(f'{count} {name}' for name, count in computed.most_common())}"],
    )

    def counted() -> _BoundModel:
        return _BoundModel(
            openvino, core.compile_model(model, "CPU", settings | {"PERF_COUNT": True}), source, bound.paths
        )

    return LoadedModel(
        bound,
        bound.dtype,
        device,
        None,
        runtime=facts,
        layer_times=partial(_layer_times, counted, artifact.path),
        reuse=bound.reuse,
    )


def packages(_: LoadedModel) -> dict[str, str]:
    """Return the packages needed to run the file where it is deployed."""
    return {"openvino": version("openvino")}


def _layer_times(counted: Callable[[], "_BoundModel"], path: Path, runs: int, *inputs: Tensor) -> list[list[LayerRun]]:
    """Return the layers of each of several runs, in a separately compiled model."""
    from benchd.daemon.worker import onnx_layers  # noqa: PLC0415 - reads the file, which most runs need not

    bound, rows, makers = counted(), [], onnx_layers.makers(path)  # a layer is named after its output
    covers = {
        layer.get_friendly_name(): [
            makers.get(name, name) for name in str(info["originalLayersNames"].value).split(",") if name
        ]
        for layer, info in _layers(bound.compiled)
    }
    # a reorder, whose name ends with that of its reader
    for name in (reorder for reorder, nodes in covers.items() if not nodes):
        covers[name] = max(
            (nodes for reader, nodes in covers.items() if name.endswith(f"_{reader}")), key=len, default=[]
        )
    for _ in range(runs):
        bound(*inputs)
        rows.append(
            [
                LayerRun(
                    layer.node_name,
                    layer.real_time.total_seconds() * 1e3,
                    layer.node_type,
                    covers.get(layer.node_name, ()),
                )
                for layer in bound.profile()
                if str(layer.status) == "Status.EXECUTED"  # excludes layers that were folded or needed no work
            ]
        )
    return rows


def _layers(compiled: Any) -> list[tuple[Any, Any]]:
    """Return the layers that OpenVINO created from a file, each with its description."""
    return [(layer, layer.get_rt_info()) for layer in compiled.get_runtime_model().get_ops()]


def _openvino() -> Any:
    try:
        return import_module("openvino")
    except ImportError as error:
        raise Unsupported(f"OpenVINO cannot be imported: {error}") from error


def _computed(compiled: Any, precision: Precision) -> Counter[str]:
    """Return how many layers compute in each number format, counting products, or all layers if there are none.

    Raises Unsupported if no layer uses the variant's format, which is only a hint for OpenVINO.
    """
    layers = [(str(info["layerType"].value), str(info["runtimePrecision"].value)) for _, info in _layers(compiled)]
    products = Counter(name for kind, name in layers if kind in _PRODUCTS)
    formats = products or Counter(name for kind, name in layers if kind not in _NO_COMPUTATION)
    wanted = _INT8 if precision == "int8" else {OPENVINO_FORMATS[precision]}
    is_another = _LOWER & formats.keys() if precision == "fp32" else not formats.keys() & wanted
    if is_another:
        words = ", ".join(f"{count} in {name}" for name, count in formats.most_common())
        raise Unsupported(f"OpenVINO computes none of its layers in {precision} on this CPU, but {words}")
    return formats


def _reason(error: RuntimeError) -> str:
    """Return the cause of an error: the lines that do not refer to OpenVINO's source files."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    plain = [line for line in lines if not line.startswith(("Exception from", "Check "))]
    return " ".join(plain or lines or ["no reason given"])


class _BoundModel:
    """A compiled model as a function of as many inputs as the file has.

    Each of SLOTS requests writes to separate memory, so that a run overwrites the outputs of the run before the
    previous one.
    """

    def __init__(self, openvino: Any, compiled: Any, source: Source, paths: Mapping[str, str]) -> None:
        self.compiled, self.paths = compiled, paths
        self._tensor, self._source = openvino.Tensor, source.for_runs()
        self.dtype = float_type(_dtype(port) for port in compiled.inputs)
        # in the file's order; a port may have several names
        outputs = [(name, _dtype(port), _shape(port)) for name, port in zip(paths, compiled.outputs, strict=True)]
        self._slots = [
            (compiled.create_infer_request(), {name: torch.empty(shape, dtype=dtype) for name, dtype, shape in outputs})
            for _ in range(SLOTS)
        ]
        for request, of_request in self._slots:
            for place, output in enumerate(of_request.values()):
                request.set_output_tensor(place, self._shared(output))

    def __call__(self, *given: Tensor) -> Batch:
        """Return the outputs."""
        self._slots.append(self._slots.pop(0))
        request, outputs = self._slots[0]
        for place, value in enumerate(self._source.inputs(*given)):
            request.set_input_tensor(place, self._shared(value.contiguous()))
        request.infer()
        return answer(outputs, self.paths)

    def reuse(self) -> None:
        """Use only one request from now on."""
        del self._slots[1:]

    def profile(self) -> Any:
        """Return the layers of the last run with their times."""
        return self._slots[0][0].profiling_info

    def _shared(self, value: Tensor) -> Any:
        return self._tensor(value.numpy(), shared_memory=True)


def _dtype(port: Any) -> torch.dtype:
    try:
        return torch.from_numpy(np.empty(0, port.get_element_type().to_dtype())).dtype
    except (TypeError, RuntimeError) as error:
        kind = port.get_element_type().get_type_name()
        raise Unsupported(f"{port.any_name} in the file is a {kind}, but must be a tensor of plain numbers") from error


def _shape(port: Any) -> tuple[int, ...]:
    if port.partial_shape.is_dynamic:
        raise Unsupported(f"the size of {port.any_name} depends on the values of the inputs: use onnxruntime")
    return tuple(port.shape)
