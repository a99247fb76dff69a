"""The inputs of a user's model: the syntax of `--input`, the ranges of random values, and input files; torch-free."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from benchd.daemon.errors import UsageError, unknown
from benchd.daemon.machine.sysfs import memory_bytes
from benchd.daemon.measuring import user_python
from benchd.daemon.records import DTYPES, Dtype, InputSpec
from benchd.exporters.artifacts import sha256_of

SYNTAX = "[NAME=][TYPE:]SIZES[:LOW-HIGH], [NAME=][TYPE:](SIZES)=VALUE or [NAME=][TYPE:]@FILE"
EXAMPLES = "3x224x224, ids=int64:16:0-999, rate=int64:()=16000 or x=@x.npy"
GIVING = "--input NAME=TYPE:SIZES:LOW-HIGH or NAME=@FILE"
"""The way to give a range or a file, for messages about randomly drawn inputs."""
SAMPLES: tuple[Dtype, ...] = ("uint8", "int8", "uint16", "int16")
"""The types of bytes and audio samples, whose full range is used."""

FILES_OF_SAMPLES = (".npz", ".safetensors")

_NUMBER = r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"
_SIZES = r"(?:\d+|N)(?:x(?:\d+|N))*"
# the name is the shortest match, possibly empty: names in ONNX files may contain any characters, as in `x:0`
_INPUT = re.compile(
    r"(?:(?P<name>.+?)=)??(?=.)(?:(?P<type>[a-z]\w*):)?"
    rf"(?P<shared>\()?(?:@(?P<file>[^()]+)|(?P<sizes>{_SIZES})?)(?(shared)\))"
    rf"(?::(?P<low>{_NUMBER})(?:-|\.\.)(?P<high>{_NUMBER})|(?(shared)=(?P<value>{_NUMBER})|(?!)))?"
)


def are_samples(text: str) -> bool:
    """Return whether `text` refers to the user's own inputs: a file of arrays, or a function in a Python file."""
    return text.endswith(FILES_OF_SAMPLES) or ".py:" in text


def named_metric(text: str) -> tuple[str, Literal["higher", "lower"]]:
    """Return a metric's FILE.py:FUNCTION and whether higher or lower values are better, by default higher."""
    place, _, better = text.rpartition(":")
    if better in ("higher", "lower") and ".py:" in place:
        return place, "lower" if better == "lower" else "higher"
    return text, "higher"


def of_samples(option: str, text: str) -> str:
    """Return a file of inputs or FILE.py:FUNCTION with its full path; raise UsageError if it is neither."""
    if text.endswith(FILES_OF_SAMPLES):
        if not Path(text).is_file():
            raise UsageError(f"{option} {text}: no such file")
        return str(Path(text).resolve())
    path, _, function = text.rpartition(":")
    if not path.endswith(".py") or not function.isidentifier():
        forms = "FILE.npz, FILE.safetensors or " if option != "--metric" else ""
        raise UsageError(f"{option} {text}: expected {forms}FILE.py:FUNCTION")
    if not Path(path).is_file():
        raise UsageError(f"{option} {text}: {path}: no such file")
    user_python.refuse(Path(path), function, option)
    return f"{Path(path).resolve()}:{function}"


def of_metric(text: str) -> str:
    """Return FILE.py:FUNCTION:higher or :lower with the full path; raise UsageError if there is no such function."""
    place, better = named_metric(text)
    return f"{of_samples('--metric', place)}:{better}"


def inputs_of(texts: Sequence[str]) -> list[InputSpec]:
    """Return the inputs, without batch axes, for texts such as `3x224x224`, `ids=int64:16:0-999` and `scale=float32:`.

    Inputs without a name come first, as in a call. Raises UsageError for invalid syntax and for a repeated name.
    """
    specs = [_input(text) for text in texts]
    names = [spec.name for spec in specs if spec.name]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise UsageError(f"--input {twice}: given twice")
    return sorted(specs, key=lambda spec: bool(spec.name))


def _input(text: str) -> InputSpec:
    match = _INPUT.fullmatch(text)
    sizes = (match["sizes"] or "").split("x") if match and match["sizes"] else []
    if not match or sizes.count("N") > (0 if match["shared"] else 1):
        raise UsageError(f"--input {text}: expected {SYNTAX}, as in {EXAMPLES}")
    known = {str(dtype): dtype for dtype in DTYPES}
    if match["type"] and match["type"] not in known:
        raise unknown("type of an input", match["type"], known)
    if any(size != "N" and not int(size) for size in sizes):
        raise UsageError(f"--input {text}: every size must be at least 1")
    low, high = match["low"] or match["value"], match["high"] or match["value"]
    return InputSpec(
        name=(match["name"] or "").strip(),
        dtype=known[match["type"]] if match["type"] else None,
        shape=[int(size) for size in sizes if size != "N"],
        batch_axis=None if match["shared"] else sizes.index("N") if "N" in sizes else 0,
        span=(_number(low), _number(high)) if low and high else None,
        file=match["file"] or "",
    )


def _number(text: str) -> int | float:
    return int(text) if re.fullmatch(r"-?\d+", text) else float(text)


