"""Counts the work in an ONNX file with fixed sizes, from the shapes that onnx infers."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path

import onnx
from onnx import helper, shape_inference

from benchd.daemon.records import WorkCount

Shape = Sequence[int]


def _conv(_: onnx.NodeProto, out: Shape, given: Sequence[Shape], weight: int = 1) -> int:
    return 2 * prod(out) * prod(given[weight][1:])


def _transposed(_: onnx.NodeProto, out: Shape, given: Sequence[Shape]) -> int:
    return 2 * prod(given[0]) * prod(given[1][1:])


def _matmul(_: onnx.NodeProto, out: Shape, given: Sequence[Shape]) -> int:
    return 2 * prod(out) * given[0][-1]


def _gemm(node: onnx.NodeProto, out: Shape, given: Sequence[Shape]) -> int:
    is_transposed = any(attribute.name == "transA" and attribute.i for attribute in node.attribute)
    return 2 * prod(out) * given[0][0 if is_transposed else -1]


def _recurrent(_: onnx.NodeProto, out: Shape, given: Sequence[Shape]) -> int:
    return 2 * prod(given[0][:2]) * (prod(given[1]) + prod(given[2]))


def _einsum(node: onnx.NodeProto, out: Shape, given: Sequence[Shape]) -> int:
    equation = helper.get_node_attr_value(node, "equation").decode().replace(" ", "")
    named = zip(equation.partition("->")[0].split(","), given, strict=True)
    sizes_of = {label: size for labels, sizes in named for label, size in zip(labels, sizes, strict=True)}
    return 2 * prod(sizes_of.values())


_FORMULAS: dict[str, Callable[[onnx.NodeProto, Shape, Sequence[Shape]], int]] = {
    "Conv": _conv,
    "ConvInteger": _conv,
    "QLinearConv": lambda node, out, given: _conv(node, out, given, weight=3),
    "ConvTranspose": _transposed,
    "MatMul": _matmul,
    "MatMulInteger": _matmul,
    "QLinearMatMul": _matmul,
    "Gemm": _gemm,
    "Einsum": _einsum,
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent),
}
# operators whose products cannot be counted here, or whose body may run any number of times
_UNKNOWN = {"Attention", "DFT", "DeformConv", "If", "Loop", "STFT", "Scan"}


def count(path: Path, inputs: Mapping[str, Shape]) -> WorkCount:
    """Return the work of one run of the file on inputs of these shapes, including the batch, counted as in float32."""
    model = onnx.load(path, load_external_data=False)
    for value in model.graph.input:
        for size, dim in zip(inputs.get(value.name, ()), value.type.tensor_type.shape.dim, strict=False):
            dim.dim_value = size
    graph = shape_inference.infer_shapes(model, data_prop=True).graph
    shapes: dict[str, list[int]] = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        dims = value.type.tensor_type.shape.dim
        if all(dim.HasField("dim_value") for dim in dims):
            shapes[value.name] = [dim.dim_value for dim in dims]
    shapes |= {node.output[0]: list(node.attribute[0].t.dims) for node in graph.node if node.op_type == "Constant"}
    flops = convolved = 0
    uncounted: dict[str, None] = {}
    for node in graph.node:
        formula = None if node.domain not in ("", "ai.onnx") else _FORMULAS.get(node.op_type)
        if formula is None:
            if node.domain not in ("", "ai.onnx", "ai.onnx.ml") or node.op_type in _UNKNOWN:
                uncounted[node.op_type] = None
            continue
        given = [shapes.get(name) for name in node.input if name]
        out = shapes.get(node.output[0])
        known = [shape for shape in given if shape is not None]
        if out is None or len(known) < len(given):
            uncounted[f"{node.op_type} of unknown sizes"] = None
            continue
        spent = formula(node, out, known)
        flops += spent
        convolved += spent if "Conv" in node.op_type else 0
    parameters_bytes = sum(4 * prod(tensor.dims) for tensor in graph.initializer)
    moved = sum(4 * prod(shapes.get(value.name, ())) for value in (*graph.input, *graph.output))
    return WorkCount(
        matrix_flops=flops,
        bytes=parameters_bytes + moved,
        parameters_bytes=parameters_bytes,
        is_convolved=2 * convolved > flops,
        uncounted=list(uncounted),
    )
