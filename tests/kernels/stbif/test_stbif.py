"""The ST-BIF op against its equation: a loop written here, and autograd through the surrogate."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchd.kernels.dispatch import Unavailable
from benchd.kernels.stbif import stbif

PLAIN = ("reference", "torch")
BOUNDS = [(3, 0), (3, -3), (1, 0), (7, -8)]


def loop(current, s, pos_max, neg_min):
    """Return codes by the equation, neuron by neuron in double precision."""
    codes = torch.zeros_like(current, dtype=torch.int8)
    flat, out = current.double().reshape(len(current), -1), codes.reshape(len(current), -1)
    for neuron in range(flat.shape[1]):
        v, k = s / 2, 0
        for t in range(len(current)):
            v += float(flat[t, neuron])
            if v >= s and k < pos_max:
                q = 1
            elif v < 0 and k > neg_min:
                q = -1
            else:
                q = 0
            v, k = v - s * q, k + q
            out[t, neuron] = q
    return codes


def dyadic(*shape, seed=0):
    """Multiples of 1/16 in [-2, 2]: every sum below is exact, ties with the threshold too."""
    return torch.randint(-32, 33, shape, generator=torch.Generator().manual_seed(seed)) / 16


@pytest.mark.parametrize("implementation", PLAIN)
@pytest.mark.parametrize(("pos_max", "neg_min"), BOUNDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 40), (9, 3, 7), (8, 1, 2, 5, 3)], ids=str)
def test_codes_are_those_of_the_equation(implementation, pos_max, neg_min, dtype, shape):
    current = dyadic(*shape).to(dtype)
    arguments = {"threshold": 0.75, "pos_max": pos_max, "neg_min": neg_min, "implementation": implementation}
    codes = stbif(current, **arguments)
    want = loop(current, 0.75, pos_max, neg_min)
    assert codes.dtype == torch.int8
    assert torch.equal(codes, want)
    assert set(want.unique().tolist()) >= ({0, 1} if shape[0] == 1 and neg_min == 0 else {-1, 0, 1})
    values = stbif(current, **arguments, output="values")
    assert values.dtype == dtype
    assert torch.equal(values, 0.75 * want.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_torch_rounds_as_the_reference_does(dtype):
    current = torch.randn(12, 4099, generator=torch.Generator().manual_seed(1)).to(dtype)
    arguments = {"threshold": torch.tensor(0.7310, dtype=dtype), "pos_max": 3, "neg_min": 0}
    for output in ("codes", "values"):
        want = stbif(current, **arguments, output=output, implementation="reference")
        assert torch.equal(stbif(current, **arguments, output=output, implementation="torch"), want)


@pytest.mark.parametrize("scale", [2.0**-20, 0.3, 1.0, 3.7, 12345.6])
def test_just_below_the_threshold_does_not_fire(scale):
    """The fast form divides: a quotient rounded up to 1 would fire one step early."""
    s = torch.tensor(scale)
    below = torch.nextafter(s, torch.tensor(0.0))
    current = (torch.stack([below, s, torch.nextafter(s, torch.tensor(1e9))]) - s / 2)[None]
    assert stbif(current, threshold=s, pos_max=3, neg_min=0, implementation="torch").tolist() == [[0, 1, 1]]


@pytest.mark.parametrize("implementation", PLAIN)
def test_the_tracer_saturates_at_both_bounds(implementation):
    up, down = torch.full((8, 1), 1.0), torch.full((8, 1), -1.0)
    codes = stbif(
        torch.cat([up, down, down], dim=0), threshold=1.0, pos_max=3, neg_min=-2, implementation=implementation
    )
    k = codes.cumsum(0).flatten().tolist()
    assert k[:8] == [1, 2, 3, 3, 3, 3, 3, 3]
    assert min(k) == k[-1] == -2


@given(st.integers(1, 9), st.integers(0, 9), st.sampled_from(BOUNDS), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_any_size_agrees_with_the_loop(time_steps, neurons, bounds, seed):
    current = dyadic(time_steps, neurons, seed=seed)
    codes = stbif(current, threshold=0.5, pos_max=bounds[0], neg_min=bounds[1], implementation="torch")
    assert torch.equal(codes, loop(current, 0.5, *bounds))


@given(st.integers(0, 2**31), st.sampled_from(BOUNDS))
@settings(max_examples=25, deadline=None)
def test_once_the_input_is_quiet_the_sum_is_the_quantised_charge(seed, bounds):
    pos_max, neg_min = bounds
    charge = dyadic(3, 50, seed=seed)
    current = torch.cat([charge, torch.zeros(pos_max - neg_min, 50)])
    codes = stbif(current, threshold=0.5, pos_max=pos_max, neg_min=neg_min, implementation="torch")
    want = torch.floor(charge.sum(0) / 0.5 + 0.5).clamp(neg_min, pos_max)
    assert torch.equal(codes.sum(0), want.to(torch.int64))


@pytest.mark.parametrize("output", ["codes", "values"])
@pytest.mark.parametrize("implementation", PLAIN)
def test_an_empty_batch_gives_an_empty_result(implementation, output):
    current = torch.empty(4, 0, 3)
    arguments = {"threshold": 1.0, "pos_max": 3, "neg_min": 0}
    assert stbif(current, **arguments, output=output, implementation=implementation).shape == (4, 0, 3)


@pytest.mark.parametrize("implementation", PLAIN)
def test_a_layout_does_not_change_the_codes_nor_the_input(implementation):
    dense = dyadic(6, 4, 5, 3)
    arguments = {"threshold": 0.5, "pos_max": 3, "neg_min": 0, "implementation": implementation}
    want = stbif(dense, **arguments)
    for current in (dense.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), dense.mT.contiguous().mT):
        assert not current.is_contiguous()
        assert torch.equal(stbif(current, **arguments), want)
        assert torch.equal(current, dense)


class Step(torch.autograd.Function):
    """x >= 0 (or x > 0 when strict) with the documented surrogate; autograd derives the rest."""

    @staticmethod
    def forward(ctx, x, s, strict):
        ctx.save_for_backward(x, s)
        return (x > 0 if strict else x >= 0).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, s = ctx.saved_tensors
        sigmoid = torch.sigmoid(4 * x / s)
        return grad * 4 / s * sigmoid * (1 - sigmoid), None, None


def recorded(current, s, pos_max, neg_min):
    v, k, values = s / 2 + torch.zeros_like(current[0]), torch.zeros_like(current[0]), []
    for x in current:
        v = v + x
        q = Step.apply(v - s, s, False) * (k < pos_max) - Step.apply(-v, s, True) * (k > neg_min)
        v = v - s * q
        k = k + q.detach()
        values.append(s * q)
    return torch.stack(values)


@pytest.mark.parametrize(("pos_max", "neg_min"), BOUNDS)
@pytest.mark.parametrize("time_steps", [1, 9])
def test_the_gradients_are_those_of_autograd_through_the_surrogate(pos_max, neg_min, time_steps):
    generator = torch.Generator().manual_seed(2)
    current = torch.randn(time_steps, 3, 11, dtype=torch.float64, generator=generator).requires_grad_()
    weights = torch.randn(time_steps, 3, 11, dtype=torch.float64, generator=generator)
    s = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    arguments = {"threshold": s, "pos_max": pos_max, "neg_min": neg_min}
    values = stbif(current, **arguments, output="values", implementation="torch")
    want = recorded(current, s, pos_max, neg_min)
    assert torch.equal(values, want)
    got = torch.autograd.grad((values * weights).sum(), (current, s))
    expected = torch.autograd.grad((want * weights).sum(), (current, s))
    assert expected[0].abs().max() > 0.1
    assert expected[1].abs() > 1e-3
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


def test_a_threshold_may_learn_alone_and_keeps_its_shape():
    s = torch.tensor([0.5], requires_grad=True)
    arguments = {"threshold": s, "pos_max": 3, "neg_min": 0, "implementation": "torch"}
    stbif(dyadic(5, 40), **arguments, output="values").sum().backward()
    assert s.grad.shape == (1,)
    assert s.grad.abs() > 0
    assert not stbif(dyadic(5, 40).requires_grad_(), **arguments).requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_tensors_get_half_gradients(dtype):
    def gradients(current, s):
        current.requires_grad_()
        s.requires_grad_()
        values = stbif(current, threshold=s, pos_max=3, neg_min=0, output="values", implementation="torch")
        return torch.autograd.grad(values.sum(), (current, s))

    half = gradients(dyadic(4, 9).to(dtype), torch.tensor(0.5, dtype=dtype))
    wide = gradients(dyadic(4, 9), torch.tensor(0.5))
    for got, want in zip(half, wide, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("output", ["codes", "values"])
def test_a_compiler_and_an_exporter_trace_it_whole(output, learns):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(0.5), requires_grad=learns)

        def forward(self, current):
            arguments = {"threshold": self.scale, "pos_max": 3, "neg_min": 0, "output": output}
            return stbif(current, **arguments, implementation="torch")

    layer, current = Layer(), dyadic(5, 8).requires_grad_(learns)
    want = layer(current)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(current)
    assert torch.equal(compiled, want)
    assert torch.equal(torch.export.export(layer, (current.detach(),)).module()(current.detach()), want)
    if learns and output == "values":
        got = torch.autograd.grad(compiled.sum(), (current, layer.scale))
        torch.testing.assert_close(got, torch.autograd.grad(want.sum(), (current, layer.scale)))


@pytest.mark.parametrize(
    ("current", "options", "error", "words"),
    [
        (torch.ones(3, dtype=torch.int8), {}, TypeError, "floating point, not torch.int8"),
        (torch.tensor(1.0), {}, ValueError, r"\(T, \.\.\.\) with T at least 1"),
        (torch.empty(0, 3), {}, ValueError, r"not \(0, 3\)"),
        (torch.ones(3), {"threshold": 0.0}, ValueError, "positive, not 0.0"),
        (torch.ones(3), {"threshold": torch.ones(2)}, ValueError, r"one element, not shape \(2,\)"),
        (torch.ones(3), {"pos_max": 0}, ValueError, "neg_min <= 0 < pos_max, not 0 and 0"),
        (torch.ones(3), {"neg_min": 1}, ValueError, "neg_min <= 0 < pos_max, not 1 and 3"),
        (torch.ones(3), {"output": "spikes"}, ValueError, "'codes' or 'values', not 'spikes'"),
        (torch.ones(3), {"implementation": "fast"}, ValueError, "unknown implementation 'fast'"),
    ],
)
def test_an_unusable_call_says_what_was_expected(current, options, error, words):
    arguments = {"threshold": 1.0, "pos_max": 3, "neg_min": 0, "implementation": "torch"}
    with pytest.raises(error, match=words):
        stbif(current, **{**arguments, **options})


def test_an_implementation_that_does_not_exist_is_named():
    with pytest.raises(Unavailable, match="stbif has no 'triton' implementation"):
        stbif(torch.ones(3), threshold=1.0, pos_max=3, neg_min=0, implementation="triton")
