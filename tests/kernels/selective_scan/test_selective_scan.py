"""The scan against its equation: a float64 loop written here, gradients by finite differences."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import pairs

from benchd.kernels.selective_scan import bidirectional_scan, delta_projection, selective_scan, selective_scan_pair

PLAIN = ("reference", "torch", "native")
OPTIONAL = ("D", "z", "delta_bias")
SHAPES = [(1, 1, 1, 1), (2, 2, 5, 3), (3, 7, 4, 1), (2, 63, 33, 5), (1, 17, 16, 40)]


def equation(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, reverse=False):
    """Return y in float64, one token and one state at a time."""
    u, delta, A, B, C = (tensor.double() for tensor in (u, delta, A, B, C))
    delta = delta if delta_bias is None else delta + delta_bias.double()
    if delta_softplus:
        delta = torch.where(delta > 20, delta, torch.log1p(torch.exp(delta.clamp(max=20))))
    y = torch.zeros_like(u)
    for n in range(A.shape[1]):
        h = torch.zeros_like(u[:, 0]) if u.shape[1] else None
        for t in reversed(range(u.shape[1])) if reverse else range(u.shape[1]):
            h = torch.exp(delta[:, t] * A[:, n]) * h + delta[:, t] * u[:, t] * B[:, t, n, None]
            y[:, t] += h * C[:, t, n, None]
    y = y if D is None else y + D.double() * u
    return y if z is None else y * z.double() / (1 + torch.exp(-z.double()))


def inputs(batch, length, channels, states, *, dtype=torch.float32, seed=0, large=False):
    """Every tensor of the scan; deltas of about 0.05 after softplus, or up to some hundreds."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    tensors = {
        "u": normal(batch, length, channels),
        "delta": normal(batch, length, channels) * (60 if large else 1) - 3,
        "A": -(torch.arange(1, states + 1) + torch.rand(channels, states, generator=generator)),
        "B": normal(batch, length, states),
        "C": normal(batch, length, states),
        "D": normal(channels),
        "z": normal(batch, length, channels),
        "delta_bias": normal(channels),
    }
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def pair_of(first, second):
    """Stack two sets of inputs for the pair, which has no gate."""
    return {name: torch.stack((first[name], second[name])) for name in first if name != "z"}


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


def projection(low, weight, bias):
    """Return delta in float64 before its softplus, written with a sum over the rank."""
    terms = low.double()[..., None, :] * weight.double()[:, None, None]
    return terms.sum(-1) + bias.double()[:, None, None]


def summed(u, low, weight, bias, A, B, C, D, z):
    """Return the bidirectional scan in float64."""
    delta = projection(low, weight, bias)
    y = [equation(u[g], delta[g], A[g], B[g], C[g], D[g], None, None, True, bool(g)) for g in (0, 1)]
    return (y[0] + y[1]) * z.double() / (1 + torch.exp(-z.double()))


def error(y, want):
    return float((y.double() - want).abs().max() / want.abs().max())


@pairs(implementation=PLAIN, reverse=[False, True], shape=[*SHAPES, (1, 197, 48, 16)])
def test_float32_is_within_2e_6_of_the_equation(implementation, reverse, shape):
    tensors = inputs(*shape)
    y = selective_scan(**tensors, delta_softplus=True, reverse=reverse, implementation=implementation)
    assert y.dtype == torch.float32
    assert error(y, equation(**tensors, delta_softplus=True, reverse=reverse)) < 2e-6


@pairs(
    implementation=PLAIN,
    given_names=[n for r in range(4) for n in itertools.combinations(OPTIONAL, r)],
    softplus=[False, True],
)
def test_every_combination_of_options(implementation, given_names, softplus):
    tensors = {k: v for k, v in inputs(2, 11, 6, 4).items() if k in given_names or k not in OPTIONAL}
    if not softplus:
        tensors["delta"] = tensors["delta"].abs() + 4
    y = selective_scan(**tensors, delta_softplus=softplus, implementation=implementation)
    assert error(y, equation(**tensors, delta_softplus=softplus)) < 2e-6


