"""The ST-BIF op against its equation, and its gradients against autograd through the surrogate."""

from functools import partial

import pytest
import torch
from pairs import pairs

from benchd.kernels.stbif import max_pool_delta, stbif, stbif_block

PLAIN = ("torch", "native")
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
BOUNDS = [(3, 0), (3, -3), (1, 0), (7, -8)]


def dyadic(*shape, seed=0):
    """Multiples of 1/16 in [-2, 2]: every sum below is exact, ties with the threshold too."""
    return torch.randint(-32, 33, shape, generator=torch.Generator().manual_seed(seed)) / 16


@pairs(implementation=PLAIN, bounds=BOUNDS, dtype=DTYPES, shape=[(1, 40), (9, 3, 7), (8, 1, 2, 5, 3), (12, 4099)])
def test_codes_and_values_are_those_of_the_equation(implementation, bounds, dtype, shape):
    normal = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for current, threshold in ((dyadic(*shape), 0.75), (normal, torch.tensor(0.7310, dtype=dtype))):
        neuron = {"threshold": threshold, "pos_max": bounds[0], "neg_min": bounds[1]}
        for output, output_dtype in (("codes", torch.int8), ("values", dtype)):
            got, want = (
                stbif(current.to(dtype), **neuron, output=output, implementation=each)
                for each in (implementation, "reference")
            )
            assert got.dtype == output_dtype
            assert torch.equal(got, want)
            assert want.unique().numel() == (2 if shape[0] == 1 and bounds[1] == 0 else 3)


@pytest.mark.parametrize("scale", [2.0**-20, 0.3, 1.0, 3.7, 12345.6])
@pytest.mark.parametrize("implementation", PLAIN)
def test_just_below_the_threshold_does_not_fire(scale, implementation):
    """The fast form divides: a quotient rounded up to 1 would fire one step early."""
    s = torch.tensor(scale)
    below = torch.nextafter(s, torch.tensor(0.0))
    current = (torch.stack([below, s, torch.nextafter(s, torch.tensor(1e9))]) - s / 2)[None]
    assert stbif(current, threshold=s, pos_max=3, neg_min=0, implementation=implementation).tolist() == [[0, 1, 1]]


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_once_the_input_is_quiet_the_sum_is_the_quantised_charge(bounds):
    pos_max, neg_min = bounds
    charge = dyadic(3, 500)
    current = torch.cat([charge, torch.zeros(pos_max - neg_min, 500)])
    codes = stbif(current, threshold=0.5, pos_max=pos_max, neg_min=neg_min, implementation="torch")
    want = torch.floor(charge.sum(0) / 0.5 + 0.5).clamp(neg_min, pos_max)
    assert torch.equal(codes.sum(0), want.to(torch.int64))


@torch.no_grad()
def test_a_nan_fires_no_spike_but_in_plain_pytorch_that_is_not_compiled():
    current = torch.tensor([[torch.nan, 1.0], [1.0, 1.0]])
    fire = partial(stbif, current, threshold=1.0, pos_max=3, neg_min=0, output="values")
    silent, passed_on = (torch.tensor([[first, 1.0]] * 2) for first in (0.0, torch.nan))
    assert torch.equal(fire(implementation="reference"), silent)
    assert torch.equal(fire(implementation="native"), silent)
    assert torch.equal(torch.compile(fire, fullgraph=True, backend="aot_eager")(implementation="torch"), silent)
    torch.testing.assert_close(fire(implementation="torch"), passed_on, rtol=0, atol=0, equal_nan=True)


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


@pairs(implementation=PLAIN, bounds=BOUNDS, time_steps=[1, 9])
def test_the_gradients_are_those_of_autograd_through_the_surrogate(implementation, bounds, time_steps):
    pos_max, neg_min = bounds
    generator = torch.Generator().manual_seed(2)
    current = torch.randn(time_steps, 3, 11, dtype=torch.float64, generator=generator).requires_grad_()
    weights = torch.randn(time_steps, 3, 11, dtype=torch.float64, generator=generator)
    s = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    arguments = {"threshold": s, "pos_max": pos_max, "neg_min": neg_min}
    values = stbif(current, **arguments, output="values", implementation=implementation)
    want = recorded(current, s, pos_max, neg_min)
    assert torch.equal(values, want)
    got = torch.autograd.grad((values * weights).sum(), (current, s))
    expected = torch.autograd.grad((want * weights).sum(), (current, s))
    assert expected[0].abs().max() > 0.1
    assert expected[1].abs() > 1e-3
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("implementation", PLAIN)
def test_a_threshold_may_learn_alone_and_keeps_its_shape(implementation):
    s = torch.tensor([0.5], requires_grad=True)
    arguments = {"threshold": s, "pos_max": 3, "neg_min": 0, "implementation": implementation}
    stbif(dyadic(5, 40), **arguments, output="values").sum().backward()
    assert s.grad.shape == (1,)
    assert s.grad.abs() > 0
    assert not stbif(dyadic(5, 40).requires_grad_(), **arguments).requires_grad


def layouts(current):
    last = current.flatten(0, 1).to(memory_format=torch.channels_last).unflatten(0, current.shape[:2])
    return current, last, current.mT.contiguous().mT


SHAPES = [(1, 2, 3, 2, 2), (8, 1, 70, 7, 9), (3, 2, 2, 20, 34), (5, 3, 130, 1, 1), (4, 0, 2, 4, 4)]


