"""Compares an exported file and its model with the model in float64, on the same images.

A file may deviate twice as much as its model in the same precision: where the model jumps, for example to a different
class, so may the file. A wrong graph is wrong on most images, while a spiking neuron that fires one step later because
of rounding changes few. Spiking and quantised models are therefore judged by the median image and by their answers.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import nn

from benchd.exporters import doubled

Run = Callable[..., list[np.ndarray]]

_TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2}  # as a share of the largest absolute output
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


class Parity(msgspec.Struct, frozen=True):
    """The comparison: errors of the file's outputs, with `error_share` relative to the largest absolute output."""

    batch_sizes: list[int]
    images: int
    max_abs_error: float
    error_share: float
    argmax_disagreements: int


_HIDING = 1 / 3  # share of the largest output: with a larger rounding error, the model's own class is meaningless


class Differs(Exception):
    """The file does not compute the same as its model; the message contains the figures."""


def compare(
    module: nn.Module,
    run: Run,
    batches: Sequence[tuple[int, Sequence[torch.Tensor]]],
    precision: Literal["fp32", "fp16"],
    judged_by: Literal["outputs", "codes"],
) -> Parity:
    """Return how far `run` agrees with `module` on batches of inputs, each with its size; raise Differs if it does not.

    Each output is judged separately, and the figures are those of the worst. A model that cannot run in float64 is
    compared with itself in float32.
    """
    try:
        exact = _outputs(doubled.reading(doubled.in_float64(module)), batches, torch.float64)
    except Exception:  # some operators have no float64 kernel
        exact = _outputs(module, batches, torch.float32)
    plain = _outputs(doubled.copied(module).to(_DTYPES[precision]), batches, _DTYPES[precision])
    answers = _rows([run(*batch) for _, batch in batches], [size for size, _ in batches])
    sizes = sorted({size for size, _ in batches})
    parts = zip(answers, exact, plain, strict=True)
    return max((_judged(*part, sizes, precision, judged_by) for part in parts), key=lambda part: part.error_share)


def _judged(
    answers: np.ndarray,
    exact: np.ndarray,
    plain: np.ndarray,
    sizes: list[int],
    precision: Literal["fp32", "fp16"],
    judged_by: Literal["outputs", "codes"],
) -> Parity:
    if answers.shape != exact.shape:
        raise Differs(f"the file returns {answers.shape}, but the model {exact.shape}")
    largest = float(np.abs(exact[np.isfinite(exact)]).max(initial=0.0)) or 1.0
    errors, plain_errors = (_distances(exact, outputs) / largest for outputs in (answers, plain))
    parity = Parity(
        batch_sizes=sizes,
        images=len(exact),
        max_abs_error=float(errors.max()) * largest,
        error_share=float(errors.max()),
        argmax_disagreements=_disagreements(answers, exact),
    )
    typical = np.max if judged_by == "outputs" else np.median
    own = float(typical(plain_errors))
    agrees = typical(errors) <= max(_TOLERANCE[precision], 2 * own) < np.inf
    if judged_by == "codes":
        agrees = agrees and (parity.argmax_disagreements <= _disagreements(plain, exact) + 1 or own > _HIDING)
    if np.isnan(exact).any():
        raise Differs("the model's own answer is NaN for these inputs, so its file cannot be compared: change them")
    if not agrees:  # NaN does not agree either
        raise Differs(
            f"the file is off by {parity.error_share:.1e} of the largest output, and {parity.argmax_disagreements} of "
            f"{parity.images} answers differ; the model in {precision} by {plain_errors.max():.1e}"
        )
    return parity


def _distances(exact: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """Return the largest distance in each row; infinities of the same sign do not differ."""
    with np.errstate(invalid="ignore"):  # inf - inf
        return np.where(exact == answers, 0.0, np.abs(answers - exact)).max(axis=1, initial=0.0)


def _outputs(
    module: Callable[..., Any], batches: Sequence[tuple[int, Sequence[torch.Tensor]]], dtype: torch.dtype
) -> list[np.ndarray]:
    answers = []
    with torch.inference_mode():
        for _, batch in batches:
            output = module(*(value.to(dtype) if value.is_floating_point() else value for value in batch))
            parts = output if isinstance(output, tuple) else (output,)
            answers.append([part.double().numpy() for part in parts])
    return _rows(answers, [size for size, _ in batches])


def _rows(answers: Sequence[Sequence[np.ndarray]], sizes: Sequence[int]) -> list[np.ndarray]:
    """Return each output (N, ...) in float64: a row per item, or per batch if the batch is not the first axis."""
    rows = [
        [
            part.reshape(size if part.shape[:1] == (size,) else 1, -1).astype(np.float64)
            for part, size in zip(parts, sizes, strict=True)
        ]
        for parts in zip(*answers, strict=True)
    ]
    return [np.concatenate(parts) for parts in rows]


def _disagreements(outputs: np.ndarray, exact: np.ndarray) -> int:
    if not outputs.size:
        return 0
    return int((outputs.argmax(axis=1) != exact.argmax(axis=1)).sum())
