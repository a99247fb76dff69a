"""Converts ONNX Runtime answers other than tensors of numbers: strings and maps, as from ai.onnx.ml classifiers."""

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

STRINGS, MAPS = "tensor(string)", "seq(map("


def are_numbers(session: Any) -> bool:
    """Return whether the session returns neither strings nor maps."""
    return not any(value.type == STRINGS or value.type.startswith(MAPS) for value in session.get_outputs())


def numbers(value: Any) -> NDArray[Any]:
    """Return an answer as numbers: strings as their hashes, and maps, one per item, as (items, keys)."""
    array: NDArray[Any] = np.array([list(_sorted(mapping)) for mapping in value]) if isinstance(value, list) else value
    if array.dtype.kind not in "OU":
        return array
    return np.array([zlib.crc32(str(text).encode()) for text in array.flat], np.int64).reshape(array.shape)


def _sorted(mapping: Mapping[Any, Any]) -> Iterator[Any]:
    """Yield the values sorted by their keys, which are the same for all items."""
    return (mapping[key] for key in sorted(mapping))
