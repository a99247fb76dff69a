"""Whether TensorRT can read an ONNX file, told from the file alone: no TensorRT, no GPU.

What its parser documents is a table, `tensorrt_ops.json`: operators, their types and restrictions, for the parser of
JetPack 6.2 and for that of TensorRT 11. A file without findings lies inside it; whether an engine can be built of it
only a build shows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import onnx
import onnx.inliner
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, numpy_helper

TensorRT = Literal["10.3", "11"]

VERSIONS: tuple[TensorRT, ...] = ("10.3", "11")

_TABLES = Path(__file__).with_name("tensorrt_ops.json")
_DOMAINS = ("", "ai.onnx")
_SHORT = {"FLOAT": "FP32", "FLOAT16": "FP16", "BFLOAT16": "BF16", "FLOAT8E4M3FN": "FP8", "FLOAT4E2M1": "FP4"}
_RECURRENT = {"RNN": 1, "GRU": 2, "LSTM": 3}  # activation functions a direction
_WITHOUT_LIMIT = 2**31 - 1  # what exporters write as the trip count of a `while`

_TYPE_ADVICE = {
    "DOUBLE": "export in float32: TensorRT would clamp the values to that range",
    "UINT8": "cast it right after the input, or right before the output",
    "INT8": "keep codes in floating point: INT8 comes out of QuantizeLinear only",
    "BOOL": "cast to float before it, and keep spikes as 0.0 and 1.0",
}


class OnnxFileError(ValueError):
    """A file cannot be read as an ONNX model, or contradicts itself; the message names it."""


class Finding(NamedTuple):
    """Something that TensorRT does not read; `node` is named as in its parser's own messages."""

    node: str
    op: str
    problem: str
    advice: str

    def __str__(self) -> str:
        return f"{self.node} ({self.op}): {self.problem}; {self.advice}"


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the table says of one operator; the fields are described in the file."""

    types: str
    typed: tuple[str, ...] = ()
    initializer: tuple[int, ...] = ()
    constant: tuple[int, ...] = ()
    zero: tuple[int, ...] = ()
    below: dict[int, int] = {}
    attributes: dict[str, tuple[str | int, ...]] = {}
    ranks: dict[int, tuple[int, ...]] = {}
    static: tuple[int, ...] = ()
    inputs: int | None = None
    outputs: int | None = None
    states: int = 0
    unchecked: str = ""


class _Table(msgspec.Struct, frozen=True):
    opsets: tuple[int, int]
    network: str
    operators: dict[str, Row]


class Tables(msgspec.Struct, frozen=True):
    """The whole file."""

    groups: dict[str, tuple[str, ...]]
    operators: dict[str, Row]
    unsupported: frozenset[str]
    tables: dict[str, _Table]

    def row(self, op: str, tensorrt: str) -> Row | None:
        """Return the row of the operator in the table of this TensorRT, or None where it has none."""
        return self.tables[tensorrt].operators.get(op) or self.operators.get(op)

    def types(self, names: str) -> list[str]:
        """Return the types that `names`, of types and of groups, stands for."""
        return [kind for name in names.split() for kind in self.groups.get(name, (name,))]


@cache
def tables() -> Tables:
    """Return the tables, read once."""
    return msgspec.json.decode(_TABLES.read_bytes(), type=Tables)


def findings(model: ModelProto | str | Path, tensorrt: TensorRT) -> list[Finding]:
    """Return what this TensorRT does not read in the model, in the order of its nodes; nothing where it reads all.

    "10.3" stands for JetPack 6.2, "11" for 11.x. Weights outside the file are not looked at. Raises OnnxFileError for a
    file that is damaged, no ONNX model, or does not fit together.
    """
    name = "the model" if isinstance(model, ModelProto) else str(model)
    typed = _with_types(name, model if isinstance(model, ModelProto) else _read(Path(model)))
    opset = next((entry.version for entry in typed.opset_import if entry.domain in _DOMAINS), None)
    if opset is None or not typed.graph.node:
        raise OnnxFileError(f"{name}: no ONNX model with standard operators; export it again")
    check = _Check(tensorrt, opset, frozenset(value.name for value in (*typed.graph.input, *typed.graph.output)))
    try:
        found = [*check.opset_range(), *check.network(typed.graph), *check.graph(typed.graph, _Scope())]
    except (IndexError, ValueError) as error:  # a node without the inputs or bodies that its operator has
        raise OnnxFileError(f"{name}: does not fit together: {error}; onnx.checker names the place") from error
    return found or check.untyped[:1]


def _read(path: Path) -> ModelProto:
    try:
        return onnx.load(path, load_external_data=False)
    except OSError as error:
        raise OnnxFileError(f"{path}: {error.strerror}") from error
    except Exception as error:  # protobuf's own, which has no types
        raise OnnxFileError(f"{path}: truncated, or no ONNX file; export it again") from error


def _with_types(name: str, model: ModelProto) -> ModelProto:
    """Return the model with the bodies of its functions in the place of their calls and the types of all values."""
    try:
        if model.functions:
            model = onnx.inliner.inline_local_functions(model)
        return onnx.shape_inference.infer_shapes(model, data_prop=True)
    except Exception as error:  # onnx raises whatever its C++ side meets
        raise OnnxFileError(f"{name}: does not fit together: {error}") from error


@dataclass(frozen=True)
class _Constant:
    """A value that is known when the engine is built; `stored` in the file, with a tensor where it is one."""

    stored: bool
    tensor: TensorProto | None = None

    def array(self) -> np.ndarray | None:
        """Return the values, or None where they are computed or lie outside the file."""
        if self.tensor is None or self.tensor.data_location == TensorProto.EXTERNAL:
            return None
        return numpy_helper.to_array(self.tensor)


@dataclass
class _Scope:
    """What is known at a place in a graph: types and constants by value name, those of the graphs around included."""

    path: str = ""
    types: dict[str, TypeProto] = field(default_factory=dict)
    constants: dict[str, _Constant] = field(default_factory=dict)

    def inside(self, graph: GraphProto, path: str) -> "_Scope":
        """Return the scope at the start of `graph`, which nothing leaves."""
        scope = _Scope(path, dict(self.types), dict(self.constants))
        for value in (*graph.input, *graph.output, *graph.value_info):
            scope.types[value.name] = value.type
        for tensor in graph.initializer:
            scope.types[tensor.name] = onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
            scope.constants[tensor.name] = _Constant(True, tensor)
        return scope

    def type_of(self, value: str) -> str | None:
        """Return the short name of a value's type, or None where it is not known."""
        proto = self.types.get(value)
        kind: str | None = proto.WhichOneof("value") if proto is not None else None
        if proto is None or kind is None:
            return None
        if kind != "tensor_type":
            return kind.removesuffix("_type").upper()
        name: str = TensorProto.DataType.Name(proto.tensor_type.elem_type)
        return None if name == "UNDEFINED" else _SHORT.get(name, name)

    def shape(self, value: str) -> list[int | None] | None:
        """Return a tensor's shape, None for a dynamic length, or None where not even the rank is known."""
        proto = self.types.get(value)
        if proto is None or not proto.tensor_type.HasField("shape"):
            return None
        return [dim.dim_value if dim.HasField("dim_value") else None for dim in proto.tensor_type.shape.dim]

    def learn(self, node: NodeProto) -> None:
        """Add the outputs of `node` that can be computed before any input is there."""
        constant = self._folded(node)
        if constant is not None:
            self.constants |= dict.fromkeys(node.output, constant)

    def _folded(self, node: NodeProto) -> _Constant | None:
        inputs = [name for name in node.input if name]
        if node.op_type == "Constant":
            return _Constant(True, _constant_tensor(node))
        if node.op_type == "Identity":
            return self.constants.get(inputs[0])
        if node.op_type in {"Shape", "Size"}:
            shape = self.shape(inputs[0])
            return _Constant(False) if shape is not None and None not in shape else None
        known = inputs and all(name in self.constants for name in inputs)
        return _Constant(False) if known and not node.op_type.startswith("Random") else None