def typed(spec: InputSpec, dtype: Dtype | None) -> InputSpec:
    """Return the input with its type, by default `dtype`.

    Raises UsageError for a span outside the type's range, and for sizes that exceed this machine's memory.
    """
    spec = msgspec.structs.replace(spec, dtype=spec.dtype or dtype)
    if spec.dtype:
        _refuse_large(spec, math.prod(spec.shape) * _bits(spec.dtype) // 8)
    if spec.span and spec.dtype:
        least, most = limits(spec.dtype)
        kind, (low, high) = "number" if isinstance(most, float) else "whole number", spec.span
        if not least <= low <= high <= most or not {type(most), int} >= {type(low), type(high)}:
            within = f"from {least} to {most}"
            words = f"a {kind} {within}" if spec.is_constant else f"two {kind}s {within}, the lower one first"
            raise UsageError(f"--input {spec}: give {words}")
    return spec


def of_module(specs: Sequence[InputSpec]) -> list[InputSpec]:
    """Return a module's inputs, as float32 unless they specify a different type or their files contain integers."""
    return [described(typed(spec, None if spec.file else DTYPES[0])) for spec in specs]


def _refuse_large(spec: InputSpec, size: int) -> None:
    """Raise UsageError for an input that is larger than this machine's memory."""
    if size > memory_bytes():
        has = f"this machine has {memory_bytes() / 2**30:.3g} GiB of memory"
        raise UsageError(f"--input {spec}: it takes {size / 2**30:.3g} GiB, but {has}")


def limits(dtype: Dtype) -> tuple[int | float, int | float]:
    """Return the smallest and the largest number of a type; for floats, the largest finite ones of either sign."""
    if dtype == "bool":
        return 0, 1
    if "float" in dtype:
        most = {"float16": 65504.0, "float64": 1.7e308}.get(dtype, 3.3e38)
        return -most, most
    is_signed = not dtype.startswith("u")
    most = 2 ** min(_bits(dtype) - is_signed, 63) - 1  # numbers are drawn as int64
    return -(most + 1) if is_signed else 0, most


def _bits(dtype: Dtype) -> int:
    return 8 if dtype == "bool" else int(re.sub(r"\D", "", dtype))


def spanned(spec: InputSpec, rows: tuple[int, int] | None = None) -> InputSpec:
    """Return the input with the span that it is drawn from, unless the user or its file defines one.

    `rows` are the first and the last index of the smallest table that it reads. Bytes and samples that do not index a
    table use the full range of their type; other integers, and all masks, are 0 and 1.
    """
    if spec.span or spec.file or spec.dtype in (None, "bool") or "float" in spec.dtype:
        return spec
    alone = limits(spec.dtype) if spec.dtype in SAMPLES else (0, 1)
    return msgspec.structs.replace(spec, span=(0, 1) if is_mask(spec.name) else rows or alone)


def is_mask(name: str) -> bool:
    """Return whether an input is a mask of 0 and 1, judging by its name."""
    return "mask" in name.lower()


def described(spec: InputSpec) -> InputSpec:
    """Return the input with the type, the sizes and the hash of its file; raise UsageError if the file does not fit."""
    if not spec.file:
        return spec
    numbers = numbers_of(spec)
    items, shape = (0, numbers.shape) if spec.batch_axis is None else (len(numbers), numbers.shape[1:])
    # floats count as float32, although numpy's default is float64
    as_held = DTYPES[0] if numbers.dtype.kind == "f" else str(numbers.dtype)
    dtype = spec.dtype or next((name for name in DTYPES if name == as_held), None)
    if dtype is None:
        raise UsageError(f"--input {spec}: its numbers are {numbers.dtype}; use one of {', '.join(DTYPES)}")
    return msgspec.structs.replace(spec, dtype=dtype, shape=list(shape), items=items, sha256=sha256_of(Path(spec.file)))


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments from named values; `batch.audio` is the entry `audio` of the dict `batch`."""
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        *outer, last = name.split(".")
        inner = arguments
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return arguments


def numbers_of(spec: InputSpec) -> Any:
    """Return the array in an input's file, items first unless the batch shares it, converted to the given type.

    Raises UsageError for a file that is missing or damaged, or contains numbers that the type cannot represent.
    """
    import numpy as np  # noqa: PLC0415 - plans without a file need none

    try:
        mapped = np.lib.format.open_memmap(spec.file, mode="r")
        _refuse_large(spec, mapped.nbytes)
        array = np.array(mapped)
    except OSError as error:
        raise UsageError(f"--input {spec}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"--input {spec}: not a complete .npy file of numbers ({error})") from error
    if array.dtype.kind not in "biuf" or np.isnan(array).any():
        raise UsageError(f"--input {spec}: its {array.dtype} array contains values that are not real numbers")
    if spec.batch_axis is not None and not array.shape[:1] > (0,):
        raise UsageError(f"--input {spec}: the first axis is the items, so {list(array.shape)} contains none")
    if not spec.dtype or spec.dtype in ("bfloat16", str(array.dtype)):
        return np.require(array, requirements=["C", "W"])
    with np.errstate(invalid="ignore"):  # reported below
        as_read = array.astype(spec.dtype)
    if "float" not in spec.dtype and not np.array_equal(as_read, array):
        raise UsageError(f"--input {spec}: its numbers are {array.dtype}, and some do not fit {spec.dtype}")
    return as_read
