"""What an ONNX file says about itself without its weights: the names that it reads and answers by."""

from pathlib import Path

import onnx


def names_of(path: Path) -> tuple[list[str], list[str]]:
    """Return the names of the file's inputs and of its outputs, in order."""
    graph = onnx.load(path, load_external_data=False).graph
    held = {tensor.name for tensor in graph.initializer}
    return [value.name for value in graph.input if value.name not in held], [value.name for value in graph.output]
