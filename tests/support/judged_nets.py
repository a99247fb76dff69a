"""Own nets with their items, targets and metric, given to a worker by path; each is wrong in bfloat16 in one way.

An image has one bright square, 1 to 3 for its class, that none of the nets misses otherwise.
"""

from typing import NamedTuple

import torch
from torch import nn

SIDE = 8


def squares():
    """Yield (image, top, left, class) of forty images."""
    draw = torch.Generator().manual_seed(0)
    for place in range(40):
        top, left = torch.randint(2, 20, (2,), generator=draw).tolist()
        image = torch.zeros(1, 32, 32)
        image[0, top : top + SIDE, left : left + SIDE] = 1 + place % 3
        yield image, top, left, place % 3


class Detector(nn.Module):
    """Returns a list of one dict per image; in bfloat16 each box is `shift` too far right and each class `other`."""

    def __init__(self, shift=0, other=0):
        super().__init__()
        self.shift, self.other = shift, other

    def forward(self, images):
        is_wrong = images.dtype == torch.bfloat16
        bright = images[:, 0] > 0
        top, left = bright.any(2).int().argmax(1), bright.any(1).int().argmax(1) + self.shift * is_wrong
        boxes = torch.stack([left, top, left + SIDE, top + SIDE], dim=1).float()
        labels = (images.amax((1, 2, 3)).long() - 1 + self.other * is_wrong) % 3
        return [{"boxes": boxes[i, None], "labels": labels[i, None]} for i in range(len(images))]


def shifted():
    return Detector(shift=4)


def confused():
    return Detector(other=1)


def boxes():
    for image, top, left, label in squares():
        box = torch.tensor([[left, top, left + SIDE, top + SIDE]]).float()
        yield image, {"boxes": box, "labels": torch.tensor([label])}


def overlap(answers, targets):
    """Return the mean intersection over union; a box of another class has none."""
    first, second = (torch.cat([image["boxes"] for image in images]) for images in (answers, targets))
    same = torch.tensor([a["labels"][0] == t["labels"][0] for a, t in zip(answers, targets, strict=True)])
    inner = (
        (torch.minimum(first[:, 2:], second[:, 2:]) - torch.maximum(first[:, :2], second[:, :2])).clamp(min=0).prod(1)
    )
    union = (first[:, 2:] - first[:, :2]).prod(1) + (second[:, 2:] - second[:, :2]).prod(1) - inner
    return (inner / union * same).mean()


class Segmenter(nn.Module):
    def forward(self, images):
        masks = images[:, 0].clamp(max=1)
        return masks.roll(1, dims=1) if images.dtype == torch.bfloat16 else masks


def masks():
    for image, *_ in squares():
        yield image, image[0].clamp(max=1)


def iou(answers, targets):
    predicted, wanted = answers > 0, targets > 0
    return (predicted & wanted).sum() / (predicted | wanted).sum()


class Spotter(nn.Module):
    def forward(self, images):
        scores = -(images.amax((1, 2, 3))[:, None] - torch.arange(1, 4)).abs()
        return scores.roll(1, dims=1) if images.dtype == torch.bfloat16 else scores


def keywords():
    for image, _, _, label in squares():
        yield image, label


def untargeted():
    for image, *_ in squares():
        yield image


def share_right(answers, targets):
    return (answers.argmax(1) == targets).float().mean()


class Found(NamedTuple):
    scores: torch.Tensor
    both: list
    hidden: None


class Structured(Spotter):
    """Returns what exported files flatten: a named tuple with a list of a dict and a tuple, and None."""

    def forward(self, images):
        scores = super().forward(images)
        return Found(scores, [{"3": scores * 2}, (scores + 1,)], None)


def in_own_form(answers, targets):
    doubled, (increased,) = answers.both
    assert answers.hidden is None
    assert type(answers.both) is list
    assert type(answers.both[1]) is tuple
    assert torch.equal(doubled["3"], answers.scores * 2)
    assert torch.equal(increased, answers.scores + 1)
    return share_right(answers.scores, targets)


class Regressor(nn.Module):
    def forward(self, images):
        means = images.mean((1, 2, 3)) * 16
        return means * 1.5 if images.dtype == torch.bfloat16 else means


def levels():
    for image, _, _, label in squares():
        yield image, label + 1.01


def rmse(answers, targets):
    return (answers - targets).square().mean().sqrt()


def spoils_scores(answers, targets):
    share = share_right(answers, targets)
    answers.zero_(), targets.add_(1)
    return share


def spoils_boxes(answers, targets):
    mean = overlap(answers, targets)
    for image in [*answers, *targets]:
        image.pop("boxes").zero_()
    answers.clear()
    return mean


class MeanError:
    """As torchmetrics has it."""

    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, answers, targets):
        self.total, self.count = self.total + (answers - targets).abs().sum(), self.count + len(targets)

    def compute(self):
        return self.total / self.count


def raises(answers, targets):
    raise ValueError("no boxes")


def undefined(answers, targets):
    return float("nan")


def changing(answers, targets):
    return torch.rand(())


class Unready:
    def __init__(self):
        raise OSError("no labels.txt")


def unreadable():
    yield torch.zeros(1, 32, 32), 0
    raise KeyError("second image")


def several(answers, targets):
    return {"map": 0.5, "mar": 0.6}


number = 3
