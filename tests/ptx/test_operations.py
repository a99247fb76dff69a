"""Single instructions against what PTX says of them, each on one warp."""

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


def run(code, given=None, shared_bytes=1024):
    """Return what `code` leaves in %r3 of each thread; %r1 is the thread and %r2 its number of `given`."""
    given = torch.arange(WARP, dtype=torch.int32) if given is None else given
    found = torch.full((WARP,), -1, dtype=given.dtype)
    machine.launch(f"{HEAD}{code}\nst.global.b32 [%rd4], %r3;\nret;\n}}\n", (1,), [given, found], shared_bytes)
    return found.tolist()


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("shfl.sync.bfly.b32 %r3, %r2, 5, 31, -1;", lambda i: i ^ 5),
        ("shfl.sync.up.b32 %r3, %r2, 3, 0, -1;", lambda i: max(i - 3, i % 3 if i < 3 else 0)),
        ("shfl.sync.down.b32 %r3, %r2, 1, 31, -1;", lambda i: min(i + 1, 31)),
        ("shfl.sync.idx.b32 %r3, %r2, 7, 31, -1;", lambda i: 7),
        ("bfe.u32 %r3, %r2, 1, 3;", lambda i: i >> 1 & 7),
        ("bfe.s32 %r3, %r2, 4, 1;", lambda i: -(i >> 4)),
        ("prmt.b32 %r3, %r2, 0x01020304, 0x7440U;", lambda i: i | 0x01040400),
        ("shl.b32 %r3, %r2, 33;", lambda i: 0),
        ("sub.s32 %r4, %r2, 16;\ndiv.s32 %r3, %r4, 5;", lambda i: int((i - 16) / 5)),
        ("sub.s32 %r4, %r2, 16;\nrem.s32 %r3, %r4, 5;", lambda i: (i - 16) - 5 * int((i - 16) / 5)),
        ("mul.hi.u32 %r3, %r2, 0x80000000;", lambda i: i >> 1),
        ("setp.lt.s32 %p1, %r2, 7;\nselp.b32 %r3, %r2, 9, %p1;", lambda i: min(i, 9) if i < 7 else 9),
        ("mov.b32 {%rs1, %rs2}, %r2;\nmov.b32 %r3, {%rs2, %rs1};", lambda i: i << 16),
        ("setp.lt.s32 %p1, %r2, 9;\nmov.u32 %r3, 1;\n@%p1 bra L1;\nmov.u32 %r3, 2;\nL1:", lambda i: 1 if i < 9 else 2),
    ],
)  # fmt: skip
def test_an_instruction_is_what_the_manual_says(code, wanted):
    assert run(code) == [wanted(i) for i in range(WARP)]


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("cvt.rn.{half}.f32 %rs1, %r2;\nadd.rn.f32.{half} %r3, %rs1, 0f3F800000;", lambda x: x + 1),
        ("cvt.rn.{half}.f32 %rs1, %r2;\nsub.rn.f32.{half} %r3, %rs1, 0f3F800000;", lambda x: x - 1),
        ("cvt.rn.{half}.f32 %rs1, %r2;\nfma.rn.f32.{half} %r3, %rs1, %rs1, 0f3F800000;", lambda x: x * x + 1),
        ("max.f32 %r3, %r2, 0f40000000, 0f41000000;", lambda x: max(x, 8)),
        ("mov.b64 %rd5, {{%r2, %r2}};\nadd.f32x2 %rd6, %rd5, %rd5;\nmov.b64 {{%r4, %r3}}, %rd6;", lambda x: 2 * x),
        ("mov.b64 %rd5, {{%r2, 0f40000000}};\nmul.f32x2 %rd6, %rd5, %rd5;\nmov.b64 {{%r3, %r4}}, %rd6;",
         lambda x: x * x),
        ("mov.b64 %rd5, {{0f40000000, %r2}};\nfma.rn.f32x2 %rd6, %rd5, %rd5, %rd5;\nmov.b64 {{%r4, %r3}}, %rd6;",
         lambda x: x * x + x),
    ],
)  # fmt: skip
@pytest.mark.parametrize("half", ["f16", "bf16"])
def test_what_sm_100_adds_is_what_the_manual_says(code, wanted, half):
    given = torch.arange(WARP, dtype=torch.float32)
    assert run(code.format(half=half), given) == [wanted(x) for x in given.tolist()]


def test_a_loop_runs_as_often_as_each_thread_wants():
    code = "mov.u32 %r3, 0;\nL1:\nadd.s32 %r3, %r3, 2;\nsetp.lt.s32 %p1, %r3, %r2;\n@%p1 bra L1;"
    assert run(code) == [max(2, i + i % 2) for i in range(WARP)]


def test_a_sum_and_a_product_are_rounded_once():
    draw = np.random.default_rng(0)
    a, b = (draw.standard_normal(2000).astype(np.float32) for _ in range(2))
    c = (-a * b + draw.standard_normal(2000) * 2.0 ** -draw.integers(0, 60, 2000)).astype(np.float32)
    for x, y, z, found in zip(a, b, c, operations.fused(a, b, c), strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        around = [np.nextafter(found, np.float32(side)) for side in (-np.inf, np.inf)]
        assert all(abs(Fraction(float(found)) - exact) <= abs(Fraction(float(each)) - exact) for each in around)


@pytest.mark.parametrize(("name", "exact", "bits"), [("ex2", np.exp2, 22.5), ("rsqrt", lambda x: x**-0.5, 22.4)])
def test_an_approximation_is_off_by_what_is_allowed(name, exact, bits):
    given = torch.rand(WARP, generator=torch.Generator().manual_seed(0)) + 0.5
    found = np.array(run(f"{name}.approx.ftz.f32 %r3, %r2;", given))
    error = np.abs(found / exact(given.double().numpy()) - 1).max()
    assert 2**-25 < error < 2**-bits + 2**-24


def test_matrices_are_loaded_multiplied_and_stored_by_the_warp():
    code = """
shl.b32 %r5, %r1, 4; mov.b32 %r4, global_smem; add.s32 %r4, %r4, %r5;
st.shared.v4.b32 [%r4], {%r2, %r2, %r2, %r2};
bar.sync 0;
ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r6, %r7, %r8, %r9}, [%r4];
ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%r10, %r11}, [%r4];
mov.b32 %r12, 0; mov.b32 %r13, 0; mov.b32 %r14, 0; mov.b32 %r15, 0;
mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r12, %r13, %r14, %r15}, {%r6, %r7, %r8, %r9}, {%r10, %r11}, {%r12, %r13, %r14, %r15};
mov.b32 %r3, %r13;"""  # noqa: E501
    numbers = torch.randn(2 * WARP, generator=torch.Generator().manual_seed(1)).half()
    found = torch.tensor(run(code, numbers.view(torch.int32))).to(torch.int32).view(torch.float32)
    rows = numbers.view(WARP, 2).repeat(1, 4).double()  # 16 bytes of each thread
    left = torch.cat((torch.cat((rows[:8], rows[16:24]), 1), torch.cat((rows[8:16], rows[24:]), 1)))
    right = rows[:16]
    want = [(left @ right)[i // 4, i % 4 * 2 + 1] for i in range(WARP)]
    torch.testing.assert_close(found.double(), torch.stack(want), rtol=1e-6, atol=1e-6)


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
