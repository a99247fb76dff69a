"""Signed ternary integrate-and-fire neurons with a tracer (ST-BIF) over all time steps at once.

    v[-1] = s / 2    k[-1] = 0                      s the threshold, k the tracer: the net count of spikes so far
    v[t] = v[t-1] + current[t]
    q[t] = +1 if v[t] >= s and k[t-1] < P,  -1 if v[t] < 0 and k[t-1] > N,  else 0
    v[t] = v[t] - s * q[t]    k[t] = k[t-1] + q[t]

The first axis has T time steps; the others are independent neurons. P = pos_max and N = neg_min bound the tracer. Once
the input ends, s * k moves to s * clamp(floor(sum(current) / s + 1/2), N, P), which is the quantiser's result
(SpikeZIP-TF, ICML 2024). v is kept in float32 for float16 and bfloat16 currents, else in the current's own dtype.
`stbif_block` adds a folded bias and a residual to the current; `max_pool_delta` is the max pool between such layers.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from benchd.kernels.dispatch import load_all
from benchd.kernels.stbif.layout import threshold_of
from benchd.kernels.stbif.ops import Pool, StBifInputs, max_pool_delta_op, stbif_op

__all__ = ["max_pool_delta", "stbif", "stbif_block"]

Output = Literal["codes", "values"]

load_all(__name__)


def stbif(
    current: Tensor,
    *,
    threshold: Tensor | float,
    pos_max: int,
    neg_min: int,
    output: Output = "codes",
    implementation: str = "auto",
) -> Tensor:
    """Return q as int8 ("codes", no gradient) or s * q in the dtype of `current` ("values"), shaped (T, ...).

    `threshold` is a positive float or a one-element tensor on the device of `current`. "values" are differentiable in
    current and threshold: the comparisons v >= s and v < 0 have the derivative of sigmoid(4 x / s), (4 / s) sig (1 -
    sig); the bounds on the tracer are constants. Raises TypeError for a current that is not floating point, ValueError
    for one without time steps, a threshold that is not a single positive number, bounds that exclude 0, or an unknown
    output or implementation, and dispatch.Unavailable if the implementation cannot run.
    """
    codes = _check_neuron(threshold, pos_max, neg_min, output)
    given = StBifInputs(current, None, None, threshold_of(threshold, current), pos_max, neg_min, codes)
    return _fired(given, implementation, lambda: _check_tensors("stbif", given))


def stbif_block(
    current: Tensor,
    *,
    threshold: Tensor | float,
    pos_max: int,
    neg_min: int,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    output: Output = "values",
    implementation: str = "auto",
) -> Tensor:
    """Return the result of `stbif` for the charge of a convolution with folded bias and a shortcut.

        x[t] = (current[t] + bias[t]) + residual[t]        v[t] = v[t-1] + x[t], then as above

    current and residual are (T, B, C, ...) and bias (T, C), one number per channel and step: a folded bias arrives as
    bias / step at t < step and 0 after. x is summed in the dtype of v. Gradients and errors are those of `stbif`, and
    bias and residual are differentiable too; also raises ValueError for shapes that do not fit.
    """
    codes = _check_neuron(threshold, pos_max, neg_min, output)
    given = StBifInputs(current, bias, residual, threshold_of(threshold, current), pos_max, neg_min, codes)
    return _fired(given, implementation, lambda: _check_tensors("stbif_block", given))


def max_pool_delta(
    values: Tensor, *, kernel_size: int, stride: int, padding: int, implementation: str = "auto"
) -> Tensor:
    """Return the max pool of the running sum over T, differenced: its sum over T is the pool of the sum of `values`.

        A[t] = A[t-1] + values[t]        out[t] = max_pool(A[t]) - max_pool(A[t-1])        both 0 at t = -1

    (T, B, C, H, W) to (T, B, C, H', W') with H' = (H + 2 padding - kernel_size) // stride + 1, in the dtype of
    `values`; windows are square, and padding is never the maximum. A is summed in float64 and rounded to float32 for
    float16, bfloat16 and float32 values. Differentiable: the first maximum in a window gets the gradient. Raises
    TypeError for values that are not floating point, ValueError for a wrong number of dimensions, no time steps or
    windows that do not fit, and dispatch.Unavailable like `stbif`.
    """
    given = Pool(values, kernel_size, stride, padding)
    return max_pool_delta_op("max_pool_delta", implementation, given, lambda: _check_windows(*given))


def _fired(given: StBifInputs, implementation: str, check: Callable[[], None]) -> Tensor:
    """Return the spikes, without gradients for codes, which have none in any implementation."""
    if given.codes and torch.is_grad_enabled():
        constants: list[Any] = [arg.detach() if isinstance(arg, Tensor) else arg for arg in given]
        given = StBifInputs(*constants)
    return stbif_op("stbif", implementation, given, check)


def _check_steps(op: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        raise TypeError(f"{op}: expected floating point, not {tensor.dtype}")
    if tensor.dim() == 0 or tensor.shape[0] == 0:
        raise ValueError(f"{op}: expected (T, ...) with T at least 1, not {tuple(tensor.shape)}")


def _check_tensors(op: str, given: StBifInputs) -> None:
    current, bias, residual, threshold, *_ = given
    _check_steps(op, current)
    if threshold.numel() != 1:
        raise ValueError(f"stbif: threshold must have one element, not shape {tuple(threshold.shape)}")
    if bias is not None and (current.dim() < 3 or bias.shape != (current.shape[0], current.shape[2])):
        raise ValueError(f"stbif_block: bias must be (T, C), not {tuple(bias.shape)} for {tuple(current.shape)}")
    if residual is not None and residual.shape != current.shape:
        raise ValueError(f"stbif_block: residual must be {tuple(current.shape)}, not {tuple(residual.shape)}")


def _check_windows(values: Tensor, kernel_size: int, stride: int, padding: int) -> None:
    _check_steps("max_pool_delta", values)
    if values.dim() != 5:
        raise ValueError(f"max_pool_delta: values must be (T, B, C, H, W), not {tuple(values.shape)}")
    if kernel_size < 1 or stride < 1 or not 0 <= padding <= kernel_size // 2:
        sizes = f"{kernel_size}, {stride} and {padding}"
        raise ValueError(f"max_pool_delta: expected kernel_size, stride >= 1 and padding <= kernel_size/2, not {sizes}")
    if min(values.shape[3:]) + 2 * padding < kernel_size:
        raise ValueError(f"max_pool_delta: no window of {kernel_size} fits into {tuple(values.shape[3:])}")


def _check_neuron(threshold: Tensor | float, pos_max: int, neg_min: int, output: str) -> bool:
    """Raise ValueError if a number does not fit, and return whether the output is codes."""
    # a tensor's value is not read, because on a GPU that would synchronise
    if not isinstance(threshold, Tensor) and not threshold > 0:
        raise ValueError(f"stbif: threshold must be positive, not {threshold}")
    if not neg_min <= 0 < pos_max:
        raise ValueError(f"stbif: expected neg_min <= 0 < pos_max, not {neg_min} and {pos_max}")
    if output not in {"codes", "values"}:
        raise ValueError(f"stbif: output must be 'codes' or 'values', not {output!r}")
    return output == "codes"
