"""The short convolution, in one direction and in both at once, against conv1d in float64.

Triton's kernel runs on a GPU where there is one, else in its interpreter.
"""

from importlib.util import find_spec

import pytest
import torch
from pairs import pairs
from torch.nn import functional

from benchd.kernels.causal_conv1d import causal_conv1d, causal_conv1d_pair

IMPLEMENTATIONS = ("torch", "native", *["triton"] * bool(find_spec("triton")))
DIRECTIONS = ("back", "ahead", "pair")
HALVES = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


def inputs(batch, length, channels, width, *, direction="back", dtype=torch.float32, biased=True):
    generator = torch.Generator().manual_seed(0)
    lead = (2,) * (direction == "pair")
    shapes = {"x": (batch, length, channels), "weight": (*lead, channels, width), "bias": (*lead, channels)}
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    return tensors if biased else {name: tensors[name] for name in ("x", "weight")}


def convolved(tensors, implementation, direction="back", activation="silu"):
    """Return y of the op, for a "pair" of both directions at once."""
    op, options = (
        (causal_conv1d_pair, {}) if direction == "pair" else (causal_conv1d, {"reverse": direction == "ahead"})
    )
    device = "cuda" if implementation == "triton" and torch.cuda.is_available() else "cpu"
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    return op(**tensors, **options, activation=activation, implementation=implementation).cpu()


def equation(tensors, direction="back", activation="silu"):
    """Return y in float64."""
    return convolved({name: each.double() for name, each in tensors.items()}, "reference", direction, activation)


def assert_right(tensors, implementation, direction="back", activation="silu", limit=2e-6):
    y, want = convolved(tensors, implementation, direction, activation), equation(tensors, direction, activation)
    assert y.dtype == tensors["x"].dtype
    torch.testing.assert_close(y.double(), want, rtol=0, atol=limit * float(want.abs().max()))


@pairs(
    implementation=IMPLEMENTATIONS,
    direction=DIRECTIONS,
    activation=["silu", None],
    biased=[True, False],
    shape=[(1, 1, 1, 4), (2, 3, 5, 4), (1, 9, 1, 4), (3, 8, 144, 1), (2, 66, 130, 3), (2, 9, 5, 11), (1, 197, 48, 4)],
)
def test_float32_agrees_with_the_equation(implementation, direction, activation, biased, shape):
    assert_right(inputs(*shape, direction=direction, biased=biased), implementation, direction, activation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_last_token_may_lie_at_each_place_of_a_tile(implementation, direction):
    for length in range(2, 8):
        for channels in (2, 70):  # of less memory than a tile that Triton reads without its mask, and of more
            assert_right(inputs(2, length, channels, 4, direction=direction), implementation, direction)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_rounds_only_what_comes_out(implementation, dtype):
    tensors = inputs(2, 11, 70, 4, direction="pair", dtype=dtype)
    assert_right(tensors, implementation, "pair", limit=HALVES[dtype])


def test_half_tokens_meet_float32_weights_as_they_are():
    pytest.importorskip("triton")
    tensors = inputs(1, 9, 70, 4, direction="pair")
    assert_right(tensors | {"x": tensors["x"].half()}, "triton", "pair", limit=1e-3)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gradients_are_those_of_finite_differences(direction):
    tensors = inputs(2, 6, 3, 4, direction=direction, dtype=torch.float64)

    def y(*values):
        return convolved(dict(zip(tensors, values, strict=True)), "torch", direction)

    assert torch.autograd.gradcheck(y, [tensor.requires_grad_() for tensor in tensors.values()])


def test_native_agrees_with_the_equation_at_any_width():
    for width in range(1, 7):
        for length, channels in ((1, 40), (5, 9), (20, 17)):
            tensors = inputs(2, length, channels, width)
            torch.testing.assert_close(convolved(tensors, "native").double(), equation(tensors), rtol=2e-6, atol=2e-6)
        half = inputs(2, 70, 150, width, dtype=torch.bfloat16)
        torch.testing.assert_close(convolved(half, "native").double(), equation(half), rtol=1.1 * 2**-8, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_silu_of_native_holds_far_from_zero_and_hides_no_nan(dtype):
    far = [-torch.inf, -3e38, -1e30, -300]
    x = torch.tensor([*far, -87, -20, -1e-3, 0, 1e-30, 0.5, 20, 300, torch.nan])[None, None].to(dtype)
    y = convolved({"x": x, "weight": torch.ones(13, 1, dtype=dtype)}, "native")
    want = functional.silu(x.double())
    want[..., : len(far)] = 0  # the limit, where torch has a NaN at -inf
    torch.testing.assert_close(y.double(), want, rtol=1.1 * 2**-8, atol=1e-34, equal_nan=True)
    tensors = inputs(1, 30, 20, 4, dtype=dtype)
    for name in tensors:
        lost = tensors | {name: torch.full_like(tensors[name], torch.nan)}
        assert convolved(lost, "native").isnan().all()


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # infinity is what the division wants
def test_the_silu_of_triton_is_right_far_from_zero():
    pytest.importorskip("triton")
    tensors = inputs(1, 9, 20, 4)
    assert_right(tensors | {"x": tensors["x"] * 200}, "triton")
