"""A user's own ONNX file, written from the text of its graph."""

import onnx
import onnx.parser

DOMAINS = '"here" : 1, "com.microsoft" : 1, "ai.onnx.ml" : 3'


def written(folder, graph, opset=20):
    """Write the graph to net.onnx in the folder; return its path."""
    path = folder / "net.onnx"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : {opset}, {DOMAINS}]> {graph}'), path)
    return path
