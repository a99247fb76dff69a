"""The colours of all charts: colours stand for runtimes, shapes for number formats; see docs/dashboard.md.

They are readable in light and dark mode; look.css contains the text colours, which differ between the modes.
"""

from pathlib import Path

from benchd.daemon.records import Variant
from benchd.daemon.runtimes import RUNTIMES, Precision

LOOK = Path(__file__).with_name("templates") / "look.css"

GREY, BAD, SHADE = "#808891", "#dd3333", "rgba(200, 90, 0, 0.18)"
OF_RUNTIME = {"custom": "#e8710a"} | {name: runtime.colour for name, runtime in RUNTIMES.items()}
SERIES = ("#2b7f9e", "#a0622d", "#5d8a3c", "#7fb2c6", "#c49a76", "#9dbb80")
"""The colours of series that are not variants, in this order; they differ from those of the runtimes."""

SHAPES: dict[Precision, str] = {"fp32": "circle", "fp16": "diamond", "bf16": "triangle", "amp": "rect", "int8": "pin"}


def colour(variant: Variant) -> str:
    """Return a variant's colour: that of our kernels, if it uses them, else that of its backend."""
    return OF_RUNTIME["custom" if variant.kernels == "custom" else variant.backend]


def shape(variant: Variant) -> str:
    """Return the shape of a variant's points by its number format, named as in Apache ECharts and charts.js."""
    return SHAPES[variant.precision]