def _constant_tensor(node: NodeProto) -> TensorProto | None:
    attribute = node.attribute[0]
    if attribute.name == "value":
        tensor: TensorProto = attribute.t
        return tensor
    if attribute.name in {"value_int", "value_ints", "value_float", "value_floats"}:
        return numpy_helper.from_array(np.asarray(onnx.helper.get_attribute_value(attribute)))
    return None


def _node_name(node: NodeProto) -> str:
    return node.name or f"node_of_{node.output[0]}"


def _bodies(node: NodeProto) -> Iterator[tuple[str, GraphProto]]:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.name, attribute.g


def _at(values: Sequence[str], index: int) -> str:
    """Return the name at `index`, empty where an optional input or output is left out."""
    return values[index] if index < len(values) else ""


class _Check:
    """One walk through a model; `untyped` gathers what could not be judged."""

    def __init__(self, tensorrt: TensorRT, opset: int, network_values: frozenset[str]) -> None:
        self.tensorrt, self.opset, self.network_values = tensorrt, opset, network_values
        self.tables = tables()
        self.table = self.tables.tables[tensorrt]
        self.untyped: list[Finding] = []

    def opset_range(self) -> Iterator[Finding]:
        """Yield a finding where the whole file is of an opset outside the table."""
        low, high = self.table.opsets
        if not low <= self.opset <= high:
            problem = f"TensorRT {self.tensorrt} reads opset {low} to {high}"
            yield Finding("the file", f"opset {self.opset}", problem, "export with opset 18")

    def network(self, graph: GraphProto) -> Iterator[Finding]:
        """Yield the inputs and outputs of the network whose type TensorRT has not."""
        scope = _Scope().inside(graph, "")
        allowed = self.tables.types(self.table.network)
        for what, values in (("network input", graph.input), ("network output", graph.output)):
            for value in values:
                kind = scope.type_of(value.name)
                if kind is not None and kind not in allowed:
                    yield Finding(value.name, what, *self._type_problem(kind, allowed))

    def graph(self, graph: GraphProto, around: _Scope, path: str = "") -> Iterator[Finding]:
        """Yield what is wrong in the graph and, recursively, in the bodies of its nodes."""
        scope = around.inside(graph, path)
        for node in graph.node:
            name = scope.path + _node_name(node)
            for problem, advice in self._node(node, scope):
                yield Finding(name, node.op_type, problem, advice)
            for attribute, body in _bodies(node):
                yield from self.graph(body, scope, f"{name}/{attribute}/")
            scope.learn(node)

    def _node(self, node: NodeProto, scope: _Scope) -> Iterator[tuple[str, str]]:
        if node.domain not in _DOMAINS:
            yield f"an operator of {node.domain}, not of ONNX", "express it in standard operators"
            return
        row = self.tables.row(node.op_type, self.tensorrt)
        if row is None:
            yield self._absent(node.op_type)
            return
        yield from self._types(node, row, scope)
        yield from _inputs(node, row, scope)
        yield from _attributes(node, row)
        yield from _SPECIAL.get(node.op_type, _nothing)(node, row, scope)

    def _absent(self, op: str) -> tuple[str, str]:
        later = [name for name in self.tables.tables if self.tables.row(op, name)]
        if later:
            return (
                f"only TensorRT {later[0]} reads it",
                "export with opset 18, which spells it out, or use that TensorRT",
            )
        known = "does not read it" if op in self.tables.unsupported else "does not know it"
        return f"TensorRT {self.tensorrt} {known}", "express it in other operators, or compute it outside the network"

    def _types(self, node: NodeProto, row: Row, scope: _Scope) -> Iterator[tuple[str, str]]:
        allowed = self.tables.types(row.types)
        kinds = {value: scope.type_of(value) for value in self._judged(node, row)}
        unknown = next((value for value, kind in kinds.items() if kind is None), None)
        if unknown is not None:
            name = scope.path + _node_name(node)
            problem = f"the type of {unknown} cannot be told"
            self.untyped.append(Finding(name, node.op_type, problem, "state it in the graph's value_info"))
        wrong = dict.fromkeys(kind for kind in kinds.values() if kind is not None and kind not in allowed)
        yield from (self._type_problem(kind, allowed) for kind in wrong)
        if "UINT8" not in wrong and any(
            scope.type_of(value) == "UINT8" and (scope.path or value not in self.network_values)
            for value in (*node.input, *node.output)
        ):
            yield "UINT8 inside the network; TensorRT has it for inputs and outputs only", _TYPE_ADVICE["UINT8"]

    def _type_problem(self, kind: str, allowed: list[str]) -> tuple[str, str]:
        problem = f"{kind}, where TensorRT {self.tensorrt} takes {', '.join(allowed)}"
        return problem, _TYPE_ADVICE.get(kind, f"cast it to {allowed[0]}")

    def _judged(self, node: NodeProto, row: Row) -> list[str]:
        """Return the names of the node's values that are bound to the type variables of its row."""
        inputs, outputs = self._variables(node)
        typed = row.typed or tuple(variable for _, variable in (*inputs, *outputs))[:1]
        return [value for value, variable in (*inputs, *outputs) if value and variable in typed]

    def _variables(self, node: NodeProto) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        """Return inputs and outputs, each with its type variable in the operator's schema of this opset."""
        try:
            schema = onnx.defs.get_schema(node.op_type, self.opset, "")
        except onnx.defs.SchemaError:  # one of the experimental operators, which had one type
            return [(value, "T") for value in node.input[:1]], [(value, "T") for value in node.output[:1]]
        return _bound(node.input, schema.inputs), _bound(node.output, schema.outputs)


