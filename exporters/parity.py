"""How far an exported file is from its model: both against the model in float64, on the same images.

A wrong graph is wrong on most images, while a spiking model's neuron that fires one step later, as rounding has it,
changes few. So spiking and quantised models are judged by the image in the middle and by their answers.
"""

import copy
from collections.abc import Callable
from typing import Literal

import msgspec
import numpy as np
import torch
from torch import nn

Run = Callable[[torch.Tensor], np.ndarray]

_TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2}  # of the largest absolute output
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


class Parity(msgspec.Struct, frozen=True):
    """What was found; errors are of the file's outputs, `error_share` over the largest absolute output."""

    batch_sizes: list[int]
    images: int
    max_abs_error: float
    error_share: float
    argmax_disagreements: int


class Differs(Exception):
    """The file computes something else than its model; the message gives the figures."""


def compare(
    module: nn.Module,
    run: Run,
    batches: list[torch.Tensor],
    precision: Literal["fp32", "fp16"],
    judged_by: Literal["outputs", "codes"],
) -> Parity:
    """Return how `run` agrees with `module` on batches of its float32 inputs; raise Differs where it does not."""
    exact = _outputs(copy.deepcopy(module).double(), batches)
    plain = _outputs(copy.deepcopy(module).to(_DTYPES[precision]), batches)
    found = np.concatenate([run(batch) for batch in batches]).astype(np.float64)
    parity = Parity(
        batch_sizes=sorted({len(batch) for batch in batches}),
        images=len(exact),
        max_abs_error=float(np.abs(found - exact).max()),
        error_share=float(np.abs(found - exact).max() / np.abs(exact).max()),
        argmax_disagreements=_disagreements(found, exact),
    )
    errors, plain_errors = (np.abs(outputs - exact).max(axis=1) / np.abs(exact).max() for outputs in (found, plain))
    if judged_by == "outputs":
        agrees = errors.max() <= _TOLERANCE[precision]
    else:
        usual = max(_TOLERANCE[precision], 2 * float(np.median(plain_errors)))
        agrees = np.median(errors) <= usual and parity.argmax_disagreements <= _disagreements(plain, exact) + 1
    if not agrees:  # NaN does not agree either
        raise Differs(
            f"the file is off by {parity.error_share:.1e} of the largest output, and {parity.argmax_disagreements} of "
            f"{parity.images} answers differ; the model in {precision} by {plain_errors.max():.1e}"
        )
    return parity


def _outputs(module: nn.Module, batches: list[torch.Tensor]) -> np.ndarray:
    dtype = next(module.parameters(), batches[0]).dtype
    with torch.inference_mode():
        return np.concatenate([module(batch.to(dtype)).double().flatten(1).numpy() for batch in batches])


def _disagreements(outputs: np.ndarray, exact: np.ndarray) -> int:
    return int((outputs.argmax(axis=1) != exact.argmax(axis=1)).sum())
