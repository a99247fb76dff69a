"""The LIF op against its equation, and its gradient against autograd through the surrogate."""

import pytest
import torch
from pairs import pairs
from torch.nn import functional

from benchd.kernels.lif import lif, lif_pool
from benchd.kernels.lif.native import lif_pool_first, lif_pool_periods

RESETS = ("zero", "subtract")
PLAIN = ("torch", "native")
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def dyadic(*shape, seed=0):
    """Multiples of 1/16 in [-1, 1]: with decay 1/2 and few steps every sum is exact, ties with the threshold too."""
    return torch.randint(-16, 17, shape, generator=torch.Generator().manual_seed(seed)) / 16


@pytest.mark.parametrize("implementation", ["reference", *PLAIN])
@pytest.mark.parametrize(("reset", "want"), [("zero", [1, 0, 1, 0]), ("subtract", [1, 0, 1, 1])])
def test_a_neuron_fires_where_it_meets_its_threshold(implementation, reset, want):
    current = torch.tensor([0.75, 0.25, 0.375, 0.46875])
    spikes = lif(current, decay=0.5, gain=2.0, threshold=1.0, reset=reset, implementation=implementation)
    assert spikes.tolist() == want


@pairs(implementation=PLAIN, reset=RESETS, dtype=DTYPES, shape=[(1, 40), (6, 3, 7), (8, 1, 2, 5, 3), (8, 4099)])
def test_spikes_are_those_of_the_equation(implementation, reset, dtype, shape):
    normal = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    exact = {"decay": 0.5, "gain": 2.0, "threshold": 0.75}
    for current, neuron in ((dyadic(*shape), exact), (normal, {"decay": 0.95, "gain": 1.7, "threshold": 0.83})):
        arguments = {"current": current.to(dtype), **neuron, "reset": reset}
        spikes, want = (lif(**arguments, implementation=each) for each in (implementation, "reference"))
        assert spikes.dtype == dtype
        assert want.any()
        assert not want.all()
        assert torch.equal(spikes, want)


@pytest.mark.parametrize("implementation", PLAIN)
def test_the_membrane_of_a_half_current_is_kept_in_float32(implementation):
    # 2048 + 1 is 2048 in float16: a half membrane would never reach 2050
    current = torch.tensor([2048.0, 1.0, 1.0], dtype=torch.float16)
    spikes = lif(current, decay=1.0, threshold=2050.0, implementation=implementation)
    assert spikes.tolist() == [0, 0, 1]


@pytest.mark.parametrize("implementation", PLAIN)
def test_one_current_for_all_steps_needs_no_copy(implementation):
    current = dyadic(7).expand(5, 7)
    want = lif(current.clone(), decay=0.5, threshold=0.5, implementation="reference")
    assert torch.equal(lif(current, decay=0.5, threshold=0.5, implementation=implementation), want)


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


def test_a_compiler_traces_it_with_its_gradient():
    def layer(current):
        return lif(current, decay=0.5, threshold=0.5, implementation="torch")

    current = dyadic(5, 8).requires_grad_()
    want, compiled = layer(current), torch.compile(layer, fullgraph=True, backend="aot_eager")(current)
    assert torch.equal(compiled, want)
    (got,), (expected,) = (torch.autograd.grad(spikes.sum(), current) for spikes in (compiled, want))
    torch.testing.assert_close(got, expected)


def channels_last(current):
    """Return (T, B, C, H, W) with the channels innermost in memory."""
    return current.flatten(0, 1).to(memory_format=torch.channels_last).unflatten(0, current.shape[:2])


