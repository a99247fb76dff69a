"""Which file of a model is meant: what it is made of, and which form of the scan suits who runs it. Needs no ONNX."""

from collections.abc import Mapping
from typing import Any, Literal

from benchd.exporters import code

Precision = Literal["fp32", "fp16"]
Form = Literal["scan", "two_level"]
Target = Literal["cpu", "cuda", "tensorrt"]

PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16")
FORMS: tuple[Form, ...] = ("scan", "two_level")
# TensorRT 10.3 reads 9 to 20; from 19 on, Pad and AveragePool have no CUDA kernel in ONNX Runtime before 1.25, and each
# of them would cross to the CPU and back (microsoft/onnxruntime issues 26393 and 27729)
OPSET = 18
# whose version shows in the file; torchvision brings the layers of the ResNets
EXPORTERS = ("torch", "torchvision", "timm", "onnx", "onnx-ir", "onnxscript")
ONLY_OUTPUT = "outputs"  # the name in the file of what a model answers as one tensor

# measured on a CPU, where one Scan node keeps its state in the cache; the others launch kernels for each turn of a loop
_BEST: dict[Target, Form] = {"cpu": "scan", "cuda": "two_level", "tensorrt": "two_level"}


def form(options: Mapping[str, Any], target: Target) -> Form | None:
    """Return the form of the scan for this target, None for a model that has none; `options` are all of the model."""
    if "scan" not in options:
        return None
    return "two_level" if options["scan"] == "two_level" else _BEST[target]


def onnx_facts(
    model: str,
    options: Mapping[str, Any],
    weights_sha256: str,
    precision: Precision,
    batch: int | None,
    form: Form | None,
) -> dict[str, Any]:
    """Return what an ONNX file is made of: the facts of its key in `benchd.exporters.artifacts.Store`.

    `batch` None is a dynamic batch. What makes the file is among them: `code_sha256` of benchd, and `versions`, which a
    file from another machine need not share.
    """
    return {
        "model": model,
        "precision": precision,
        "format": "onnx",
        "options": {name: value for name, value in options.items() if name != "scan"},
        "weights_sha256": weights_sha256,
        "batch": "dynamic" if batch is None else batch,
        "form": form,
        "opset": OPSET,
        "code_sha256": code.sha256(),
        "versions": code.versions(*EXPORTERS),
    }
