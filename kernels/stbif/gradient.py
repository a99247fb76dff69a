"""What autograd keeps of an ST-BIF op and hands to its backward op; the kernels themselves are the caller's."""

from typing import Any

import torch


def learns(op: Any, backward: Any) -> None:
    """Give `op` (current, bias, residual, threshold, pos_max, neg_min, codes) the gradients of `backward`.

    `backward` takes the gradient of the values, then these arguments without the last, and returns the gradients of
    current + bias + residual and of the threshold.
    """

    def save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        *tensors, pos_max, neg_min, _ = inputs
        ctx.save_for_backward(*tensors)
        ctx.bounds = pos_max, neg_min

    def gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        current, bias, residual, _ = ctx.saved_tensors
        to_charge, to_threshold = backward(grad, *ctx.saved_tensors, *ctx.bounds)
        to_bias = None if bias is None else _by_channel(to_charge).to(bias.dtype)
        to_residual = None if residual is None else to_charge.to(residual.dtype)
        return to_charge.to(current.dtype), to_bias, to_residual, to_threshold, None, None, None

    torch.library.register_autograd(op, gradients, setup_context=save)


def fired(op: Any, *arguments: Any, codes: bool) -> torch.Tensor:
    """Return what `op` does: values, or codes, which are integers and have no gradient."""
    if not codes:
        values: torch.Tensor = op(*arguments, False)
        return values
    with torch.no_grad():
        integers: torch.Tensor = op(*arguments, True)
    return integers


def _by_channel(to_charge: torch.Tensor) -> torch.Tensor:
    """Return (T, C) for (T, B, C, ...): what all neurons of a channel add up to."""
    return to_charge.sum([1, *range(3, to_charge.dim())])


def pool_learns(op: Any, backward: Any) -> None:
    """Give `op` (values, kernel_size, stride, padding) the gradient of `backward`, which takes that of the result."""

    def save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        values, *windows = inputs
        ctx.save_for_backward(values)
        ctx.windows = windows

    def gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (values,) = ctx.saved_tensors
        return backward(grad, values, *ctx.windows).to(values.dtype), None, None, None

    torch.library.register_autograd(op, gradients, setup_context=save)
