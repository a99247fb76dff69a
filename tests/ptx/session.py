"""A pytest plugin that runs the project's Triton kernels as the PTX that Triton emits: `-p tests.ptx.session --ptx 87`.

Launches are compiled for the architecture, from CPU tensors, and interpreted in place of the GPU.
"""

import os
import re
import subprocess
import tempfile
from functools import partial
from pathlib import Path

import pytest

from tests.ptx import machine
from tests.ptx.memory import Fault

LAUNCHED: set[str] = set()  # the kernels' functions, with their modules


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ptx", type=int, required=True, help="the architecture to compile for: 75, 87, 90, 110")
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
    from benchd.kernels import dispatch  # noqa: F401 - it reads the variable once

    del os.environ["TRITON_INTERPRET"]
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from benchd.kernels import launch

    target = GPUTarget("cuda", sm, 32)
    driver.set_active(_Driver(target))
    launch.architecture = lambda device: sm
    triton.runtime.JITFunction.run = _run


class _Driver:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, target) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self):
        return self._target


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
        _refuse_spills(kernels[key].asm["cubin"], self.fn.__name__)
    compiled = _Compiled(self, kernels[key], dict(zip(bound, specialization, strict=True)))
    compiled[grid](*bound.values())
    return compiled


def _refuse_spills(cubin: bytes, name: str) -> None:
    """Raise Fault if ptxas had too few registers for the kernel and put some of them into memory."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    stack, local = re.search(r"STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage).groups()
    if (stack, local) != ("0", "0"):
        raise Fault(f"{name} spills registers: {usage.splitlines()[-1].strip()}")


class _Compiled:
    """A specialisation of a kernel, launched as Triton's CompiledKernel is."""

    def __init__(self, function, kernel, specialization) -> None:
        self._function, self._kernel, self._specialization = function, kernel, specialization

    def __getitem__(self, grid):
        return partial(self._launch, tuple(grid))

    def _launch(self, grid, *args) -> None:
        kinds = self._specialization.values()
        arguments = [value for value, (kind, _) in zip(args, kinds, strict=True) if kind != "constexpr"]
        LAUNCHED.add(f"{self._function.module}.{self._function.fn.__name__}")
        machine.launch(self._kernel.asm["ptx"], grid, arguments, self._kernel.metadata.shared)
