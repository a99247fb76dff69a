"""The scan in Triton against the equation in float64; without a GPU its interpreter runs it, hence the small shapes."""

import itertools

import pytest
import torch
from pairs import pairs
from test_selective_scan import OPTIONAL, error
from test_selective_scan import inputs as on_a_cpu

triton_impl = pytest.importorskip("benchd.kernels.selective_scan.triton_impl", reason="needs triton")

from benchd.kernels.selective_scan import (  # noqa: E402
    bidirectional_scan,
    delta_projection,
    selective_scan,
    selective_scan_pair,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# a GPU takes powers of two to 22.5 bits and the interpreter to the last one, which shows relative to small steps
TO_STEPS, TO_SOFTPLUS = (4e-6, 1e-6) if DEVICE == "cuda" else (2e-6, 4e-7)
FORMS = ("serial", "two_level")
ENOUGH = {"serial": 19, "two_level": 37}  # tokens that take a program through all of its code, by form


def inputs(*sizes, **options):
    return {name: tensor.to(DEVICE) for name, tensor in on_a_cpu(*sizes, **options).items()}


def doubled(tensors):
    return {name: None if tensor is None else tensor.double() for name, tensor in tensors.items()}


def scanned(tensors, *, softplus=True, reverse=False, form="serial", implementation="triton"):
    options = {"delta_softplus": softplus, "reverse": reverse, "form": form}
    return selective_scan(**tensors, **options, implementation=implementation)


def equation(tensors, **options):
    return scanned(doubled(tensors), implementation="reference", **options)


@pairs(form=FORMS, reverse=[False, True], shape=[(2, 2, 5, 3), (1, 9, 17, 2), (1, 8, 16, 5)])
def test_float32_is_within_2e_6_of_the_equation(form, reverse, shape):
    batch, length, *sizes = shape
    for tokens in (length, ENOUGH[form]):
        tensors = inputs(batch, tokens, *sizes)
        y = scanned(tensors, reverse=reverse, form=form)
        assert y.dtype == torch.float32
        assert error(y, equation(tensors, reverse=reverse)) < 2e-6


@pytest.mark.parametrize("form", FORMS)
def test_a_single_number_is_scanned(form):
    tensors = inputs(1, 1, 1, 1)
    assert error(scanned(tensors, form=form), equation(tensors)) < 2e-6


@pairs(
    form=FORMS, given_names=[n for r in range(4) for n in itertools.combinations(OPTIONAL, r)], softplus=[False, True]
)
def test_every_combination_of_options(form, given_names, softplus):
    every = inputs(1, ENOUGH[form], 3, 2)
    tensors = {name: t for name, t in every.items() if name in given_names or name not in OPTIONAL}
    if not softplus:
        tensors["delta"] = tensors["delta"].abs() + 4
    y = scanned(tensors, softplus=softplus, form=form)
    assert error(y, equation(tensors, softplus=softplus)) < 2e-6


@pytest.mark.parametrize(
    "cut", [(2, 8, 1, True), (4, 8, 1, True), (8, 8, 1, True), (16, 8, 2), (32, 4, 1), (64, 2, 2, True)], ids=str
)
def test_each_cut_of_the_serial_form(monkeypatch, cut):
    monkeypatch.setattr(triton_impl, "_cut", lambda *_: triton_impl._Cut(*cut))
    # a few channels more than a tile, and mostly less than one
    for length, channels, states in ((21, cut[0] + 3, 9), (19, 8, 1)):
        tensors = inputs(2, length, channels, states)
        assert error(scanned(tensors, reverse=True), equation(tensors, reverse=True)) < 2e-6


@pytest.mark.parametrize("cut", [(8, 16, 4), (4, 32, 4)], ids=str)
def test_each_cut_of_the_two_level_form_hands_its_state_on(monkeypatch, cut):
    monkeypatch.setattr(triton_impl, "_cut", lambda *_: triton_impl._Cut(*cut))
    tensors = inputs(2, 45, cut[0], 2)
    y = scanned(tensors, reverse=True, form="two_level")
    assert error(y, equation(tensors, reverse=True)) < 2e-6


@pytest.mark.parametrize("form", FORMS)
def test_large_steps_stay_exact(form):
    tensors = inputs(1, 20, 8, 2, large=True)
    assert (tensors["delta"] > 20).any()
    assert (tensors["delta"] < -100).any()
    assert error(scanned(tensors, form=form), equation(tensors)) < 2e-6


def test_softplus_is_accurate_relative_to_itself():
    raw = torch.cat((torch.linspace(-80, 30, 1901), torch.linspace(-2, 2, 201))).to(DEVICE)
    low, ones = raw.view(1, 1, -1, 1).expand(2, 1, -1, 1), torch.ones(2, 1, 1, device=DEVICE)
    delta = delta_projection(low, ones, torch.zeros(2, 1, device=DEVICE), implementation="triton")[0, 0, :, 0]
    relative = (delta.double() / torch.log1p(raw.double().exp()) - 1).abs()
    assert float(relative.max()) < 1e-5  # what rounding the exponent of exp(-80) costs
    assert float(relative[raw.abs() < 2].max()) < TO_SOFTPLUS


def test_small_steps_are_accurate_relative_to_themselves():
    tensors = inputs(1, 20, 8, 4) | {"delta": torch.full((1, 20, 8), -12.3, device=DEVICE)}
    for name in OPTIONAL:
        del tensors[name]
    assert error(scanned(tensors), equation(tensors)) < TO_STEPS


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)], ids=str)
def test_half_precision_rounds_only_what_comes_out(form, dtype, limit):
    tensors = inputs(2, ENOUGH[form], 5, 3, dtype=dtype)
    y = scanned(tensors, form=form)
    assert y.dtype == dtype
    assert error(y, equation(tensors)) < limit


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(2, 11, 9, 4), (2, 19, 16, 2)], ids=str)
def test_a_pair_is_a_forward_and_a_reverse_scan(form, shape):
    tensors = inputs(*shape, lead=(2,))
    y = paired(tensors, form)
    for reverse in (False, True):
        arguments = {name: tensor[int(reverse)] for name, tensor in tensors.items() if name != "z"}
        assert error(y[int(reverse)], equation(arguments, reverse=reverse)) < 2e-6


