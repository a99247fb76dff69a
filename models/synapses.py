"""What a spiking network says about its layers of weights, for whoever counts what its spikes cause."""

from typing import Literal, NamedTuple

from torch import nn

from benchd.models.catalog import Kernels

Received = Literal["values", "spikes", "counts"]


class Synapses(NamedTuple):
    """A layer of weights: `module` is what runs, with hooks that see it, `layer` has its weights and sizes.

    What arrives are plain `values`; `spikes`, where each number but 0 is one; or `counts`, the means of 2x2 neurons.
    """

    module: nn.Module
    layer: nn.Conv2d | nn.Linear
    receives: Received


def per_weight(kernels: Kernels) -> int:
    """Return how many digits of 8 bits a weight has in a layer that convolves whole numbers."""
    return 1 if kernels == "custom-int8" else 3
