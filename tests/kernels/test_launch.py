"""Launches repeated of other memory: of what Triton would have compiled for it, with the arguments in its order."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

triton = pytest.importorskip("triton")

from launches import interpreted  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import make_backend  # noqa: E402
from triton.runtime.jit import JITFunction, create_function_from_signature  # noqa: E402

from benchd.kernels import launch, plan  # noqa: E402

CPU = torch.device("cpu")


def _signature(x, y, bias, rows, scale, count, WIDTH, FLAG):
    """Parameters of every sort: tensors, one that may be missing, a size, a number, a free size and constants."""


for _name in ("WIDTH", "FLAG"):
    _signature.__annotations__[_name] = triton.language.constexpr


class Call(NamedTuple):
    x: torch.Tensor
    bias: torch.Tensor | None
    rows: int
    scale: float
    count: int
    FLAG: bool
    WIDTH: int
    num_warps: int


class Kernel:
    """A kernel bound by Triton's own code, whose compiled forms note what they get."""

    arg_names = ("x", "y", "bias", "rows", "scale", "count", "WIDTH", "FLAG")

    def __init__(self):
        function = JITFunction(_signature, do_not_specialize=["count"])
        backend = make_backend(GPUTarget("cuda", 87, 32))
        self._bind = create_function_from_signature(function.signature, function.params, backend)
        self.launched = []

    def __getitem__(self, grid):
        def compile_and_launch(*arguments, **constants):
            values, specialization, options = self._bind(*arguments, **constants)
            self.values = list(values.values())
            kinds = {name: kind for name, (kind, _) in zip(self.arg_names, specialization, strict=True)}
            return Compiled(self, (specialization, options), kinds)

        return compile_and_launch

    def made(self, call):
        """Launch as an op's function does."""
        x, bias, *numbers, flag, width, warps = call
        y = x.new_empty(x.shape)
        launch.run(self, (3, 2), (x, y, bias), tuple(numbers), FLAG=flag, WIDTH=width, num_warps=warps)
        return y


class Compiled:
    def __init__(self, kernel, compiled_for, kinds):
        self._kernel, self.compiled_for = kernel, compiled_for
        self.src, self.function = SimpleNamespace(signature=kinds), 4711
        self.metadata = SimpleNamespace(num_warps=4, shared=1024, global_scratch_size=0)

    def __getitem__(self, grid):
        return lambda *arguments, stream: self._kernel.launched.append((grid, arguments, stream))


