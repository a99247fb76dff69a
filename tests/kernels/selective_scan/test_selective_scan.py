"""The scan against its equation in float64, gradients by finite differences."""

import itertools

import pytest
import torch
from pairs import pairs

from benchd.kernels.selective_scan import (
    bidirectional_scan,
    delta_projection,
    selective_scan,
    selective_scan_pair,
    torch_impl,
)

PLAIN = ("torch", "native")
OPTIONAL = ("D", "z", "delta_bias")
SHAPES = [(1, 1, 1, 1), (2, 2, 5, 3), (3, 7, 4, 1), (2, 63, 33, 5), (1, 17, 16, 40)]


def equation(op, tensors, **options):
    """Return y in float64."""
    return op(**{name: each.double() for name, each in tensors.items()}, **options, implementation="reference")


def inputs(batch, length, channels, states, *, lead=(), dtype=torch.float32, seed=0, large=False):
    """Every tensor of the scan; deltas of about 0.05 after softplus, or up to some hundreds."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*lead, *shape, generator=generator)

    tensors = {
        "u": normal(batch, length, channels),
        "delta": normal(batch, length, channels) * (60 if large else 1) - 3,
        "A": -(torch.arange(1, states + 1) + normal(channels, states).sigmoid()),
        "B": normal(batch, length, states),
        "C": normal(batch, length, states),
        "D": normal(channels),
        "z": normal(batch, length, channels),
        "delta_bias": normal(channels),
    }
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def pair(*sizes, **options):
    """Every tensor of the pair of scans, which has no gate."""
    return {name: tensor for name, tensor in inputs(*sizes, lead=(2,), **options).items() if name != "z"}


def layer(batch, length, channels, states, rank, *, dtype=torch.float32, seed=0, large=False):
    """Every tensor of the bidirectional scan."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    rates = torch.arange(1, states + 1) + torch.rand(2, channels, states, generator=generator)
    tensors = {
        "u": normal(2, batch, length, channels),
        "low": normal(2, batch, length, rank) * (30 if large else 1),
        "weight": normal(2, channels, rank) / max(1, rank) ** 0.5,
        "bias": normal(2, channels) - 3,
        "A": -rates,
        "B": normal(2, batch, length, states),
        "C": normal(2, batch, length, states),
        "D": normal(2, channels),
        "z": normal(batch, length, channels),
    }
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def error(y, want):
    return float((y.double() - want).abs().max() / want.abs().max())


def assert_near(op, tensors, implementation, limit=2e-6, **options):
    y = op(**tensors, **options, implementation=implementation)
    assert y.dtype == next(iter(tensors.values())).dtype
    assert error(y, equation(op, tensors, **options)) < limit


@pairs(implementation=PLAIN, reverse=[False, True], large=[False, True], shape=[*SHAPES, (1, 197, 48, 16)])
def test_float32_is_within_2e_6_of_the_equation(implementation, reverse, large, shape):
    tensors = inputs(*shape, large=large)
    assert not large or shape[1] < 50 or -100 > tensors["delta"].min() < 20 < tensors["delta"].max()
    assert_near(selective_scan, tensors, implementation, delta_softplus=True, reverse=reverse)


@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize("implementation", PLAIN)
def test_every_combination_of_options(implementation, softplus):
    every = inputs(2, 11, 6, 4)
    if not softplus:
        every["delta"] = every["delta"].abs() + 4
    for left_out in (names for r in range(4) for names in itertools.combinations(OPTIONAL, r)):
        tensors = {name: tensor for name, tensor in every.items() if name not in left_out}
        assert_near(selective_scan, tensors, implementation, delta_softplus=softplus)


@pytest.mark.parametrize("implementation", PLAIN)
def test_small_steps_are_accurate_relative_to_themselves(implementation):
    tensors = inputs(1, 60, 8, 4) | {"delta": torch.full((1, 60, 8), -12.3)}
    for name in OPTIONAL:
        del tensors[name]
    assert_near(selective_scan, tensors, implementation, delta_softplus=True)


