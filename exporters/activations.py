"""The values of a file's inner tensors."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import ModelProto

from benchd.exporters import sessions


def run(
    model: ModelProto, names: Sequence[str], feeds: Sequence[Mapping[str, NDArray[Any]]]
) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield the values of these tensors of `model` for each feed, by name."""
    watched = ModelProto()
    watched.CopyFrom(model)
    del watched.graph.output[:]
    watched.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names)
    with tempfile.TemporaryDirectory() as folder:
        onnx.save(watched, Path(folder) / "watched.onnx")
        session = sessions.open_session(Path(folder) / "watched.onnx", spin=False)
    for feed in feeds:
        yield dict(zip(names, session.run(list(names), dict(feed)), strict=True))
