"""The runtimes: one file each, one line in the table. A backend turns a built module into something that runs.

A backend's module has `load(module, precision, device, example) -> Loaded`; it raises Unsupported with the reason
where it cannot run, and never replaces itself by another.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchd.daemon.errors import Unsupported
from benchd.daemon.records import Variant

BACKENDS = {
    "eager": "benchd.daemon.worker.backends.eager",
    "compile": "benchd.daemon.worker.backends.compile",
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


def load(variant: Variant, module: nn.Module, device: torch.device, example: Tensor) -> Loaded:
    """Return `module` loaded in the variant's backend; `example` is one batch of float32 images on the CPU."""
    if variant.backend not in BACKENDS:
        raise Unsupported(f"the {variant.backend} backend is not part of this version")
    backend = importlib.import_module(BACKENDS[variant.backend])
    loaded: Loaded = backend.load(module, variant.precision, device, example)
    return loaded
