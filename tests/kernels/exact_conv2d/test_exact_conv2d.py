"""The convolution in integers against 64-bit sums, with all instructions of this CPU in turn."""

import pytest
import torch
from torch.nn import functional

from benchd.kernels.dispatch import Unavailable
from benchd.kernels.exact_conv2d import MOST_PRODUCTS, exact_conv2d, native, pack
from benchd.kernels.exact_conv2d.whole import whole

# images, channels, height, width, out channels, window height, window width, stride, padding
SHAPES = [
    (2, 3, 5, 7, 5, 3, 3, 1, 1),
    (3, 17, 6, 5, 64, 3, 3, 1, 0),
    (2, 5, 9, 8, 65, 3, 3, 2, 1),
    (8, 70, 1, 1, 130, 3, 3, 1, 1),
    (5, 16, 2, 2, 48, 3, 3, 2, 1),
    (4, 12, 4, 4, 33, 1, 1, 2, 0),
    (1, 4, 13, 11, 20, 7, 7, 3, 3),
    (2, 6, 4, 9, 100, 4, 2, 2, 2),
    (2, 8, 12, 12, 16, 1, 1, 1, 3),
    (8, 64, 8, 8, 64, 3, 3, 1, 1),
    (7, 33, 1, 1, 200, 1, 1, 1, 0),
    (1, 1, 1, 1, 1, 1, 1, 1, 0),
]
EVERY = native.paths()

needs_instructions = pytest.mark.skipif(not EVERY, reason="needs a CPU with AMX, VNNI or a dot product of bytes")


def problem(shape, density=0.3, scale=0.37):
    images, channels, height, width, out_channels, window_height, window_width, stride, padding = shape
    generator = torch.Generator().manual_seed(sum(shape))
    codes = torch.randint(-3, 4, (images, channels, height, width), generator=generator)
    codes *= torch.rand(codes.shape, generator=generator) < density
    weight = torch.randn(out_channels, channels, window_height, window_width, generator=generator)
    bias = torch.randn(out_channels, generator=generator)
    sizes = {"stride": stride, "padding": padding, "scale": scale, "largest": 3}
    return (codes * torch.tensor(scale), weight, bias), sizes


