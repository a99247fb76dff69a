"""Computes NeuroBench's metrics for one pass: memory, sparsity and synaptic operations of a spiking or ordinary net.

They follow NeuroBench's definitions (Yik et al., The NeuroBench framework, 2025) and version 2.3 of its package:
operations are counted for `Linear` and `Conv` layers without biases, excluding taps on padding, per sample; operations
are accumulates if all inputs of the call are -1, 0 or 1, otherwise multiply-accumulates. Unlike in the package, a layer
shared by two parents is counted once, an unknown layer is listed instead of making every figure 0, and spikes of a
different height are counted separately.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from benchd.daemon.profiling.profile import Sparsity
from benchd.daemon.records import NeuroBench
from benchd.daemon.worker.structures import Batch, values

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_OTHER_LAYERS = (*_RECURRENT, nn.Bilinear, nn.MultiheadAttention, nn.modules.conv._ConvTransposeNd)
_ACTIVATIONS = (nn.ReLU, nn.Sigmoid)
# the base classes of snnTorch, SpikingJelly and Norse
_NEURONS = {"SpikingNeuron", "BaseNode", "SNNCell", "SNNRecurrentCell", "SNN", "SNNRecurrent"}
_STATES = ("mem", "v")  # their names for the membrane potential


def measure(module: nn.Module, example: Batch) -> NeuroBench:
    """Return the metrics of `module` in one pass over `example`, both on the CPU in float32."""
    footprint = sum(value.nbytes for value in (*module.parameters(), *module.buffers()))
    tally = _Pass()
    with ExitStack() as hooks, torch.no_grad():
        for called, layer in _layers(module):
            hooks.callback(called.register_forward_pre_hook(tally.arrives(layer)).remove)
        for neuron in _neurons(module):
            hooks.callback(neuron.register_forward_pre_hook(tally.begins).remove)
            hooks.callback(neuron.register_forward_hook(tally.leaves).remove)
        module(*values(example))
    samples = len(example)
    return NeuroBench(
        footprint_bytes=footprint,
        connection_sparsity=_share_zero(_weights(module)),
        activation_sparsity=tally.zeros / tally.numbers if tally.numbers else None,
        effective_macs=(tally.macs + tally.scaled_acs) / samples,
        effective_acs=tally.acs / samples,
        scaled_acs=tally.scaled_acs / samples,
        dense_operations=tally.dense / samples,
        membrane_updates=tally.updates / samples if tally.has_state else None,
        uncounted=sorted({type(part).__name__ for part in module.modules() if isinstance(part, _OTHER_LAYERS)}),
    )


def by_layer(module: nn.Module, run: Callable[[], object]) -> list[Sparsity]:
    """Return the sparsities of each layer of weights and each neuron or activation, by its full name."""
    tallies = {neuron: _Pass() for neuron in _neurons(module)}
    with ExitStack() as hooks:
        for neuron, its in tallies.items():
            hooks.callback(neuron.register_forward_hook(its.leaves).remove)
        run()
    rows = []
    for name, part in module.named_modules():
        weights = [part.weight] if isinstance(part, _LAYERS) else []
        its = tallies.get(part, _Pass())
        if weights or its.numbers:
            activation = its.zeros / its.numbers if its.numbers else None
            rows.append(Sparsity(name=name, connection=_share_zero(weights), activation=activation))
    return rows


def _layers(module: Any) -> list[tuple[nn.Module, Any]]:
    """Return each layer with weights and the module that is called for it, which differs only in a folded net."""
    if hasattr(module, "synapses"):
        return [(synapses.module, synapses.layer) for synapses in module.synapses()]
    return [(part, part) for part in module.modules() if isinstance(part, _LAYERS)]


def _neurons(module: Any) -> Iterable[nn.Module]:
    """Yield the activations: neurons and, as in NeuroBench, ReLU and Sigmoid."""
    own = {id(neuron) for neuron in module.neurons()} if hasattr(module, "neurons") else set()
    for part in module.modules():
        is_neuron = any(base.__name__ in _NEURONS for base in type(part).__mro__)
        if is_neuron or isinstance(part, _ACTIVATIONS) or id(part) in own:
            yield part


def _weights(module: nn.Module) -> list[Tensor]:
    """Return the weights of each layer; recurrent layers include their biases."""
    weights = [part.weight for part in module.modules() if isinstance(part, _LAYERS)]
    recurrent = [part for part in module.modules() if isinstance(part, _RECURRENT)]
    return [*weights, *(parameter for part in recurrent for parameter in part.parameters())]


def _share_zero(weights: list[Tensor]) -> float | None:
    count = sum(weight.numel() for weight in weights)
    return sum(int((weight == 0).sum()) for weight in weights) / count if count else None


class _Pass:
    """The counts of one pass from its hooks, summed over calls and samples."""

    def __init__(self) -> None:
        self.zeros = self.numbers = self.updates = 0
        self.macs = self.acs = self.scaled_acs = self.dense = 0.0
        self.has_state = False
        self._before: dict[nn.Module, Tensor | None] = {}

    def arrives(self, layer: Any) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        """Return the hook that counts the operations of one call of a layer."""

        def hook(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            given = inputs[0].float()
            reached = _operations(layer, given != 0, layer.weight != 0)
            self.dense += _operations(layer, torch.ones_like(given), torch.ones_like(layer.weight))
            heights = given.abs().unique()
            heights = heights[heights > 0]
            if len(heights) > 1:
                self.macs += reached
            elif len(heights) == 1 and heights[0] != 1:
                self.scaled_acs += reached
            else:
                self.acs += reached

        return hook

    def begins(self, neuron: nn.Module, _: tuple[Any, ...]) -> None:
        """Store the membrane potential before a step."""
        state = _state(neuron)
        self._before[neuron] = None if state is None else state.clone()

    def leaves(self, neuron: nn.Module, _: tuple[Any, ...], output: Any) -> None:
        """Count a neuron's outputs and its updated potentials: all at the first step, later those that changed."""
        out = output[0] if isinstance(output, tuple) else output
        self.zeros += int((out == 0).sum())
        self.numbers += out.numel()
        before, after = self._before.pop(neuron, None), _state(neuron)
        if after is not None:
            self.has_state = True
            if before is not None and before.shape == after.shape:
                self.updates += int((after - before).count_nonzero())
            else:
                self.updates += after.numel()


def _state(neuron: nn.Module) -> Tensor | None:
    states = (getattr(neuron, name, None) for name in _STATES)
    return next((state for state in states if isinstance(state, Tensor) and state.numel()), None)


def _operations(layer: Any, given: Tensor, weight: Tensor) -> float:
    """Return how many products of a layer have two non-zero factors, computed exactly as sums of ones."""
    given, weight = given.float(), weight.float()
    if isinstance(layer, nn.Linear):
        return float(nn.functional.linear(given, weight).sum(dtype=torch.float64))
    sides = weight.dim() - 1
    given = given.reshape(-1, *given.shape[-sides:])
    return float(layer._conv_forward(given, weight, None).sum(dtype=torch.float64))
