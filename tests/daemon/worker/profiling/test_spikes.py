"""Counts of spikes and of what they cause, against loops over every spike, tap and output."""

from functools import cache
from itertools import product

import pytest
import torch
from torch import nn

from benchd.daemon.worker.profiling import spikes
from benchd.kernels.lif import lif
from benchd.models.catalog import build

IMAGES, TIME_STEPS = 2, 8


def converted(kernels):
    torch.manual_seed(0)
    return build("snn_stbif_resnet18", kernels=kernels, width=4, time_steps=TIME_STEPS)


@pytest.fixture
def network():
    return converted("torch")


@pytest.fixture
def images():
    return torch.randn(IMAGES, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@cache
def reached(layer, row, column, side):
    """Return how many weights of the layer a number at this place meets, output by output and tap by tap."""
    (stride, _), (padding, _), (size, _) = layer.stride, layer.padding, layer.kernel_size
    outputs = range((side + 2 * padding - size) // stride + 1)
    meetings = [
        (y, x)
        for y, x in product(outputs, outputs)
        if 0 <= row - (y * stride - padding) < size and 0 <= column - (x * stride - padding) < size
    ]
    return len(meetings) * layer.out_channels // layer.groups


def operations(layer, x):
    """Return the operations of one pass on x (N, ...) of spikes, one spike after another."""
    spiked = x.nonzero().tolist()
    if isinstance(layer, nn.Linear):
        return len(spiked) * layer.out_features
    return sum(reached(layer, row, column, x.shape[-1]) for _, _, row, column in spiked)


def watched(network, images):
    """Return the input of each layer of weights and the output of each neuron in one pass."""
    inputs, outputs = {}, {}
    hooks = [
        each.module.register_forward_pre_hook(lambda m, x: inputs.update({m: x[0]})) for each in network.synapses()
    ]
    hooks += [neuron.register_forward_hook(lambda m, _, y: outputs.update({m: y})) for neuron in network.neurons()]
    with torch.inference_mode():
        network(images)
    for hook in hooks:
        hook.remove()
    return inputs, outputs


def counted(network, images, precision="fp32"):
    with torch.inference_mode():
        return spikes.count(network, lambda: network(images), len(images), precision)


@pytest.mark.parametrize("kernels", ["torch", "custom"])
def test_synaptic_operations_equal_a_count_of_every_spike_and_tap(images, kernels):
    network = converted(kernels)
    inputs, _ = watched(network, images)
    by_module = counted(network, images)
    read = [each for each in network.synapses() if each.receives == "spikes"]
    assert len(read) == 19
    for each in read:
        arrived = inputs[each.module]
        assert arrived.any()
        assert by_module[each.module].operations * IMAGES == operations(each.layer, arrived)
    assert any((inputs[each.module] < 0).any() for each in read)


def test_a_layer_that_reads_plain_values_multiplies_and_has_no_synaptic_operations(network, images):
    by_module = counted(network, images)
    first, *_, last = network.synapses()
    assert by_module[first.module].operations is by_module[last.module].operations is None
    taps = operations(first.layer, torch.ones(1, 3, 32, 32))
    assert by_module[first.module].energy_j == pytest.approx(taps * 4.6e-12)
    assert by_module[last.module].energy_j == pytest.approx(32 * 10 * 4.6e-12)
    second = network.synapses()[1].module
    assert by_module[second].energy_j == pytest.approx(by_module[second].operations * 0.9e-12)


def test_a_spike_is_wasted_that_cancels_another(network, images):
    _, outputs = watched(network, images)
    by_module = counted(network, images)
    wasted = {neuron: outputs[neuron].sign() for neuron in network.neurons()}
    for neuron, codes in wasted.items():
        assert by_module[neuron].wasted * IMAGES == (codes.abs().sum(0) - codes.sum(0).abs()).sum()
    assert any(by_module[neuron].wasted for neuron in wasted)


def test_the_spikes_of_a_pool_are_those_of_the_neurons_before_it():
    torch.manual_seed(0)
    network = build("snn_onepass", time_steps=3)
    images = torch.rand(IMAGES, 3, 32, 32)
    currents = []
    hook = network.lif1.register_forward_pre_hook(lambda _, inputs: currents.append(inputs[0]))
    inputs, _ = watched(network, images)
    hook.remove()
    fired = lif(currents[0], decay=0.95)
    by_module = counted(network, images)
    assert by_module[network.lif1].fired * IMAGES == float(fired.sum()) > 0
    assert by_module[network.lif1].rate == pytest.approx(float(fired.mean()))
    assert by_module[network.lif1].wasted == 0
    counts = (inputs[network.conv2] * 4).sum(0)
    each = torch.tensor([[reached(network.conv2, row, column, 16) for column in range(16)] for row in range(16)])
    assert by_module[network.conv2].operations * IMAGES == float((counts * each).sum())
    assert by_module[network.fc1].operations * IMAGES == float((inputs[network.fc1] * 4).sum()) * 256


def test_figures_are_of_one_image(network, images):
    once, twice = counted(network, images[:1]), counted(network, images[[0, 0]])
    assert once == twice


def test_there_is_no_energy_where_the_precision_has_no_model(network, images):
    assert all(each.energy_j is None for each in counted(network, images, "bf16").values())
