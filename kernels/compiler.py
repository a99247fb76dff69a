"""Compiles an op's C file with this machine's compiler at first use; cached by source, flags, compiler and CPU."""

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchd.daemon.machine import folders
from benchd.kernels.dispatch import Unavailable

# AVX2 and NEON have no masks: gcc vectorises a loop with conditions only if no comparison may trap
FLAGS = ("-std=c11", "-O3", "-fopenmp", "-fPIC", "-fvisibility=hidden", "-Wall", "-fno-trapping-math")
EXACT = ("-ffp-contract=off",)  # a fused multiply-add rounds once where the equation rounds twice
# ISO C rounds every product; a fused multiply-add is both faster and closer to the equation in real numbers
FUSED = ("-ffp-contract=fast",)
COMPILE_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a compiled function on the memory of these tensors; it may be repeated."""

    function: Callable[[ctypes.Structure], None]
    problem: ctypes.Structure
    tensors: tuple[Any, ...]

    def __call__(self) -> None:
        """Run the function on the tensors' current contents."""
        self.function(self.problem)


@functools.cache
def load(source: Path, flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Return the library compiled from the C file `source`, compiling it unless an earlier process has done so.

    `flags` are further compiler flags, such as EXACT. Raises Unavailable if there is no compiler, if it fails or if its
    library cannot be loaded.
    """
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise Unavailable("native kernels need a C compiler; install gcc or set CC")
    command = (compiler, *FLAGS, _target(), *flags)
    folder = folders.cache() / "native"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{source.parent.name}-{_key(source, command)}.so"
    with suppress(OSError):  # no lock is needed, because a complete file is renamed to this path
        return ctypes.CDLL(str(library))
    return _compiled(source, command, library)


def functions(module: str, flags: tuple[str, ...], **arguments: Sequence[type]) -> ctypes.CDLL:
    """Return the compiled native.c next to the Python file `module`, with its functions' argument types by name."""
    library = load(Path(module).with_name("native.c"), flags)
    for name, types in arguments.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, None
    return library


def fields(*spelled: str) -> list[tuple[str, type]]:
    """Return the fields of a C struct in order: names with a star are pointers, the others are int64_t."""
    names = " ".join(spelled).split()
    return [(name.lstrip("*"), ctypes.c_void_p if name.startswith("*") else ctypes.c_int64) for name in names]


def real(dtype: torch.dtype) -> str:
    """Return the flag that defines a kernel's REAL as float, or as double for float64."""
    return f"-DREAL={'double' if dtype == torch.float64 else 'float'}"


def number(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the flags for a kernel that reads and writes float32, or bfloat16."""
    return ("-DBF16",) if dtype == torch.bfloat16 else ()


def common(*tensors: Tensor) -> torch.dtype:
    """Return the number format in which a kernel reads the tensors: bfloat16 if all of them are, else float32."""
    return torch.bfloat16 if all(tensor.dtype is torch.bfloat16 for tensor in tensors) else torch.float32


def description() -> str:
    """Return the compiler and the flags common to all kernels, "none" without a compiler."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return "none"
    try:
        name = _version(compiler).partition("\n")[0]
    except subprocess.CalledProcessError:
        name = Path(compiler).name
    return " ".join([name, *FLAGS, _target()])


def threads() -> int:
    """Return a kernel's number of threads: torch's, but one in a forked child.

    OpenMP's pool does not survive a fork; a child that requested threads would wait forever.
    """
    return torch.get_num_threads() if os.getpid() == _PID else 1


def in_dtype(tensor: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the tensor in `dtype`, skipping torch's no-op conversion, whose cost per argument matters at batch 1."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def dense(tensor: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the tensor in `dtype`, contiguous."""
    return in_dtype(tensor, dtype).contiguous()


_PID = os.getpid()


def _target() -> str:
    return "-mcpu=native" if platform.machine() == "aarch64" else "-march=native"


def _key(source: Path, command: tuple[str, ...]) -> str:
    digest = hashlib.sha256(source.read_bytes())
    for header in sorted(Path(__file__).parent.glob("*.h")):
        digest.update(header.read_bytes())
    for piece in (*command, _version(command[0]), cpu(), str(_openmp())):
        digest.update(b"\0" + piece.encode())
    return digest.hexdigest()[:24]


def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout


def cpu() -> str:
    """Return the CPU that native code is compiled for, because a cache folder may be copied to another machine."""
    wanted = ("model name", "flags", "Features", "CPU part")
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    return "\n".join(line for line in lines if line.startswith(wanted))


@functools.cache
def _openmp() -> Path | None:
    """Return torch's bundled OpenMP runtime, or None if it uses the system's.

    A second runtime would have its own threads, which compete with torch's for the cores.
    """
    return next(iter(sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))), None)


def _compiled(source: Path, command: tuple[str, ...], library: Path) -> ctypes.CDLL:
    """Return the library, compiled by the first process to get here."""
    # read-only, because another member of the folder's group may have created the lock
    with os.fdopen(os.open(f"{library}.lock", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with suppress(OSError):
            return ctypes.CDLL(str(library))
        _compile(source, command, library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise Unavailable(f"a compiled kernel cannot be loaded: {error}") from error


def _compile(source: Path, command: tuple[str, ...], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        compiled, linked = Path(scratch, "kernel.o"), Path(scratch, "kernel.so")
        runtime = str(_openmp() or "-fopenmp")
        _run([*command, "-c", str(source), "-o", str(compiled)])
        _run([command[0], "-shared", str(compiled), "-o", str(linked), runtime, "-lm"])
        folders.sync(linked)
        linked.replace(library)
    folders.sync(library.parent)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{command[0]} took longer than {COMPILE_TIMEOUT_S} s to compile a native kernel") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
        raise Unavailable(f"{command[0]} cannot compile a native kernel: {lines[0]}")
