"""The inputs of a user's ONNX file, read without torch: names, types and sizes; and each reason to refuse it."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx import TensorProto

from benchd.daemon.errors import UsageError
from benchd.daemon.records import Dtype, InputSpec, Precision

_TYPES: dict[int, Dtype] = {
    TensorProto.FLOAT: "float32",
    TensorProto.FLOAT16: "float16",
    TensorProto.DOUBLE: "float64",
    TensorProto.INT64: "int64",
    TensorProto.INT32: "int32",
    TensorProto.INT16: "int16",
    TensorProto.INT8: "int8",
    TensorProto.UINT8: "uint8",
    TensorProto.BOOL: "bool",
}
_FLOATS: dict[int, Precision] = {TensorProto.FLOAT: "fp32", TensorProto.FLOAT16: "fp16", TensorProto.BFLOAT16: "bf16"}
_PRODUCTS = ("Conv", "MatMul", "Gemm", "ConvTranspose")
_INTEGER = ("QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger")
_DOMAINS = ("", "ai.onnx")


def reads(path: Path, given: Sequence[InputSpec]) -> tuple[list[InputSpec], int | None]:
    """Return the inputs of the file, and its fixed batch size, None if it accepts any.

    Open sizes are those of `given`, whose inputs without a name are matched by position. Raises UsageError for an
    unreadable file, for operators that are not part of ONNX, and for inputs that do not fit.
    """
    values = _values(path, _read(path).graph)
    by_name = _by_name(path, [value.name for value in values], given)
    sizes = {value.name: _sizes(path, value) for value in values}
    inputs = [_input(path, value, sizes[value.name], by_name.get(value.name)) for value in values]
    return inputs, _batch_size(path, {name: first for name, (first, *_) in sizes.items() if first})


def open_inputs(path: Path) -> list[str]:
    """Return the names of the inputs that leave more than the batch size open."""
    return [value.name for value in _values(path, _read(path).graph) if 0 in _sizes(path, value)[1:]]


def precision(path: Path) -> Precision:
    """Return what the file computes in: the type of most of its products' weights, which inputs need not have.

    Without products the type of its tables counts, and without these that of its first input of floats. Raises
    UsageError for bfloat16.
    """
    graph = _read(path).graph
    if _is_quantised(graph.node):
        return "int8"
    inputs = [value.type.tensor_type.elem_type for value in _values(path, graph)]
    first = [kind for kind in inputs if kind in _FLOATS][:1]
    kinds = _weights(graph, _PRODUCTS) or _weights(graph, ("Gather",)) or first or [TensorProto.FLOAT]
    found = _FLOATS[Counter(kinds).most_common(1)[0][0]]
    if found == "bf16":
        raise UsageError(f"{path}: its weights are BFLOAT16; export it in float32 or float16")
    return found


def _weights(graph: onnx.GraphProto, operators: Sequence[str]) -> list[int]:
    """Return the type of the stored floats that each node of these operators reads."""
    stored = {tensor.name: tensor.data_type for tensor in graph.initializer}
    stored |= {node.output[0]: node.attribute[0].t.data_type for node in graph.node if node.op_type == "Constant"}
    read = [name for node in graph.node if node.op_type in operators for name in node.input[:2]]
    return [stored[name] for name in read if stored.get(name) in _FLOATS]


def _is_quantised(nodes: Sequence[onnx.NodeProto]) -> bool:
    """Return whether a product reads dequantised numbers, or is an operator of quantised ones."""
    dequantised = {output for node in nodes if node.op_type == "DequantizeLinear" for output in node.output}
    return any(
        node.op_type in _INTEGER or (node.op_type in _PRODUCTS and dequantised & set(node.input[:2])) for node in nodes
    )


def _values(path: Path, graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """Return the inputs that are not stored in the file."""
    stored = {tensor.name for tensor in graph.initializer}
    values = [value for value in graph.input if value.name not in stored]
    if not values:
        raise UsageError(f"{path}: it has no inputs, so there is nothing to measure it with")
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
        onnx.checker.check_model(str(path))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except Exception as error:  # protobuf's own have no types
        reason = str(error).strip().split("\n")[0]
        raise UsageError(f"{path}: truncated or not a valid ONNX file: {reason}") from error
    outside = [tensor.name for tensor in model.graph.initializer if tensor.data_location == TensorProto.EXTERNAL]
    if outside:  # anything outside the file's hash could change between two runs
        raise UsageError(
            f"{path}: weights such as {outside[0]} are in another file; save the model with its weights inside"
        )
    foreign = sorted({node.domain for node in model.graph.node} - {*_DOMAINS, *(f.domain for f in model.functions)})
    if foreign:
        raise UsageError(f"{path}: operators of {', '.join(foreign)} are not part of ONNX; export it without them")
    return model


def _dtype(path: Path, value: onnx.ValueInfoProto) -> Dtype:
    kind = value.type.tensor_type.elem_type
    if kind not in _TYPES:
        name = TensorProto.DataType.Name(kind)
        raise UsageError(f"{path}: input {value.name} is {name}; it must be a tensor of numbers")
    return _TYPES[kind]


def _sizes(path: Path, value: onnx.ValueInfoProto) -> list[int]:
    """Return the sizes in the file, the batch size first; 0 for an open one."""
    sizes = [size.dim_value if size.HasField("dim_value") else 0 for size in value.type.tensor_type.shape.dim]
    _dtype(path, value)  # text has no sizes either, but is refused as text
    if not sizes:
        raise UsageError(f"{path}: input {value.name} is a scalar; export it with the batch as first dimension")
    return sizes


def _input(path: Path, value: onnx.ValueInfoProto, sizes: Sequence[int], given: InputSpec | None) -> InputSpec:
    dtype, (batch, *inner) = _dtype(path, value), sizes
    if given and given.dtype not in (None, dtype):
        raise UsageError(f"--input {given}: input {value.name} of {path.name} is {dtype}, not {given.dtype}")
    shape = given.shape if given else inner
    if given and len(shape) == len(sizes) and shape[0] == (batch or shape[0]) and _fits(inner, shape[1:]):
        without = InputSpec(given.name, given.dtype, shape[1:])
        raise UsageError(f"--input {given}: omit the batch: --input {without} --batch-sizes {shape[0]}")
    if given and not _fits(inner, shape):
        raise UsageError(f"--input {given}: {path.name} expects {_text(inner)} after the batch, not {_text(shape)}")
    spec = InputSpec(value.name, dtype, list(shape))
    if 0 in shape:
        example = InputSpec(value.name, None if dtype == "float32" else dtype, [size or 1 for size in inner])
        raise UsageError(
            f"{path}: input {value.name} is {_text(inner)} after the batch; give it as in --input {example}"
        )
    return spec


def _fits(own: Sequence[int], given: Sequence[int]) -> bool:
    return len(own) == len(given) and all(size in (0, asked) for size, asked in zip(own, given, strict=True))


def _batch_size(path: Path, fixed: dict[str, int]) -> int | None:
    if len(set(fixed.values())) > 1:
        sizes = ", ".join(f"{name} {size}" for name, size in fixed.items())
        raise UsageError(
            f"{path}: its inputs have different first sizes ({sizes}); export it with the batch as first dimension"
        )
    return next(iter(fixed.values()), None)


def _text(sizes: Sequence[int]) -> str:
    return "x".join(str(size or "?") for size in sizes) or "one number"
