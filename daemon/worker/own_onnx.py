"""A user's own ONNX file: what it reads, and itself in ONNX Runtime on the CPU as the reference of its variants."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto
from torch import Tensor, nn

from benchd.daemon.errors import Unsupported, UsageError
from benchd.daemon.records import Precision
from benchd.exporters import sessions
from benchd.exporters.artifacts import Artifact, Metadata, sha256_of
from benchd.exporters.support import OnnxFileError

_TYPES: dict[int, torch.dtype] = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.FLOAT16: torch.float16,
    TensorProto.DOUBLE: torch.float64,
    TensorProto.INT64: torch.int64,
    TensorProto.INT32: torch.int32,
    TensorProto.UINT8: torch.uint8,
    TensorProto.BOOL: torch.bool,
}
_PRECISIONS: dict[torch.dtype, Precision] = {torch.float32: "fp32", torch.float16: "fp16"}
_DOMAINS = ("", "ai.onnx")


class OwnFile(nn.Module):
    """The file as a module, on the CPU and without graph optimisation: what its variants are compared with.

    `shapes` gives sizes by input where the file leaves them open. Raises UsageError for a file that cannot be read, has
    operators that are not ONNX's own, or whose inputs do not fit.
    """

    def __init__(self, path: Path, shapes: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        (self.input_name, self.dtype, self._shape), *others = _inputs(path, shapes)
        self.path, self.sha256 = path, sha256_of(path)
        self._names = [self.input_name, *(name for name, _, _ in others)]
        self.input_shape = self._shape[1:]
        draw = torch.Generator().manual_seed(0)
        self.extras = tuple(_random(shape, dtype, draw) for _, dtype, shape in others)
        self._session: Any = None

    @property
    def batch_size(self) -> int:
        """Return the first size of the first input."""
        return self._shape[0]

    def __deepcopy__(self, memo: object) -> "OwnFile":
        return self  # nothing in it changes

    def forward(self, images: Tensor) -> Tensor:
        """Return the first output for the first input, of any dtype; the others are `extras`, the same every time."""
        self._session = self._session or sessions.open_session(self.path, optimised=False)
        values = (images.to(self.dtype), *self.extras)
        feeds = {name: value.cpu().numpy() for name, value in zip(self._names, values, strict=True)}
        first: np.ndarray = self._session.run(None, feeds)[0]
        return torch.from_numpy(first)


def _random(shape: Sequence[int], dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    """Return standard normal numbers, or 0 and 1 for a type of whole numbers: an index then fits any table."""
    if dtype.is_floating_point:
        return torch.randn(tuple(shape), generator=draw).to(dtype)
    return torch.randint(2, tuple(shape), generator=draw).to(dtype)


def artifact(path: Path, precision: Precision) -> Artifact:
    """Return the user's file as an artifact; raise Unsupported where it computes in another precision."""
    (_, dtype, _), *_ = _inputs(path, {}, require_shapes=False)
    own: Precision = _PRECISIONS.get(dtype, "fp32")
    if precision != own:
        suffix = "" if own == "fp32" else f"-{own}"
        raise Unsupported(f"{path.name} is written in {own}; ask for onnxruntime{suffix} or tensorrt{suffix}")
    written = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc).isoformat(timespec="seconds")
    metadata = Metadata(
        bytes=path.stat().st_size,
        sha256=sha256_of(path),
        made_at=written,
        made_on="",
        versions={},
        facts={"format": "onnx", "model": path.stem, "precision": own},
    )
    return Artifact(key=path.name, path=path, metadata=metadata, used_ns=0)


Input = tuple[str, torch.dtype, tuple[int, ...]]


def _inputs(path: Path, shapes: Mapping[str, Sequence[int]], *, require_shapes: bool = True) -> list[Input]:
    """Return name, type and shape of each input that is not stored in the file."""
    model = _read(path)
    stored = {tensor.name for tensor in model.graph.initializer}
    values = [value for value in model.graph.input if value.name not in stored]
    if not values:
        raise UsageError(f"{path}: it has no inputs, so there is nothing to measure it with")
    unknown = sorted(set(shapes) - {value.name for value in values})
    if unknown:
        names = ", ".join(value.name for value in values)
        raise UsageError(f"--input {', '.join(unknown)}: the inputs of {path.name} are {names}")
    return [_input(path, value, shapes.get(value.name), require_shapes) for value in values]


def _read(path: Path) -> onnx.ModelProto:
    try:
        model = onnx.load(path, load_external_data=False)
        onnx.checker.check_model(str(path))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except Exception as error:  # protobuf's own have no types
        reason = str(OnnxFileError(error)).strip().split("\n")[0]
        raise UsageError(f"{path}: truncated, or no valid ONNX file: {reason}") from error
    outside = [tensor.name for tensor in model.graph.initializer if tensor.data_location == TensorProto.EXTERNAL]
    if outside:  # what the file's hash does not cover could change between two runs
        raise UsageError(f"{path}: weights such as {outside[0]} lie in another file; save it with them inside")
    foreign = sorted({node.domain for node in model.graph.node} - {*_DOMAINS, *(f.domain for f in model.functions)})
    if foreign:
        raise UsageError(f"{path}: operators of {', '.join(foreign)} are not ONNX's own; export it without them")
    return model


def _input(path: Path, value: onnx.ValueInfoProto, given: Sequence[int] | None, require_shape: bool) -> Input:
    tensor = value.type.tensor_type
    if tensor.elem_type not in _TYPES:
        kind = TensorProto.DataType.Name(tensor.elem_type)
        raise UsageError(f"{path}: input {value.name} is {kind}; it must be a tensor of plain numbers")
    sizes = [size.dim_value if size.HasField("dim_value") else 0 for size in tensor.shape.dim]
    shape = list(given or sizes)
    fits = len(shape) == len(sizes) and all(own in (0, size) for own, size in zip(sizes, shape, strict=False))
    if not fits:
        raise UsageError(f"--input {value.name}: {path.name} takes {_text(sizes)}, not {_text(shape)}")
    if require_shape and (not shape or min(shape) < 1):
        example = "x".join(str(size or 1) for size in sizes)
        raise UsageError(f"{path}: input {value.name} is {_text(sizes)}; give it as in --input {value.name}={example}")
    return value.name, _TYPES[tensor.elem_type], tuple(shape)


def _text(sizes: Sequence[int]) -> str:
    return "x".join(str(size or "?") for size in sizes) or "a scalar"
