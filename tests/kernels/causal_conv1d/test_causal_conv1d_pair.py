"""Both directions at once against conv1d in float64, one direction after the other."""

import pytest
import torch
from pairs import pairs
from test_causal_conv1d import PLAIN, equation, inputs

from benchd.kernels.causal_conv1d import causal_conv1d, causal_conv1d_pair


def equations(x, weight, bias=None, activation="silu"):
    """Return both y, (2, batch, length, channels) in float64."""
    biases = (None, None) if bias is None else bias
    return torch.stack([equation(x, weight[g], biases[g], activation, reverse=g == 1) for g in (0, 1)])


@pairs(
    implementation=PLAIN,
    activation=["silu", None],
    biased=[True, False],
    shape=[(1, 1, 1, 4), (2, 3, 5, 4), (3, 4, 7, 1), (2, 66, 130, 3), (2, 9, 5, 11), (1, 197, 48, 4)],
)
def test_float32_agrees_with_the_equation(implementation, activation, biased, shape):
    tensors = inputs(*shape, lead=(2,))
    if not biased:
        del tensors["bias"]
    y = causal_conv1d_pair(**tensors, activation=activation, implementation=implementation)
    want = equations(**tensors, activation=activation)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), want, rtol=0, atol=2e-6 * float(want.abs().max()))


@pytest.mark.parametrize("implementation", PLAIN[1:])
def test_each_direction_is_what_it_is_alone(implementation):
    x, weight, bias = inputs(3, 70, 150, 4, lead=(2,)).values()
    y = causal_conv1d_pair(x, weight, bias, implementation=implementation)
    for g in (0, 1):
        alone = causal_conv1d(x, weight[g], bias[g], reverse=g == 1, implementation=implementation)
        assert torch.equal(y[g], alone)


@pytest.mark.parametrize("implementation", ["reference", "torch"])
def test_gradients_are_those_of_finite_differences(implementation):
    tensors = [tensor.requires_grad_() for tensor in inputs(1, 5, 2, 4, lead=(2,), dtype=torch.float64).values()]

    def convolved(x, weight, bias):
        return causal_conv1d_pair(x, weight, bias, implementation=implementation)

    assert torch.autograd.gradcheck(convolved, tensors)
    with torch.no_grad():
        torch.testing.assert_close(convolved(*tensors), equations(*tensors), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("x", torch.zeros(2, 3), r"x must be \(batch, length, channels\), not \(2, 3\)"),
        ("weight", torch.zeros(3, 4), r"weight must be \(2, 3, width\), not \(3, 4\)"),
        ("weight", torch.zeros(2, 3, 0), r"weight must be \(2, 3, width\), not \(2, 3, 0\)"),
        ("bias", torch.zeros(3), r"bias must be \(2, 3\), not \(3,\)"),
        ("weight", torch.zeros(2, 3, 4, device="meta"), "weight must be on cpu"),
        ("activation", "relu", "activation must be 'silu' or None, not 'relu'"),
        ("implementation", "fast", "unknown implementation 'fast'"),
    ],
)
def test_a_wrong_argument_is_named_with_what_was_expected(name, value, expected):
    with pytest.raises(ValueError, match=expected):
        causal_conv1d_pair(**{"implementation": "torch"} | inputs(1, 2, 3, 4, lead=(2,)) | {name: value})
