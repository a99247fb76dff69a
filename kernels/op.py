"""Creates torch ops, each for the kernels of all devices: traced, compiled and profiled by name, and cheap to call.

torch.library.custom_op does the same, but adds checks to each call that cost a tenth of a small kernel's time at batch
1; here opcheck runs them in the tests.
"""

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Generic, TypeVar, cast, get_type_hints

import torch
from torch import nn
from torch.autograd import profiler
from torch.nn.modules.module import _has_any_global_hook
from torch.torch_version import TorchVersion

from benchd.kernels import plan
from benchd.kernels.dispatch import INTERPRETED, Kernel, chosen, load, refuse_float64, require_device, require_inference

Given = TypeVar("Given", bound=tuple[Any, ...])
Made = TypeVar("Made")

_LIBRARY = torch.library.Library("benchd", "FRAGMENT")
_TELLS_EXPORTS = TorchVersion(torch.__version__) >= "2.10"
# Both kernels are one op, whose kernel is chosen by the tensors' device. Triton's interpreter, however, reads CPU
# tensors like the native kernel, so there it needs its own overload.
_KEYS = {"native": "CPU", "triton": "CompositeExplicitAutograd" if INTERPRETED else "CUDA"}
_OVERLOADS = {"native": "default", "triton": "interpreted" if INTERPRETED else "default"}
_MOST_PLANS = 1000  # per op: limits the memory used for a caller whose shapes or numbers never repeat


class Op(Generic[Given, Made]):
    """The op `benchd::name` and its implementations, each a function of one NamedTuple, the op's arguments.

    Torch's dispatcher chooses the kernel ("native", "triton"); "torch" is a function that compilers trace through.
    op[kernel] is torch's own op.
    """

    def __init__(
        self, name: str, fake: Callable[[Given], Made], learns: bool, float32: tuple[Kernel, ...], summed: int
    ) -> None:
        self._package, self._learns = fake.__module__.rpartition(".")[0], learns
        self._float32, self._summed = float32, summed
        (self._arguments,) = (kind for argument, kind in get_type_hints(fake).items() if argument != "return")
        self._functions: dict[str, Callable[[Given], Made]] = {}
        self._kernels: dict[str, Callable[[Given], Made]] = {}
        self._plans: dict[tuple[Any, ...], Callable[[Given], Made]] = {}
        schema = torch.library.infer_schema(self._flat(fake), mutates_args=())
        for overload in dict.fromkeys(_OVERLOADS.values()):
            full_name = name if overload == "default" else f"{name}.{overload}"
            _LIBRARY.define(full_name + schema, tags=(torch.Tag.pt2_compliant_tag,))
            torch.library.register_fake(f"benchd::{full_name}", self._flat(fake), lib=_LIBRARY)
            if not learns:
                torch.library.register_autograd(f"benchd::{full_name}", _refuse, lib=_LIBRARY)
        packet = getattr(torch.ops.benchd, name)
        self._ops = {which: getattr(packet, overload) for which, overload in _OVERLOADS.items()}

    def __call__(self, name: str, implementation: str, given: Given, check: Callable[[], None]) -> Made:
        """Return the result of `implementation` for `given`; "auto" is chosen by the device of the first argument.

        `check` raises an error if the tensors do not fit each other; it is called once per signature. If no gradient is
        needed and nothing observes ops, a kernel is called without its op, which takes as long as a small kernel.

        Raises ValueError for an unknown implementation, and Unavailable with `name` and the reason for one that cannot
        run here: there is no fallback, because a substitute would be timed under the wrong name.
        """
        if (function := self._functions.get(implementation)) is not None:
            check()
            return function(given)
        key = None
        if not (torch.compiler.is_compiling() or torch.is_grad_enabled() or is_observed() or plan.of_thread.recording):
            key = (implementation, *plan.signature(given))
            if (planned := self._plans.get(key)) is not None:
                return planned(given)
        check()
        which = chosen(implementation, given[0].device)
        if which not in self._kernels:
            load(self._package, which)
        require_device(name, which, given[0])
        if not self._learns:
            require_inference(name, which, *given)
        if which in self._float32:
            refuse_float64(name, which, *tuple(given)[: self._summed])  # torch 2.8 cannot trace a slice of a NamedTuple
        return self._planned(which, key, given) if key and plan.is_plain(key) else self._ops[which](*given)

    def _planned(self, which: str, key: tuple[Any, ...], given: Given) -> Made:
        """Return a kernel's result for `given`, using the plan for the key, which is created if missing.

        While a larger plan is being recorded, the kernel is launched directly, and its result is memory that launches
        share.
        """
        if plan.of_thread.recording is not None:
            result = self._kernels[which](given)
            for tensor in result if isinstance(result, tuple) else (result,):
                plan.workspace(cast("torch.Tensor", tensor))
            return result
        if (planned := self._plans.get(key)) is None:
            function = self._kernels[which]
            planned = plan.planned(function, given) if which == "triton" else function
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[key] = planned
        return planned(given)

    def __getitem__(self, which: Kernel) -> Any:
        """Return torch's op for this kernel, which takes the arguments one by one."""
        return self._ops[which]

    def computes(self, which: str) -> Callable[[Callable[[Given], Made]], Callable[[Given], Made]]:
        """Return a decorator for the function that is this implementation."""

        def register(function: Callable[[Given], Made]) -> Callable[[Given], Made]:
            if which in self._ops:
                self._kernels[which] = function
                _LIBRARY.impl(self._ops[which], self._flat(self._kernel(which, function)), _KEYS[which])
            else:
                self._functions[which] = function
            return function

        return register

    def _kernel(self, which: str, function: Callable[[Given], Made]) -> Callable[[Given], Made]:
        """Return the function in the form that torch's op calls."""
        if which == "native":
            return function

        @wraps(function)
        def kernel(given: Given) -> Made:
            return self._planned(which, (which, *plan.signature(given)), given)

        return kernel

    def learn(self, backward: "Op[Any, Any]", save: Callable[..., None], gradients: Callable[..., Any]) -> None:
        """Give the op its gradient, `gradients(backward, context, grad)`, after `save(context, inputs, output)`."""
        for forward, back in dict(zip(self._ops.values(), backward._ops.values(), strict=True)).items():
            torch.library.register_autograd(forward, partial(gradients, back), setup_context=save, lib=_LIBRARY)

    def _flat(self, function: Callable[[Given], Made]) -> Callable[..., Made]:
        """Return `function` with separate arguments, as torch calls and inspects it."""
        # takes half the time of _make, which matters for a small kernel
        make = partial(tuple.__new__, self._arguments)

        def flat(*arguments: Any) -> Made:
            return function(make(arguments))

        parameters = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
            for name, kind in get_type_hints(self._arguments).items()
        ]
        result = get_type_hints(function)["return"]
        flat.__signature__ = inspect.Signature(parameters, return_annotation=result)  # type: ignore[attr-defined]
        return flat


