"""Random weights that make the outputs of a trainable net depend on all its parts and on the input.

Untrained nets differ from trained ones: batch norm has no statistics, so values vanish (1e-14 in EfficientNet) or
overflow half precision (1e8 in ResNet-152), heads are zero (ViT), and residual branches are all but switched off by a
scale of zero or 1e-6. A variant that leaves out a layer would pass every check.
"""

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

IMAGES = 8
_SWITCHED_OFF = 1e-3


def settle(net: nn.Module, input_shape: tuple[int, ...]) -> None:
    """Activate inactive parts, and set batch norm's statistics from seeded normal inputs (8, *input_shape).

    Random values come from torch's global generator. `net` is left in eval mode.
    """
    for name, parameter in net.named_parameters():
        if not name.endswith("bias") and max(map(abs, parameter.aminmax())) < _SWITCHED_OFF:
            _switch_on(parameter)
    calibrate(net, torch.randn(IMAGES, *input_shape))


@torch.no_grad()
def _switch_on(parameter: nn.Parameter) -> None:
    """Set a per-channel scale to one, or draw a matrix that preserves the magnitude of its input."""
    if parameter.numel() == max(parameter.shape):
        parameter.fill_(1.0)
    else:
        parameter.normal_(std=(parameter.shape[0] / parameter.numel()) ** 0.5)


@torch.no_grad()
def calibrate(net: nn.Module, inputs: torch.Tensor) -> None:
    """Set batch norm's statistics from one pass over these inputs; `net` is left in eval mode."""
    norms = [module for module in net.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0  # use only the statistics of these inputs
        norm.train()
    if norms:
        net(inputs)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    net.eval()
