"""Reads the inputs of a user's ONNX file without torch: names, types and sizes, and any reason to reject it."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import onnx
from onnx import TensorProto

from benchd.daemon.errors import UsageError
from benchd.daemon.measuring.user_inputs import described, typed
from benchd.daemon.records import Dtype, InputSpec
from benchd.daemon.runtimes import Precision
from benchd.exporters import onnx_files

_TYPES: dict[int, Dtype] = {
    TensorProto.FLOAT: "float32",
    TensorProto.FLOAT16: "float16",
    TensorProto.DOUBLE: "float64",
    TensorProto.INT64: "int64",
    TensorProto.INT32: "int32",
    TensorProto.INT16: "int16",
    TensorProto.INT8: "int8",
    TensorProto.UINT64: "uint64",
    TensorProto.UINT32: "uint32",
    TensorProto.UINT16: "uint16",
    TensorProto.UINT8: "uint8",
    TensorProto.BOOL: "bool",
}
_FLOATS: dict[int, Precision] = {TensorProto.FLOAT: "fp32", TensorProto.FLOAT16: "fp16", TensorProto.BFLOAT16: "bf16"}
_PRODUCTS = ("Conv", "MatMul", "Gemm", "ConvTranspose")
_INTEGER = ("QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger")
_UNKNOWN = "No Op registered for"
"""The start of the checker's message for an operator that is not part of ONNX, such as a TensorRT plugin."""

Size = int | str | None
"""A size in the file; an open size is a name or None."""


def reads(path: Path, given: Sequence[InputSpec]) -> tuple[list[InputSpec], int | None]:
    """Return the file's inputs, and its fixed batch size, or None if it accepts any.

    Open sizes are taken from `given`, whose unnamed inputs are matched by position. Raises UsageError for an unreadable
    file, and for inputs that do not fit.
    """
    values = _values(path, _read(path).graph)
    by_name, sizes = _by_name(path, [value.name for value in values], given), _sizes(values)
    axes = _batch_axes(sizes)
    inputs = [_input(path, value, sizes[value.name], axes[value.name], by_name.get(value.name)) for value in values]
    if all(spec.batch_axis is None for spec in inputs):
        raise UsageError(
            f"{path}: none of its inputs has a batch axis; export it with the batch as the first dimension"
        )
    return inputs, _batch_size(path, sizes, inputs)


def open_inputs(path: Path) -> list[str]:
    """Return the names of the inputs in which more than the batch size is open."""
    sizes = _sizes(_values(path, _read(path).graph))
    axes = _batch_axes(sizes)
    return [name for name in sizes if any(not isinstance(size, int) for size in _inner(sizes[name], axes[name]))]


def precision(path: Path) -> Precision:
    """Return the format in which the file computes: the type of most of its products' weights; inputs may differ.

    Without products, it is the type of the tables, and without tables that of the first float input. Raises UsageError
    for bfloat16.
    """
    graph = _read(path).graph
    if _is_quantised(graph.node):
        return "int8"
    inputs = [value.type.tensor_type.elem_type for value in _values(path, graph)]
    first = [kind for kind in inputs if kind in _FLOATS][:1]
    kinds = _weights(graph, _PRODUCTS) or _weights(graph, ("Gather",)) or first or [TensorProto.FLOAT]
    commonest = _FLOATS[Counter(kinds).most_common(1)[0][0]]
    if commonest == "bf16":
        raise UsageError(f"{path}: its weights are BFLOAT16; export it in float32 or float16")
    return commonest


def _weights(graph: onnx.GraphProto, operators: Sequence[str]) -> list[int]:
    """Return the type of each stored float tensor that nodes of these operators read."""
    stored = {tensor.name: tensor.data_type for tensor in graph.initializer}
    stored |= {node.output[0]: node.attribute[0].t.data_type for node in graph.node if node.op_type == "Constant"}
    read = [name for node in graph.node if node.op_type in operators for name in node.input[:2]]
    return [stored[name] for name in read if stored.get(name) in _FLOATS]


def _is_quantised(nodes: Sequence[onnx.NodeProto]) -> bool:
    """Return whether a product reads dequantised numbers, or is a quantised operator."""
    dequantised = {output for node in nodes if node.op_type == "DequantizeLinear" for output in node.output}
    return any(
        node.op_type in _INTEGER or (node.op_type in _PRODUCTS and dequantised & set(node.input[:2])) for node in nodes
    )