def op(
    name: str, *, learns: bool = False, float32: tuple[Kernel, ...] = (), summed: int = 1
) -> Callable[[Callable[[Given], Made]], Op[Given, Made]]:
    """Return a decorator for a function that allocates the results of the op `benchd::name` without computing them.

    The fields of its single parameter, a NamedTuple, are the op's arguments: tensors, which the op does not change, and
    numbers. An op that `learns` gets its gradient from `Op.learn`; any other op raises Unavailable if one is needed.
    `float32` lists the kernels that sum in float32 and reject the first `summed` arguments in float64, because quietly
    rounding them would return a result in a precision that was not requested.
    """

    def define(fake: Callable[[Given], Made]) -> Op[Given, Made]:
        return Op(name, fake, learns, float32, summed)

    return define


def is_watched(*modules: nn.Module) -> bool:
    """Return whether a profiler, a torch mode, or a hook or replaced forward of these modules observes which ops run.

    If not, and no gradient is needed, layers call a kernel's function without its op, which takes as long as a small
    layer.
    """
    return is_observed() or is_hooked(*modules)


def is_observed() -> bool:
    """Return whether a profiler, a tracer or a torch mode observes which ops run."""
    if profiler._is_profiler_enabled or torch._C._len_torch_dispatch_stack() > 0:
        return True
    return torch._C._get_tracing_state() is not None


def is_hooked(*modules: nn.Module) -> bool:
    """Return whether a hook or replaced forward of these modules observes their inputs and outputs."""
    if _has_any_global_hook():
        return True
    return any(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__ for module in modules)


def is_exported() -> bool:
    """Return whether torch.export or torch.jit.trace is tracing.

    Until torch 2.10, torch.compile also calls its own tracing an export, so a strict export looks the same there.
    """
    exports = torch.compiler.is_exporting() and (_TELLS_EXPORTS or not torch.compiler.is_dynamo_compiling())
    return exports or torch._C._get_tracing_state() is not None


def _refuse(context: Any, *gradients: Any) -> None:
    raise NotImplementedError("this op of benchd has no gradient; use implementation='torch', or torch.no_grad()")
