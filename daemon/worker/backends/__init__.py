"""The runtimes: one file each, one line in the table. A backend turns a built module into something that runs.

A backend's module has `load(source, precision, device, example) -> Loaded`; it raises Unsupported with the reason
where it cannot run, and never replaces itself by another. One that runs a file has `prepare(source, precision, device,
batch)` too, which makes that file, so that exporting and loading are timed apart.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn

from benchd.daemon.records import RuntimeFacts, Variant
from benchd.daemon.worker.source import Source

BACKENDS = {
    "eager": "benchd.daemon.worker.backends.eager",
    "compile": "benchd.daemon.worker.backends.compile",
    "cudagraph": "benchd.daemon.worker.backends.cudagraph",
    "onnxruntime": "benchd.daemon.worker.backends.onnxruntime",
    "tensorrt": "benchd.daemon.worker.backends.tensorrt",
}


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to run: `run` maps images of `dtype` on `device` to its output.

    A model that draws random numbers takes them as a further argument in checks. `module` is the nn.Module whose inner
    spikes a check may watch, None where they are no outputs.
    """

    run: Callable[..., Tensor]
    dtype: torch.dtype
    device: torch.device
    module: nn.Module | None
    runtime: RuntimeFacts | None = None


def prepare(variant: Variant, source: Source, device: torch.device, batch: int) -> None:
    """Make the file that the variant runs, where it runs one."""
    make = getattr(_module(variant), "prepare", None)
    if make:
        make(source, variant.precision, device, batch)


def load(variant: Variant, source: Source, device: torch.device, example: Tensor) -> Loaded:
    """Return the source loaded in the variant's backend; `example` is one batch of float32 images on the CPU."""
    loaded: Loaded = _module(variant).load(source, variant.precision, device, example)
    return loaded


def _module(variant: Variant) -> ModuleType:
    return importlib.import_module(BACKENDS[variant.backend])
