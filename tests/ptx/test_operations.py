"""What no kernel's own test shows of the interpreter: what it refuses, and that it is no more exact than a GPU."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.ptx import machine, operations
from tests.ptx.memory import Fault

WARP = 32
HEAD = """.extern .shared .align 16 .b8 global_smem[];
.visible .entry k(.param .u64 a, .param .u64 b)
.reqntid 32
{
.reg .pred %p<9>;
.reg .b16 %rs<9>;
.reg .b32 %r<30>;
.reg .b64 %rd<9>;
ld.param.b64 %rd1, [a];
ld.param.b64 %rd2, [b];
mov.u32 %r1, %tid.x;
mad.wide.u32 %rd3, %r1, 4, %rd1;
mad.wide.u32 %rd4, %r1, 4, %rd2;
ld.global.b32 %r2, [%rd3];
"""


def run(code, given=None):
    """Return what `code` leaves in %r3 of each thread; %r1 is the thread and %r2 its number of `given`."""
    given = torch.arange(WARP, dtype=torch.int32) if given is None else given
    output = torch.full((WARP,), -1, dtype=given.dtype)
    machine.launch(f"{HEAD}{code}\nst.global.b32 [%rd4], %r3;\nret;\n}}\n", (1,), [given, output], 1024)
    return output.tolist()


def test_a_sum_and_a_product_are_rounded_once():
    draw = np.random.default_rng(0)
    a, b = (draw.standard_normal(2000).astype(np.float32) for _ in range(2))
    c = (-a * b + draw.standard_normal(2000) * 2.0 ** -draw.integers(0, 60, 2000)).astype(np.float32)
    for x, y, z, result in zip(a, b, c, operations.fused(a, b, c), strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        around = [np.nextafter(result, np.float32(side)) for side in (-np.inf, np.inf)]
        assert all(abs(Fraction(float(result)) - exact) <= abs(Fraction(float(each)) - exact) for each in around)


@pytest.mark.parametrize(("name", "exact", "bits"), [("ex2", np.exp2, 22.5), ("rsqrt", lambda x: x**-0.5, 22.4)])
def test_an_approximation_is_off_by_what_is_allowed(name, exact, bits):
    given = torch.rand(WARP, generator=torch.Generator().manual_seed(0)) + 0.5
    values = np.array(run(f"{name}.approx.ftz.f32 %r3, %r2;", given))
    error = np.abs(values / exact(given.double().numpy()) - 1).max()
    assert 2**-25 < error < 2**-bits + 2**-24


@pytest.mark.parametrize("barrier", ["", "bar.warp.sync -1;", "bar.sync 0;"])
def test_a_warp_needs_a_barrier_too(barrier):
    code = f"""shl.b32 %r5, %r1, 2; xor.b32 %r6, %r5, 4;
st.shared.b32 [%r5], %r2;
{barrier}
ld.shared.b32 %r3, [%r6];"""
    if barrier:
        assert run(code) == [i ^ 1 for i in range(WARP)]
    else:
        with pytest.raises(Fault, match=r"race in shared memory .* in one warp without a barrier"):
            run(code)


def test_any_thread_of_a_warp_may_win_a_place():
    code = "mov.b32 %r5, 0;\nst.shared.b32 [%r5], %r2;\nst.shared.b32 [%r5+4], %r2;\nbar.sync 0;\n"
    (winners,) = set(run(f"{code}ld.shared.b32 %r6, [%r5];\nld.shared.b32 %r7, [%r5+4];\nadd.s32 %r3, %r6, %r7;"))
    assert winners < 2 * (WARP - 1)


def test_threads_that_part_at_a_barrier_are_named():
    code = "setp.lt.s32 %p1, %r2, 7;\n@%p1 bra L1;\nbar.sync 0;\nbra L2;\nL1:\nbar.sync 0;\nL2:\nmov.u32 %r3, 1;"
    with pytest.raises(Fault, match="wait at different barriers"):
        run(code)


def test_a_shuffle_of_half_a_warp_is_named():
    code = "setp.lt.s32 %p1, %r2, 7;\n@%p1 bra L1;\nshfl.sync.idx.b32 %r3, %r2, 0, 31, -1;\nL1:"
    with pytest.raises(Fault, match="only some threads of a warp come to shfl"):
        run(code)


def test_what_is_not_known_is_refused():
    with pytest.raises(operations.NotExecuted, match=r"the interpreter has no wgmma\.fence"):
        run("wgmma.fence;")
