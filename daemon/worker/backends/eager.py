"""Plain PyTorch, operator by operator."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchd.daemon.runtimes import Precision
from benchd.daemon.worker.backends import LoadedModel
from benchd.daemon.worker.source import Source
from benchd.daemon.worker.structures import Batch
from benchd.exporters import doubled

DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "amp": torch.float32,
    "int8": torch.float32,  # for inputs, and everything that is not quantised
}


def load(source: Source, precision: Precision, device: torch.device, example: Batch) -> LoadedModel:
    """Return the module on `device` in `precision`; amp keeps float32 weights and inputs."""
    module = doubled.copied(source.module).to(device, DTYPES[precision])
    return LoadedModel(_autocast(module, device) if precision == "amp" else module, DTYPES[precision], device, module)


def amp_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which autocast computes: float16 on CUDA, bfloat16 on a CPU."""
    return torch.float16 if device.type == "cuda" else torch.bfloat16


def _autocast(module: nn.Module, device: torch.device) -> Callable[..., Any]:
    def run(*inputs: Tensor) -> Any:
        with torch.autocast(device.type, amp_dtype(device)):
            return module(*inputs)

    return run