def paired(tensors, form):
    tensors = {name: tensor for name, tensor in tensors.items() if name != "z"}
    return selective_scan_pair(**tensors, delta_softplus=True, form=form, implementation="triton")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["u", "delta", "A", "B", "C", "D", "z", "delta_bias"])
def test_nan_is_not_hidden(form, name):
    tensors = inputs(1, 6, 3, 2)
    tensors[name] = torch.full_like(tensors[name], torch.nan)
    assert scanned(tensors, form=form)[:, 1:].isnan().all()


def layer(batch, length, channels, states, rank, *, dtype=torch.float32, seed=0):
    """The tensors of `bidirectional_scan`, with B, C and low as columns of one projection and z as half of another."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    B, C, low, beyond = normal(2, batch, length, 2 * states + rank + 1).split([states, states, rank, 1], dim=-1)
    beyond.fill_(torch.nan)  # nor is a number beside them read and multiplied by 0
    A = -(torch.arange(1, states + 1) + torch.rand(2, channels, states, generator=generator)).to(DEVICE)
    return {
        "u": normal(2, batch, length, channels),
        "low": low,
        "weight": normal(2, channels, rank) / 4,
        "bias": normal(2, channels) - 3,
        "A": A,
        "B": B,
        "C": C,
        "D": normal(2, channels),
        "z": normal(batch, length, 2 * channels)[..., channels:],
    }


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("shape", [(2, 5, 7, 3, 3), (1, 37, 65, 2, 12), (3, 3, 4, 2, 20)], ids=str)
def test_the_projection_of_delta(dtype, limit, shape):
    batch, length, *sizes = shape
    for tokens in (length, 70):  # some rows of a tile, and all of them
        tensors = [layer(batch, tokens, *sizes, dtype=dtype)[name] for name in ("low", "weight", "bias")]
        delta = delta_projection(*tensors, implementation="triton")
        assert delta.dtype == dtype
        assert error(delta, delta_projection(*map(torch.Tensor.double, tensors), implementation="reference")) < limit


def test_a_single_delta_is_projected():
    tensors = [layer(1, 1, 1, 1, 1)[name] for name in ("low", "weight", "bias")]
    delta = delta_projection(*tensors, implementation="triton")
    assert error(delta, delta_projection(*map(torch.Tensor.double, tensors), implementation="reference")) < 2e-6


def test_the_projection_of_half_rows_by_float32_weights():
    tensors = layer(2, 5, 7, 3, 3, dtype=torch.float16)
    ordered = [tensors["low"], tensors["weight"].float(), tensors["bias"].float()]
    delta = delta_projection(*ordered, implementation="triton")
    assert delta.dtype == torch.float16
    assert error(delta, delta_projection(*map(torch.Tensor.double, ordered), implementation="reference")) < 1e-3


def test_rows_of_amp_multiply_as_autocast_has_them():
    """Its weights stay float32, and a product in float32 would leave the tensor cores out."""
    low, weight, bias = (layer(2, 5, 7, 3, 12)[name] for name in ("low", "weight", "bias"))
    delta = delta_projection(low.half(), weight, bias, implementation="triton")
    assert torch.equal(delta, delta_projection(low.half(), weight.half(), bias, implementation="triton"))


@pytest.mark.parametrize("form", FORMS)
def test_both_directions_gated(form):
    for length in (39, 2):
        tensors = layer(1, length, 20, 3, 5)
        y = bidirectional_scan(*tensors.values(), form=form, implementation="triton")
        assert y.is_contiguous()
        assert error(y, bidirectional_scan(**doubled(tensors), implementation="reference")) < 2e-6


@pytest.mark.parametrize("shape", [(0, 3, 4, 2), (2, 0, 4, 2), (2, 3, 0, 2), (2, 3, 4, 0)], ids=str)
def test_empty_inputs(shape):
    tensors = inputs(*shape)
    for form in FORMS:
        y = scanned(tensors, form=form)
        assert y.shape == shape[:3]
        torch.testing.assert_close(y, scanned(tensors, implementation="reference"), rtol=1e-5, atol=1e-6)
    if shape[3]:
        assert bidirectional_scan(*layer(*shape, 3).values(), implementation="triton").shape == shape[:3]
