"""What an ONNX file says about itself without its weights: the names that it reads and answers by."""

from collections.abc import Iterator
from pathlib import Path

import onnx

_DRAWING = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli"}
_HALF = {onnx.TensorProto.FLOAT16: "float16", onnx.TensorProto.BFLOAT16: "bfloat16"}


def names_of(path: Path) -> tuple[list[str], list[str]]:
    """Return the names of the file's inputs and of its outputs, in order."""
    graph = onnx.load(path, load_external_data=False).graph
    held = {tensor.name for tensor in graph.initializer}
    return [value.name for value in graph.input if value.name not in held], [value.name for value in graph.output]


def drawing(path: Path) -> list[str]:
    """Return the types of the file's operators that draw random numbers."""
    return sorted({node.op_type for node in _nodes(path) if node.op_type in _DRAWING or _drops(node)})


def half(path: Path) -> list[str]:
    """Return the names of the types in half precision that the file casts to."""
    kinds = {cast.i for node in _nodes(path) if node.op_type == "Cast" for cast in node.attribute if cast.name == "to"}
    return [name for kind, name in _HALF.items() if kind in kinds]


def _drops(node: onnx.NodeProto) -> bool:
    return node.op_type == "Dropout" and len(node.input) > 2


def _nodes(path: Path) -> Iterator[onnx.NodeProto]:
    """Yield every node of the file, those of subgraphs and functions too."""
    model = onnx.load(path, load_external_data=False)
    left = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    while left:
        yield (node := left.pop())
        graphs = [graph for attribute in node.attribute for graph in (attribute.g, *attribute.graphs)]
        left += [inner for graph in graphs for inner in graph.node]
