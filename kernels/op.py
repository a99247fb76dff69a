"""Makes a function an op of torch: traced, compiled and profiled by name, and cheap to call.

torch.library.custom_op does the same and adds checks to each call, which at batch 1 take a tenth of a small kernel's
time; opcheck makes them in the tests.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch

_LIBRARY = torch.library.Library("benchd", "FRAGMENT")

Key = Literal["CPU", "CompositeExplicitAutograd"]
Function = TypeVar("Function", bound=Callable[..., Any])


def op(name: str, key: Key = "CompositeExplicitAutograd", *, learns: bool = False) -> Callable[[Any], Any]:
    """Return a decorator for a function of tensors and numbers that changes none of them and returns new ones.

    It returns the op `benchd::name`, for tensors on the CPU or anywhere, whose results `fake` describes. One that
    `learns` is given its gradient by the caller, any other refuses to have one.
    """

    def define(function: Callable[..., Any]) -> Any:
        schema = torch.library.infer_schema(function, mutates_args=())
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, function, key)
        if not learns:
            torch.library.register_autograd(f"benchd::{name}", _refuse, lib=_LIBRARY)
        return getattr(torch.ops.benchd, name).default

    return define


def fake(op: Any) -> Callable[[Function], Function]:
    """Return a decorator for a function that makes what `op` returns, without computing it."""
    decorator: Callable[[Function], Function] = torch.library.register_fake(op, lib=_LIBRARY)
    return decorator


def _refuse(context: Any, *gradients: Any) -> None:
    raise NotImplementedError("this op of benchd has no gradient; use implementation='torch', or torch.no_grad()")
