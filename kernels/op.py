"""Makes ops of torch, one for the kernels of every device: traced, compiled and profiled by name, and cheap to call.

torch.library.custom_op does the same but adds checks to each call, which at batch 1 cost a tenth of a small kernel's
time; in the tests opcheck does them.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd import profiler
from torch.nn.modules.module import _has_any_global_hook
from torch.torch_version import TorchVersion

from benchd.kernels.dispatch import INTERPRETED, Kernel, refuse_float64, require_inference

# The op to call for each kernel. Both are one op, whose kernel the tensors' device chooses; but Triton's interpreter
# reads the CPU tensors that are also the native kernel's, so there it has an overload of its own.
Op = Mapping[Kernel, Any]
Function = TypeVar("Function", bound=Callable[..., Any])

_LIBRARY = torch.library.Library("benchd", "FRAGMENT")
_TELLS_EXPORTS = TorchVersion(torch.__version__) >= "2.10"
_KEYS: Mapping[Kernel, str] = {"native": "CPU", "triton": "CompositeExplicitAutograd" if INTERPRETED else "CUDA"}
_OVERLOADS: Mapping[Kernel, str] = {"native": "default", "triton": "interpreted" if INTERPRETED else "default"}


def op(name: str, *, learns: bool = False) -> Callable[[Callable[..., Any]], Op]:
    """Return a decorator for a function that makes what the op `benchd::name` returns, without computing it.

    Its parameters are the op's: tensors, which the op does not change, and numbers. `computes` adds the kernels. One
    that `learns` is given its gradient by `learn`, any other refuses to have one.
    """

    def define(fake: Callable[..., Any]) -> Op:
        schema = torch.library.infer_schema(fake, mutates_args=())
        for overload in dict.fromkeys(_OVERLOADS.values()):
            full_name = name if overload == "default" else f"{name}.{overload}"
            _LIBRARY.define(full_name + schema, tags=(torch.Tag.pt2_compliant_tag,))
            torch.library.register_fake(f"benchd::{full_name}", fake, lib=_LIBRARY)
            if not learns:
                torch.library.register_autograd(f"benchd::{full_name}", _refuse, lib=_LIBRARY)
        packet = getattr(torch.ops.benchd, name)
        return {which: getattr(packet, overload) for which, overload in _OVERLOADS.items()}

    return define


def computes(op: Op, which: Kernel) -> Callable[[Function], Function]:
    """Return a decorator for the function that computes `op` on the tensors of this kernel's device."""

    def register(function: Function) -> Function:
        _LIBRARY.impl(op[which], function, _KEYS[which])
        return function

    return register


def infer(name: str, op: Op, which: Kernel, first: torch.Tensor, *others: Any) -> Any:
    """Return what `op` makes of these; raise Unavailable, with `name`, for a float64 first, a gradient or a device."""
    require_inference(name, which, first, *[value for value in others if isinstance(value, torch.Tensor)])
    refuse_float64(name, which, first)
    return op[which](first, *others)


def is_watched(*modules: nn.Module) -> bool:
    """Return whether a profiler, a mode of torch, or a hook or another forward of these modules sees which ops run.

    If none does, and nothing learns, layers call a kernel's function without its op, which takes as long as a small
    layer.
    """
    return profiler._is_profiler_enabled or torch._C._len_torch_dispatch_stack() > 0 or is_hooked(*modules)


def is_hooked(*modules: nn.Module) -> bool:
    """Return whether a hook or another forward of these modules sees what enters and leaves them."""
    if _has_any_global_hook():
        return True
    return any(each._forward_hooks or each._forward_pre_hooks or "forward" in vars(each) for each in modules)


def is_exported() -> bool:
    """Return whether torch.export or torch.jit.trace traces.

    Until torch 2.10 torch.compile calls its own tracing an export too: there a strict export is not told from it.
    """
    exports = torch.compiler.is_exporting() and (_TELLS_EXPORTS or not torch.compiler.is_dynamo_compiling())
    return exports or torch._C._get_tracing_state() is not None


def learn(op: Op, backward: Op, save: Callable[..., None], gradients: Callable[..., Any]) -> None:
    """Give `op` its gradient: `gradients(backward, context, grad)` of what `save(context, inputs, output)` has kept."""
    for forward, back in dict(zip(op.values(), backward.values(), strict=True)).items():
        torch.library.register_autograd(forward, partial(gradients, back), setup_context=save, lib=_LIBRARY)


def _refuse(context: Any, *gradients: Any) -> None:
    raise NotImplementedError("this op of benchd has no gradient; use implementation='torch', or torch.no_grad()")
