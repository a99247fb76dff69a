"""ST-BIF and its pool as ops of torch for the kernels in C and in Triton, with their gradients."""

from typing import Any

import torch

from benchd.kernels.dispatch import Kernel, require_device
from benchd.kernels.op import learn, op
from benchd.kernels.stbif.layout import laid_out, pictures, pooled, threshold_of


@op("stbif", learns=True)
def stbif_op(
    current: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    threshold: torch.Tensor,
    pos_max: int,
    neg_min: int,
    codes: bool,
) -> torch.Tensor:
    """Make codes (int8) or values in the dtype of `current` (T, B, C, ...); bias (T, C), threshold one element."""
    dense = laid_out(current, by_channel=bias is not None)
    return torch.empty_like(dense, dtype=torch.int8 if codes else current.dtype)


@op("stbif_backward")
def stbif_backward_op(
    grad: torch.Tensor,
    current: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    threshold: torch.Tensor,
    pos_max: int,
    neg_min: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the gradients of current + bias + residual (T, B, C, ...) and of the threshold, in the state's dtype."""
    dense = laid_out(current, by_channel=bias is not None)
    to_threshold = torch.empty_like(threshold, memory_format=torch.contiguous_format)
    return torch.empty_like(dense, dtype=threshold.dtype), to_threshold


@op("max_pool_delta", learns=True)
def max_pool_delta_op(values: torch.Tensor, kernel_size: int, stride: int, padding: int) -> torch.Tensor:
    """Make the pooled running sum of `values` (T, B, C, H, W), differenced over T."""
    return pooled(values, values.dtype, kernel_size, stride, padding)


@op("max_pool_delta_backward")
def max_pool_delta_backward_op(
    grad: torch.Tensor, values: torch.Tensor, kernel_size: int, stride: int, padding: int
) -> torch.Tensor:
    """Make the gradient of `values` (T, B, C, H, W) in the state's dtype."""
    return pictures(values)


def stbif(
    kernel: Kernel,
    current: torch.Tensor,
    *,
    threshold: torch.Tensor | float,
    pos_max: int,
    neg_min: int,
    output: str,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return codes (int8, without a gradient) or values of current + bias + residual (T, B, C, ...).

    Channels last stays channels last. Raises Unavailable if `kernel` cannot take the tensors.
    """
    require_device("stbif", kernel, current)
    arguments = current, bias, residual, threshold_of(threshold, current), pos_max, neg_min
    if output == "values":
        return stbif_op[kernel](*arguments, False)
    with torch.no_grad():
        return stbif_op[kernel](*arguments, True)


def max_pool_delta(
    kernel: Kernel, values: torch.Tensor, *, kernel_size: int, stride: int, padding: int
) -> torch.Tensor:
    """Return the pooled running sum of `values` (T, B, C, H, W), differenced over T; the result lies channels last."""
    require_device("max_pool_delta", kernel, values)
    return max_pool_delta_op[kernel](values, kernel_size, stride, padding)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, pos_max, neg_min, _ = inputs
    ctx.save_for_backward(*tensors)
    ctx.bounds = pos_max, neg_min


def _gradients(backward: Any, ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    current, bias, residual, _ = ctx.saved_tensors
    to_charge, to_threshold = backward(grad, *ctx.saved_tensors, *ctx.bounds)
    # of a channel, all its neurons add up
    to_bias = None if bias is None else to_charge.sum([1, *range(3, to_charge.dim())]).to(bias.dtype)
    to_residual = None if residual is None else to_charge.to(residual.dtype)
    return to_charge.to(current.dtype), to_bias, to_residual, to_threshold, None, None, None


def _save_pool(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    values, *windows = inputs
    ctx.save_for_backward(values)
    ctx.windows = windows


def _pool_gradients(backward: Any, ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (values,) = ctx.saved_tensors
    return backward(grad, values, *ctx.windows).to(values.dtype), None, None, None


learn(stbif_op, stbif_backward_op, _save, _gradients)
learn(max_pool_delta_op, max_pool_delta_backward_op, _save_pool, _pool_gradients)