@pairs(
    implementation=PLAIN,
    reset=RESETS,
    dtype=DTYPES,
    # rows of one window, of less than a block of the C kernel, of blocks with a ragged rest, and none
    shape=[(1, 2, 3, 2, 2), (4, 2, 11, 5, 18), (6, 1, 70, 7, 9), (3, 3, 2, 40, 134), (4, 0, 2, 4, 4)],
)
def test_pooled_spikes_are_the_average_of_the_spikes(implementation, reset, dtype, shape):
    current = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    arguments = {"decay": 0.95, "gain": 1.7, "threshold": 0.83, "reset": reset}
    spikes = lif(current, **arguments, implementation="reference")
    want = functional.avg_pool2d(spikes.flatten(0, 1), 2).unflatten(0, shape[:2])
    for layout in (current, channels_last(current), current.mT.contiguous().mT):
        pooled = lif_pool(layout, **arguments, implementation=implementation)
        assert pooled.dtype == dtype
        assert torch.equal(pooled, want)
        counts = lif_pool(layout, **arguments, output="counts", implementation=implementation)
        assert counts.dtype == torch.uint8
        assert torch.equal(counts, (4 * want).to(torch.uint8))


@pairs(
    implementation=PLAIN, dtype=DTYPES, shape=[(1, 2, 3, 2, 2), (4, 2, 11, 5, 18), (6, 1, 70, 7, 9), (4, 0, 2, 4, 4)]
)
def test_a_bias_is_added_in_the_dtype_of_the_membrane(implementation, dtype, shape):
    generator = torch.Generator().manual_seed(3)
    current, bias = torch.randn(shape, generator=generator).to(dtype), torch.randn(shape[2], generator=generator)
    arguments = {"decay": 0.95, "gain": 1.7, "threshold": 0.83}
    for each in (bias, bias.to(dtype), bias.double(), bias.repeat_interleave(2)[::2]):
        wide = torch.promote_types(dtype, torch.float32)
        charges = current.to(wide) + each.to(wide)[:, None, None]
        want = lif_pool(charges, **arguments, implementation="reference").to(dtype)
        for layout in (current, channels_last(current), current.mT.contiguous().mT):
            pooled = lif_pool(layout, **arguments, bias=each, implementation=implementation)
            assert pooled.dtype == dtype
            assert torch.equal(pooled, want)
    counts = lif_pool(current, **arguments, bias=each, output="counts", implementation=implementation)
    assert torch.equal(counts, (4 * want).to(torch.uint8))


@pytest.mark.parametrize("implementation", PLAIN)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_one_step_may_stand_for_all(implementation, memory_format):
    one = dyadic(2, 5, 6, 4).contiguous(memory_format=memory_format)
    arguments = {"decay": 0.5, "threshold": 0.75, "implementation": implementation}
    for bias in (None, dyadic(5)):
        want = lif_pool(one.repeat(7, 1, 1, 1, 1), bias=bias, **arguments)
        assert want.any()
        assert torch.equal(lif_pool(one, bias=bias, time_steps=7, **arguments), want)


def test_the_ops_of_steady_currents_are_registered_as_torch_wants():
    step = dyadic(2, 3, 4, 6).contiguous(memory_format=torch.channels_last)
    torch.library.opcheck(torch.ops.benchd.lif.default, (step, 3, 0.5, 1.0, 0.5, True))
    torch.library.opcheck(torch.ops.benchd.lif_pool.default, (step, dyadic(3), 3, 0.5, 1.0, 0.5, True, False))
    torch.library.opcheck(torch.ops.benchd.lif_pool.default, (step, None, 3, 0.5, 1.0, 0.5, True, True))
    one, by_period = torch.randn(2, 16, 4, 6), torch.randn(3, 2, 16, 4, 6)
    torch.library.opcheck(torch.ops.benchd.lif_pool_first.default, (one, 3, 0.9, 1.0, 1.0))
    torch.library.opcheck(torch.ops.benchd.lif_pool_periods.default, (by_period, one[0, :, 0, 0], 0.9, 1.0, 1.0))


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


@pytest.mark.parametrize("implementation", PLAIN)
def test_counts_have_no_gradient(implementation):
    current, bias = (torch.ones(shape, requires_grad=True) for shape in ((2, 1, 1, 2, 2), (1,)))
    counts = lif_pool(current, decay=0.9, bias=bias, output="counts", implementation=implementation)
    assert counts.flatten().tolist() == [4, 4]
    assert not counts.requires_grad


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