@pytest.mark.parametrize("implementation", PLAIN)
def test_large_steps_stay_exact(implementation):
    tensors = inputs(2, 197, 16, 16, large=True)
    want = equation(**tensors, delta_softplus=True)
    assert (tensors["delta"] > 20).any()
    assert (tensors["delta"] < -100).any()
    y = selective_scan(**tensors, delta_softplus=True, implementation=implementation)
    assert error(y, want) < 2e-6


@pytest.mark.parametrize("implementation", PLAIN)
def test_small_steps_are_accurate_relative_to_themselves(implementation):
    tensors = inputs(1, 60, 8, 4) | {"delta": torch.full((1, 60, 8), -12.3)}
    for name in OPTIONAL:
        del tensors[name]
    y = selective_scan(**tensors, delta_softplus=True, implementation=implementation)
    assert error(y, equation(**tensors, delta_softplus=True)) < 2e-6


@pytest.mark.parametrize("implementation", PLAIN)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 1e-3), (torch.bfloat16, 8e-3), (torch.float64, 1e-14)])
def test_other_dtypes_round_only_what_comes_out(implementation, dtype, limit):
    if implementation == "native" and dtype == torch.float64:
        pytest.skip("refused, which has a test of its own")
    tensors = inputs(2, 63, 17, 5, dtype=dtype)
    y = selective_scan(**tensors, delta_softplus=True, implementation=implementation)
    assert y.dtype == dtype
    assert error(y, equation(**tensors, delta_softplus=True)) < limit


@pytest.mark.parametrize("implementation", PLAIN)
def test_half_activations_with_float32_parameters(implementation):
    tensors = inputs(2, 19, 8, 4, dtype=torch.float16)
    tensors |= {name: tensors[name].float() for name in ("A", "D", "delta_bias", "B")}
    y = selective_scan(**tensors, delta_softplus=True, implementation=implementation)
    assert y.dtype == torch.float16
    assert error(y, equation(**tensors, delta_softplus=True)) < 1e-3


@pytest.mark.parametrize("implementation", PLAIN)
@pytest.mark.parametrize("shape", [(0, 5, 3, 2), (2, 0, 3, 2)], ids=["no images", "no tokens"])
def test_empty_inputs_give_empty_outputs(implementation, shape):
    tensors = inputs(*shape)
    assert selective_scan(**tensors, implementation=implementation).shape == shape[:3]
    assert selective_scan_pair(**pair_of(tensors, tensors), implementation=implementation).shape == (2, *shape[:3])


@pytest.mark.parametrize("implementation", PLAIN)
@pytest.mark.parametrize("shape", [(1, 1, 3, 2), (2, 50, 9, 4), (13, 40, 384, 16)], ids=str)
def test_a_pair_is_a_forward_and_a_reverse_scan(implementation, shape):
    if implementation == "reference" and shape[0] == 13:
        shape = (13, 4, 24, 16)
    directions = [inputs(*shape, seed=seed) for seed in (1, 2)]
    y = selective_scan_pair(**pair_of(*directions), delta_softplus=True, implementation=implementation)
    for reverse, tensors in enumerate(directions):
        del tensors["z"]
        assert error(y[reverse], equation(**tensors, delta_softplus=True, reverse=bool(reverse))) < 2e-6


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
def test_gradients_through_several_blocks_of_tokens_and_groups_of_images(reverse):
    tensors = {k: v.requires_grad_() for k, v in inputs(12, 23, 384, 16, dtype=torch.float64).items()}
    got, want = (gradients(selective_scan, tensors, name, reverse=reverse) for name in ("torch", "reference"))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_gradients_of_a_pair():
    directions = [inputs(6, 15, 384, 16, dtype=torch.float64, seed=seed) for seed in (3, 4)]
    tensors = {name: tensor.requires_grad_() for name, tensor in pair_of(*directions).items()}
    got, want = (gradients(selective_scan_pair, tensors, name) for name in ("torch", "reference"))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("length", "reverse"), [(1, False), (2, True), (40, False)])
def test_what_compilers_see_is_the_same_scan(reverse, length):
    tensors = inputs(2, length, 6, 4, dtype=torch.float64)
    exported = torch.export.export(Scan(reverse), (), tensors, strict=False)
    want = equation(**tensors, delta_softplus=True, reverse=reverse)
    torch.testing.assert_close(exported.module()(**tensors), want, rtol=1e-10, atol=1e-12)
    ops = {node.target for node in exported.graph.nodes if node.op == "call_function"}
    assert not any("addcmul_." in str(op) or "copy_" in str(op) for op in ops)


