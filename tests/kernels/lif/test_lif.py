"""The LIF op against its equation, bit for bit, and its gradient against autograd through the surrogate.

Triton's kernels run on a GPU where there is one, else in its interpreter.
"""

from importlib.util import find_spec

import pytest
import torch
from pairs import pairs
from torch.nn import functional

from benchd.kernels.lif import lif, lif_pool
from benchd.kernels.lif.native import lif_pool_first, lif_pool_periods

RESETS = ("zero", "subtract")
PLAIN = ("torch", "native")
IMPLEMENTATIONS = (*PLAIN, *["triton"] * bool(find_spec("triton")))
DTYPES = [torch.float32, torch.float16, torch.bfloat16]  # float64 is in test_conformance.py
EXACT = {"decay": 0.5, "gain": 2.0, "threshold": 0.75}
NEURON = {"decay": 0.95, "gain": 1.7, "threshold": 0.83}


def device_of(implementation):
    return "cuda" if implementation == "triton" and torch.cuda.is_available() else "cpu"


def dyadic(*shape, seed=0):
    """Multiples of 1/16 in [-1, 1]: with decay 1/2 and few steps every sum is exact, ties with the threshold too."""
    return torch.randint(-16, 17, shape, generator=torch.Generator().manual_seed(seed)) / 16


def currents(shape, implementation, dtype):
    """Yield currents and their neuron: membranes that meet the threshold itself, and rounded ones."""
    normal = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for current, neuron in ((dyadic(*shape), EXACT), (normal, NEURON)):
        yield current.to(device_of(implementation), dtype), neuron


@pytest.mark.parametrize("implementation", ["reference", *IMPLEMENTATIONS])
@pytest.mark.parametrize(("reset", "want"), [("zero", [1, 0, 1, 0]), ("subtract", [1, 0, 1, 1])])
def test_a_neuron_fires_where_it_meets_its_threshold(implementation, reset, want):
    current = torch.tensor([0.75, 0.25, 0.375, 0.46875], device=device_of(implementation))
    spikes = lif(current, decay=0.5, gain=2.0, threshold=1.0, reset=reset, implementation=implementation)
    assert spikes.tolist() == want


# the smallest is of less memory than a block that Triton reads without its mask
@pairs(
    implementation=IMPLEMENTATIONS,
    reset=RESETS,
    dtype=DTYPES,
    shape=[(1, 40), (8, 3), (6, 3, 7), (8, 1, 2, 5, 3), (3, 255), (1, 257), (8, 4099)],
)
def test_spikes_are_those_of_the_equation(implementation, reset, dtype, shape):
    for current, neuron in currents(shape, implementation, dtype):
        arguments = neuron | {"reset": reset}
        spikes, want = (lif(current, **arguments, implementation=each) for each in (implementation, "reference"))
        assert spikes.dtype == dtype
        assert want.any()
        assert not want.all()
        assert torch.equal(spikes, want)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_membrane_of_a_half_current_is_kept_in_float32(implementation):
    # 2048 + 1 is 2048 in float16: a half membrane would never reach 2050
    current = torch.tensor([2048.0, 1.0, 1.0], dtype=torch.float16, device=device_of(implementation))
    spikes = lif(current, decay=1.0, threshold=2050.0, implementation=implementation)
    assert spikes.tolist() == [0, 0, 1]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_product_and_a_sum_round_twice(implementation):
    x = torch.rand(1000, generator=torch.Generator().manual_seed(2))
    decay = torch.tensor(0.95)
    twice, once = decay * x + x, (decay.double() * x.double() + x.double()).float()
    (neuron, *_) = (twice > once).nonzero().flatten()
    current = x[neuron].to(device_of(implementation)).repeat(2, 1)
    # a fused multiply-add would stay below this threshold
    spikes = lif(current, decay=0.95, threshold=twice[neuron].item(), implementation=implementation)
    assert spikes.flatten().tolist() == [0, 1]