def _bound(values: Sequence[str], formals: Sequence[onnx.defs.OpSchema.FormalParameter]) -> list[tuple[str, str]]:
    """Pair each value with its type variable; the last formal stands for all that follow."""
    return [(value, formals[min(index, len(formals) - 1)].type_str) for index, value in enumerate(values)]


Problem = tuple[str, str]  # what is wrong, what to do


def _inputs(node: NodeProto, row: Row, scope: _Scope) -> Iterator[Problem]:
    """Yield which inputs are not known, or not of the shape, that the row asks for."""
    for rule, indices in (("stored in the file", row.initializer), ("a constant", (*row.constant, *row.zero))):
        for index in indices:
            value = _at(node.input, index)
            constant = scope.constants.get(value)
            if value and (constant is None or (indices is row.initializer and not constant.stored)):
                yield f"input {index} ({value}) must be {rule}", "export with static shapes, or fold constants first"
    for index in row.zero:
        values = _known(node, index, scope)
        if values is not None and np.any(values.astype(np.float32)):
            yield f"input {index} must be zero", "quantise symmetrically, and export in eval mode"
    for index, limit in row.below.items():
        values = _known(node, index, scope)
        if values is not None and np.any(values >= limit):
            yield f"input {index} must be less than {limit}", "split the work over several nodes"
    yield from _shapes(node, row, scope)
    for what, values, most in (("input", node.input, row.inputs), ("output", node.output, row.outputs)):
        if most is not None and any(values[most:]):
            yield f"{what} {most} is not supported", f"leave out what comes after {what} {most - 1}"


