"""Launches: the second of a kind meets what Triton would compile for its arguments, which it gets in Triton's order."""

from itertools import pairwise

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
ARGUMENTS = st.tuples(tensors(), tensors(), st.none() | tensors(), SIZES, st.floats(), SIZES)
CONSTANTS = st.fixed_dictionaries(
    {"FLAG": st.booleans(), "WIDTH": st.sampled_from([1, 4]), "num_warps": st.sampled_from([1, 4])}
)


@given(ARGUMENTS, ARGUMENTS, CONSTANTS, CONSTANTS)
def test_a_launch_meets_the_specialisation_that_triton_would_compile(arguments, others, constants, other_constants):
    # two calls that differ in one thing are the hardest to tell apart
    calls = [(arguments, constants), (arguments, other_constants), (others, other_constants)]
    calls += [((*arguments[:i], others[i], *arguments[i + 1 :]), constants) for i in range(len(arguments))]
    kernel = Kernel()
    for arguments, constants in [*calls, *reversed(calls)]:
        launch.run(kernel, (3, 2), *arguments, **constants)
        found, grid = kernel.launched
        assert found[:2] == kernel.bound(*arguments, **constants)[:2]
        assert all(one is other for one, other in zip(found[2], [*arguments, *_in_order(constants)], strict=True))
        assert grid == (3, 2, 1)


def _in_order(constants):
    return [constants["WIDTH"], constants["FLAG"]]


def test_a_kind_of_launch_is_bound_once():
    kernel = Kernel()
    x = torch.zeros(8)
    for scale, other in pairwise([0.5, float("nan"), float("nan"), -1.0]):
        launch.run(kernel, (1,), x, x + other, None, 8, scale, 8, WIDTH=4, FLAG=True)
    assert kernel.compilations == 1
