"""The colours of every chart: a colour is a runtime, a shape a number format; docs/dashboard.md describes both.

They are readable on light and on dark; look.css has those of text, which differ between the two.
"""

from pathlib import Path

from benchd.daemon.records import Precision, Variant

LOOK = Path(__file__).with_name("templates") / "look.css"

GREY, BAD, SHADE = "#808891", "#dd3333", "rgba(200, 90, 0, 0.18)"
OF_RUNTIME = {
    "eager": "#4c8bf5",
    "custom": "#e8710a",
    "tensorrt": "#12a594",
    "onnxruntime": "#d6409f",
    "openvino": "#5b6b7f",
    "compile": "#8e6cef",
    "cudagraph": "#b8860b",
}
COLOURS = tuple(OF_RUNTIME.values())
"""For what is no variant, in this order."""

SHAPES: dict[Precision, str] = {"fp32": "circle", "fp16": "diamond", "bf16": "triangle", "amp": "rect", "int8": "pin"}


def colour(variant: Variant) -> str:
    """Return the colour of a variant: that of our kernels, else of its backend."""
    return OF_RUNTIME["custom" if variant.kernels == "custom" else variant.backend]


def shape(variant: Variant) -> str:
    """Return the shape of a variant's points, by its number format, as Apache ECharts and charts.js name it."""
    return SHAPES[variant.precision]
