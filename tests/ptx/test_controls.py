"""A kernel that is wrong in one place does not pass: the compiled add_rms_norm of half precision for an sm_90.

`add_rms_norm.ptx` is what Triton 3.8 made of it, without its debugging lines.
"""

from pathlib import Path

import pytest
import torch

from tests.ptx import machine
from tests.ptx.memory import Fault

PTX = Path(__file__).with_name("add_rms_norm.ptx").read_text()
ROWS, DIM = 3, 192


def run(ptx):
    """Return how far the results are from the equation, relative to the largest."""
    generator = torch.Generator().manual_seed(0)
    hidden, residual, weight = (torch.randn(shape, generator=generator) for shape in ((ROWS, DIM), (ROWS, DIM), (DIM,)))
    hidden, weight = hidden.half(), weight.half()
    normed, total = torch.full((ROWS, DIM), torch.nan).half(), torch.full((ROWS, DIM), torch.nan)
    machine.launch(ptx, (ROWS,), [hidden, residual, weight, normed, total, DIM, 1e-5], 8)
    want = hidden.double() + residual.double()
    scaled = want / (want.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight.double()
    errors = (normed - scaled).abs().max() / scaled.abs().max(), (total - want).abs().max() / want.abs().max()
    return float(errors[0]), float(errors[1])


def test_the_kernel_as_it_is_agrees_with_the_equation():
    normed, total = run(PTX)
    assert normed < 1e-3
    assert total < 1e-7


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ("bar.sync \t0;", "", "race in shared memory .* between two barriers"),
        ("[ %rd1 + 0 ]", "[ %rd1 + 2 ]", "argument 0 at byte .* misaligned"),
        ("[ %r10 + 0 ]", "[ %r10 + 2 ]", "shared memory at byte 2, 4 bytes, misaligned"),
        ("@%p1 ld.global.v4", "ld.global.v4", "argument 1 at byte .* outside its 2304 bytes"),
        ("@%p1 st.global.v4", "st.global.v4", "argument 4 at byte .* outside|race in argument 4 .* from two blocks"),
        ("shl.b64 \t%rd16, %rd14, 2", "shl.b64 \t%rd16, %rd14, 3", "outside its 2304 bytes"),
        ("add.s64 \t%rd5, %rd9", "add.s64 \t%rd5, %rd15", "no memory at"),
        ("cvt.u64.u32 \t%rd11, %r22", "cvt.u64.u32 \t%rd11, %r20", "outside"),
    ],
)
def test_a_fault_is_named(before, after, fault):
    assert PTX.count(before) == 1
    with pytest.raises(Fault, match=fault):
        run(PTX.replace(before, after))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("add.f32 \t%r12, %r4, %r25", "sub.f32 \t%r12, %r4, %r25"),
        ("mad.wide.u32 \t%rd3, %r20, 2", "mad.wide.u32 \t%rd3, %r20, 0"),
        ("%r38, 2, 31, -1", "%r38, 4, 31, -1"),
        ("%r47, 1, 31, -1", "%r47, 2, 31, -1"),
        ("shr.u32 \t%r42, %r18, 3", "shr.u32 \t%r42, %r18, 4"),
        ("rsqrt.approx", "rcp.approx"),
    ],
)
def test_a_wrong_number_shows(before, after):
    assert PTX.count(before) == 1
    try:
        wrong = run(PTX.replace(before, after))
    except Fault:
        return
    assert not max(wrong) < 1e-3
