"""Post-training quantisation of an exported float file to QDQ int8, using ONNX Runtime's own tools.

Weights are symmetric per output channel, activations symmetric per tensor. Activations on a grid, such as spikes and
codes, are represented exactly: their scale is the step of the grid. Whatever stays in float32 is listed with the reason
in the result and in the file's metadata.
"""

import json
import logging
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from benchd.exporters import sessions, smoothing
from benchd.exporters.calibrated import CannotQuantise, Quantised, agreement
from benchd.exporters.files import QuantisedFor

Feed = dict[str, NDArray[Any]]

PERCENTILE = 99.999
_BINS = 2048
_LARGEST_CODE = 127
_GRID_ERROR = 1e-4  # share of a grid step: float32's rounding error for an exact multiple
_PRODUCTS = ("Conv", "MatMul", "Gemm")
# ONNX Runtime runs a Conv or Gemm in integers only if its output is quantised too, which costs accuracy elsewhere
_FLOAT_OUTPUTS = ["MatMul"]


def quantise(
    source: Path, path: Path, feeds: Sequence[Feed], target: QuantisedFor, about: Mapping[str, str], *, smooth: bool
) -> Quantised:
    """Write the float32 file `source` in int8 to `path`, with ranges from running `feeds` through it.

    `smooth` moves outlier channels, and the scale of each token, out of a state-space model's activations. `about` goes
    into the file's metadata. Raises CannotQuantise, leaving no file, for a model without layers to quantise, for
    activations that are not finite, and if the result is not quantised as requested.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = _prepared(source, Path(folder) / "prepared.onnx")
        chosen, left = _chosen(model, recurrent=smooth)
        grids, largest = _seen(model, chosen, feeds, smooth=smooth)
        ranges = smoothing.smooth(model, chosen, largest)
        scales = {name: step for name, step in grids.items() if step} | ranges
        names = [node.name for node in chosen]
        converted = _converted(model, chosen, scales, feeds, target, Path(folder))
    for key, value in {**about, "benchd.left_fp32": json.dumps(left), "benchd.int8": json.dumps(names)}.items():
        converted.metadata_props.add(key=key, value=value)
    _refuse_unquantised(converted, names)
    onnx.save(converted, path)
    try:
        parity = _compared(source, path, feeds)
    except CannotQuantise:
        path.unlink()
        raise
    exact = [node.name for node in chosen if grids.get(node.input[0])]
    return Quantised(layers=names, left_fp32=left, exact=exact, nodes=len(converted.graph.node), **parity)


def _prepared(source: Path, path: Path) -> ModelProto:
    """Return the file with batch norm folded into convolutions, constants folded and a name for each node."""
    from onnxruntime.quantization.shape_inference import quant_pre_process  # noqa: PLC0415 - imports sympy

    try:
        quant_pre_process(source, path, skip_symbolic_shape=True)
    except Exception as error:  # its many steps may raise anything
        raise CannotQuantise(f"ONNX Runtime cannot prepare it: {str(error).strip().splitlines()[0]}") from error
    model = onnx.load(path)
    used = {node.domain for node in model.graph.node}
    known = [entry for entry in model.opset_import if entry.domain in used]
    del model.opset_import[:]
    model.opset_import.extend(known)
    _name(model.graph.node)
    _separate_biases(model.graph)
    return model


def _name(nodes: Iterable[NodeProto]) -> None:
    """Give unnamed nodes, which ONNX allows, unique names."""
    names = {node.name for node in nodes}
    for place, node in enumerate(nodes):
        if not node.name:
            node.name = f"{node.op_type}_{place}"
            while node.name in names:
                node.name += "_"


def _separate_biases(graph: GraphProto) -> None:
    """Give products that share a bias copies of it: the quantiser's own copies may get the name of another value."""
    stored = {tensor.name: tensor for tensor in graph.initializer}
    biased = [node for node in graph.node if node.op_type in _PRODUCTS and len(node.input) > 2]
    uses = Counter(node.input[2] for node in biased)
    for node in biased:
        if uses[node.input[2]] > 1 and node.input[2] in stored:
            copied = graph.initializer.add()
            copied.CopyFrom(stored[node.input[2]])
            copied.name = node.input[2] = f"{node.name}/bias"


