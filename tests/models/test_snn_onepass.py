"""OnePass against the network written step by step, as its authors run it."""

import copy
import math
from collections import Counter

import pytest
import torch
from torch.nn import functional

from benchd.kernels.exact_conv2d import layer
from benchd.models.catalog import build
from benchd.models.snn_onepass import OnePass


def built(**options):
    torch.manual_seed(0)
    return build("snn_onepass", **options).double()


def step_by_step(model, images, *, uniforms=None, decay=0.95, threshold=1.0, reset="zero", time_steps=8, p_scale=1.0):
    """Return logits and both layers' spikes by a loop over T, with nothing folded."""

    def neuron(v, current):
        v = decay * v + current
        spike = (v >= threshold).to(current.dtype)
        return spike, v * (1 - spike) if reset == "zero" else v - threshold * spike

    norm1, norm2 = getattr(model, "bn1", torch.nn.Identity()), getattr(model, "bn2", torch.nn.Identity())
    v1 = v2 = 0.0
    logits, spikes = [], ([], [])
    for t in range(time_steps):
        x = images if uniforms is None else (uniforms[t] < (p_scale * images).clamp(0, 1)).to(images.dtype)
        first, v1 = neuron(v1, norm1(model.conv1(x)))
        second, v2 = neuron(v2, norm2(model.conv2(functional.avg_pool2d(first, 2))))
        hidden = model.fc1(functional.avg_pool2d(second, 2).flatten(1)).relu()
        logits.append(model.fc2(hidden))
        spikes[0].append(first)
        spikes[1].append(second)
    return torch.stack(logits).mean(0), [torch.stack(layer) for layer in spikes]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reset": "subtract", "threshold": 0.3, "decay": 0.5, "time_steps": 3},
        {"batch_norm": True, "time_steps": 4},
        {"encoding": "rate", "p_scale": 3.0, "time_steps": 5},
        {"encoding": "rate", "time_steps": 1, "threshold": 0.2},
    ],
    ids=str,
)
@torch.no_grad()
def test_logits_and_spikes_are_those_of_the_step_by_step_network(options):
    model = built(**options)
    if options.get("batch_norm"):
        model.train()(torch.rand(8, 3, 32, 32, dtype=torch.float64))
        model.eval()
    images = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    rate = options.get("encoding") == "rate"
    uniforms = torch.rand(options["time_steps"], 2, 3, 32, 32, dtype=torch.float64) if rate else None
    fired = []
    for neuron in model.neurons():
        neuron.register_forward_hook(lambda _module, _inputs, output: fired.append(output))
    logits = model(images, uniforms)
    plain = {name: value for name, value in options.items() if name not in {"encoding", "batch_norm"}}
    want, spikes = step_by_step(model, images, uniforms=uniforms, **plain)
    assert logits.shape == (2, 10)
    torch.testing.assert_close(logits, want, rtol=1e-9, atol=1e-12)
    for got, expected in zip(fired, spikes, strict=True):
        assert 0 < expected.mean() < 1
        assert torch.equal(got, functional.avg_pool2d(expected.flatten(0, 1), 2).unflatten(0, expected.shape[:2]))


@torch.no_grad()
def test_without_uniforms_the_spikes_follow_the_global_generator():
    model = build("snn_onepass", encoding="rate", p_scale=3.0)
    images = torch.rand(2, 3, 32, 32)
    torch.manual_seed(7)
    first = model(images)
    assert not torch.equal(model(images), first)
    torch.manual_seed(7)
    assert torch.equal(model(images), first)
    torch.manual_seed(7)
    assert torch.equal(model(images, torch.rand(8, 2, 3, 32, 32)), first)


def test_wrong_uniforms_are_refused():
    images = torch.rand(2, 3, 32, 32)
    with pytest.raises(ValueError, match=r"uniforms must be \(T, B, \.\.\.\) = \(8, 2, 3, 32, 32\), not \(8, 1,"):
        build("snn_onepass", encoding="rate")(images, torch.rand(8, 1, 3, 32, 32))
    with pytest.raises(ValueError, match='this model uses "repeat"'):
        build("snn_onepass")(images, torch.rand(8, 2, 3, 32, 32))