def _known(node: NodeProto, index: int, scope: _Scope) -> np.ndarray | None:
    """Return the values of an input where they are known."""
    constant = scope.constants.get(_at(node.input, index))
    return constant.array() if constant is not None else None


def _shapes(node: NodeProto, row: Row, scope: _Scope) -> Iterator[Problem]:
    for index, ranks in row.ranks.items():
        shape = scope.shape(_at(node.input, index))
        if shape is not None and len(shape) not in ranks:
            wanted = " or ".join(map(str, ranks))
            yield f"input {index} has {len(shape)} dimensions, not {wanted}", "reshape before and after the node"
    for index in row.static:
        if None in (scope.shape(_at(node.input, index)) or [None]):
            yield f"input {index} must have a static shape", "export with a fixed batch size"


def _attributes(node: NodeProto, row: Row) -> Iterator[Problem]:
    """Yield the attributes with a value that the row does not list."""
    for attribute in node.attribute:
        allowed = row.attributes.get(attribute.name)
        if allowed is None:
            continue
        values = _values(attribute) if allowed else None
        if values is None or not set(values) <= set(allowed):
            shown = "" if values is None else f" = {', '.join(map(str, values))}"
            wanted = f"set it to {' or '.join(map(str, allowed))}" if allowed else "leave it out"
            yield f"attribute {attribute.name}{shown} is not supported", f"{wanted}, or express it in other operators"


def _values(attribute: AttributeProto) -> list[str | int]:
    value = onnx.helper.get_attribute_value(attribute)
    values: list[Any] = [value] if isinstance(value, (bytes, int, float)) else list(value)
    return [one.decode() if isinstance(one, bytes) else one for one in values]


def _attribute(node: NodeProto, name: str, default: object) -> Any:
    found = next((attribute for attribute in node.attribute if attribute.name == name), None)
    return default if found is None else onnx.helper.get_attribute_value(found)


def _nothing(node: NodeProto, row: Row, scope: _Scope) -> Iterator[Problem]:
    yield from ()