def _chosen(model: ModelProto, *, recurrent: bool) -> tuple[list[NodeProto], dict[str, str]]:
    """Return the nodes to quantise, and the reasons why other products stay in float32."""
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    products = [node for node in model.graph.node if node.op_type in _PRODUCTS]
    left: dict[str, str] = {}
    for node in products:
        weight = weights.get(node.input[1])
        if weight is None:
            left[node.name] = "neither of its inputs is constant"
        elif weight.data_type != TensorProto.FLOAT:
            left[node.name] = f"its weights are {TensorProto.DataType.Name(weight.data_type)}"
        elif node.op_type == "MatMul" and len(weight.dims) > 2:
            left[node.name] = "feeds the recurrence of the scan" if recurrent else "its weights are a batch of matrices"
    able = [node for node in products if node.name not in left]
    if len(able) > 2:
        left |= {able[0].name: "first layer", able[-1].name: "last layer"}
    chosen = [node for node in able[1:-1] if node.name not in left]
    if not chosen:
        raise CannotQuantise(
            f"nothing to quantise: {len(products)} products (Conv, MatMul, Gemm), of which {len(able)} have constant "
            "float weights, and the first and the last stay in float32"
        )
    return chosen, left


def _seen(
    model: ModelProto, chosen: Sequence[NodeProto], feeds: Sequence[Feed], *, smooth: bool
) -> tuple[dict[str, float | None], dict[str, NDArray[Any]]]:
    """Return the grid step of each node input (None if not on a grid), and the magnitudes for `smooth`.

    A tensor with at most 127 codes on either side of 0 is exact in int8, with the step as its scale. The inputs of
    projections are smoothed using their largest magnitudes (tokens, channels). Raises CannotQuantise unless all are
    finite.
    """
    by_token = {node.input[0] for node in chosen if smooth and node.op_type == "MatMul"}
    magnitudes: dict[str, NDArray[Any] | None] = {}
    largest: dict[str, NDArray[Any]] = {}
    for values in activations(model, list(dict.fromkeys(node.input[0] for node in chosen)), feeds):
        for name, value in values.items():
            if not np.isfinite(value).all():
                raise CannotQuantise(f"the activation {name} is not finite on the calibration images")
            if name in by_token and value.ndim == 3:
                largest_of_channel = np.abs(value).max(axis=0)
                largest[name] = np.maximum(largest.get(name, largest_of_channel), largest_of_channel)
            else:
                magnitudes[name] = _merged(magnitudes.get(name, np.zeros(0, np.float32)), value)
    return {name: _step(distinct) for name, distinct in magnitudes.items()}, largest


def activations(model: ModelProto, names: Sequence[str], feeds: Sequence[Feed]) -> Iterator[Feed]:
    """Yield the values of these tensors of `model` for each feed, by name."""
    watched = ModelProto()
    watched.CopyFrom(model)
    del watched.graph.output[:]
    watched.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names)
    with tempfile.TemporaryDirectory() as folder:
        onnx.save(watched, Path(folder) / "watched.onnx")
        session = sessions.open_session(Path(folder) / "watched.onnx", spin=False)
    for feed in feeds:
        yield dict(zip(names, session.run(list(names), feed), strict=True))


def _merged(distinct: NDArray[Any] | None, value: NDArray[Any]) -> NDArray[Any] | None:
    """Return the distinct magnitudes, including those in `value`, or None if there are too many for a grid."""
    if distinct is None:
        return None
    merged = _distinct(np.concatenate([distinct, np.abs(value).ravel()]))
    return merged if len(merged) <= _LARGEST_CODE else None


def _distinct(magnitudes: NDArray[Any]) -> NDArray[Any]:
    """Return the distinct positive magnitudes, merging those within float32's rounding error of each other."""
    values = np.unique(magnitudes[magnitudes > 0])
    if not len(values):
        return values
    return values[np.concatenate([[True], np.diff(values) > _GRID_ERROR * values[1:]])]


def _step(magnitudes: NDArray[Any] | None) -> float | None:
    if magnitudes is None or not len(magnitudes):
        return None
    step = float(magnitudes[0])
    codes = magnitudes / step
    on_grid = np.abs(codes - np.round(codes)) <= _GRID_ERROR * codes
    return step if on_grid.all() and codes[-1] <= _LARGEST_CODE else None