class Scan(torch.nn.Module):
    def __init__(self, reverse, implementation="torch"):
        super().__init__()
        self.options = {"delta_softplus": True, "reverse": reverse, "implementation": implementation}

    def forward(self, **tensors):
        return selective_scan(**tensors, **self.options)


def test_compiled_as_one_graph_with_gradients():
    first, second = (inputs(2, 20, 6, 4, dtype=torch.float64, seed=seed) for seed in (5, 6))
    tensors = {name: tensor.requires_grad_() for name, tensor in pair_of(first, second).items()}

    def total(tensors):
        return selective_scan_pair(**tensors, delta_softplus=True, implementation="torch").square().sum()

    compiled = torch.compile(total, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(tensors), list(tensors.values()))
    for gradient, want in zip(got, torch.autograd.grad(total(tensors), list(tensors.values())), strict=True):
        torch.testing.assert_close(gradient, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("implementation", ["torch", "native"])
def test_autocast_leaves_the_state_in_float32(implementation):
    tensors = inputs(2, 30, 8, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = selective_scan(**tensors, delta_softplus=True, implementation=implementation)
    assert error(y, equation(**tensors, delta_softplus=True)) < 2e-6


def test_memory_kept_between_calls_serves_inference_mode_and_training_alike():
    tensors = inputs(1, 9, 4, 3, dtype=torch.float64)
    with torch.inference_mode():
        first = selective_scan(**tensors, implementation="torch").clone()
    tensors["u"].requires_grad_()
    second = selective_scan(**tensors, implementation="torch")
    second.sum().backward()
    assert torch.equal(first, second)
    assert tensors["u"].grad.abs().max() > 0


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
    torch.testing.assert_close(y.cpu(), equation(**on_cpu, delta_softplus=True, reverse=reverse), rtol=1e-9, atol=1e-9)


LAYERS = [(1, 1, 1, 1, 1), (2, 2, 5, 3, 2), (3, 7, 17, 17, 4), (2, 63, 33, 5, 70), (1, 197, 48, 16, 12)]


@pairs(implementation=PLAIN, large=[False, True], shape=LAYERS)
def test_a_layer_is_within_2e_6_of_the_equation(implementation, shape, large):
    tensors = layer(*shape, large=large)
    y = bidirectional_scan(**tensors, implementation=implementation)
    assert y.shape == tensors["z"].shape
    assert y.dtype == torch.float32
    # the projection of a step of some hundreds is rounded before its exponential
    assert error(y, summed(**tensors)) < (2e-5 if large else 2e-6)


@pytest.mark.parametrize("implementation", PLAIN)
@pytest.mark.parametrize("shape", LAYERS, ids=str)
def test_projected_steps_are_within_2e_6_of_the_equation(implementation, shape):
    tensors = {name: layer(*shape)[name] for name in ("low", "weight", "bias")}
    delta = delta_projection(**tensors, implementation=implementation)
    assert error(delta, torch.log1p(projection(**tensors).exp())) < 2e-6


@pytest.mark.parametrize("implementation", PLAIN)
@pytest.mark.parametrize("shape", [(0, 5, 3, 2, 1), (2, 0, 3, 2, 1), (1, 4, 0, 2, 1)], ids=str)
def test_an_empty_layer_gives_an_empty_output(implementation, shape):
    tensors = layer(*shape)
    assert bidirectional_scan(**tensors, implementation=implementation).shape == shape[:3]
    steps = {name: tensors[name] for name in ("low", "weight", "bias")}
    assert delta_projection(**steps, implementation=implementation).shape == (2, *shape[:3])


@pytest.mark.parametrize("implementation", PLAIN)
def test_both_forms_are_one_on_a_cpu(implementation):
    tensors, one = layer(2, 9, 6, 4, 3), inputs(2, 9, 6, 4)
    one["delta"] = one["delta"].abs() + 4
    both = pair_of(one, one)
    for op, given_tensors in ((bidirectional_scan, tensors), (selective_scan, one), (selective_scan_pair, both)):
        results = [op(**given_tensors, form=form, implementation=implementation) for form in ("serial", "two_level")]
        assert torch.equal(*results)
        with pytest.raises(ValueError, match="form must be 'serial' or 'two_level', not 'parallel'"):
            op(**given_tensors, form="parallel", implementation=implementation)


def test_gradients_of_a_layer():
    tensors = {k: v.requires_grad_() for k, v in layer(2, 6, 3, 4, 2, dtype=torch.float64).items()}

    def scanned(*values):
        return bidirectional_scan(**dict(zip(tensors, values, strict=True)), implementation="torch")

    def steps(*values):
        return delta_projection(*values, implementation="torch")

    assert torch.autograd.gradcheck(scanned, tuple(tensors.values()))
    assert torch.autograd.gradcheck(steps, tuple(tensors[name] for name in ("low", "weight", "bias")))


@settings(deadline=None, max_examples=40)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 40), st.integers(1, 35)),
    reverse=st.booleans(),
    large=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_native_agrees_with_the_equation_at_any_shape(shape, reverse, large, seed):
    tensors = inputs(*shape, seed=seed, large=large)
    y = selective_scan(**tensors, delta_softplus=True, reverse=reverse, implementation="native")
    # over a few numbers the largest may be small beside the terms that it sums
    assert error(y, equation(**tensors, delta_softplus=True, reverse=reverse)) < 2e-5