class Spike(torch.autograd.Function):
    """One comparison with the documented surrogate; autograd does the rest of the derivation below."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x >= 0).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        sigmoid = torch.sigmoid(4 * ctx.saved_tensors[0])
        return grad * 4 * sigmoid * (1 - sigmoid)


def recorded(current, decay, gain, threshold, reset):
    v, spikes = torch.zeros_like(current[0]), []
    for x in current:
        v = decay * v + gain * x
        spike = Spike.apply(v - threshold)
        v = v * (1 - spike) if reset == "zero" else v - threshold * spike
        spikes.append(spike)
    return torch.stack(spikes)


@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("time_steps", [1, 7])
def test_the_gradient_is_that_of_autograd_through_the_surrogate(reset, time_steps):
    generator = torch.Generator().manual_seed(2)
    current = torch.randn(time_steps, 3, 11, dtype=torch.float64, generator=generator).requires_grad_()
    weights = torch.randn(time_steps, 3, 11, dtype=torch.float64, generator=generator)
    spikes = lif(current, decay=0.9, gain=1.5, threshold=0.8, reset=reset, implementation="torch")
    want = recorded(current, 0.9, 1.5, 0.8, reset)
    assert torch.equal(spikes, want)
    (got,) = torch.autograd.grad((spikes * weights).sum(), current)
    (expected,) = torch.autograd.grad((want * weights).sum(), current)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


def channels_last(current):
    """Return (T, B, C, H, W) with the channels innermost in memory."""
    return current.flatten(0, 1).to(memory_format=torch.channels_last).unflatten(0, current.shape[:2])


def layouts(current):
    return current, channels_last(current), current.mT.contiguous().mT


@pairs(
    implementation=IMPLEMENTATIONS,
    reset=RESETS,
    dtype=DTYPES,
    # rows of one window, of less than a block of the C kernel, of blocks with a ragged rest, and none
    shape=[(1, 2, 3, 2, 2), (4, 2, 11, 5, 18), (6, 1, 70, 7, 9), (3, 3, 2, 4, 134), (2, 1, 70, 6, 8), (4, 0, 2, 4, 4)],
)
def test_pooled_spikes_are_the_average_of_the_spikes(implementation, reset, dtype, shape):
    for current, neuron in currents(shape, implementation, dtype):
        arguments = neuron | {"reset": reset}
        spikes = lif(current, **arguments, implementation="reference")
        want = functional.avg_pool2d(spikes.flatten(0, 1), 2).unflatten(0, shape[:2])
        for layout in layouts(current):
            pooled = lif_pool(layout, **arguments, implementation=implementation)
            assert pooled.dtype == dtype
            assert torch.equal(pooled, want)
            counts = lif_pool(layout, **arguments, output="counts", implementation=implementation)
            assert counts.dtype == torch.uint8
            assert torch.equal(counts, (4 * want).to(torch.uint8))


@pairs(
    implementation=IMPLEMENTATIONS,
    dtype=DTYPES,
    shape=[(1, 2, 3, 2, 2), (4, 2, 11, 5, 18), (6, 1, 70, 7, 9), (2, 1, 70, 6, 8), (4, 0, 2, 4, 4)],
)
def test_a_bias_is_added_in_the_dtype_of_the_membrane(implementation, dtype, shape):
    *_, (current, neuron) = currents(shape, implementation, dtype)
    bias = torch.randn(shape[2], generator=torch.Generator().manual_seed(3)).to(current.device)
    for each in (bias, bias.to(dtype), bias.double(), bias.repeat_interleave(2)[::2]):
        charges = current.float() + each.float()[:, None, None]
        want = lif_pool(charges, **neuron, implementation="reference").to(dtype)
        for layout in layouts(current):
            pooled = lif_pool(layout, **neuron, bias=each, implementation=implementation)
            assert pooled.dtype == dtype
            assert torch.equal(pooled, want)
    counts = lif_pool(current, **neuron, bias=each, output="counts", implementation=implementation)
    assert torch.equal(counts, (4 * want).to(torch.uint8))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_one_step_may_stand_for_all(implementation, memory_format):
    step, shift = (each.to(device_of(implementation)) for each in (dyadic(2, 5, 6, 4), dyadic(5)))
    step = step.contiguous(memory_format=memory_format)
    arguments = {"decay": 0.5, "threshold": 0.75, "implementation": implementation}
    for bias in (None, shift):
        want = lif_pool(step.repeat(7, 1, 1, 1, 1), bias=bias, **arguments)
        assert want.any()
        assert torch.equal(lif_pool(step, bias=bias, time_steps=7, **arguments), want)
    assert torch.equal(lif(step.expand(7, *step.shape), **arguments), lif(step.repeat(7, 1, 1, 1, 1), **arguments))


def test_the_ops_of_steady_currents_are_registered_as_torch_wants():
    step = dyadic(2, 3, 4, 6).contiguous(memory_format=torch.channels_last)
    torch.library.opcheck(torch.ops.benchd.lif.default, (step, 3, 0.5, 1.0, 0.5, True))
    torch.library.opcheck(torch.ops.benchd.lif_pool.default, (step, dyadic(3), 3, 0.5, 1.0, 0.5, True, False))
    torch.library.opcheck(torch.ops.benchd.lif_pool.default, (step, None, 3, 0.5, 1.0, 0.5, True, True))
    current, by_period = torch.randn(2, 16, 4, 6), torch.randn(3, 2, 16, 4, 6)
    torch.library.opcheck(torch.ops.benchd.lif_pool_first.default, (current, 3, 0.9, 1.0, 1.0))
    torch.library.opcheck(torch.ops.benchd.lif_pool_periods.default, (by_period, current[0, :, 0, 0], 0.9, 1.0, 1.0))


def test_a_pooled_gradient_is_that_of_the_pool_of_the_spikes():
    current = dyadic(5, 2, 3, 4, 6).requires_grad_()
    weights = torch.randn(5, 2, 3, 2, 3, generator=torch.Generator().manual_seed(5))
    arguments = {"decay": 0.5, "threshold": 0.75, "implementation": "torch"}
    want = functional.avg_pool2d(lif(current, **arguments).flatten(0, 1), 2).unflatten(0, (5, 2))
    (expected,) = torch.autograd.grad((want * weights).sum(), current)
    (got,) = torch.autograd.grad((lif_pool(current, **arguments) * weights).sum(), current)
    assert expected.any()
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_the_gradient_of_a_bias_is_that_of_the_currents_it_is_added_to(dtype):
    current, bias = dyadic(5, 2, 3, 4, 6).to(dtype).requires_grad_(), dyadic(3, seed=1).to(dtype).requires_grad_()
    weights = torch.randn(5, 2, 3, 2, 3, generator=torch.Generator().manual_seed(5))
    arguments = {"decay": 0.5, "threshold": 0.75, "implementation": "torch"}
    wide = [tensor.detach().double().requires_grad_() for tensor in (current, bias)]
    want = lif_pool(wide[0] + wide[1][:, None, None], **arguments)
    expected = torch.autograd.grad((want * weights).sum(), wide)
    got = torch.autograd.grad((lif_pool(current, bias=bias, **arguments) * weights).sum(), (current, bias))
    assert [each.dtype for each in got] == [dtype, dtype]
    tolerance = 1e-2 if dtype == torch.float16 else 1e-12
    for each, other in zip(got, expected, strict=True):
        assert other.any()
        torch.testing.assert_close(each.double(), other, rtol=tolerance, atol=tolerance)


def by_divisors(periods, start):
    """Return start + the sum of periods[d - 1] over the divisors d of t, for each step t, in their order."""
    steps = range(1, len(periods) + 1)
    return torch.stack([sum((periods[d - 1] for d in steps if t % d == 0), start) for t in steps])


@pairs(
    steps=[1, 2, 13],
    memory_format=[torch.contiguous_format, torch.channels_last],
    dtype=[torch.float32, torch.float64],
)
def test_neurons_of_a_steady_current_fire_at_the_multiples_of_their_first_step(steps, memory_format, dtype):
    generator = torch.Generator().manual_seed(0)
    current = (torch.randn(3, 20, 9, 10, generator=generator, dtype=dtype) + 0.4).to(memory_format=memory_format)
    first = lif_pool_first(current, steps, decay=0.9, threshold=1.5, gain=0.5)
    want = lif_pool(current, time_steps=steps, decay=0.9, threshold=1.5, gain=0.5)
    assert steps == 1 or first.count_nonzero() < want.count_nonzero()
    assert torch.equal(by_divisors(first, torch.zeros_like(first[0])), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1, 2, 16, 4, 6), (8, 3, 40, 5, 7), (13, 1, 20, 2, 2)], ids=str)
def test_neurons_receive_what_divides_their_step(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    current, bias = torch.randn(shape, generator=generator, dtype=dtype), torch.randn(shape[2], generator=generator)
    charges = by_divisors(current, bias.to(dtype)[:, None, None].expand(shape[1:]))
    want = lif_pool(charges, decay=0.9, threshold=0.8, gain=0.5)
    assert want.any()
    assert torch.equal(lif_pool_periods(current, bias, decay=0.9, threshold=0.8, gain=0.5), want)
