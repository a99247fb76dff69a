"""The calls of modules, seen without changing what runs.

Hooks change it: with one inside, nn.TransformerEncoderLayer does not run its fused operator, and with one for all
modules torch.compile compiles anew.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn


@contextmanager
def calls_through(call: Callable[..., Any], modules: Iterable[nn.Module]) -> Iterator[None]:
    """While this is open, `call(module, forward, *inputs, **options)` runs each forward pass of these modules.

    Those inside a compiled module are left as they are: its graph would no longer fit.
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
