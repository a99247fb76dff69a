"""The short convolution, in one direction and in both at once, against conv1d in float64."""

import pytest
import torch
from pairs import pairs
from torch.nn import functional

from benchd.kernels.causal_conv1d import causal_conv1d, causal_conv1d_pair

PLAIN = ("torch", "native")
DIRECTIONS = ("back", "ahead", "pair")


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
    return op(**tensors, **options, activation=activation, implementation=implementation)


def equation(tensors, direction="back", activation="silu"):
    """Return y in float64."""
    return convolved({name: each.double() for name, each in tensors.items()}, "reference", direction, activation)


@pairs(
    implementation=PLAIN,
    direction=DIRECTIONS,
    activation=["silu", None],
    biased=[True, False],
    shape=[(1, 1, 1, 4), (2, 3, 5, 4), (3, 4, 7, 1), (2, 66, 130, 3), (2, 9, 5, 11), (1, 197, 48, 4)],
)
def test_float32_agrees_with_the_equation(implementation, direction, activation, biased, shape):
    tensors = inputs(*shape, direction=direction, biased=biased)
    y = convolved(tensors, implementation, direction, activation)
    want = equation(tensors, direction, activation)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), want, rtol=0, atol=2e-6 * float(want.abs().max()))


@pytest.mark.parametrize("implementation", PLAIN)
def test_each_direction_is_what_it_is_alone(implementation):
    tensors = inputs(3, 70, 150, 4, direction="pair")
    both = convolved(tensors, implementation, "pair")
    for y, weight, bias, direction in zip(both, tensors["weight"], tensors["bias"], DIRECTIONS, strict=False):
        alone = {"x": tensors["x"], "weight": weight, "bias": bias}
        assert torch.equal(y, convolved(alone, implementation, direction))


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
