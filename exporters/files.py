"""The identity of a model's file: its sources, and the form of the scan for its target; does not need ONNX."""

import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from benchd.exporters import code, sessions

Precision = Literal["fp32", "fp16", "int8"]
FloatPrecision = Literal["fp32", "fp16"]
Form = Literal["scan", "two_level"]
Target = Literal["cpu", "cpu_without_scan", "cuda", "tensorrt"]
"""The target on which a file runs; some CPU runtimes do not support the Scan node."""

QuantisedFor = Literal["cpu", "avx2", "arm", "tensorrt"]
"""The target of a quantised file: ONNX Runtime on an x86 CPU, on one whose byte products overflow (7-bit weights), or
on any other CPU, whose kernels require int8 with a zero point of 0; or TensorRT, where outputs stay in float."""

PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "int8")
QUANTISED_FOR: tuple[QuantisedFor, ...] = ("cpu", "avx2", "arm", "tensorrt")
FORMS: tuple[Form, ...] = ("scan", "two_level")
# TensorRT 10.3 supports opsets 9 to 20; from 19 on, ONNX Runtime before 1.25 has no CUDA kernels for Pad and
# AveragePool, each of which would copy to the CPU and back (microsoft/onnxruntime issues 26393 and 27729)
OPSET = 18
# packages whose versions affect the file; torchvision provides the layers of the ResNets
EXPORTERS = ("torch", "torchvision", "timm", "onnx", "onnx-ir", "onnxscript")
ONLY_OUTPUT = "outputs"  # the name of the output in the file of a model that returns a single tensor


def form(options: Mapping[str, Any], target: Target) -> Form | None:
    """Return the form of the scan for this target, or None for a model without one; `options` must be complete.

    As measured: on a CPU, a single Scan node keeps its state in the cache; a GPU launches kernels for each of its
    iterations.
    """
    if "scan" not in options:
        return None
    return "scan" if target == "cpu" and options["scan"] != "two_level" else "two_level"


def quantised_for(target: Target) -> QuantisedFor:
    """Return the kind of int8 file for this target: x86 has fast kernels only for uint8 activations."""
    if target not in ("cpu", "cpu_without_scan"):
        return "tensorrt"
    if not is_x86():
        return "arm"
    return "avx2" if overflows() else "cpu"


def is_x86() -> bool:
    """Return whether this machine's CPU is x86."""
    return platform.machine() in ("x86_64", "AMD64")


def overflows(root: Path = Path("/")) -> bool:
    """Return whether this x86 CPU lacks VNNI: it then adds two byte products in 16 bits, which overflow."""
    match = re.search(r"^flags\s*:(.*)$", (root / "proc/cpuinfo").read_text(), re.MULTILINE)
    return not {"avx512_vnni", "avx_vnni"} & set(match[1].split() if match else [])


def onnx_facts(
    model: str,
    options: Mapping[str, Any],
    weights_sha256: str,
    precision: Precision,
    batch: int | None,
    form: Form | None,
) -> dict[str, Any]:
    """Return the facts that determine an ONNX file's key in `benchd.exporters.artifacts.ArtifactStore`.

    `batch` None means a dynamic batch. The facts include what makes the file: `code_sha256` of benchd, and `versions`,
    which may differ for a file from another machine; for an int8 file they include ONNX Runtime, which writes it.
    """
    makers = (*EXPORTERS, *sessions.DISTRIBUTIONS) if precision == "int8" else EXPORTERS
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
        "versions": code.versions(*makers),
    }