def _converted(
    model: ModelProto,
    chosen: Sequence[NodeProto],
    scales: Mapping[str, float],
    feeds: Sequence[Feed],
    target: QuantisedFor,
    folder: Path,
) -> ModelProto:
    """Return the QDQ model, with known `scales` by tensor and the rest from percentiles of the activations."""
    from onnxruntime.quantization import CalibrationMethod, QDQQuantizer, QuantType  # noqa: PLC0415
    from onnxruntime.quantization.calibrate import TensorData, TensorsData  # noqa: PLC0415 - 1.23 has them only there

    is_for_tensorrt, is_signed = target == "tensorrt", target in ("arm", "tensorrt")
    floats = list(_PRODUCTS) if is_for_tensorrt else _FLOAT_OUTPUTS
    # ONNX Runtime's fast x86 kernels require uint8 activations: the same grid with a zero point of 128
    kind, zero = (QuantType.QInt8, np.array(0, np.int8)) if is_signed else (QuantType.QUInt8, np.array(128, np.uint8))
    known = {
        name: [{"scale": np.array(scale, np.float32), "zero_point": zero, "quant_type": kind}]
        for name, scale in scales.items()
    }
    unknown = {node.op_type for node in chosen if node.input[0] not in scales or node.op_type not in floats}
    ranges = _ranges(model, sorted(unknown), feeds, folder)
    for name, scale in scales.items():  # the quantiser requires a range even for a tensor with a known scale
        ends = np.array([-scale, scale], np.float32) * _LARGEST_CODE
        ranges[name] = TensorData(lowest=ends[0], highest=ends[1])
    measured = TensorsData(CalibrationMethod.Percentile, ranges)
    quantizer = QDQQuantizer(
        model,
        per_channel=True,
        reduce_range=target == "avx2",
        weight_qType=QuantType.QInt8,
        activation_qType=kind,
        tensors_range=measured,
        nodes_to_quantize=[node.name for node in chosen],
        nodes_to_exclude=[],
        op_types_to_quantize=list(_PRODUCTS),
        extra_options={
            "ActivationSymmetric": True,
            "WeightSymmetric": True,
            "DedicatedQDQPair": is_for_tensorrt,
            "OpTypesToExcludeOutputQuantization": floats,
            "QuantizeBias": not is_for_tensorrt,
            "QDQOpTypePerChannelSupportToAxis": {"MatMul": 1},
            "TensorQuantOverrides": known,
        },
    )
    try:
        with _quiet():
            quantizer.quantize_model()
            quantizer.model.topological_sort()  # checkers require an order that the quantiser leaves to its caller
    except Exception as error:  # it raises ValueError, KeyError, AssertionError and more
        raise CannotQuantise(f"ONNX Runtime cannot quantise it: {str(error).strip().splitlines()[0]}") from error
    return quantizer.model.model


def _ranges(model: ModelProto, kinds: Sequence[str], feeds: Sequence[Feed], folder: Path) -> dict[str, Any]:
    """Return the ranges of the activations around products of these kinds, from histograms."""
    from onnxruntime.quantization import CalibrationMethod, create_calibrator  # noqa: PLC0415 - see above

    if not kinds:
        return {}
    path, augmented = folder / "float.onnx", folder / "augmented.onnx"
    onnx.save(model, path)
    method = CalibrationMethod.Percentile
    options = {"symmetric": True, "num_bins": _BINS, "percentile": PERCENTILE}
    with _quiet():
        calibrator = create_calibrator(path, kinds, str(augmented), method, extra_options=options)
        calibrator.infer_session = sessions.open_session(augmented, level=sessions.LOWER[-1], spin=False)
        for feed in feeds:  # one at a time, because the calibrator keeps all activations for its input
            calibrator.collect_data(_Reader([feed]))
        return dict(calibrator.compute_data().items())


class _Reader:
    """ONNX Runtime's CalibrationDataReader for feeds."""

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self._left = iter(feeds)

    def get_next(self) -> Feed | None:
        return next(self._left, None)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what the quantiser prints and logs; real problems raise errors."""
    level = logging.getLogger().level
    logging.getLogger().setLevel(logging.ERROR)
    try:
        with redirect_stdout(StringIO()):
            yield
    finally:
        logging.getLogger().setLevel(level)


def _refuse_unquantised(model: ModelProto, names: Sequence[str]) -> None:
    """Raise unless each of these nodes reads dequantised activations and weights with positive scales."""
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    by_output = {output: node for node in model.graph.node for output in node.output}
    products = {node.name: node for node in model.graph.node if node.op_type in _PRODUCTS}
    for name in names:
        makers = [by_output.get(value) for value in products[name].input[:2]]
        if not all(maker and maker.op_type == "DequantizeLinear" for maker in makers):
            raise CannotQuantise(f"ONNX Runtime left {name} in float32 although it should have been quantised")
        scales = [numpy_helper.to_array(initializers[maker.input[1]]) for maker in makers if maker]
        if not all(np.isfinite(scale).all() and (scale > 0).all() for scale in scales):
            raise CannotQuantise(f"the scales of {name} are not positive numbers: its calibrated range is empty")


def _compared(source: Path, path: Path, feeds: Sequence[Feed], most: int = 64) -> dict[str, Any]:
    """Return the int8 file's deviations from the float32 file; raise CannotQuantise if its answers are not finite."""
    files = [sessions.open_session(file, spin=False) for file in (source, path)]
    exact, answers = ([session.run(None, feed)[0] for feed in feeds[:most]] for session in files)
    return agreement(exact, answers, len(next(iter(feeds[0].values()))))