@pytest.mark.parametrize("kernels", ["torch", "custom"])
@torch.no_grad()
def test_every_precision_a_compiler_and_an_exporter_take_it(kernels):
    model, images = build("snn_onepass", kernels=kernels, time_steps=2), torch.rand(4, 3, 32, 32)
    want = model(images)
    assert model(images[:0]).shape == (0, 10)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(images), want)
    # strict export in versions of torch before 2.10 refuses a tensor of the module's file: int8 is then made without it
    for strict in (False,) if torch.__version__.startswith(("2.8.", "2.9.")) else (False, True):
        exported = torch.export.export(model, (images,), strict=strict)
        torch.testing.assert_close(exported.module()(images), want)
        ours = {str(node.target) for node in exported.graph.nodes if "benchd" in str(node.target)}
        # the others know more than an exported graph holds
        assert ours == ({"benchd.lif_pool.default"} if kernels == "custom" else set())
    with torch.autocast("cpu", torch.bfloat16):
        answers = {torch.bfloat16: [model(images)]}
    for dtype in (torch.float16, torch.bfloat16):
        answers.setdefault(dtype, []).append(model.to(dtype)(images.to(dtype)))
    for dtype, halves in answers.items():
        for logits in halves:
            assert logits.dtype == dtype
            assert (logits - want).abs().max() < 0.05 * want.abs().max()


@pytest.mark.parametrize("encoding", ["repeat", "rate"])
def test_every_parameter_learns(encoding):
    model = build("snn_onepass", encoding=encoding, batch_norm=True, time_steps=3).train()
    model(torch.rand(2, 3, 32, 32)).square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())


CUSTOM = [{}, {"reset": "subtract", "time_steps": 3}, {"encoding": "rate", "p_scale": 3.0}, {"batch_norm": True}]


@pytest.mark.parametrize("options", CUSTOM, ids=str)
@torch.no_grad()
def test_custom_kernels_give_the_plain_network_s_logits(options):
    plain, custom = build("snn_onepass", **options), build("snn_onepass", kernels="custom", **options)
    custom.load_state_dict(plain.state_dict())
    images = torch.rand(3, 3, 32, 32)
    steps = options.get("time_steps", 8)
    extra = [torch.rand(steps, 3, 3, 32, 32)] if options.get("encoding") == "rate" else []
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        inputs = [tensor.to(dtype) for tensor in (images, *extra)]
        want = plain.to(dtype)(*inputs)
        assert want.any()
        # where zeros are skipped, in float32, sums have another order
        tolerance = 1e-6 if dtype == torch.float32 else 0.0
        torch.testing.assert_close(custom.to(dtype)(*inputs), want, rtol=tolerance, atol=tolerance)
    assert custom(images[:0].to(dtype), *[tensor[:, :0].to(dtype) for tensor in extra]).shape == (0, 10)
    assert custom.float()(images[:0], *[tensor[:, :0].float() for tensor in extra]).shape == (0, 10)


@pytest.mark.parametrize(
    "options",
    [{"reset": "subtract", "threshold": 0.2, "time_steps": 3}, {"encoding": "rate", "threshold": 0.2, "time_steps": 3}],
    ids=["repeat", "rate"],
)
@torch.no_grad()
def test_neurons_add_the_biases_of_the_layers_as_they_do_on_a_gpu(monkeypatch, options):
    plain, custom = build("snn_onepass", **options), build("snn_onepass", kernels="custom", **options)
    custom.load_state_dict(plain.state_dict())
    images, steps = torch.rand(2, 3, 32, 32), options.get("time_steps", 8)
    extra = [torch.rand(steps, 2, 3, 32, 32)] if options.get("encoding") == "rate" else []
    wanted, left = plain(images, *extra), []

    def received(_, layer, x, neurons):
        left.append(layer)
        return layer._conv_forward(x, layer.weight, None), layer.bias

    monkeypatch.setattr(OnePass, "_received", received)
    torch.testing.assert_close(custom(images, *extra), wanted, rtol=1e-6, atol=1e-6)
    assert left == [custom.conv1, custom.conv2]


@torch.no_grad()
def test_neurons_that_know_no_bias_may_replace_ours():
    class Relu(torch.nn.Module):
        def forward(self, current):
            return current.relu()[..., ::2, ::2]

    for kernels in ("torch", "custom"):
        model = build("snn_onepass", kernels=kernels, encoding="rate")
        model.lif1, model.lif2 = Relu(), Relu()
        assert model(torch.rand(1, 3, 32, 32)).shape == (1, 10)