def test_native_follows_steps_that_make_the_state_grow():
    tensors = inputs(1, 12, 20, 4)
    del tensors["delta_bias"]
    tensors["delta"] = -4 * tensors["delta"].sigmoid()
    want = equation(**tensors)
    assert want.abs().max() > 100
    assert error(selective_scan(**tensors, implementation="native"), want) < 2e-6
    tensors["delta"] -= 100
    assert not selective_scan(**tensors, implementation="native")[:, 3:].isfinite().any()


@pytest.mark.parametrize("name", ["u", "delta", "A", "B", "C", "D", "z", "delta_bias"])
def test_native_hides_no_nan(name):
    tensors = inputs(2, 20, 18, 17)
    tensors[name] = torch.full_like(tensors[name], torch.nan)
    assert selective_scan(**tensors, delta_softplus=True, implementation="native")[:, 1:].isnan().all()


@pytest.mark.parametrize("name", ["u", "low", "weight", "bias", "A", "B", "C", "D", "z"])
def test_a_native_layer_hides_no_nan(name):
    tensors = layer(2, 20, 18, 17, 3)
    tensors[name] = torch.full_like(tensors[name], torch.nan)
    assert bidirectional_scan(**tensors, implementation="native").isnan().all()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("u", torch.zeros(2, 3), r"u must be \(batch, length, channels\), not \(2, 3\)"),
        ("delta", torch.zeros(1, 2, 4), r"delta must be \(1, 2, 3\), not \(1, 2, 4\)"),
        ("A", torch.zeros(4, 4), r"A must be \(3, state\), not \(4, 4\)"),
        ("B", torch.zeros(1, 2, 5), r"B must be \(1, 2, 4\), not \(1, 2, 5\)"),
        ("C", torch.zeros(1, 4), r"C must be \(1, 2, 4\), not \(1, 4\)"),
        ("D", torch.zeros(4), r"D must be \(3,\), not \(4,\)"),
        ("z", torch.zeros(1, 1, 3), r"z must be \(1, 2, 3\)"),
        ("delta_bias", torch.zeros(1), r"delta_bias must be \(3,\)"),
        ("B", torch.zeros(1, 2, 4, device="meta"), "B must be on cpu"),
    ],
)
def test_a_wrong_tensor_is_named_with_what_was_expected(name, value, expected):
    with pytest.raises(ValueError, match=expected):
        selective_scan(**inputs(1, 2, 3, 4) | {name: value}, implementation="torch")


