"""The backends, one file each, named as in benchd.daemon.records. A backend turns a built module into a callable.

A backend's module has `load(source, precision, device, example) -> LoadedModel`, whose `run` takes the tensors of an
example as positional arguments; it raises Unsupported with the reason if it cannot run, and never falls back to a
different one. A backend that runs a file also has `file(source, precision, device, batch)`, which returns that file,
created if necessary, so that exporting and loading are timed separately, and `packages(loaded)`, the packages needed to
run it where it is deployed, with their versions. Its row is in benchd.daemon.runtimes.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from benchd.daemon.errors import Unsupported
from benchd.daemon.records import RuntimeFacts, Variant
from benchd.daemon.runtimes import FILE_BACKENDS, RUNTIMES
from benchd.daemon.worker.source import Source
from benchd.daemon.worker.structures import Batch, Tensors, spread
from benchd.exporters.artifacts import Artifact


class LayerRun(NamedTuple):
    """A layer in one run, named by the runtime: its operator and, if known, the file's nodes that it covers."""

    name: str
    ms: float
    kind: str = ""
    covers: Sequence[str] = ()


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run: `run` maps a batch on `device`, its floats as `dtype`, to the model's answer.

    For every catalogued model, the answer is a Tensor. In checks, a model that draws random numbers gets them as an
    additional argument. `module` is the nn.Module whose inner spikes a check may observe, None if they are not visible.
    `taken` is the GPU memory, in bytes, that loading and the first runs took in a runtime other than torch, or why it
    is unknown. `layer_times`, for a runtime that times its own layers, takes a number of runs and the tensors of a
    batch on `device`, and returns each run's layers. `bind` prepares runs that read a batch in place, before the clock
    starts; None for a runtime that reads inputs from any address at no cost. `reuse` makes each further run overwrite
    the outputs of the run before; None for a runtime that allocates them or copies them from a device.
    """

    run: Callable[..., Any]
    dtype: torch.dtype
    device: torch.device
    module: nn.Module | None
    runtime: RuntimeFacts | None = None
    taken: int | str = 0
    layer_times: Callable[..., list[list[LayerRun]]] | None = None
    bind: Callable[[Batch], None] | None = None
    reuse: Callable[[], None] | None = None


def prepare(variant: Variant, source: Source, device: torch.device, batch: int) -> None:
    """Create the variant's file, if it runs one."""
    if variant.backend in FILE_BACKENDS:
        file(variant, source, device, batch)


def file(variant: Variant, source: Source, device: torch.device, batch: int) -> Artifact:
    """Return the ONNX file that a variant in FILE_BACKENDS runs, exporting it if it does not exist."""
    artifact: Artifact = _module(variant).file(source, variant.precision, device, batch)
    return artifact


def load(variant: Variant, source: Source, device: torch.device, example: Batch) -> LoadedModel:
    """Return the source, loaded in the variant's backend; `example` is one batch on the CPU, with floats in float32."""
    takes_lengths = RUNTIMES[variant.backend].takes_lengths and not variant.needs_torchao
    if isinstance(example, Tensors) and example.lengths and not takes_lengths:
        able = ", ".join(name for name, runtime in RUNTIMES.items() if runtime.takes_lengths)
        raise Unsupported(f"{variant.label} runs a single size: pad the items to one length, or use {able}")
    loaded: LoadedModel = _module(variant).load(source, variant.precision, device, example)
    return replace(loaded, run=spread(loaded.run)) if isinstance(example, Tensors) else loaded


def packages(variant: Variant, loaded: LoadedModel) -> dict[str, str]:
    """Return the packages, besides numpy, that run the file of a FILE_BACKENDS variant, with the installed versions."""
    versions: dict[str, str] = _module(variant).packages(loaded)
    return versions


def _module(variant: Variant) -> ModuleType:
    name = "torchao" if variant.needs_torchao else variant.backend
    return importlib.import_module(f"benchd.daemon.worker.backends.{name}")