def _if(node: NodeProto, row: Row, scope: _Scope) -> Iterator[Problem]:
    first, second = (body for _, body in _bodies(node))
    shared = {value.name for value in first.output} & {value.name for value in second.output}
    if shared:
        yield f"both branches name an output {min(shared)}", "give the outputs of the branches different names"
    for one, other in zip(first.output, second.output, strict=True):
        then, otherwise = scope.inside(first, "").shape(one.name), scope.inside(second, "").shape(other.name)
        if then is not None and otherwise is not None and len(then) != len(otherwise):
            yield f"{one.name} and {other.name} differ in rank", "reshape the outputs of the branches to one rank"


def _scan(node: NodeProto, row: Row, scope: _Scope) -> Iterator[Problem]:
    states = len(node.input) - _attribute(node, "num_scan_inputs", 0)
    if states < row.states:
        yield "a Scan without a state", "carry one, be it a constant, or unroll the loop"
    ((_, body),) = _bodies(node)
    yield from _carried(node.input[:states], body, body.output[:states], scope)


def _loop(node: NodeProto, row: Row, scope: _Scope) -> Iterator[Problem]:
    states = len(node.input) - 2
    ((_, body),) = _bodies(node)
    yield from _carried(node.input[2:], body, body.output[1 : 1 + states], scope)
    if len(node.output) > states and _length_is_dynamic(node, body, scope):
        yield "scan outputs of a length that is not known", "loop a constant number of times, without a condition"


def _carried(
    initial: Sequence[str], body: GraphProto, after: Sequence[onnx.ValueInfoProto], scope: _Scope
) -> Iterator[Problem]:
    """Yield the values that change their shape from one step to the next."""
    inner = scope.inside(body, "")
    for name, value in zip(initial, after, strict=True):
        before, later = scope.shape(name), inner.shape(value.name)
        if before is not None and later is not None and not _may_agree(before, later):
            yield f"{name} {before} becomes {later} in the body", "carry values of one shape through all steps"


def _may_agree(one: list[int | None], other: list[int | None]) -> bool:
    """Return whether two shapes are equal for some value of their dynamic lengths."""
    return len(one) == len(other) and all(a == b or None in {a, b} for a, b in zip(one, other, strict=True))


def _length_is_dynamic(node: NodeProto, body: GraphProto, scope: _Scope) -> bool:
    """Return whether a Loop may end before a number of steps that is known, or has none."""
    constant = node.input[0] in scope.constants and (not node.input[1] or node.input[1] in scope.constants)
    trips = _known(node, 0, scope)
    if not constant or (trips is not None and np.any(trips >= _WITHOUT_LIMIT)):
        return True
    inner = scope.inside(body, "")
    for inside in body.node:
        inner.learn(inside)
    passed = {body.input[1].name}
    for inside in body.node:
        if inside.op_type == "Identity" and inside.input[0] in passed:
            passed.add(inside.output[0])
    kept = body.output[0].name
    return kept not in passed and kept not in inner.constants


def _recurrent(node: NodeProto, row: Row, scope: _Scope) -> Iterator[Problem]:
    count = _RECURRENT[node.op_type]
    functions = _attribute(node, "activations", [])
    if len(functions) > count and functions[:count] != functions[count:]:
        yield "other activations backwards than forwards", "use the same ones, or two nodes of one direction"


def _pads(node: NodeProto, row: Row, scope: _Scope) -> Iterator[Problem]:
    pads = list(_attribute(node, "pads", []))
    if pads[: len(pads) // 2] != pads[len(pads) // 2 :]:
        yield f"pads {pads} differ between the ends of an axis", "pad with a node of its own before it"


def _axis(node: NodeProto, row: Row, scope: _Scope) -> Iterator[Problem]:
    shape, axis = scope.shape(node.input[0]), _attribute(node, "axis", -1)
    if shape is not None and shape[axis] is None:
        yield f"axis {axis} has a dynamic length", "export with that length fixed"


def _seed(node: NodeProto, row: Row, scope: _Scope) -> Iterator[Problem]:
    if any(attribute.name == "seed" for attribute in node.attribute):
        yield "its seed is ignored", "draw the numbers outside the network and feed them"


_SPECIAL: dict[str, Callable[[NodeProto, Row, _Scope], Iterator[Problem]]] = {
    "If": _if,
    "Loop": _loop,
    "Scan": _scan,
    "Hardmax": _axis,
    "DeformConv": _pads,
    **dict.fromkeys(_RECURRENT, _recurrent),
    **dict.fromkeys(("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"), _seed),
}