def test_other_wrong_arguments():
    tensors = inputs(1, 2, 3, 4)
    with pytest.raises(TypeError, match=r"A must be floating point, not torch\.int64"):
        selective_scan(**tensors | {"A": tensors["A"].long()}, implementation="torch")
    pair = pair_of(tensors, tensors)
    with pytest.raises(ValueError, match=r"u must be \(2, batch, length, channels\), not \(1, 2, 3\)"):
        selective_scan_pair(**pair | {"u": tensors["u"]}, implementation="torch")
    with pytest.raises(ValueError, match=r"D must be \(2, 3\), not \(3,\)"):
        selective_scan_pair(**pair | {"D": tensors["D"]}, implementation="torch")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("u", torch.zeros(1, 1, 2, 3), r"u must be \(2, batch, length, channels\), not \(1, 1, 2, 3\)"),
        ("low", torch.zeros(2, 1, 3, 2), r"low must be \(2, 1, 2, 2\), not \(2, 1, 3, 2\)"),
        ("weight", torch.zeros(2, 3, 3), r"weight must be \(2, 3, 2\), not \(2, 3, 3\)"),
        ("bias", torch.zeros(3), r"bias must be \(2, 3\), not \(3,\)"),
        ("A", torch.zeros(3, 4), r"A must be \(2, 3, state\), not \(3, 4\)"),
        ("z", torch.zeros(2, 1, 2, 3), r"z must be \(1, 2, 3\), not \(2, 1, 2, 3\)"),
        ("z", torch.zeros(1, 2, 3, device="meta"), "z must be on cpu"),
    ],
)
def test_a_wrong_tensor_of_a_layer_is_named(name, value, expected):
    with pytest.raises(ValueError, match=expected):
        bidirectional_scan(**layer(1, 2, 3, 4, 2) | {name: value}, implementation="torch")


def test_a_wrong_tensor_of_a_projection_is_named():
    low, weight, bias = (layer(1, 2, 3, 4, 2)[name] for name in ("low", "weight", "bias"))
    with pytest.raises(ValueError, match=r"low must be \(2, batch, length, rank of at least 1\), not \(1, 2, 2\)"):
        delta_projection(low[0], weight, bias)
    with pytest.raises(ValueError, match=r"weight must be \(2, channels, 2\), not \(2, 3, 1\)"):
        delta_projection(low, weight[..., :1], bias)
    with pytest.raises(ValueError, match=r"bias must be \(2, 3\), not \(3,\)"):
        delta_projection(low, weight, bias[0])
    with pytest.raises(TypeError, match=r"weight must be floating point, not torch\.int64"):
        delta_projection(low, weight.long(), bias)


@pytest.mark.parametrize("implementation", PLAIN)
def test_a_projection_from_no_numbers_is_refused(implementation):
    tensors = layer(1, 2, 3, 4, 0)
    steps = {name: tensors[name] for name in ("low", "weight", "bias")}
    for op, given_tensors in ((bidirectional_scan, tensors), (delta_projection, steps)):
        with pytest.raises(ValueError, match=r"rank of at least 1\), not \(2, 1, 2, 0\)"):
            op(**given_tensors, implementation=implementation)


@pytest.mark.parametrize("step", [1e-4, 0.02, 0.04, 0.08, 0.15, 0.3, 2.0, 20.0])
def test_native_is_exact_however_far_the_exponents_reach(step):
    tensors = layer(1, 100, 20, 16, 3)
    tensors["low"] = tensors["low"] * 0.1
    tensors["bias"] = torch.full((2, 20), step).expm1().log()
    assert error(bidirectional_scan(**tensors, implementation="native"), summed(**tensors)) < 2e-6


@pytest.mark.parametrize("shape", [(2, 40, 17, 40, 3), (1, 33, 50, 16, 70), (3, 197, 96, 16, 12)], ids=str)
def test_native_rounds_bfloat16_once_however_many_passes_a_sum_takes(shape):
    tensors = layer(*shape, dtype=torch.bfloat16)
    tensors["bias"] = tensors["bias"] * 0 - 3
    want = summed(**tensors)
    y = bidirectional_scan(**tensors, implementation="native")
    torch.testing.assert_close(y.double(), want, rtol=2**-8, atol=1e-3 * float(want.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_not_a_number_stays_so_in_native(dtype):
    tensors = layer(1, 20, 20, 4, 3, dtype=dtype)
    tensors["u"][0, 0, 5, 3] = torch.nan
    y = bidirectional_scan(**tensors, implementation="native")
    assert y[0, 5:, 3].isnan().all()
    assert y[0].isnan().sum() == 15
