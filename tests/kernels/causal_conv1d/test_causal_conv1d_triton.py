"""The Triton kernel of the short convolution against conv1d in float64, in the interpreter where there is no GPU."""

import pytest
import torch
from pairs import pairs
from test_causal_conv1d import DIRECTIONS, convolved, equation, inputs

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = range(2, 8)


def assert_right(tensors, direction, activation="silu", limit=2e-6):
    on_device = {name: tensor.to(DEVICE) for name, tensor in tensors.items()}
    y, want = convolved(on_device, "triton", direction, activation), equation(tensors, direction, activation)
    assert y.dtype == tensors["x"].dtype
    torch.testing.assert_close(y.cpu().double(), want, rtol=0, atol=limit * float(want.abs().max()))


@pairs(
    direction=DIRECTIONS,
    shape=[(2, 9, 70, 4), (3, 8, 144, 1), (1, 17, 130, 3)],
    activation=["silu", None],
    biased=[True, False],
)
def test_float32_agrees_with_the_equation(direction, shape, activation, biased):
    batch, longest, channels, width = shape
    few = 2, channels % 64  # less memory than a tile that reads without its mask
    # and a last token at each place of a tile, which neither the bias nor the activation sees
    places = LENGTHS if biased and activation and width == 4 else ()
    for length, wide in ((longest, channels), few, *((length, channels) for length in places)):
        tensors = inputs(batch, length, wide, width, direction=direction, biased=biased)
        assert_right(tensors, direction, activation)


@pytest.mark.parametrize("direction", ["back", "pair"])
def test_a_single_channel_is_convolved(direction):
    for length in (1, 9):
        assert_right(inputs(1, length, 1, 4, direction=direction), direction)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)], ids=str)
def test_half_precision_rounds_only_what_comes_out(dtype, limit):
    assert_right(inputs(2, 11, 70, 4, direction="pair", dtype=dtype), "pair", limit=limit)


def test_half_tokens_meet_float32_weights_as_they_are():
    tensors = inputs(1, 9, 70, 4, direction="pair")
    assert_right(tensors | {"x": tensors["x"].half()}, "pair", limit=1e-3)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # infinity is what the division wants
def test_silu_is_right_far_from_zero():
    tensors = inputs(1, 9, 20, 4)
    assert_right(tensors | {"x": tensors["x"] * 200}, "back")
