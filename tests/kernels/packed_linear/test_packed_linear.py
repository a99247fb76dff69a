"""Products with a packed weight against PyTorch's in float64."""

import pytest
import torch
from torch.nn import functional

from benchd.kernels import packed_linear
from benchd.kernels.packed_linear import PackedLinear, native

SIZES = [
    (1, 1, 1),
    (7, 5, 15),
    (8, 12, 16),
    (9, 64, 17),
    (3, 31, 48),
    (17, 96, 49),
    (5, 10, 64),
    (197, 192, 100),
]
ERRORS = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 2e-3}


def product(rows, inner, outer, dtype, groups=()):
    generator = torch.Generator().manual_seed(rows + inner + outer)
    x, weight = (torch.randn(*groups, n, inner, generator=generator).to(dtype) for n in (rows, outer))
    return x, weight, x.double() @ weight.double().mT


def error(y, want):
    return float((y.double() - want).abs().max() / want.abs().max())


@torch.no_grad()
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_row_and_output_is_the_product(sizes, dtype):
    x, weight, want = product(*sizes, dtype)
    y = PackedLinear(weight)(x)
    assert y.dtype == dtype
    assert y.shape == want.shape
    assert error(y, want) < ERRORS[dtype]
    beyond = torch.full((len(x) + 2, weight.shape[0]), 7.0, dtype=dtype)
    if PackedLinear(weight).suits(dtype):
        PackedLinear(weight).call(x, beyond[1:-1])()
        assert torch.equal(beyond[1:-1], y)
        assert (beyond[[0, -1]] == 7).all()


@torch.no_grad()
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
def test_groups_have_weights_of_their_own(dtype):
    x, weight, want = product(11, 24, 20, dtype, groups=(3,))
    assert error(PackedLinear(weight)(x), want) < ERRORS[dtype]


@torch.no_grad()
def test_a_weight_and_rows_may_lie_anywhere():
    x, weight, want = product(10, 24, 20, torch.float32, groups=(2,))
    packed = PackedLinear(weight.mT.contiguous().mT)
    assert error(packed(x.mT.contiguous().mT), want) < 1e-6
    assert error(PackedLinear(weight[0])(x.unflatten(1, (2, 5))[0]), want[0].view(2, 5, 20)) < 1e-6


@torch.no_grad()
def test_nothing_in_gives_nothing_out():
    assert PackedLinear(torch.ones(3, 4))(torch.ones(2, 0, 4)).shape == (2, 0, 3)


@torch.no_grad()
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_no_bit(threads):
    x, weight, _ = product(29, 33, 70, torch.float32)
    thread_count = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = PackedLinear(weight)(x)
        torch.set_num_threads(threads)
        assert torch.equal(PackedLinear(weight)(x), want)
    finally:
        torch.set_num_threads(thread_count)


@torch.no_grad()
def test_tiles_give_the_same_product_for_every_number_of_rows(monkeypatch):
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bfloat16 on this CPU")
    monkeypatch.setattr(packed_linear, "_multiplies_in_tiles", lambda dtype: dtype == torch.bfloat16)
    x, weight, want = product(40, 64, 24, torch.bfloat16, groups=(2,))
    packed, y = PackedLinear(weight), torch.empty(2, 40, 24, dtype=torch.bfloat16)
    packed.call(x, y)()
    assert error(y, want) < 8e-3
    assert error(packed(x[:, :7]), want[:, :7]) < 8e-3
    assert error(packed(x), want) < 8e-3


def test_it_is_an_op_of_torch_that_learns_nothing():
    x, weight, want = product(4, 6, 5, torch.float32)
    packed = native.pack(weight[None])
    torch.library.opcheck(native.linear_op["native"], (x, packed, 5))
    compiled = torch.compile(
        lambda x: native.linear_op["native"](x, packed, 5) + 1, fullgraph=True, backend="aot_eager"
    )
    assert error(compiled(x), want + 1) < 1e-6
    with pytest.raises(NotImplementedError, match="has no gradient"):
        PackedLinear(weight)(x.requires_grad_()).sum().backward()


@torch.no_grad()
def test_autocast_multiplies_in_its_dtype():
    x, weight, want = product(9, 16, 20, torch.float32)
    packed = PackedLinear(weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = packed(x)
    assert half.dtype == functional.linear(x.bfloat16(), weight.bfloat16()).dtype
    assert 1e-6 < error(half, want) < 2e-2
    assert error(packed(x), want) < 1e-6