def _values(path: Path, graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """Return the inputs that are not stored in the file; raise UsageError if there are none."""
    stored = {tensor.name for tensor in graph.initializer}
    values = [value for value in graph.input if value.name not in stored]
    if not values:
        raise UsageError(f"{path}: it has no inputs, so it cannot be measured")
    return values


def _by_name(path: Path, names: Sequence[str], given: Sequence[InputSpec]) -> dict[str, InputSpec]:
    known = ", ".join(names)
    unknown = [spec.name for spec in given if spec.name and spec.name not in names]
    if unknown:
        raise UsageError(f"--input {', '.join(unknown)}: the inputs of {path.name} are {known}")
    left = [name for name in names if name not in {spec.name for spec in given}]
    unnamed = [spec for spec in given if not spec.name]
    if len(unnamed) > len(left):
        raise UsageError(f"--input {unnamed[-1]}: the inputs of {path.name} are {known}")
    return {spec.name: spec for spec in given if spec.name} | dict(zip(left, unnamed, strict=False))


def _read(path: Path) -> onnx.ModelProto:
    try:
        model = onnx.load(path, load_external_data=False)
        missing = [part.name for part in onnx_files.data_files(path) if not part.is_file()]
        if not missing:
            onnx.checker.check_model(str(path))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except Exception as error:  # protobuf's errors are untyped
        reason = str(error).strip().split("\n")[0]
        if not reason.startswith(_UNKNOWN):  # a runtime may know the operator
            raise UsageError(f"{path}: truncated or not a valid ONNX file: {reason}") from error
    if missing:
        raise UsageError(f"{path}: its weights are in {missing[0]}, which is not next to it: copy both")
    return model


def _dtype(path: Path, value: onnx.ValueInfoProto) -> Dtype:
    kind = value.type.tensor_type.elem_type
    if kind in _TYPES:
        return _TYPES[kind]
    name = TensorProto.DataType.Name(kind) if kind else str(value.type.WhichOneof("value")).removesuffix("_type")
    part = "; export the part after the tokenizer, which reads numbers" if kind == TensorProto.STRING else ""
    advice = part or f"; export it to read one of {', '.join(_TYPES.values())} and to convert it"
    raise UsageError(f"{path}: input {value.name} is {name}, but benchd supplies tensors of numbers{advice}")


def _sizes(values: Sequence[onnx.ValueInfoProto]) -> dict[str, list[Size]]:
    return {
        value.name: [size.dim_value or size.dim_param or None for size in value.type.tensor_type.shape.dim]
        for value in values
    }


def _batch_axes(sizes: Mapping[str, Sequence[Size]]) -> dict[str, int | None]:
    """Return each input's batch axis, None for an input that a whole batch shares.

    This is the axis that the file calls batch, or leaves open without a name. If there is none, it is the first axis if
    the name of its size is the same in all inputs, otherwise the first open axis.
    """
    lead = next((shape[0] for shape in sizes.values() if shape), None)
    rules: list[Callable[[Size], bool]] = [lambda size: size == lead, lambda size: not isinstance(size, int)]
    if any(_is_batch(size) for shape in sizes.values() for size in shape):
        rules = [_is_batch, lambda size: size is None]
    return {
        name: next((place for rule in rules for place, size in enumerate(shape) if rule(size)), None)
        for name, shape in sizes.items()
    }


def _is_batch(size: Size) -> bool:
    return isinstance(size, str) and ("batch" in size.lower() or size.lower() in ("n", "b", "bs"))


def _inner(sizes: Sequence[Size], axis: int | None) -> list[Size]:
    return [size for place, size in enumerate(sizes) if place != axis]


def _input(
    path: Path, value: onnx.ValueInfoProto, sizes: Sequence[Size], axis: int | None, given: InputSpec | None
) -> InputSpec:
    dtype = _dtype(path, value)
    if given and given.dtype not in (None, dtype) and not given.file:
        raise UsageError(f"--input {given}: input {value.name} of {path.name} is {dtype}, not {given.dtype}")
    if given and given.batch_axis != 0:
        axis = given.batch_axis
    if given and given.file:
        given = described(msgspec.structs.replace(given, dtype=dtype, batch_axis=axis))
    inner = _inner(sizes, axis)
    if given and not _fits(inner, given.shape):
        raise UsageError(_misfit(path, sizes, axis, given))
    shape = given.shape if given else [size if isinstance(size, int) else 0 for size in inner]
    spec = msgspec.structs.replace(given or InputSpec(), name=value.name, shape=shape, batch_axis=axis)
    if 0 in shape:
        example = msgspec.structs.replace(spec, shape=[size or 1 for size in shape], dtype=dtype)
        raise UsageError(
            f"{path}: input {value.name} is {_text(inner)} after the batch; give it as in --input {example}"
        )
    return typed(spec, dtype)


def _misfit(path: Path, sizes: Sequence[Size], axis: int | None, given: InputSpec) -> str:
    """Return how the sizes on the command line differ from the file's."""
    inner = _inner(sizes, axis)
    if axis is not None and _fits(sizes, given.shape) and not given.file:
        batch = given.shape[axis]
        without = msgspec.structs.replace(given, shape=_inner(given.shape, axis))
        return f"--input {given}: omit the batch: --input {without} --batch-sizes {batch}"
    after = " after the batch" if axis is not None else ""
    return f"--input {given}: {path.name} expects {_text(inner)}{after}, not {_text(given.shape)}"


def _fits(own: Sequence[Size], given: Sequence[int]) -> bool:
    pairs = zip(own, given, strict=False)
    return len(own) == len(given) and all(size == given_size or not isinstance(size, int) for size, given_size in pairs)


def _batch_size(path: Path, sizes: Mapping[str, Sequence[Size]], inputs: Sequence[InputSpec]) -> int | None:
    places = {spec.name: spec.batch_axis for spec in inputs}
    batches = {name: sizes[name][place] for name, place in places.items() if place is not None}
    fixed = {name: size for name, size in batches.items() if isinstance(size, int)}
    if len(set(fixed.values())) > 1:
        sizes_text = ", ".join(f"{name} {size}" for name, size in fixed.items())
        raise UsageError(
            f"{path}: its inputs have different batch sizes ({sizes_text}); mark the batch with N, as in 2xNx8"
        )
    return next(iter(fixed.values()), None)


def _text(sizes: Sequence[Size]) -> str:
    return "x".join(str(size) if isinstance(size, int) and size else "?" for size in sizes) or "one number"