@pairs(implementation=PLAIN, terms=["", "bias", "residual", "bias residual"], dtype=DTYPES, shape=SHAPES)
def test_a_block_is_the_neuron_behind_the_sum(implementation, terms, dtype, shape):
    generator = torch.Generator().manual_seed(6)
    state = torch.promote_types(dtype, torch.float32)
    current, residual = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    bias = torch.randn(shape[0], shape[2], generator=generator).to(dtype)
    added = {name: value for name, value in (("bias", bias), ("residual", residual)) if name in terms}
    charge = current.to(state)
    for name, term in added.items():
        charge = charge + (term[:, None, :, None, None] if name == "bias" else term).to(state)
    arguments = {"threshold": 0.731, "pos_max": 3, "neg_min": -1}
    want = stbif(charge, **arguments, implementation="reference")
    values = (want * torch.tensor(0.731, dtype=state)).to(dtype)
    for layout in layouts(current):
        for output, expected in (("codes", want), ("values", values)):
            got = stbif_block(layout, **added, **arguments, output=output, implementation=implementation)
            assert got.dtype == expected.dtype
            assert torch.equal(got, expected)


def test_a_block_of_features_takes_a_bias_as_well():
    current, bias = dyadic(6, 4, 33), dyadic(6, 33, seed=1)
    arguments = {"threshold": 0.5, "pos_max": 3, "neg_min": 0, "output": "codes"}
    want = stbif(current + bias[:, None], **arguments, implementation="reference")
    for implementation in PLAIN:
        assert torch.equal(stbif_block(current, bias=bias, **arguments, implementation=implementation), want)


def block_gradients(current, s, terms, weights, implementation):
    """Return the gradients of current, threshold and terms, in this order."""
    leaves = [tensor.detach().requires_grad_() for tensor in (current, s, *terms.values())]
    arguments = {"threshold": leaves[1], "pos_max": 3, "neg_min": -1, "implementation": implementation}
    values = stbif_block(leaves[0], **dict(zip(terms, leaves[2:], strict=True)), **arguments)
    return torch.autograd.grad((values * weights).sum(), leaves)


@pairs(names=[[], ["bias"], ["residual"], ["bias", "residual"]], dtype=DTYPES[:3], shape=SHAPES)
def test_the_native_gradients_are_the_plain_ones_in_double(names, dtype, shape):
    generator = torch.Generator().manual_seed(11)
    current, residual, weights = (torch.randn(shape, generator=generator).to(dtype) for _ in range(3))
    terms = {"bias": torch.randn(shape[0], shape[2], generator=generator).to(dtype), "residual": residual}
    terms = {name: terms[name] for name in names}
    double = {name: term.double() for name, term in terms.items()}
    s = torch.tensor(0.731, dtype=torch.promote_types(dtype, torch.float32))
    wanted = block_gradients(current.double(), s.double(), double, weights.double(), "torch")
    plain = block_gradients(current, s, terms, weights, "torch")
    for layout in layouts(current):
        native = block_gradients(layout, s, terms, weights, "native")
        for got, want, by_torch in zip(native, wanted, plain, strict=True):
            assert got.dtype in {dtype, s.dtype}
            # a threshold and a bias collect from many neurons
            terms_each = current.numel() / max(1, want.numel())
            limit = 32 * torch.finfo(dtype).eps * max(1.0, terms_each**0.5)
            # nor is torch's own sum in this type, in another order, closer on every machine
            limit = max([limit, *(2 * (by_torch.double() - want).abs()).flatten().tolist()])
            torch.testing.assert_close(got.double(), want, rtol=limit, atol=limit)


@pytest.mark.parametrize("windows", [(2, 2, 0), (3, 2, 1), (3, 1, 1), (5, 3, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_pool_hands_its_gradient_to_the_first_of_equals(windows, dtype):
    """Sums of few values tie all the time."""
    values = (dyadic(6, 2, 70, 9, 7).sign() / 2).to(dtype)
    sizes = dict(zip(("kernel_size", "stride", "padding"), windows, strict=True))
    for layout in layouts(values):
        results = []
        for implementation in PLAIN:
            leaf = layout.detach().requires_grad_()
            out = max_pool_delta(leaf, **sizes, implementation=implementation)
            weights = torch.randn(out.shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
            results += torch.autograd.grad((out * weights).sum(), leaf)
        assert results[0].any()
        torch.testing.assert_close(results[1], results[0], rtol=0, atol=32 * torch.finfo(dtype).eps)


@pairs(
    implementation=PLAIN,
    windows=[(2, 2, 0), (3, 2, 1), (3, 1, 1), (1, 1, 0), (5, 3, 2)],
    dtype=DTYPES,
    shape=[(1, 2, 3, 5, 4), (8, 1, 70, 7, 9), (3, 2, 2, 20, 34)],
)
def test_deltas_are_those_of_the_pooled_running_sum(implementation, windows, dtype, shape):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(8)).to(dtype)
    sizes = dict(zip(("kernel_size", "stride", "padding"), windows, strict=True))
    want = max_pool_delta(values, **sizes, implementation="reference")
    for layout in layouts(values):
        got = max_pool_delta(layout, **sizes, implementation=implementation)
        assert got.dtype == dtype
        assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_plain_pool_of_a_gpu_is_that_of_the_cpu(dtype):
    values = torch.randn(64, 1, 8, 9, 9, generator=torch.Generator().manual_seed(8)).to(dtype)
    sizes = {"kernel_size": 3, "stride": 2, "padding": 1}
    want = max_pool_delta(values, **sizes, implementation="torch")
    assert torch.equal(max_pool_delta(values.cuda(), **sizes, implementation="torch").cpu(), want)