@pytest.mark.parametrize("per_weight", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_equation_is_that_of_conv2d_with_whole_weights(shape, per_weight):
    (x, weight, bias), sizes = problem(shape)
    sizes["packed"] = pack(weight, per_weight)
    want = exact_conv2d(x, weight, bias, **sizes, implementation="reference")
    assert torch.equal(exact_conv2d(x, weight, bias, **sizes, implementation="torch"), want)
    numbers, unit = whole(weight, per_weight)
    rounded = numbers * unit.double()[:, None, None, None]
    placed = sizes["stride"], sizes["padding"]
    exact = functional.conv2d((x / sizes["scale"]).round().double(), rounded, None, *placed) * sizes["scale"]
    torch.testing.assert_close(want.double(), exact + bias.double()[:, None, None], rtol=1e-6, atol=1e-6)


@needs_instructions
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("path", EVERY)
@pytest.mark.parametrize("per_weight", [1, 3])
def test_all_instructions_and_threads_give_the_reference_bit_for_bit(path, threads, per_weight, monkeypatch):
    monkeypatch.setattr(native, "paths", lambda: (path,))
    monkeypatch.setattr(native.compiler, "threads", lambda: threads)
    monkeypatch.setattr(native, "_GATHERED", 2**15)  # some images at a time
    native._plan.cache_clear()
    for shape in SHAPES:
        (x, weight, bias), sizes = problem(shape)
        for shift in (bias, None):
            sizes["packed"] = pack(weight, per_weight)
            want = exact_conv2d(x, weight, shift, **sizes, implementation="torch")
            got = exact_conv2d(x, weight, shift, **sizes, implementation="native")
            assert torch.equal(got, want), shape


@needs_instructions
@pytest.mark.parametrize("path", EVERY)
def test_sums_at_the_bound_do_not_overflow(path, monkeypatch):
    monkeypatch.setattr(native, "paths", lambda: (path,))
    largest, channels = 60, 1088
    assert MOST_PRODUCTS - largest < largest * channels <= MOST_PRODUCTS
    weight = torch.stack([torch.full((channels, 1, 1), value) for value in (1.0, -1.0, 0.996)])
    x = torch.full((1, channels, 1, 1), float(largest))
    for sign in (1, -1):
        y = exact_conv2d(sign * x, weight, scale=1.0, largest=largest)
        want = exact_conv2d(sign * x, weight, scale=1.0, largest=largest, implementation="reference")
        assert torch.equal(y, want)
        assert torch.equal(y.flatten()[:2], sign * torch.tensor([1.0, -1.0]) * largest * channels)
    with pytest.raises(ValueError, match=r"sums of codes up to 61 times \(3, 1088, 1, 1\) could overflow"):
        exact_conv2d(x, weight, scale=1.0, largest=largest + 1)


def test_a_weight_is_rounded_to_22_bits_of_its_channel_s_largest():
    weight = torch.randn(40, 7, 3, 3) * torch.logspace(-30, 30, 40)[:, None, None, None]
    weight[3] = 0
    numbers, unit = whole(weight)
    largest = weight.abs().amax((1, 2, 3)).double()
    off = (numbers * unit.double()[:, None, None, None] - weight.double()).abs().amax((1, 2, 3))
    assert (off <= largest * 2.0**-22).all()
    assert (unit.frexp().mantissa == 0.5).all(), "powers of two keep the weights that are sums of them"
    dyadic = torch.randint(-64, 65, (5, 4, 3, 3)) / 16
    numbers, unit = whole(dyadic)
    assert torch.equal((numbers * unit[:, None, None, None]).float(), dyadic)
    with pytest.raises(ValueError, match="a weight that is not finite"):
        pack(torch.full((1, 1, 1, 1), torch.inf))


def test_an_int8_weight_is_rounded_to_127_numbers_of_its_channel():
    weight = torch.randn(40, 7, 3, 3) * torch.logspace(-30, 30, 40)[:, None, None, None]
    weight[3] = 0
    numbers, unit = whole(weight, 1)
    assert numbers.abs().amax() == 127
    largest = weight.abs().amax((1, 2, 3)).double()
    off = (numbers * unit.double()[:, None, None, None] - weight.double()).abs().amax((1, 2, 3))
    assert (off <= largest / 254 * (1 + 1e-6)).all()


@pytest.mark.parametrize("implementation", ["reference", "torch", *["native"] * bool(EVERY)])
def test_what_is_not_whole_is_left_to_others(implementation):
    (x, weight, bias), sizes = problem((2, 3, 5, 7, 5, 3, 3, 1, 1))

    def given(x):
        return exact_conv2d(x, weight, bias, **sizes, implementation=implementation)

    assert given(x) is not None
    for wrong in (0.37 / 2, 4 * 0.37, -4 * 0.37, torch.nan, torch.inf, 1e30):
        other = x.clone()
        other[1, 2, 4, 6] = wrong
        assert given(other) is None, wrong
    assert given(x[:0]).shape == (0, 5, 5, 7)


@needs_instructions
def test_the_share_of_nonzeros_of_few_rows_is_counted():
    (x, _, _), _ = problem((2, 3, 5, 7, 5, 3, 3, 1, 1))
    x, density = x.contiguous(memory_format=torch.channels_last), (x != 0).float().mean().item()
    assert not native.is_sparse(x, density - 0.01)
    assert native.is_sparse(x, density + 0.01)
    assert not native.is_sparse(x[:0], 1.0)


@needs_instructions
@pytest.mark.parametrize("height", [5, 7, 12])
def test_the_sample_has_rows_of_all_heights(height):
    x = torch.zeros(63, 3, height, 4).contiguous(memory_format=torch.channels_last)
    x[:, :, 0] = 1
    assert not native.is_sparse(x, 0.8 / height)
    assert native.is_sparse(x, 1.3 / height)


@needs_instructions
def test_another_default_dtype_changes_no_answer():
    (x, weight, bias), sizes = problem((2, 3, 5, 7, 5, 3, 3, 1, 1))
    want = exact_conv2d(x, weight, bias, **sizes, implementation="reference")
    torch.set_default_dtype(torch.float64)
    try:
        found = exact_conv2d(x, weight, bias, **sizes, implementation="native")
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32
    assert torch.equal(found, want)


@needs_instructions
def test_any_layout_in_and_channels_last_out():
    (x, weight, bias), sizes = problem((3, 6, 7, 8, 20, 3, 3, 1, 1))
    want = exact_conv2d(x, weight, bias, **sizes)
    assert want.is_contiguous(memory_format=torch.channels_last)
    for same in (x.contiguous(memory_format=torch.channels_last), x.mT.contiguous().mT):
        assert torch.equal(exact_conv2d(same, weight, bias, **sizes), want)
    sizes["scale"] = torch.tensor([sizes["scale"]])
    assert torch.equal(exact_conv2d(x, weight, bias.repeat_interleave(2)[::2], **sizes), want)


@needs_instructions
def test_the_op_keeps_the_rules_of_custom_ops():
    (x, weight, bias), _ = problem((2, 3, 5, 4, 18, 3, 3, 2, 1))
    digits = pack(weight)
    for tensor in (x, x[:0], x.contiguous(memory_format=torch.channels_last)):
        arguments = (tensor, digits.digits, digits.unit, torch.tensor(0.37), bias, list(digits.window), 3, 2, 1, 3)
        torch.library.opcheck(torch.ops.benchd.exact_conv2d.default, arguments)


def test_wrong_arguments_are_refused():
    x, weight = torch.zeros(1, 2, 3, 3), torch.zeros(4, 2, 3, 3)
    grid = {"scale": 1.0, "largest": 1}
    for arguments, sizes, words in (
        ((x[0], weight), {}, r"x must be \(N, C, H, W\)"),
        ((x, weight[:, :1]), {}, r"weight must be \(O, 2, kh, kw\), not \(4, 1, 3, 3\)"),
        ((x, weight, torch.zeros(3)), {}, r"bias must be \(4,\), not \(3,\)"),
        ((x, weight), {"stride": 0}, "stride >= 1, padding >= 0 and codes up to 127, not 0, 0 and 1"),
        ((x[..., :2], weight), {}, r"a window \(3, 3\) does not fit in \(3, 2\)"),
    ):
        with pytest.raises(ValueError, match=words):
            exact_conv2d(*arguments, **grid, **sizes)
    with pytest.raises(TypeError, match=r"x must be float32, not torch\.float64"):
        exact_conv2d(x.double(), weight, **grid)


def test_a_cpu_without_the_instructions_is_told(monkeypatch):
    monkeypatch.setattr(native, "paths", tuple)
    with pytest.raises(Unavailable, match="this CPU has no AMX, VNNI or dot product of bytes"):
        exact_conv2d(torch.zeros(1, 2, 3, 3), torch.zeros(4, 2, 3, 3), scale=1.0, largest=1)
