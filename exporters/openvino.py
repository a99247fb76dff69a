"""How OpenVINO is asked to compile a file, by benchd and by the lines of LOAD.md alike. Needs no OpenVINO."""

FORMATS = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}
"""Its name of what a precision computes in; beside int8 it chooses the format of the other layers itself."""


def settings(precision: str) -> dict[str, str]:
    """Return what makes one inference at a time fastest in this precision; the number of threads is to be added."""
    hint = {"INFERENCE_PRECISION_HINT": FORMATS[precision]} if precision in FORMATS else {}
    return hint | {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1"}
