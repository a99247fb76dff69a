"""Launches: the second of a kind meets what Triton would compile for its arguments, which it gets in Triton's order."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import make_backend  # noqa: E402
from triton.runtime.jit import JITFunction, create_function_from_signature  # noqa: E402

from benchd.kernels import launch  # noqa: E402


def _signature(x, y, bias, rows, scale, count, WIDTH, FLAG):
    """Parameters of every sort: tensors, one that may be missing, a size, a number, a free size and constants."""


for _name in ("WIDTH", "FLAG"):
    _signature.__annotations__[_name] = triton.language.constexpr


class Kernel:
    """A kernel bound by Triton's own code, whose compiled forms note what they were compiled for and got."""

    arg_names = ("x", "y", "bias", "rows", "scale", "count", "WIDTH", "FLAG")

    def __init__(self):
        function = JITFunction(_signature, do_not_specialize=["count"])
        backend = make_backend(GPUTarget("cuda", 87, 32))
        self._bind = create_function_from_signature(function.signature, function.params, backend)
        self.compilations, self.launched = 0, None

    def bound(self, *arguments, **constants):
        values, specialization, options = self._bind(*arguments, **constants)
        return specialization, options, list(values.values())

    def __getitem__(self, grid):
        def compile_and_launch(*arguments, **constants):
            self.compilations += 1
            specialization, options, values = self.bound(*arguments, **constants)
            compiled = Compiled(self, specialization, options)
            compiled[grid](*values)
            return compiled

        return compile_and_launch


class Compiled:
    def __init__(self, kernel, specialization, options):
        self._kernel, self._compiled_for = kernel, (specialization, options)

    def __getitem__(self, grid):
        def launched(*arguments):
            self._kernel.launched = (*self._compiled_for, list(arguments)), (*grid, 1, 1)[:3]

        return launched


@st.composite
def tensors(draw):
    """Eight numbers that start at, or a few bytes behind, a multiple of 16."""
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8]))
    memory = torch.zeros(64, dtype=dtype)
    first = draw(st.sampled_from([0, 1, 16 // memory.element_size()]))
    return memory[first : first + 8]


SIZES = st.sampled_from([0, 1, 2, 15, 16, 48, 2**31 - 1, 2**31, 2**40])
TENSORS = st.tuples(tensors(), tensors(), st.none() | tensors())
NUMBERS = st.tuples(SIZES, st.floats(), SIZES)
CONSTANTS = st.builds(
    lambda *values: dict(zip(("FLAG", "WIDTH", "num_warps"), values, strict=True)),  # always in this order
    st.booleans(),
    st.sampled_from([1, 4]),
    st.sampled_from([1, 4]),
)


@given(st.tuples(TENSORS, NUMBERS, CONSTANTS), st.tuples(TENSORS, NUMBERS, CONSTANTS))
def test_a_launch_meets_the_specialisation_that_triton_would_compile(call, other):
    kernel = Kernel()
    calls = [call, other, *one_thing_changed(call, other)]
    for tensors, numbers, constants in [*calls, *reversed(calls)]:
        launch.run(kernel, (3, 2), tensors, numbers, **constants)
        found, grid = kernel.launched
        arguments = [*tensors, *numbers]
        assert found[:2] == kernel.bound(*arguments, **constants)[:2]
        arguments += [constants["WIDTH"], constants["FLAG"]]
        assert all(one is given for one, given in zip(found[2], arguments, strict=True))
        assert grid == (3, 2, 1)


def one_thing_changed(call, other):
    """Yield `call` with one tensor, number or constant of `other`: the calls that are hardest to tell apart."""
    tensors, numbers, constants = call
    for i in range(3):
        yield (*tensors[:i], other[0][i], *tensors[i + 1 :]), numbers, constants
        yield tensors, (*numbers[:i], other[1][i], *numbers[i + 1 :]), constants
    for name in constants:
        yield tensors, numbers, constants | {name: other[2][name]}


def test_a_kind_of_launch_is_bound_once():
    kernel = Kernel()
    x = torch.zeros(8)
    for decay in (0.5, 0.25, float("nan"), float("nan")):
        launch.run(kernel, (1,), (x, x + 1, None), (8, decay, 8), WIDTH=4, FLAG=True)
    assert kernel.compilations == 1
