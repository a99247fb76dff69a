"""The quantised ResNet-18, its conversion, and the equality of the two."""

import copy
from collections import Counter

import pytest
import torch
from dyadic_nets import LEVEL, STEP, draw, dyadic_qann
from torch import nn
from torchvision import models

from benchd.kernels.dispatch import Unavailable
from benchd.kernels.exact_conv2d import layer, native
from benchd.models.catalog import build
from benchd.models.stbif import Quantiser, build_snn, convert, fold

BOUND = STEP + 17 * 2  # all of the net's neurons are on one path
NARROW = {"width": 16}  # a sixteenth of the arithmetic, the same layers


def dyadic_images(count=4):
    return draw((count, 3, 32, 32), -8, 9, STEP / 8)


@pytest.fixture(scope="module")
def qann():
    torch.manual_seed(0)
    return build("qann_resnet18", **NARROW)


@pytest.mark.parametrize("kernels", ["torch", "custom"])
@torch.no_grad()
def test_a_dyadic_net_is_equal_bit_for_bit_from_its_bound_on_and_not_below(kernels):
    for dtype in (torch.float64, torch.float32):
        qann, images = dyadic_qann().to(dtype), dyadic_images().to(dtype)
        want = qann(images)
        assert want.unique().numel() > 10
        for extra in (0, 1):
            assert torch.equal(convert(qann, BOUND + extra, kernels=kernels)(images), want)
        assert not torch.equal(convert(qann, STEP, kernels=kernels)(images), want)


@torch.no_grad()
def test_the_resnet_is_equal_in_double_from_its_bound_on_and_not_below(qann):
    double = copy.deepcopy(qann).double()
    images = torch.randn(8, 3, 32, 32, dtype=torch.float64)
    want = double(images)
    assert (convert(double, BOUND)(images) - want).abs().max() < 1e-9
    assert (convert(double, 4)(images) - want).abs().max() > 1e-3


def test_too_few_steps_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match="time_steps 2 is less than step 3"):
        convert(dyadic_qann(), 2)
    with pytest.raises(ValueError, match="time_steps 4 is less than step 7"):
        build_snn(name="snn_stbif_resnet18", kernels="torch", level=16, time_steps=4)


