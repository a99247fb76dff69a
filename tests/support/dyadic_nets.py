"""Nets whose products and sums float32 holds exactly."""

import torch
from torch import nn

from benchd.models.stbif import QuantisedResNet18, Quantiser

LEVEL = 8
STEP = 3


def draw(shape, low, high, unit):
    return torch.randint(low, high, shape).float() * unit


def dyadic_qann():
    """Return a narrow net whose weights, scales and statistics are sums of powers of two."""
    torch.manual_seed(0)
    qann = QuantisedResNet18(LEVEL, width=4)
    with torch.no_grad():
        for layer in qann.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                layer.weight.copy_(draw(layer.weight.shape, -4, 5, 1 / 8))
            if isinstance(layer, nn.BatchNorm2d | nn.Linear):
                layer.bias.copy_(draw(layer.bias.shape, -2, 3, STEP / 8))
            if isinstance(layer, nn.BatchNorm2d):
                layer.eps = 0.0
                layer.weight.copy_(2.0 ** torch.randint(-1, 1, layer.weight.shape))
                layer.running_mean.copy_(draw(layer.bias.shape, -2, 3, STEP / 8))
                layer.running_var.copy_(4.0 ** torch.randint(-1, 2, layer.bias.shape))
            if isinstance(layer, Quantiser):
                layer.scale.copy_(2.0 ** torch.randint(0, 2, ()))
    return qann.eval()
