"""The convolution in integers against sums in float64, which holds them, with all instructions of this CPU in turn."""

import pytest
import torch
from pairs import pairs
from torch.nn import functional

from benchd.kernels.exact_conv2d import MOST_PRODUCTS, native, pack
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


def computed(x, weight, bias, *, scale, largest, stride=1, padding=0, per_weight=3):
    """Return y of the kernel, None for an x that is not whole."""
    scale = torch.as_tensor(scale, dtype=torch.float32)
    return native.convolved(x, bias, pack(weight, per_weight), scale, largest, stride, padding)


def equation(x, weight, bias, *, scale, largest, stride=1, padding=0, per_weight=3):
    """Return y by exact sums, rounded as the kernel does: those of the upper digits apart from those of the lowest."""
    codes = (x * (1 / torch.tensor(scale))).round().double()
    assert codes.abs().max() <= largest
    numbers, unit = whole(weight, per_weight)
    lowest = (numbers + 128).remainder(256) - 128
    sums, lower = (functional.conv2d(codes, taps, None, stride, padding) for taps in (numbers, lowest))
    upper = ((sums - lower) / 256).float()
    y = (upper * 256 + lower.float()) * (unit * torch.tensor(scale))[:, None, None]
    return y if bias is None else y + bias[:, None, None]


@pytest.mark.parametrize("per_weight", [1, 3])
def test_the_equation_is_that_of_conv2d(per_weight):
    for shape in SHAPES:
        (x, weight, bias), sizes = problem(shape)
        numbers, unit = whole(weight, per_weight)
        rounded = numbers * unit.double()[:, None, None, None]
        placed = sizes["stride"], sizes["padding"]
        want = functional.conv2d(x.double(), rounded, bias.double(), *placed)
        got = equation(x, weight, bias, **sizes, per_weight=per_weight)
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


@needs_instructions
@pairs(path=EVERY, threads=[1, 2, 5], per_weight=[1, 3])
def test_all_instructions_and_threads_give_the_equation_bit_for_bit(path, threads, per_weight, monkeypatch):
    monkeypatch.setattr(native, "paths", lambda: (path,))
    monkeypatch.setattr(native.compiler, "threads", lambda: threads)
    monkeypatch.setattr(native, "_GATHERED", 2**15)  # some images at a time
    native._plan.cache_clear()
    for shape in SHAPES:
        (x, weight, bias), sizes = problem(shape)
        for shift in (bias, None):
            want = equation(x, weight, shift, **sizes, per_weight=per_weight)
            assert torch.equal(computed(x, weight, shift, **sizes, per_weight=per_weight), want), shape


@needs_instructions
@pytest.mark.parametrize("path", EVERY)
def test_sums_at_the_bound_do_not_overflow(path, monkeypatch):
    monkeypatch.setattr(native, "paths", lambda: (path,))
    largest, channels = 60, 1088
    assert MOST_PRODUCTS - largest < largest * channels <= MOST_PRODUCTS
    weight = torch.stack([torch.full((channels, 1, 1), value) for value in (1.0, -1.0, 0.996)])
    x = torch.full((1, channels, 1, 1), float(largest))
    for sign in (1, -1):
        y = computed(sign * x, weight, None, scale=1.0, largest=largest)
        assert torch.equal(y, equation(sign * x, weight, None, scale=1.0, largest=largest))
        assert torch.equal(y.flatten()[:2], sign * torch.tensor([1.0, -1.0]) * largest * channels)


@pytest.mark.parametrize("per_weight", [1, 3])
def test_a_weight_is_rounded_to_numbers_of_its_channel(per_weight):
    weight = torch.randn(40, 7, 3, 3) * torch.logspace(-30, 30, 40)[:, None, None, None]
    weight[3] = 0
    numbers, unit = whole(weight, per_weight)
    largest = weight.abs().amax((1, 2, 3)).double()
    off = (numbers * unit.double()[:, None, None, None] - weight.double()).abs().amax((1, 2, 3))
    if per_weight == 1:
        assert numbers.abs().amax() == 127
        assert (off <= largest / 254 * (1 + 1e-6)).all()
    else:
        assert (off <= largest * 2.0**-22).all()
        assert (unit.frexp().mantissa == 0.5).all(), "powers of two keep the weights that are sums of them"
        dyadic = torch.randint(-64, 65, (5, 4, 3, 3)) / 16
        numbers, unit = whole(dyadic)
        assert torch.equal((numbers * unit[:, None, None, None]).float(), dyadic)
    with pytest.raises(ValueError, match="weights must be finite"):
        pack(torch.full((1, 1, 1, 1), torch.inf), per_weight)


