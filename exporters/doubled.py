"""Converts modules to float64, except large weights, which stay in float32 until an operation uses them.

All copies of a module share these weights, so that a check needs little more memory than the module and its largest
weight in float64.
"""

import copy
import ctypes
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

LARGE = 2**20
"""Weights with more elements are shared between copies, and read by a linear layer in parts of this size."""


def copied(module: nn.Module) -> nn.Module:
    """Return a deep copy that shares the memory of the large weights, which must not be written to."""
    memo = {id(weight): _sharing(weight) for weight in _large(module).values()}
    return copy.deepcopy(module, memo)


def in_float64(module: nn.Module) -> nn.Module:
    """Return a copy in float64, except for its large weights, which `reading` converts on use."""
    doubled = copied(module)
    large = _large(doubled).keys()
    doubled._apply(lambda value: value.double() if value.is_floating_point() and id(value) not in large else value)
    return doubled


def reading(module: nn.Module) -> Callable[..., Any]:
    """Return a function that runs the module with its large weights read in float64."""
    return partial(_run, module) if _large(module) else module


def places(module: nn.Module) -> set[int]:
    """Return the addresses of the large weights, which copies share and which must not be overwritten."""
    return {weight.data_ptr() for weight in _large(module).values()}


def _run(module: nn.Module, *inputs: Tensor) -> Any:
    ctypes.CDLL(None).malloc_trim(0)  # otherwise the fragmented heap would lack space for this run's weights
    with _Reading(_large(module)):
        return module(*inputs)


def _large(module: nn.Module) -> dict[int, nn.Parameter]:
    """Return the large float32 weights by identity; none in TorchScript, whose reads a torch mode cannot intercept."""
    scripted = (part for part in module.modules() if isinstance(part, torch.jit.ScriptModule))
    hidden = {id(weight) for part in scripted for weight in part.parameters()}
    return {
        id(weight): weight
        for weight in module.parameters()
        if type(weight) is nn.Parameter
        and weight.dtype == torch.float32
        and weight.numel() > LARGE
        and id(weight) not in hidden
    }


def _sharing(weight: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(weight.detach(), weight.requires_grad)


def _selects(func: Any, padding: object = None, max_norm: object = None, **named: object) -> bool:
    """Return whether an operation only selects elements of its weight, without changing it."""
    if func is functional.embedding:
        return max_norm is None and named.get("max_norm") is None
    return getattr(func, "__name__", "") in ("__getitem__", "index_select")


class _Reading(TorchFunctionMode):
    """Converts the large weights of each operation to float64."""

    def __init__(self, weights: Mapping[int, nn.Parameter]) -> None:
        super().__init__()
        self._weights = weights

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = args, kwargs or {}
        if func is functional.linear and len(args) > 1 and id(args[1]) in self._weights and args[1].dim() == 2:
            return self._linear(*args, **call[1])
        if self._weights.keys().isdisjoint(map(id, tree_leaves(call))):
            return func(*args, **call[1])
        place = 1 if func is functional.embedding else 0
        is_whole = self._weights.keys().isdisjoint(map(id, args[place : place + 1]))
        if not is_whole and _selects(func, *args[2:4], **call[1]):
            return func(*args, **call[1]).double()
        args, named = tree_map(self._exact, call)
        return func(*args, **named)

    def _linear(self, read: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the output of a linear layer, computed in parts of its rows."""
        rows, columns = weight.shape
        count = min(rows, max(1, LARGE // columns))
        # allocated once, because the heap never shrinks
        scratch = torch.empty(count, columns, dtype=torch.float64, device=weight.device)
        answers = []
        for first in range(0, rows, count):
            part = slice(first, first + count)
            exact = scratch[: rows - first].copy_(weight.detach()[part])
            answers.append(functional.linear(read, exact, None if bias is None else self._exact(bias)[part]))
        return torch.cat(answers, dim=-1)

    def _exact(self, value: Tensor) -> Tensor:
        """Return a large weight in float64, and any other value unchanged."""
        if id(value) not in self._weights:
            return value
        return value.detach().double()
