"""Describes the layers of a spiking network that have weights, for counting the operations that spikes cause."""

from typing import Literal, NamedTuple

from torch import nn

from benchd.models.catalog import Kernels

Received = Literal["values", "spikes", "counts"]


class Synapses(NamedTuple):
    """A layer with weights: `module` runs and accepts hooks; `layer` has its weights and sizes.

    Its inputs are plain `values`; `spikes`, one per nonzero number; or `counts`, the means of 2x2 neurons.
    """

    module: nn.Module
    layer: nn.Conv2d | nn.Linear
    receives: Received


def per_weight(kernels: Kernels) -> int:
    """Return the number of 8-bit digits per weight in a layer that convolves integers."""
    return 1 if kernels == "custom-int8" else 3