@pytest.mark.parametrize("level", [4, 8, 16])
@torch.no_grad()
def test_every_layer_of_a_random_build_uses_its_codes(level):
    torch.manual_seed(1)
    model = build("qann_resnet18", level=level, **NARROW)
    outputs = []
    for quantiser in model.neurons():
        quantiser.register_forward_hook(lambda module, _inputs, output: outputs.append(output / module.scale))
    model(torch.randn(16, 3, 32, 32))
    assert len(outputs) == 17
    for codes in outputs:
        assert set(codes.round().unique().tolist()) <= set(range(level // 2))
        assert codes.max() > level // 4 - 1
        assert 0.1 < (codes > 0).float().mean() < 0.9
        assert (codes.round() == level // 2 - 1).float().mean() < 0.5


@torch.no_grad()
def test_every_spiking_layer_emits_both_signs_of_scaled_codes():
    torch.manual_seed(1)
    model = build("snn_stbif_resnet18", **NARROW)
    outputs = []
    for neuron in model.neurons():
        neuron.register_forward_hook(lambda module, _inputs, output: outputs.append((module.scale, output)))
    model(torch.randn(4, 3, 32, 32))
    assert [tuple(output.shape[:2]) for _, output in outputs] == [(8, 4)] * 17
    for index, (scale, output) in enumerate(outputs):
        expected = [0, scale] if index == 0 else [-scale, 0, scale]  # an image pushes the first layer one way only
        assert torch.equal(output.unique(), torch.tensor(expected))


def test_builds_are_seeded_and_share_a_state_dict():
    torch.manual_seed(3)
    first = build("qann_resnet18", **NARROW)
    torch.manual_seed(3)
    spiking = build("snn_stbif_resnet18", **NARROW)
    other = build("qann_resnet18", **NARROW)
    assert spiking.state_dict().keys() == first.state_dict().keys()
    assert dict(spiking.named_parameters()).keys() == dict(first.named_parameters()).keys()
    for name, tensor in first.state_dict().items():
        assert torch.equal(spiking.state_dict()[name], tensor), name
    assert not torch.equal(other.conv1.weight, first.conv1.weight)
    assert first.input_shape == spiking.input_shape == (3, 32, 32)
    with pytest.raises(RuntimeError, match="Missing key"):
        spiking.load_state_dict({})


@torch.no_grad()
def test_the_qann_stays_as_it_was():
    qann = dyadic_qann()
    before = copy.deepcopy(qann.state_dict())
    network = convert(qann, STEP)
    for parameter in network.parameters():
        parameter.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in qann.state_dict().items())
    assert type(qann.relu) is Quantiser
    assert len(network.neurons()) == 17


def other_qann():
    qann = dyadic_qann()
    with torch.no_grad():
        qann.conv1.weight.neg_()
        qann.layer1[0].bn2.bias.add_(STEP / 4)
        qann.fc.bias.sub_(STEP / 4)
        qann.layer2[0].relu2.scale.mul_(2.0)
    return qann


@pytest.mark.parametrize("assign", [False, True])
@torch.inference_mode()
def test_derived_weights_follow_load_state_dict(assign):
    network, images = convert(dyadic_qann(), STEP), dyadic_images()
    before = network(images)
    network.load_state_dict(other_qann().state_dict(), assign=assign)
    want = convert(other_qann(), STEP)(images)
    assert torch.equal(network(images), want)
    assert not torch.equal(want, before)


@torch.no_grad()
def test_derived_weights_follow_a_write_and_an_optimiser():
    network, images = convert(dyadic_qann(), STEP), dyadic_images()
    network(images)
    network.load_state_dict(other_qann().state_dict())
    network.bn1.weight.mul_(2)
    changed = other_qann()
    changed.bn1.weight.mul_(2)
    assert torch.equal(network(images), convert(changed, STEP)(images))
    with torch.enable_grad():
        network(images).sum().backward()
    torch.optim.SGD(network.parameters(), lr=0.5).step()
    changed.load_state_dict(network.state_dict())
    assert torch.equal(network(images), convert(changed, STEP)(images))


@pytest.mark.parametrize("replace", ["del and set", "data", "twice"])
@torch.no_grad()
def test_derived_weights_follow_replaced_parameters(replace):
    """Whatever memory the new ones get: freed, that of the old ones is the first choice."""
    network, images = convert(dyadic_qann(), STEP), dyadic_images()
    convolution, weight = network.conv1, network.conv1.weight.clone()
    factors = (2, -1, 4)
    in_one_storage = torch.stack([weight * factor for factor in factors])
    for factor, value in zip(factors, in_one_storage, strict=True):
        network(images)
        if replace == "data":
            convolution.weight.data = value
        else:
            if replace == "twice":
                convolution.weight = nn.Parameter(weight * 3)
            del convolution.weight
            convolution.weight = nn.Parameter(weight * factor)
        fresh = dyadic_qann()
        fresh.load_state_dict(network.state_dict())
        assert torch.equal(network(images), convert(fresh, STEP)(images)), factor


@pytest.mark.parametrize("kernels", ["torch", "custom"])
@torch.no_grad()
def test_every_precision_a_compiler_and_an_exporter_take_it(kernels):
    network, images = convert(dyadic_qann(), STEP, kernels=kernels), dyadic_images()
    want = network(images)
    assert torch.equal(torch.compile(network, fullgraph=True, backend="aot_eager")(images), want)
    for learns in (False, True):
        with torch.set_grad_enabled(learns):
            exported = torch.export.export(network, (images,))
        assert torch.equal(exported.module()(images), want)
    assert torch.equal(network(images), want)
    network.conv1.weight.mul_(-1)
    assert not torch.equal(network(images), want)
    network.conv1.weight.mul_(-1)
    with torch.autocast("cpu", torch.bfloat16):
        assert network(images).isfinite().all()
    assert network(images[:0]).shape == (0, 10)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        answer = network.to(dtype)(images.to(dtype))
        assert answer.isfinite().all()
        assert torch.equal(copy.deepcopy(network)(images.to(dtype)), answer)


def test_with_relus_in_place_of_its_quantisers_the_resnet_is_torchvisions():
    own, published = build("qann_resnet18"), models.resnet18(num_classes=10).eval()
    for name, module in list(own.named_modules()):
        if isinstance(module, Quantiser):
            own.set_submodule(name, nn.ReLU())
    published.load_state_dict(own.state_dict())
    images = torch.rand(2, 3, 32, 32)
    with torch.inference_mode():
        assert torch.equal(own(images), published(images))


def test_the_quantiser_has_the_gradients_of_lsq():
    quantiser = Quantiser(LEVEL).double()
    with torch.no_grad():
        quantiser.scale.fill_(0.5)
    x = torch.tensor([[-0.7, 0.1, 0.4, 1.3], [0.24, 0.26, 1.6, 9.0]], dtype=torch.float64, requires_grad=True)
    y = quantiser(x)
    assert y.tolist() == [[0, 0, 0.5, 1.5], [0, 0.5, 1.5, 1.5]]
    y.sum().backward()
    assert x.grad.tolist() == [[0, 1, 1, 1], [1, 1, 0, 0]]
    slopes = [0, -0.2, 1 - 0.8, 3 - 2.6, -0.48, 1 - 0.52, 3, 3]
    assert quantiser.scale.grad.item() == pytest.approx(sum(slopes) / (4 * 3) ** 0.5)


@torch.inference_mode()
def test_custom_kernels_follow_their_weights():
    network, images = convert(dyadic_qann(), STEP, kernels="custom"), dyadic_images()
    network(images)
    network.load_state_dict(other_qann().state_dict())
    want = convert(other_qann(), STEP)(images)
    assert torch.equal(network(images), want)
    assert torch.equal(copy.deepcopy(network).double()(images.double()), want.double())


def codes_of(model, *batches):
    """Return the outputs of all neurons, flattened, and the logits of each batch."""
    codes = []
    keep = lambda _module, _inputs, output: codes.append(output.flatten())  # noqa: E731
    hooks = [neuron.register_forward_hook(keep) for neuron in model.neurons()]
    logits = [model(batch) for batch in batches]
    for hook in hooks:
        hook.remove()
    return torch.cat(codes), logits


def prefer_integers(monkeypatch):
    """Convolve in integers however few numbers are not 0, as a CPU with AMX does."""
    for least in layer.LEAST_DENSITY.values():
        for instructions in least:
            monkeypatch.setitem(least, instructions, (0.0, 0.0))


RESNETS = ["snn_stbif_resnet18", *["qann_resnet18"] * bool(native.paths())]


@pytest.mark.parametrize("name", RESNETS)
@torch.no_grad()
def test_custom_kernels_give_the_resnet_s_codes(monkeypatch, name):
    torch.manual_seed(0)
    plain, custom = (build(name, kernels=kernels, **NARROW) for kernels in ("torch", "custom"))
    custom.load_state_dict(plain.state_dict())
    assert custom.state_dict().keys() == plain.state_dict().keys()
    images, ran = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1)), Counter()
    monkeypatch.setattr(layer, "_ran", ran)
    prefer_integers(monkeypatch)
    want, got = (codes_of(model, images, images[:1])[0] for model in (plain, custom))
    assert ran == {(*native.paths(), "c")[0]: 2 * 19}, "all convolutions but the first one read spikes or codes"
    assert want.any()
    # sums in another order may move a neuron over its threshold, and with it those behind it
    assert (got != want).float().mean() < 1e-3
    (want, (logits,)), (got, (others,)) = (codes_of(model.double(), images.double()) for model in (plain, custom))
    assert torch.equal(got, want)
    torch.testing.assert_close(others, logits, rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")  # it is deprecated, but does not refuse what it cannot see
def test_the_old_tracer_sees_all_that_custom_kernels_do():
    network, images = convert(dyadic_qann(), STEP, kernels="custom"), dyadic_images()
    traced = torch.jit.trace(network, images, check_trace=False)
    assert torch.equal(traced(-images), network(-images))


def test_custom_kernels_learn_what_plain_ones_do():
    torch.manual_seed(0)
    plain = build("snn_stbif_resnet18", **NARROW).double()
    custom = build("snn_stbif_resnet18", kernels="custom", **NARROW).double()
    custom.load_state_dict(plain.state_dict())
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    for model in (plain, custom):
        model.train()(images).square().sum().backward()
    wanted = dict(plain.named_parameters())
    for name, parameter in custom.named_parameters():
        assert wanted[name].grad.any(), name
        torch.testing.assert_close(
            parameter.grad, wanted[name].grad, rtol=1e-7, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.skipif(not native.paths(), reason="needs a CPU with AMX, VNNI or a dot product of bytes")
@torch.no_grad()
def test_a_folded_dyadic_net_is_equal_bit_for_bit_and_traced_whole():
    folded, images = fold(dyadic_qann(), "small"), dyadic_images()
    want = dyadic_qann()(images)
    assert torch.equal(folded(images), want)
    assert torch.equal(copy.deepcopy(folded)(images), want)
    assert torch.equal(torch.compile(folded, fullgraph=True, backend="aot_eager")(images), want)
    folded.load_state_dict(other_qann().state_dict())
    assert torch.equal(folded(images), other_qann()(images))


@torch.no_grad()
def test_a_folded_net_whose_codes_fit_no_byte_is_equal_too(monkeypatch):
    monkeypatch.setattr(native, "paths", lambda: ("avx_vnni",))
    monkeypatch.setattr(native, "convolved", lambda *_: pytest.fail("bytes cannot hold these codes"))
    qann, images = dyadic_qann(), 100 * dyadic_images()
    for name, module in list(qann.named_modules()):
        if isinstance(module, Quantiser):
            qann.set_submodule(name, Quantiser(512))
    assert qann.relu(qann.bn1(qann.conv1(images))).max() > 127
    assert torch.equal(fold(qann, "small")(images), qann(images))


def test_a_custom_qann_is_refused_without_the_instructions_and_for_a_gpu(monkeypatch):
    with torch.device("meta"), pytest.raises(Unavailable, match="qann_resnet18 has custom kernels for CPUs only"):
        fold(dyadic_qann(), "qann_resnet18")
    monkeypatch.setattr(native, "paths", tuple)
    with pytest.raises(Unavailable, match="need a CPU with AMX, VNNI or Arm's dot product of bytes"):
        build("qann_resnet18", kernels="custom")