@pytest.mark.parametrize("implementation", PLAIN)
def test_half_activations_with_float32_parameters(implementation):
    tensors = inputs(2, 19, 8, 4, dtype=torch.float16)
    tensors |= {name: tensors[name].float() for name in ("A", "D", "delta_bias", "B")}
    assert_near(selective_scan, tensors, implementation, 1e-3, delta_softplus=True)


@pytest.mark.parametrize("implementation", PLAIN)
def test_no_tokens_and_no_channels_give_no_output(implementation):
    for shape in ((2, 0, 3, 2), (1, 4, 0, 2)):
        tensors, both = inputs(*shape), layer(*shape, 1)
        steps = {name: both[name] for name in ("low", "weight", "bias")}
        assert selective_scan(**tensors, implementation=implementation).shape == shape[:3]
        assert selective_scan_pair(**pair(*shape), implementation=implementation).shape == (2, *shape[:3])
        assert bidirectional_scan(**both, implementation=implementation).shape == shape[:3]
        assert delta_projection(**steps, implementation=implementation).shape == (2, *shape[:3])


@pytest.mark.parametrize("implementation", PLAIN)
@pytest.mark.parametrize("shape", [(1, 1, 3, 2), (2, 50, 9, 4)], ids=str)
def test_a_pair_is_a_forward_and_a_reverse_scan(implementation, shape):
    assert_near(selective_scan_pair, pair(*shape), implementation, delta_softplus=True)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_gradients_are_those_of_finite_differences(reverse):
    tensors = {k: v.requires_grad_() for k, v in inputs(2, 7, 3, 4, dtype=torch.float64).items()}

    def scanned(*values):
        arguments = dict(zip(tensors, values, strict=True))
        return selective_scan(**arguments, delta_softplus=True, reverse=reverse, implementation="torch")

    assert torch.autograd.gradcheck(scanned, tuple(tensors.values()))


def gradients(scanned, tensors, implementation, **options):
    y = scanned(**tensors, delta_softplus=True, implementation=implementation, **options)
    return torch.autograd.grad(y.square().sum(), list(tensors.values()))


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_gradients_through_several_blocks_of_tokens_and_groups_of_images(monkeypatch, reverse):
    monkeypatch.setattr(torch_impl, "_BLOCK_NUMBERS", 2**13)
    monkeypatch.setattr(torch_impl, "_STATE_NUMBERS", 2**10)
    tensors = {k: v.requires_grad_() for k, v in inputs(12, 23, 24, 4, dtype=torch.float64).items()}
    got, want = (gradients(selective_scan, tensors, name, reverse=reverse) for name in ("torch", "reference"))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("implementation", PLAIN)
