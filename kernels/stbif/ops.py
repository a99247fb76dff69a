"""ST-BIF and its pool as torch ops, with the gradients of their kernels in C and in Triton."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchd.kernels.op import op
from benchd.kernels.stbif.layout import laid_out, pictures, pooled


class StBifInputs(NamedTuple):
    """current and residual are (T, B, C, ...), bias (T, C); the threshold has one element of the membranes' dtype."""

    current: Tensor
    bias: Tensor | None
    residual: Tensor | None
    threshold: Tensor
    pos_max: int
    neg_min: int
    codes: bool


class StBifBackward(NamedTuple):
    """The gradient of the values, and the inputs of the forward pass."""

    grad: Tensor
    current: Tensor
    bias: Tensor | None
    residual: Tensor | None
    threshold: Tensor
    pos_max: int
    neg_min: int


class Pool(NamedTuple):
    """`values` are (T, B, C, H, W)."""

    values: Tensor
    kernel_size: int
    stride: int
    padding: int


class PoolBackward(NamedTuple):
    """The gradient of the pooled deltas, and the inputs of the forward pass."""

    grad: Tensor
    values: Tensor
    kernel_size: int
    stride: int
    padding: int


@op("stbif", learns=True)
def stbif_op(given: StBifInputs) -> Tensor:
    """Allocate codes (int8) or values in the dtype of `current` (T, B, C, ...)."""
    dense = laid_out(given.current, by_channel=given.bias is not None)
    return torch.empty_like(dense, dtype=torch.int8 if given.codes else given.current.dtype)


@op("stbif_backward")
def stbif_backward_op(given: StBifBackward) -> tuple[Tensor, Tensor]:
    """Allocate the gradients of current + bias + residual (T, B, C, ...) and of the threshold, in the state's dtype."""
    dense = laid_out(given.current, by_channel=given.bias is not None)
    to_threshold = torch.empty_like(given.threshold, memory_format=torch.contiguous_format)
    return torch.empty_like(dense, dtype=given.threshold.dtype), to_threshold


@op("max_pool_delta", learns=True)
def max_pool_delta_op(given: Pool) -> Tensor:
    """Allocate the pooled running sum of `values`, differenced over T, channels last."""
    return pooled(given.values, given.values.dtype, *given[1:])


@op("max_pool_delta_backward")
def max_pool_delta_backward_op(given: PoolBackward) -> Tensor:
    """Allocate the gradient of `values` in the state's dtype."""
    return pictures(given.values)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, pos_max, neg_min, _ = inputs
    ctx.save_for_backward(*tensors)
    ctx.bounds = pos_max, neg_min


def _gradients(backward: Any, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    current, bias, residual, _ = ctx.saved_tensors
    to_charge, to_threshold = backward(grad, *ctx.saved_tensors, *ctx.bounds)
    # summed over all neurons of a channel
    to_bias = None if bias is None else to_charge.sum([1, *range(3, to_charge.dim())]).to(bias.dtype)
    to_residual = None if residual is None else to_charge.to(residual.dtype)
    return to_charge.to(current.dtype), to_bias, to_residual, to_threshold, None, None, None


def _save_pool(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, *windows = inputs
    ctx.save_for_backward(values)
    ctx.windows = windows


def _pool_gradients(backward: Any, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (values,) = ctx.saved_tensors
    return backward(grad, values, *ctx.windows).to(values.dtype), None, None, None


stbif_op.learn(stbif_backward_op, _save, _gradients)
max_pool_delta_op.learn(max_pool_delta_backward_op, _save_pool, _pool_gradients)
