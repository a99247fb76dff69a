"""Finds the valid range of an ONNX file's integer inputs: the rows of the tables that they index, from its graph."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import onnx
from onnx import NodeProto, TensorProto, inliner, numpy_helper

# operators that do not change the meaning of a number
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
"""The positions of the indices and of the tables in an operator's inputs; `axis` is its attribute."""

_RECURRENT, _LENGTHS = ("GRU", "LSTM", "RNN"), 4


def rows(model: onnx.ModelProto, names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return, for each of these inputs, the first and last number that keep all its indices within their tables.

    Inputs that do not index a table are left out.
    """
    model = inliner.inline_local_functions(model) if model.functions else model
    return _Graph(model, names).ranges


class _Index(NamedTuple):
    """An integer in the graph, as a sum of inputs, each times a factor, plus a constant."""

    factors: Mapping[str, int]
    constant: int = 0


class _Graph:
    """Traces integers from the inputs to the tables that they index."""

    def __init__(self, model: onnx.ModelProto, names: Sequence[str]) -> None:
        self.ranges: dict[str, tuple[int, int]] = {}
        self._model, nodes = model, list(_nodes(model.graph))
        self._stored = {tensor.name: tensor for tensor in model.graph.initializer}
        self._stored |= {node.output[0]: node.attribute[0].t for node in nodes if node.op_type == "Constant"}
        self._shapes: Mapping[str, list[int]] | None = None
        self._followed = {name: _Index({name: 1}) for name in names}
        for node in nodes:
            for index, size in self._indices(node):
                self._note(self._followed[index], 0, size - 1)
            for lengths, steps in self._lengths(node):
                self._note(self._followed[lengths], 1, steps)
            self._follow(node)

    def _indices(self, node: NodeProto) -> Iterator[tuple[str, int]]:
        """Yield the traced indices that a node reads, each with the size of its table."""
        if node.op_type == "OneHot" and node.input[0] in self._followed and node.input[1] in self._stored:
            yield node.input[0], int(self._largest(node.input[1]))
        if node.op_type in ("GatherND", "ScatterND") and node.input[1] in self._followed:
            sizes, columns = self._shape(node.input[0]), self._shape(node.input[1])[-1:]
            first = _integer(node, "batch_dims")
            indexed = sizes[first : first + columns[0] if columns and columns[0] else None]
            if indexed and all(indexed):
                yield node.input[1], min(indexed)
        axis = _integer(node, "axis", "gather_axis")
        for index, table in _TABLES.get(node.op_type, ()):
            shape = self._shape(node.input[table]) if node.input[index] in self._followed else []
            if shape and shape[axis]:
                yield node.input[index], shape[axis]

    def _lengths(self, node: NodeProto) -> Iterator[tuple[str, int]]:
        """Yield the traced sequence lengths that a node reads, each with the number of available steps."""
        if node.op_type in _RECURRENT and len(node.input) > _LENGTHS and node.input[_LENGTHS] in self._followed:
            steps = self._shape(node.input[0])[:1]
            if steps and steps[0]:
                yield node.input[_LENGTHS], steps[0]

    def _note(self, index: _Index, first: int, last: int) -> None:
        slope = sum(index.factors.values())
        low, high = max(0, -((index.constant - first) // slope)), (last - index.constant) // slope
        for name in index.factors:
            lowest, highest = self.ranges.get(name, (low, high))
            if max(low, lowest) <= min(high, highest):
                self.ranges[name] = max(low, lowest), min(high, highest)

    def _follow(self, node: NodeProto) -> None:
        read = node.input[:1] if node.op_type.startswith(("Gather", "Slice", "Pad", "CumSum")) else node.input
        known = [self._followed[name] for name in read if name in self._followed]
        if not known or node.op_type not in {*_SAME, "Add", "Sub", "Mod", "Mul", "CumSum"}:
            return
        first, *others = known
        index = _Index(
            {name: factor for operand in known for name, factor in operand.factors.items()},
            max(operand.constant for operand in known),
        )
        if node.op_type == "Add":
            index = _Index(_summed(known), sum(operand.constant for operand in known) + self._constant(node.input))
        elif node.op_type == "Sub":
            if node.input[0] not in self._followed:
                return
            index = _Index(first.factors, first.constant - self._largest(node.input[1]))
        elif node.op_type == "Mul":
            if others and first.factors.keys() & others[0].factors.keys():  # a mask multiplied by itself
                return
            # otherwise multiplied by a mask of 0 and 1
            index = first if others else _times(first, max(1, self._constant(node.input)))
        elif node.op_type == "CumSum":
            index = _times(first, self._length(node))
        if all(factor > 0 for factor in index.factors.values()):
            self._followed |= dict.fromkeys(node.output, index)

    def _length(self, node: NodeProto) -> int:
        """Return how many numbers a CumSum adds up, 0 if that is not in the file."""
        axis, sizes = self._stored.get(node.input[1]), self._shape(node.input[0])
        return sizes[int(numpy_helper.to_array(axis).item())] if axis is not None and sizes else 0

    def _constant(self, names: Sequence[str]) -> int:
        """Return the sum of the largest numbers in the stored tensors among `names`."""
        return sum(self._largest(name) for name in names if name not in self._followed)

    def _largest(self, name: str) -> int:
        """Return the largest number in a stored tensor, or in a traced one if all inputs are 1; otherwise 0."""
        if name in self._followed:
            index = self._followed[name]
            return sum(index.factors.values()) + index.constant
        tensor = self._stored.get(name)
        if tensor is None or tensor.data_location == TensorProto.EXTERNAL:
            return 0
        return int(numpy_helper.to_array(tensor).max(initial=0))

    def _shape(self, name: str) -> list[int]:
        """Return the sizes of a tensor, with 0 for each unknown size; [] if nothing is known."""
        if name in self._stored:
            return list(self._stored[name].dims)
        if self._shapes is None:
            inferred = onnx.shape_inference.infer_shapes(self._model).graph
            described = [*inferred.value_info, *inferred.input]
            self._shapes = {
                value_info.name: [size.dim_value for size in value_info.type.tensor_type.shape.dim]
                for value_info in described
            }
        return self._shapes.get(name, [])


def _summed(parts: Sequence[_Index]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part.factors)
    return dict(total)


def _times(index: _Index, factor: int) -> _Index:
    return _Index({name: factor * coefficient for name, coefficient in index.factors.items()}, factor * index.constant)


def _integer(node: NodeProto, *names: str) -> int:
    """Return the node's attribute with one of these names, 0 if absent."""
    return next((attribute.i for attribute in node.attribute if attribute.name in names), 0)


def _nodes(graph: onnx.GraphProto) -> Iterator[NodeProto]:
    """Yield the nodes in order, each before those of its subgraphs."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            yield from _nodes(attribute.g)