@st.composite
def tensors(draw):
    """Eight numbers that start at, or a few bytes behind, a multiple of 16."""
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.int8]))
    memory = torch.zeros(64, dtype=dtype)
    first = draw(st.sampled_from([0, 1, 3, 16 // memory.element_size()]))
    return memory[first : first + 8]


SIZES = st.sampled_from([0, 1, 2, 15, 16, 2**31 - 1, 2**31, 2**40])
CALLS = st.builds(
    Call, tensors(), st.none() | tensors(), SIZES, st.floats(allow_nan=False), SIZES, st.booleans(),
    st.sampled_from([1, 4]), st.sampled_from([1, 4]),
)  # fmt: skip


def compiled_for(call):
    kernel = Kernel()
    with plan.recording() as recording:
        kernel.made(call)
    return recording.launches[0].compiled.compiled_for


@given(CALLS, CALLS)
def test_calls_of_one_signature_launch_what_triton_compiles_for_either(call, other):
    """Also those that are hardest to tell apart, which differ in one thing."""
    alike = Call(*(plan._stand_in(each) if isinstance(each, torch.Tensor) else each for each in call))
    assert plan.signature(alike) == plan.signature(call)
    assert compiled_for(alike) == compiled_for(call)
    for i in range(len(call)):
        changed = Call(*call[:i], other[i], *call[i + 1 :])
        if plan.signature(changed) == plan.signature(call):
            assert compiled_for(changed) == compiled_for(call)


ADDRESSES = [2**40, 2**41, 2**42]
PLACES = [(1, 4), (2, 0), (0, 16)]


@given(CALLS)
def test_it_is_repeated_as_triton_takes_it(call):
    kernel = Kernel()
    with plan.recording() as recording:
        kernel.made(call)
    launch._by_triton(recording.launches[0], PLACES)(ADDRESSES, 7)
    grid, arguments, stream = kernel.launched[0]
    assert (grid, stream) == ((3, 2, 1), 7)
    assert arguments == (2**41 + 4, 2**42, 2**40 + 16, *call[2:5], call.WIDTH, call.FLAG)


@pytest.mark.parametrize(
    ("bias", "rows", "count", "letters", "arguments"),
    [
        (None, 1, 2**40, "OOflO", (2**41 + 4, 2**42, 0.5, 2**40, None)),
        (torch.zeros(8), 48, 1, "OOOifiO", (2**41 + 4, 2**42, 2**40 + 16, 48, 0.5, 1, None)),
    ],
)
def test_it_is_repeated_by_torch_with_what_triton_leaves_to_a_launch(
    monkeypatch, bias, rows, count, letters, arguments
):
    kernel, calls = Kernel(), []
    native = SimpleNamespace(_launch_kernel=lambda *given: calls.append(given))
    monkeypatch.setattr(torch._C, "_StaticCudaLauncher", native, raising=False)
    with plan.recording() as recording:
        kernel.made(Call(torch.zeros(8), bias, rows, 0.5, count, True, 4, 2))
    launch._by_torch(recording.launches[0], PLACES)(ADDRESSES, 7)
    assert calls == [(4711, 3, 2, 1, 4, 1024, letters, arguments, 7)]


def test_what_torch_s_launcher_does_not_take_is_left_to_triton_s():
    kernel = Kernel()
    with plan.recording() as recording:
        kernel.made(Call(torch.zeros(8), None, 2, 0.5, 3, True, 4, 2))
    recording.launches[0].compiled.metadata.global_scratch_size = 64
    assert launch._by_torch(recording.launches[0], PLACES) is None


def shifted(each, places):
    return interpreted(each, [places[0], places[1], (1, 0)], CPU)


def raising(each, places):
    raise AttributeError("_StaticCudaLauncher")


@pytest.mark.parametrize(
    ("by_torch", "is_used"),
    [(lambda each, places: interpreted(each, places, CPU), True), (shifted, False), (raising, False)],
    ids=["right", "wrong", "absent"],
)
def test_torch_s_launcher_is_used_where_it_gives_the_known_answer(monkeypatch, by_torch, is_used):
    monkeypatch.setattr(launch, "_by_torch", by_torch)
    monkeypatch.setattr(launch, "current_stream", lambda index: 0)
    assert launch.launches_by_torch.__wrapped__(CPU) is is_used


BY_TORCH = """
import ctypes, struct, sys
from types import SimpleNamespace as Holds
import torch
from benchd.kernels import launch
from benchd.kernels.plan import Launch

cuda = ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
cuda.last_launch.restype = ctypes.POINTER(ctypes.c_int64)
sizes = (ctypes.c_int64 * 8)(6, 8, 8, 4, 8, 4, 8)  # two pointers, an i32, an i64, an fp32 and a pointer to no scratch
names = ["x", "bias", "y", "rows", "many", "eps", "one", "WIDTH"]
kinds = ["*fp16", "constexpr", "*fp32", "i32", "i64", "fp32", "constexpr", "constexpr"]
compiled = Holds(
    src=Holds(signature=dict(zip(names, kinds))), function=ctypes.addressof(sizes),
    metadata=Holds(num_warps=4, shared=2048, global_scratch_size=0),
)
made = Launch(Holds(arg_names=names), compiled, (3, 5, 2), (0, None, 0), (-7, 2**40 + 1, 0.375, 1), {"WIDTH": 4})
launch._by_torch(made, [(0, 16), (0, 0), (1, 0)])([2**45, 2**46], 99)
last = cuda.last_launch()
print(*last[:9])
print(*struct.unpack("<QQiqfQ", bytes(ctypes.cast(last, ctypes.POINTER(ctypes.c_uint8))[72 : 72 + last[8]])))
"""


def test_torch_s_own_launcher_hands_each_number_over_as_it_is(tmp_path):
    """In torch's C++, over a library in the place of the driver."""
    if not hasattr(torch._C, "_StaticCudaLauncher"):
        pytest.skip("this torch has no launcher for CUDA")
    library = tmp_path / "libcuda.so.1"
    build = ["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-Wl,-soname,libcuda.so.1", "-o", str(library)]
    subprocess.run([*build, str(Path(__file__).with_name("fake_cuda.c"))], check=True)
    command = [sys.executable, "-c", BY_TORCH, str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shape, parameters = done.stdout.splitlines()
    assert shape == "3 5 2 128 1 1 2048 99 40"
    assert parameters == f"{2**45 + 16} {2**46} -7 {2**40 + 1} 0.375 0"
