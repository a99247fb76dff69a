"""A pytest plugin that runs the project's Triton kernels as the PTX that Triton emits: `-p tests.ptx.session --ptx 87`.

Launches are compiled for the architecture, from CPU tensors, and interpreted in place of the GPU.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.ptx import machine

EXECUTED: set[str] = set()  # the PTX that was launched
LAUNCHED: set[str] = set()  # the kernels' functions, with their modules
COUNTED: list[tuple[int, Callable]] = []  # who is told what a launch for so many images executed
REPLACED: dict[str, str] = {}  # what is executed in the place of which PTX


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ptx", type=int, required=True, help="the architecture to compile for: 75, 87, 90")
    parser.addoption("--launched", type=Path, help="a file that gets a line per kernel that was launched")


def pytest_configure(config: pytest.Config) -> None:
    execute_as(config.getoption("ptx"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if to := session.config.getoption("launched"):
        with to.open("a") as file:  # each process of a run adds its own
            file.writelines(f"{function}\n" for function in sorted(LAUNCHED))


def execute_as(sm: int) -> None:
    """Let kernels take CPU tensors, be compiled for the architecture `sm` and be executed by the interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"
    from benchd.kernels import dispatch, launch  # noqa: F401 - it reads the variable once

    del os.environ["TRITON_INTERPRET"]
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target = GPUTarget("cuda", sm, 32)
    driver.set_active(_Driver(target))
    launch.architecture = lambda device: sm
    triton.runtime.JITFunction.run = _run
    triton.knobs.runtime.add_stages_inspection_hook = _without_machine_code


class _Driver:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, target) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self):
        return self._target


def _without_machine_code(*stages):
    """Leave out ptxas, under a key of its own in Triton's cache; every launch that ships goes through it elsewhere."""
    if not stages:
        return "ptx only", "ptx only"
    stages[1]["cubin"] = lambda source, metadata: b"none"
    return None


def _run(self, *args, grid, warmup, **kwargs):
    """Compile as Triton does, for these arguments, interpret, and return what launches the same again."""
    kernels, _, target, backend, binder = self.device_caches[0]
    kwargs["debug"] = False
    bound, specialization, options = binder(*args, **kwargs)
    key = str(specialization) + str(options)
    if key not in kernels:
        options, signature, constants, attributes = self._pack_args(backend, kwargs, bound, specialization, options)
        source = self.ASTSource(self, signature, constants, attributes)
        kernels[key] = self.compile(source, target=target, options=options.__dict__)
    compiled = _Compiled(self, kernels[key], dict(zip(bound, specialization, strict=True)))
    compiled[grid](*bound.values())
    return compiled


class _Compiled:
    """A specialisation of a kernel, launched as Triton's CompiledKernel is."""

    def __init__(self, function, kernel, specialization) -> None:
        self._function, self._kernel, self._specialization = function, kernel, specialization

    def __getitem__(self, grid):
        return partial(self._launch, tuple(grid))

    def _launch(self, grid, *args) -> None:
        kinds = self._specialization.values()
        taken = [value for value, (kind, _) in zip(args, kinds, strict=True) if kind != "constexpr"]
        ptx = self._kernel.asm["ptx"]
        EXECUTED.add(ptx)
        LAUNCHED.add(f"{self._function.module}.{self._function.fn.__name__}")
        executed = machine.launch(
            REPLACED.get(ptx, ptx), grid, taken, self._kernel.metadata.shared, one_of=COUNTED[0][0] if COUNTED else None
        )
        for _, count in COUNTED:
            named = {name: key if kind == "constexpr" else kind for name, (kind, key) in self._specialization.items()}
            count(self._function, named, self._kernel.metadata.num_warps, executed)
