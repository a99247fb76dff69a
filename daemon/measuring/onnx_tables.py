"""Which whole numbers an ONNX file's inputs may hold: the rows of the tables that they index, read from its graph."""

from collections.abc import Iterator, Mapping, Sequence

import onnx
from onnx import NodeProto, TensorProto, inliner, numpy_helper

# what leaves a number what it means
_SAME_NAMES = (
    "Cast Clip Concat Expand Flatten Gather GatherElements GatherND Identity Max Min Pad Reshape ReverseSequence "
    "Slice Split Squeeze Tile Transpose Unsqueeze Where"
)
_SAME = set(_SAME_NAMES.split())
_GATHERING = ("Gather", "GatherElements", "GatherBlockQuantized", "ScatterElements")
_EMBEDDING = ("EmbedLayerNormalization", "QEmbedLayerNormalization")
_TABLES: dict[str, tuple[tuple[int, int], ...]] = {
    **dict.fromkeys(_GATHERING, ((1, 0),)),
    **dict.fromkeys(_EMBEDDING, ((0, 2), (1, 4))),
}
"""Per operator the places of indices and of what they index, along the attribute `axis`."""


def rows(model: onnx.ModelProto, names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the first and last number of each of these inputs that keeps all its indices within their tables.

    Inputs that index nothing are left out.
    """
    model = inliner.inline_local_functions(model) if model.functions else model
    return _Graph(model, names).found


class _Graph:
    """Follows whole numbers from the inputs, each of which is 1, to the tables that they index."""

    def __init__(self, model: onnx.ModelProto, names: Sequence[str]) -> None:
        self.found: dict[str, tuple[int, int]] = {}
        self._model, nodes = model, list(_nodes(model.graph))
        self._stored = {tensor.name: tensor for tensor in model.graph.initializer}
        self._stored |= {node.output[0]: node.attribute[0].t for node in nodes if node.op_type == "Constant"}
        self._shapes: Mapping[str, list[int]] | None = None
        self._origins = {name: ({name}, 1) for name in names}  # and the largest number
        for node in nodes:
            for index, size in self._indices(node):
                self._note(index, size)
            self._follow(node)

    def _indices(self, node: NodeProto) -> Iterator[tuple[str, int]]:
        """Yield the followed indices that a node reads, each with the size of its table."""
        if node.op_type == "OneHot" and node.input[0] in self._origins and node.input[1] in self._stored:
            yield node.input[0], int(self._largest(node.input[1]))
        axis = next((one.i for one in node.attribute if one.name in ("axis", "gather_axis")), 0)
        for index, table in _TABLES.get(node.op_type, ()):
            shape = self._shape(node.input[table]) if node.input[index] in self._origins else []
            if shape and shape[axis]:
                yield node.input[index], shape[axis]

    def _note(self, index: str, size: int) -> None:
        origins, top = self._origins[index]
        low, high = max(0, 1 - top), 1 + (size - 1 - top) // len(origins)
        for name in origins:
            lowest, highest = self.found.get(name, (low, high))
            self.found[name] = max(low, lowest), min(high, highest)

    def _follow(self, node: NodeProto) -> None:
        read = node.input[:1] if node.op_type.startswith(("Gather", "Slice", "Pad")) else node.input
        known = [self._origins[name] for name in read if name in self._origins]
        if not known or node.op_type not in {*_SAME, "Add", "Sub", "Mod"}:
            return
        tops = [top for _, top in known]
        moved = [self._largest(name) for name in node.input[: 2 if node.op_type in ("Add", "Sub") else 0]]
        top = max(tops)
        if node.op_type == "Add":
            top = sum(moved)
        elif node.op_type == "Sub":
            top = moved[0] - moved[1]
        origins = set().union(*(names for names, _ in known))
        self._origins |= dict.fromkeys(node.output, (origins, top))

    def _largest(self, name: str) -> int:
        """Return the largest number of a followed tensor or of a stored one, 0 of any other."""
        if name in self._origins:
            return self._origins[name][1]
        held = self._stored.get(name)
        if held is None or held.data_location == TensorProto.EXTERNAL:
            return 0
        return int(numpy_helper.to_array(held).max(initial=0))

    def _shape(self, name: str) -> list[int]:
        """Return the sizes of a tensor, 0 for each unknown one; [] if nothing is known."""
        if name in self._stored:
            return list(self._stored[name].dims)
        if self._shapes is None:
            inferred = onnx.shape_inference.infer_shapes(self._model).graph
            found = [*inferred.value_info, *inferred.input]
            self._shapes = {one.name: [size.dim_value for size in one.type.tensor_type.shape.dim] for one in found}
        return self._shapes.get(name, [])


def _nodes(graph: onnx.GraphProto) -> Iterator[NodeProto]:
    """Yield the nodes in order, each before those of the graphs in it."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            yield from _nodes(attribute.g)
