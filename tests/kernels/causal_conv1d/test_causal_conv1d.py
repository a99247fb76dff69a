"""The short convolution against conv1d in float64, which pads and flips."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import pairs
from torch.nn import functional

from benchd.kernels.causal_conv1d import causal_conv1d

PLAIN = ("reference", "torch", "native")


def inputs(batch, length, channels, width, *, lead=(), dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"x": (batch, length, channels), "weight": (*lead, channels, width), "bias": (*lead, channels)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def equation(x, weight, bias=None, activation="silu", reverse=False):
    """Return y in float64 through conv1d, channels first, flipped for the reverse direction."""
    x = x.double().flip(1) if reverse else x.double()
    padded = functional.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0))
    bias = None if bias is None else bias.double()
    y = functional.conv1d(padded, weight.double()[:, None], bias, groups=len(weight)).transpose(1, 2)
    y = y.flip(1) if reverse else y
    return functional.silu(y) if activation else y


@pairs(
    implementation=PLAIN,
    reverse=[False, True],
    activation=["silu", None],
    biased=[True, False],
    shape=[(1, 1, 1, 4), (2, 3, 5, 4), (3, 4, 7, 1), (2, 63, 33, 3), (1, 197, 48, 4)],
)
def test_float32_agrees_with_the_equation(implementation, reverse, activation, biased, shape):
    tensors = inputs(*shape)
    if not biased:
        del tensors["bias"]
    y = causal_conv1d(**tensors, activation=activation, reverse=reverse, implementation=implementation)
    want = equation(**tensors, activation=activation, reverse=reverse)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), want, rtol=0, atol=2e-6 * float(want.abs().max()))


@pytest.mark.parametrize("implementation", PLAIN)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 1e-3), (torch.bfloat16, 8e-3), (torch.float64, 1e-14)])
def test_other_dtypes_round_only_what_comes_out(implementation, dtype, limit):
    if implementation == "native" and dtype == torch.float64:
        pytest.skip("refused, which has a test of its own")
    tensors = inputs(2, 40, 9, 4, dtype=dtype)
    y = causal_conv1d(**tensors, implementation=implementation)
    want = equation(**tensors)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), want, rtol=limit, atol=limit)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("implementation", ["reference", "torch"])
def test_gradients_are_those_of_finite_differences(implementation, reverse):
    tensors = [tensor.requires_grad_() for tensor in inputs(2, 6, 3, 4, dtype=torch.float64).values()]

    def convolved(x, weight, bias):
        return causal_conv1d(x, weight, bias, reverse=reverse, implementation=implementation)

    assert torch.autograd.gradcheck(convolved, tensors)


@settings(deadline=None, max_examples=40)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 20), st.integers(1, 40), st.integers(1, 6)),
    reverse=st.booleans(),
    activation=st.sampled_from(["silu", None]),
)
def test_native_agrees_with_the_equation_at_any_shape(shape, reverse, activation):
    tensors = inputs(*shape)
    y = causal_conv1d(**tensors, activation=activation, reverse=reverse, implementation="native")
    want = equation(**tensors, activation=activation, reverse=reverse)
    torch.testing.assert_close(y.double(), want, rtol=2e-6, atol=2e-6)


def test_native_silu_is_right_far_from_zero_and_hides_no_nan():
    tensors = inputs(1, 30, 20, 4)
    scaled = tensors | {"x": tensors["x"] * 200}
    y = causal_conv1d(**scaled, implementation="native")
    torch.testing.assert_close(y.double(), equation(**scaled), rtol=2e-6, atol=2e-4)
    for name in tensors:
        lost = tensors | {name: torch.full_like(tensors[name], torch.nan)}
        assert causal_conv1d(**lost, implementation="native").isnan().all()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("x", torch.zeros(2, 3), r"x must be \(batch, length, channels\), not \(2, 3\)"),
        ("weight", torch.zeros(3, 1, 4), r"weight must be \(3, width\), not \(3, 1, 4\)"),
        ("weight", torch.zeros(4, 4), r"weight must be \(3, width\), not \(4, 4\)"),
        ("bias", torch.zeros(4), r"bias must be \(3,\), not \(4,\)"),
        ("weight", torch.zeros(3, 4, device="meta"), "weight must be on cpu"),
        ("activation", "relu", "activation must be 'silu' or None, not 'relu'"),
        ("implementation", "fast", "unknown implementation 'fast'"),
    ],
)
def test_a_wrong_argument_is_named_with_what_was_expected(name, value, expected):
    with pytest.raises(ValueError, match=expected):
        causal_conv1d(**{"implementation": "torch"} | inputs(1, 2, 3, 4) | {name: value})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_silu_of_native_holds_far_from_zero(dtype):
    far = [-torch.inf, -3e38, -1e30, -300]
    x = torch.tensor([*far, -87, -20, -1e-3, 0, 1e-30, 0.5, 20, 300, torch.nan])[None, None].to(dtype)
    y = causal_conv1d(x, torch.ones(13, 1, dtype=dtype), implementation="native")
    want = functional.silu(x.double())
    want[..., : len(far)] = 0  # the limit, where torch has a NaN at -inf
    torch.testing.assert_close(y.double(), want, rtol=1.1 * 2**-8, atol=1e-34, equal_nan=True)


@pytest.mark.parametrize("width", [2, 4, 6])
def test_native_takes_bfloat16_of_any_width(width):
    tensors = inputs(2, 70, 150, width, dtype=torch.bfloat16)
    y = causal_conv1d(**tensors, implementation="native")
    torch.testing.assert_close(y.double(), equation(**tensors), rtol=1.1 * 2**-8, atol=1e-4)
