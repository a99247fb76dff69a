"""The Triton kernel of the short convolution against conv1d in float64, in the interpreter where there is no GPU."""

import pytest
import torch
from pairs import pairs
from test_causal_conv1d import equation, inputs

from benchd.kernels.causal_conv1d import causal_conv1d, causal_conv1d_pair

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = range(2, 8)


def convolved(tensors, **arguments):
    """Return y of the kernel, (batch, length, channels), or (2, ...) for the weight of a pair."""
    op = causal_conv1d_pair if tensors["weight"].dim() == 3 else causal_conv1d
    return op(**{name: tensor.to(DEVICE) for name, tensor in tensors.items()}, **arguments, implementation="triton")


def wanted(tensors, activation="silu", reverse=False):
    if tensors["weight"].dim() == 2:
        return equation(**tensors, activation=activation, reverse=reverse)
    halves = [{name: tensors[name][g] for name in tensors if name != "x"} for g in (0, 1)]
    return torch.stack([equation(tensors["x"], **halves[g], activation=activation, reverse=g == 1) for g in (0, 1)])


def assert_right(y, want, limit=2e-6):
    torch.testing.assert_close(y.cpu().double(), want, rtol=0, atol=limit * float(want.abs().max()))


@pairs(
    direction=["back", "ahead", "pair"],
    shape=[(2, 9, 70, 4), (3, 8, 144, 1), (1, 17, 130, 3)],
    activation=["silu", None],
    biased=[True, False],
)
def test_float32_agrees_with_the_equation(direction, shape, activation, biased):
    lead, reverse = (2,) * (direction == "pair"), direction == "ahead"
    batch, longest, channels, width = shape
    few = 2, channels % 64  # less memory than a tile that reads without its mask
    # and a last token at each place of a tile, which neither the bias nor the activation sees
    places = LENGTHS if biased and activation else ()
    for length, wide in ((longest, channels), few, *((length, channels) for length in places)):
        tensors = inputs(batch, length, wide, width, lead=lead)
        if not biased:
            del tensors["bias"]
        y = convolved(tensors, activation=activation, **({} if lead else {"reverse": reverse}))
        assert y.dtype == torch.float32
        assert_right(y, wanted(tensors, activation, reverse))


@pytest.mark.parametrize("lead", [(), (2,)], ids=["back", "pair"])
def test_a_single_channel_is_convolved(lead):
    for length in (1, 9):
        tensors = inputs(1, length, 1, 4, lead=lead)
        assert_right(convolved(tensors), wanted(tensors))


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)], ids=str)
def test_half_precision_rounds_only_what_comes_out(dtype, limit):
    tensors = inputs(2, 11, 70, 4, lead=(2,), dtype=dtype)
    y = convolved(tensors)
    assert y.dtype == dtype
    assert_right(y, wanted(tensors), limit)


def test_half_tokens_meet_float32_weights_as_they_are():
    tensors = inputs(1, 9, 70, 4, lead=(2,))
    tensors["x"] = tensors["x"].half()
    y = convolved(tensors)
    assert y.dtype == torch.float16
    assert_right(y, wanted(tensors), 1e-3)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # infinity is what the division wants
def test_silu_is_right_far_from_zero():
    tensors = inputs(1, 9, 20, 4)
    scaled = tensors | {"x": tensors["x"] * 200}
    y = convolved(scaled)
    torch.testing.assert_close(y.cpu().double(), equation(**scaled), rtol=2e-6, atol=2e-4)
