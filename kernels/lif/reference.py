"""The equation of `benchd.kernels.lif` as a loop: the oracle of the other implementations, not meant to be fast."""

import torch
from torch import Tensor
from torch.nn import functional

from benchd.kernels.dispatch import state_dtype
from benchd.kernels.lif.layout import all_steps, with_bias
from benchd.kernels.lif.ops import Lif, LifPool, lif_op, lif_pool_op


@lif_op.computes("reference")
def _lif(given: Lif) -> Tensor:
    return _spikes(all_steps(given.current, given.repeats), *given[2:])


def _spikes(current: Tensor, decay: float, gain: float, threshold: float, subtract: bool) -> Tensor:
    x = current.detach().to(state_dtype(current))
    v = torch.zeros_like(x[0])
    spikes = []
    for t in range(x.shape[0]):
        v = decay * v + gain * x[t]
        fired = v >= threshold
        v = torch.where(fired, v - threshold if subtract else 0.0, v)
        spikes.append(fired.to(current.dtype))
    return torch.stack(spikes)


@lif_pool_op.computes("reference")
def _lif_pool(given: LifPool) -> Tensor:
    current = all_steps(given.current, given.repeats)
    spikes = _spikes(with_bias(current, given.bias), *given[3:7])
    pooled: Tensor = functional.avg_pool2d(spikes.flatten(0, 1), 2).unflatten(0, current.shape[:2])
    return (4 * pooled).to(torch.uint8) if given.counts else pooled.to(current.dtype)