def test_autocast_leaves_the_state_in_float32(implementation):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_near(selective_scan, inputs(2, 30, 8, 4), implementation, delta_softplus=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_on_a_gpu_values_and_gradients_are_those_of_the_cpu(reverse):
    on_cpu = {k: v.requires_grad_() for k, v in inputs(3, 50, 32, 16, dtype=torch.float64).items()}
    on_gpu = {k: v.detach().cuda().requires_grad_() for k, v in on_cpu.items()}
    got, want = (gradients(selective_scan, tensors, "torch", reverse=reverse) for tensors in (on_gpu, on_cpu))
    torch.testing.assert_close([gradient.cpu() for gradient in got], list(want), rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        y = selective_scan(**on_gpu, delta_softplus=True, reverse=reverse, implementation="torch")
    want = equation(selective_scan, on_cpu, delta_softplus=True, reverse=reverse)
    torch.testing.assert_close(y.cpu(), want, rtol=1e-9, atol=1e-9)


LAYERS = [(1, 1, 1, 1, 1), (2, 2, 5, 3, 2), (3, 7, 17, 17, 4), (2, 63, 33, 5, 70), (1, 197, 48, 16, 12)]


@pairs(implementation=PLAIN, large=[False, True], shape=LAYERS)
def test_a_layer_is_within_2e_6_of_the_equation(implementation, shape, large):
    tensors = layer(*shape, large=large)
    # the projection of a step of some hundreds is rounded before its exponential
    assert_near(bidirectional_scan, tensors, implementation, 2e-5 if large else 2e-6)
    if not large:
        steps = {name: tensors[name] for name in ("low", "weight", "bias")}
        assert_near(delta_projection, steps, implementation)


@pytest.mark.parametrize("implementation", PLAIN)
def test_both_forms_are_one_on_a_cpu(implementation):
    layers, scan, both = layer(2, 9, 6, 4, 3), inputs(2, 9, 6, 4), pair(2, 9, 6, 4)
    for op, tensors in ((bidirectional_scan, layers), (selective_scan, scan), (selective_scan_pair, both)):
        options = {} if op is bidirectional_scan else {"delta_softplus": True}
        forms = ("serial", "two_level")
        assert torch.equal(*(op(**tensors, **options, form=form, implementation=implementation) for form in forms))


def test_gradients_of_a_layer():
    tensors = {k: v.requires_grad_() for k, v in layer(2, 6, 3, 4, 2, dtype=torch.float64).items()}

    def scanned(*values):
        return bidirectional_scan(**dict(zip(tensors, values, strict=True)), implementation="torch")

    def steps(*values):
        return delta_projection(*values, implementation="torch")

    assert torch.autograd.gradcheck(scanned, tuple(tensors.values()))
    assert torch.autograd.gradcheck(steps, tuple(tensors[name] for name in ("low", "weight", "bias")))


def test_native_agrees_with_the_equation_at_any_width():
    for channels, states in itertools.product((1, 7, 8, 9, 16, 31, 33, 40), (1, 3, 8, 15, 16, 17, 35)):
        tensors = inputs(2, 5, channels, states, seed=channels)
        # over a few numbers the largest may be small beside the terms that it sums
        assert_near(selective_scan, tensors, "native", 2e-5, delta_softplus=True, reverse=states % 2 == 0)


def test_native_follows_steps_that_make_the_state_grow():
    tensors = inputs(1, 12, 20, 4)
    del tensors["delta_bias"]
    tensors["delta"] = -4 * tensors["delta"].sigmoid()
    assert equation(selective_scan, tensors).abs().max() > 100
    assert_near(selective_scan, tensors, "native")
    tensors["delta"] -= 100
    assert not selective_scan(**tensors, implementation="native")[:, 3:].isfinite().any()


def test_native_hides_no_nan():
    for op, tensors in ((selective_scan, inputs(2, 20, 18, 17)), (bidirectional_scan, layer(2, 20, 18, 17, 3))):
        options = {"delta_softplus": True} if op is selective_scan else {}
        for name in tensors:
            lost = tensors | {name: torch.full_like(tensors[name], torch.nan)}
            assert op(**lost, **options, implementation="native")[:, 1:].isnan().all(), name


def test_native_is_exact_however_far_the_exponents_reach():
    tensors = layer(1, 100, 20, 16, 3)
    tensors["low"] = tensors["low"] * 0.1
    for step in (1e-4, 0.02, 0.04, 0.08, 0.15, 0.3, 2.0, 20.0):
        assert_near(bidirectional_scan, tensors | {"bias": torch.full((2, 20), step).expm1().log()}, "native")


@pytest.mark.parametrize("shape", [(2, 40, 17, 40, 3), (1, 33, 50, 16, 70), (3, 197, 96, 16, 12)], ids=str)
def test_native_rounds_bfloat16_once_however_many_passes_a_sum_takes(shape):
    tensors = layer(*shape, dtype=torch.bfloat16)
    tensors["bias"] = tensors["bias"] * 0 - 3
    want = equation(bidirectional_scan, tensors)
    y = bidirectional_scan(**tensors, implementation="native")
    torch.testing.assert_close(y.double(), want, rtol=2**-8, atol=1e-3 * float(want.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_not_a_number_stays_so_in_native(dtype):
    tensors = layer(1, 20, 20, 4, 3, dtype=dtype)
    tensors["u"][0, 0, 5, 3] = torch.nan
    y = bidirectional_scan(**tensors, implementation="native")
    assert y[0, 5:, 3].isnan().all()
    assert y[0].isnan().sum() == 15
