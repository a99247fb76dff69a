"""Reads facts from an ONNX file without its weights, such as the names of its inputs and outputs."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

_DRAWING = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli"}
# operators that compute floats, whose results other operators never use as a size or index
_COMPUTING_NAMES = (
    "BatchNormalization Conv ConvTranspose Erf Exp GRU Gelu Gemm InstanceNormalization LSTM LayerNormalization "
    "LogSoftmax MatMul RNN Sigmoid Softmax Tanh"
)
_COMPUTING = set(_COMPUTING_NAMES.split())
_HALF = {TensorProto.FLOAT16: "float16", TensorProto.BFLOAT16: "bfloat16"}
_FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE}


def names_of(path: Path) -> tuple[list[str], list[str]]:
    """Return the names of the file's inputs and outputs, in order."""
    graph = onnx.load(path, load_external_data=False).graph
    weights = {tensor.name for tensor in graph.initializer}
    return [value.name for value in graph.input if value.name not in weights], [value.name for value in graph.output]


def sizes_of(path: Path) -> set[int]:
    """Return the sizes of the tensors stored in the file."""
    return {size for tensor in _tensors(onnx.load(path, load_external_data=False)) for size in tensor.dims}


def data_files(path: Path) -> list[Path]:
    """Return the external weight files, sorted; raise ValueError for one outside the file's folder."""
    model = onnx.load(path, load_external_data=False)
    places = {entry.value for tensor in _tensors(model) for entry in tensor.external_data if entry.key == "location"}
    outside = [place for place in places if Path(place).is_absolute() or ".." in Path(place).parts]
    if outside:
        raise ValueError(f"its weights are in {outside[0]}, outside its folder")
    return [path.parent / place for place in sorted(places)]


def drawing(path: Path) -> list[str]:
    """Return the types of operators in the file that draw random numbers."""
    return sorted({node.op_type for node in _nodes(path) if node.op_type in _DRAWING or _drops(node)})


def half(path: Path) -> list[str]:
    """Return the names of the half-precision types that the file casts to."""
    kinds = {cast.i for node in _nodes(path) if node.op_type == "Cast" for cast in node.attribute if cast.name == "to"}
    return [name for kind, name in _HALF.items() if kind in kinds]


def rounded(path: Path, share: float, seed: int, *, floating: bool) -> bytes:
    """Return the file with random errors up to this share of each number, or of a tensor's largest if not `floating`.

    The errors are added to the weights and to the outputs of computing operators, and are drawn again in every run.
    """
    model = onnx.shape_inference.infer_shapes(onnx.load(path, load_external_data=False))
    graph, number = model.graph, count()
    weight_kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    kinds = weight_kinds | {
        value.name: value.type.tensor_type.elem_type for value in [*graph.value_info, *graph.output]
    }
    nodes: list[onnx.NodeProto] = []

    def add(operator: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        output = output or f"rounding/{next(number)}"
        nodes.append(helper.make_node(operator, inputs, [output], **attributes))
        return output

    def off(exact: str, output: str = "") -> str:
        interval: dict[str, Any] = {"low": -share, "high": share, "dtype": TensorProto.FLOAT}
        drawn = add("RandomUniformLike", exact, seed=float(seed + next(number)), **interval)
        size = exact if floating else add("ReduceMax", add("Abs", exact), keepdims=0)
        return add("Add", exact, add("Mul", size, add("Cast", drawn, to=kinds[exact])), output=output)

    for node in graph.node:
        names = node.output if node.op_type in _COMPUTING else []
        if names:
            node.input[:] = [off(name) if weight_kinds.get(name) in _FLOATS else name for name in node.input]
        nodes.append(node)
        for place, name in enumerate(names):
            if kinds.get(name) in _FLOATS:
                node.output[place] = f"exact/{name}"
                kinds[node.output[place]] = kinds[name]
                off(node.output[place], name)
    del graph.node[:]
    graph.node.extend(nodes)
    return bytes(model.SerializeToString())


def _drops(node: onnx.NodeProto) -> bool:
    return node.op_type == "Dropout" and len(node.input) > 2


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield every tensor stored in the file."""
    nodes = list(_nodes_of(model))
    graphs = [graph for node in nodes for attribute in node.attribute for graph in (attribute.g, *attribute.graphs)]
    for graph in (model.graph, *graphs):
        yield from graph.initializer
        yield from (part for sparse in graph.sparse_initializer for part in (sparse.values, sparse.indices))
    for attribute in (attribute for node in nodes for attribute in node.attribute):
        yield from (attribute.t, *attribute.tensors)


def _nodes(path: Path) -> Iterator[onnx.NodeProto]:
    return _nodes_of(onnx.load(path, load_external_data=False))


def _nodes_of(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Yield every node of the file, including those of subgraphs and functions."""
    left = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    while left:
        yield (node := left.pop())
        graphs = [graph for attribute in node.attribute for graph in (attribute.g, *attribute.graphs)]
        left += [inner for graph in graphs for inner in graph.node]
