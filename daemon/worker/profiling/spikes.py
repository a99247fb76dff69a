"""Counts the effects of one batch's spikes: their number, how many are wasted, and the operations that they cause.

    spike rate           spikes per neuron per time step, of either sign
    wasted spikes        a pair of +1 and -1 from one neuron within the T steps, which cancel
    synaptic operations  one per spike and synapse it reaches, given borders, strides and groups. A synapse is a
                         weight, so pools and the shortcuts of a residual net have none
    modelled energy      of the synapses only: a multiply-add if a layer reads plain values, an addition if it
                         reads spikes. 4.6 and 0.9 pJ in float32, 1.5 and 0.4 pJ in float16, at 45 nm (Horowitz,
                         ISSCC 2014), as is usual for spiking networks. Memory, neurons and leaks are not included

A spike from a max pool over running sums is counted where it arrives. Figures are per image: the mean over the batch.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from benchd.daemon.runtimes import Precision
from benchd.models.snn_onepass import OnePass, PooledLif
from benchd.models.stbif import SpikingNetwork
from benchd.models.synapses import Received, Synapses

JOULES: dict[Precision, tuple[float, float]] = {"fp32": (4.6e-12, 0.9e-12), "fp16": (1.5e-12, 0.4e-12)}
WINDOW = 4  # the number of neurons whose spikes are summed in a pooled count

Network = OnePass | SpikingNetwork


@dataclass(frozen=True, kw_only=True)
class Spikes:
    """A part's spikes, out of `chances` (neurons times steps), the `operations` of its synapses, and joules.

    `flops` is the minimum for its products: 2 per synapse and non-zero input, however many spikes an input stands for.
    """

    chances: float = 0.0
    fired: float = 0.0
    wasted: float = 0.0
    operations: float | None = None
    energy_j: float | None = None
    flops: float | None = None

    @property
    def rate(self) -> float | None:
        """Return the spikes per neuron per time step, None without neurons."""
        return self.fired / self.chances if self.chances else None


def count(
    network: Network, forward: Callable[[], object], images: int, precision: Precision
) -> dict[nn.Module, Spikes]:
    """Return the figures of each layer of neurons and of weights in one forward pass over `images` images."""
    tally = _SpikeSums()
    with ExitStack() as hooks:
        for neuron in network.neurons():
            hooks.callback(neuron.register_forward_hook(tally.leaves).remove)
        for synapses in network.synapses():
            hooks.callback(synapses.module.register_forward_pre_hook(tally.arrives(synapses)).remove)
        forward()
    return tally.figures(images, JOULES.get(precision))


def total(parts: Iterable[Spikes]) -> Spikes:
    """Return the sum of these parts' figures."""
    every = list(parts)
    sums = {field.name: _sum(getattr(part, field.name) for part in every) for field in fields(Spikes)}
    return Spikes(**{name: value for name, value in sums.items() if value is not None})


def fan_out(layer: nn.Conv2d | nn.Linear, shape: torch.Size) -> Tensor:
    """Return how many synapses each element of an input of this shape (...) reaches, in float64.

    It is the gradient of the sum of the layer's outputs with all weights 1: the transposed layer applied to ones.
    """
    if isinstance(layer, nn.Linear):
        return torch.full(shape, float(layer.out_features), dtype=torch.float64)
    with torch.inference_mode(False), torch.enable_grad():
        numbers = torch.zeros(1, *shape, dtype=torch.float64, requires_grad=True)
        outputs = layer._conv_forward(numbers, torch.ones(layer.weight.shape, dtype=torch.float64), None)
        (reached,) = torch.autograd.grad(outputs.sum(), numbers)
    return reached[0]


class _SpikeSums:
    """The data seen by hooks in one pass, summed over the time steps."""

    def __init__(self) -> None:
        self._left: list[tuple[nn.Module, Tensor, Tensor, int]] = []
        self._arrived: list[tuple[Synapses, Tensor, Tensor]] = []

    def leaves(self, neuron: nn.Module, _: object, output: Tensor) -> None:
        """Record the output (T, B, ...) of neurons, as their forward hook."""
        pooled = isinstance(neuron, PooledLif)
        codes = (output * WINDOW).round() if pooled else output.sign()
        self._left.append((neuron, _summed(codes.abs()), _summed(codes), output.numel() * (WINDOW if pooled else 1)))

    def arrives(self, synapses: Synapses) -> Callable[..., None]:
        """Return the forward pre-hook that records the input (N, ...) of a layer of weights."""

        def hook(_: nn.Module, inputs: tuple[Tensor]) -> None:
            events = _events(inputs[0], synapses.receives)
            self._arrived.append((synapses, _summed(events), _summed(events != 0)))

        return hook

    def figures(self, images: int, joules: tuple[float, float] | None) -> dict[nn.Module, Spikes]:
        """Return the figures of each module that was seen."""
        by_module: dict[nn.Module, list[Spikes]] = defaultdict(list)
        for synapses, arrived, read in self._arrived:
            reach = fan_out(synapses.layer, arrived.shape)
            flops = 2.0 * float((read * reach).sum()) / images
            by_module[synapses.module].append(
                _operations(synapses, float((arrived * reach).sum()) / images, joules, flops)
            )
        for neuron, fired, net, chances in self._left:
            wasted = float((fired - net).sum())  # no neuron emits more -1 than +1 in total
            by_module[neuron].append(
                Spikes(chances=chances / images, fired=float(fired.sum()) / images, wasted=wasted / images)
            )
        return {module: total(parts) for module, parts in by_module.items()}


def _operations(synapses: Synapses, count: float, joules: tuple[float, float] | None, flops: float) -> Spikes:
    reads_values = synapses.receives == "values"
    energy_j = count * joules[0 if reads_values else 1] if joules else None
    return Spikes(operations=None if reads_values else count, energy_j=energy_j, flops=flops)


def _events(x: Tensor, receives: Received) -> Tensor:
    """Return how many spikes, or values, each number represents."""
    if receives == "counts":
        return (x * WINDOW).round()
    return torch.ones_like(x) if receives == "values" else x != 0


def _summed(steps: Tensor) -> Tensor:
    return steps.sum(0, dtype=torch.float64).cpu()


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
