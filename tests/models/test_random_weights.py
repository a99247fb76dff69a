"""Random nets whose outputs depend on every part of them and on the input."""

import torch
from torch import nn

from benchd.models import random_weights


class Branch(nn.Module):
    """A residual branch that is switched off as torchvision's ConvNeXt and timm's ResNet do, and a head of zeros."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.layer_scale = nn.Parameter(torch.full((3, 1, 1), 1e-6))
        self.head = nn.Linear(3, 4)
        nn.init.zeros_(self.norm.weight)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        nn.init.constant_(self.conv.weight, 1e4)

    def forward(self, images):
        branch = self.layer_scale * self.norm(self.conv(images))
        return self.head((images + branch).mean((2, 3)))


def settled(seed=0):
    torch.manual_seed(seed)
    net = Branch()
    random_weights.settle(net, (3, 8, 8))
    return net


def test_parts_that_are_switched_off_count_again_and_numbers_keep_their_size():
    net, images = settled(), torch.randn(16, 3, 8, 8)
    with torch.no_grad():
        scores = net(images)
        without = net.head(images.mean((2, 3)))
    assert not net.training
    assert not net.norm.training
    assert net.norm.momentum == 0.1
    assert 1e-2 < (scores - scores.mean(0)).abs().max() < 10
    assert (scores - without).abs().max() > 0.1 * scores.abs().max()
    assert not net.head.bias.any(), "a bias of zero is no switch"


def test_the_same_seed_gives_the_same_net():
    first, again, other = (settled(seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["norm.running_mean"], other["norm.running_mean"])