@needs_instructions
def test_what_is_not_whole_is_left_to_others():
    (x, weight, bias), sizes = problem((2, 3, 5, 7, 5, 3, 3, 1, 1))
    assert computed(x, weight, bias, **sizes) is not None
    for wrong in (0.37 / 2, 4 * 0.37, -4 * 0.37, torch.nan, torch.inf, 1e30):
        other = x.clone()
        other[1, 2, 4, 6] = wrong
        assert computed(other, weight, bias, **sizes) is None, wrong
    assert computed(x[:0], weight, bias, **sizes).shape == (0, 5, 5, 7)


@needs_instructions
def test_the_share_of_nonzeros_is_counted_in_rows_of_all_heights():
    (x, _, _), _ = problem((2, 3, 5, 7, 5, 3, 3, 1, 1))
    x, density = x.contiguous(memory_format=torch.channels_last), (x != 0).float().mean().item()
    assert not native.is_sparse(x, density - 0.01)
    assert native.is_sparse(x, density + 0.01)
    assert not native.is_sparse(x[:0], 1.0)
    for height in (5, 7, 12):
        x = torch.zeros(63, 3, height, 4).contiguous(memory_format=torch.channels_last)
        x[:, :, 0] = 1
        assert not native.is_sparse(x, 0.8 / height)
        assert native.is_sparse(x, 1.3 / height)


@needs_instructions
def test_another_default_dtype_changes_no_answer():
    (x, weight, bias), sizes = problem((2, 3, 5, 7, 5, 3, 3, 1, 1))
    want = computed(x, weight, bias, **sizes)
    torch.set_default_dtype(torch.float64)
    try:
        y = computed(x, weight, bias, **sizes)
    finally:
        torch.set_default_dtype(torch.float32)
    assert y.dtype == torch.float32
    assert torch.equal(y, want)


@needs_instructions
def test_any_layout_in_and_channels_last_out():
    (x, weight, bias), sizes = problem((3, 6, 7, 8, 20, 3, 3, 1, 1))
    want = computed(x, weight, bias, **sizes)
    assert want.is_contiguous(memory_format=torch.channels_last)
    for same in (x.contiguous(memory_format=torch.channels_last), x.mT.contiguous().mT):
        assert torch.equal(computed(same, weight, bias, **sizes), want)
    sizes["scale"] = torch.tensor([sizes["scale"]])
    assert torch.equal(computed(x, weight, bias.repeat_interleave(2)[::2], **sizes), want)


@needs_instructions
def test_the_op_keeps_the_rules_of_custom_ops():
    (x, weight, bias), _ = problem((2, 3, 5, 4, 18, 3, 3, 2, 1))
    digits = pack(weight)
    for tensor in (x, x[:0], x.contiguous(memory_format=torch.channels_last)):
        arguments = (tensor, digits.digits, digits.unit, torch.tensor(0.37), bias, list(digits.window), 3, 2, 1, 3)
        torch.library.opcheck(torch.ops.benchd.exact_conv2d.default, arguments)


@pytest.mark.parametrize(
    ("shape", "words"),
    [((1, 3, 5, 5), r"a window of 18 numbers does not fit x \(1, 3, 5, 5\)"), ((1, 2, 3, 2), r"a window \(3, 3\)")],
)
def test_a_window_that_does_not_fit_is_refused(shape, words):
    with pytest.raises(ValueError, match=words):
        computed(torch.zeros(shape), torch.zeros(4, 2, 3, 3), None, scale=1.0, largest=1)