def test_fc1_reads_spikes_also_in_the_order_in_which_they_lie():
    layer = build("snn_onepass", kernels="custom").fc1.double()
    x = torch.randint(5, (3, 128, 8, 8)).double().contiguous(memory_format=torch.channels_last) / 4
    both = layer(x), layer.pixels_first(x)
    torch.testing.assert_close(both[1], both[0])
    wanted, gradient = (torch.autograd.grad(answer.square().sum(), layer.weight)[0] for answer in both)
    torch.testing.assert_close(gradient, wanted)


@torch.no_grad()
def test_custom_kernels_follow_their_weights():
    plain, custom = build("snn_onepass", time_steps=4), build("snn_onepass", kernels="custom", time_steps=4)
    images = torch.rand(2, 3, 32, 32)
    custom(images)
    custom.load_state_dict(plain.state_dict())
    torch.testing.assert_close(custom(images), plain(images), rtol=1e-6, atol=1e-6)
    for model in (plain, custom):
        model.conv2.weight.mul_(2)
        model.fc1.weight.mul_(3)
        model.conv2.bias = None
    want = plain(images)
    torch.testing.assert_close(custom(images), want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(copy.deepcopy(custom)(images), want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(custom.double().float()(images), want, rtol=1e-6, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert custom(images).dtype == torch.bfloat16


@torch.no_grad()
def test_custom_kernels_convolve_the_first_spikes_of_steady_neurons(monkeypatch):
    torch.manual_seed(0)  # no membrane is within rounding of the threshold, where both would be right
    sent = []
    chosen = layer.SpikeConvolution._in_integers
    monkeypatch.setattr(
        layer.SpikeConvolution, "_in_integers", lambda self, x, *rest: sent.append(x) or chosen(self, x, *rest)
    )
    images = torch.rand(2, 3, 32, 32)
    others = {"reset": "subtract"}, {"batch_norm": True}, {"time_steps": 65}
    for options, is_steady in [({}, True), *((other, False) for other in others)]:
        plain, custom = (build("snn_onepass", kernels=kernels, **options) for kernels in ("torch", "custom"))
        custom.load_state_dict(plain.state_dict())
        plain_outputs, custom_outputs = [[neuron_output(model, i) for i in range(2)] for model in (plain, custom)]
        sent.clear()
        torch.testing.assert_close(custom(images), plain(images), rtol=1e-6, atol=1e-6)
        assert all(map(torch.equal, *([calls.pop() for calls in each] for each in (plain_outputs, custom_outputs))))
        assert (sent[0].count_nonzero() < plain.lif1(plain._stem(images)[0]).count_nonzero()) == is_steady


def neuron_output(model, number):
    """Return a list of what the neurons of this number will send."""
    outputs = []
    model.neurons()[number].register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    return outputs


@pytest.mark.parametrize("options", CUSTOM, ids=str)
@torch.no_grad()
def test_custom_kernels_take_a_large_batch_in_groups_that_nobody_sees(options, monkeypatch):
    ran = Counter()
    monkeypatch.setattr(layer, "_ran", ran)
    model = build("snn_onepass", kernels="custom", **options)
    images, steps = torch.rand(50, 3, 32, 32), options.get("time_steps", 8)
    extra = [torch.rand(steps, 50, 3, 32, 32)] if options.get("encoding") == "rate" else []
    logits = model(images, *extra)
    assert ran.total() == 2 * math.ceil(50 / (128 // steps))
    ran.clear()
    outputs = neuron_output(model, 1)
    torch.testing.assert_close(model(images, *extra), logits, rtol=1e-5, atol=1e-6)
    assert ran.total() == 2
    assert outputs[0].shape == (steps, 50, 128, 8, 8)


def test_without_a_compiler_the_custom_kernels_are_refused_by_name(tmp_path, printed):
    code = """
import sys
from benchd.kernels.dispatch import Unavailable
from benchd.models.catalog import build
for name, options in (("snn_onepass", {}), ("snn_stbif_resnet18", {"width": 8}), ("vim_tiny", {"depth": 1})):
    try:
        build(name, kernels="custom", **options)
    except Unavailable as error:
        print(error)
print("torchvision" in sys.modules)
"""
    output = printed(code, CC="no-such-compiler", CACHE_DIRECTORY=str(tmp_path))
    assert output.count("native kernels need a C compiler") == 3
    assert output.endswith("False\n"), "building one waits for no import of torchvision"
