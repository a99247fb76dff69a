"""The calls of modules, observed without changing what runs.

Hooks would change that: with a hook inside, nn.TransformerEncoderLayer does not run its fused operator, and with a hook
for all modules, torch.compile recompiles.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn


@contextmanager
def calls_through(call: Callable[..., Any], modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside the block, run each forward pass of these modules as `call(module, forward, *inputs, **options)`.

    Modules inside a compiled module are left alone, because its graph would no longer match.
    """
    every = dict.fromkeys(modules)
    compiled = {
        inner
        for module in every
        if hasattr(module, "_orig_mod") or module._compiled_call_impl
        for inner in getattr(module, "_orig_mod", module).modules()
    }
    own = {module: vars(module).get("forward") for module in every if module not in compiled}
    for module in own:
        vars(module)["forward"] = partial(call, module, module.forward)
    try:
        yield
    finally:
        for module, forward in own.items():
            del vars(module)["forward"]
            if forward:
                vars(module)["forward"] = forward
