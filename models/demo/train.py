"""Train the nets of this folder: `make weights`. The same machine and versions write the same bytes.

Each net learns scikit-learn's handwritten digits, enlarged to 32x32 pixels with three equal channels; every fifth digit
is kept for testing. In each epoch an image is shifted by up to 2.5 pixels, rotated by up to 8 degrees and scaled by up
to 8 %. Weights are written in half precision, and the accuracy printed is that of the written file, in float32.
"""

import math
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from benchd.models import catalog, data, demo, weights

THREADS, BATCH, SEED = 2, 64, 0
CALIBRATION = 512
_SHIFT, _TURN, _SCALE = 2.5 / 16, math.radians(8), 0.08  # a shift of 1 is half the image


class Recipe(NamedTuple):
    """How a net learns: passes over the training images, peak learning rate, weight decay of its matrices."""

    epochs: int
    rate: float
    decay: float


RECIPES = {
    "qann_resnet18": Recipe(30, 3e-3, 1e-2),
    "vim_tiny": Recipe(24, 2e-3, 5e-2),
    "snn_onepass": Recipe(8, 2e-3, 1e-2),
}


class Digits(NamedTuple):
    """Digits (n, 8, 8) with values 0 to 16, and their labels (n,)."""

    images: Tensor
    labels: Tensor


def main() -> None:
    """Write test and calibration images and a checkpoint for each recipe, and print the accuracies."""
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    learnt, test = digits()
    every = torch.arange(CALIBRATION) * len(learnt.labels) // CALIBRATION
    for part, path in ((test, demo.IMAGES), (Digits(*(tensor[every] for tensor in learnt)), demo.CALIBRATION)):
        _write({name: tensor.to(torch.uint8) for name, tensor in part._asdict().items()}, path)
    for model, recipe in RECIPES.items():
        begun = time.monotonic()
        module = trained(model, learnt, recipe)
        _write(module.half().state_dict(), demo.CHECKPOINTS[model].path)
        sys.stdout.write(f"{model}: {time.monotonic() - begun:.0f} s\n")
    for model in demo.CHECKPOINTS:
        right = int(answers_right(model, test).sum())
        sys.stdout.write(f"{model}: {right} of {len(test.labels)} right, {100 * right / len(test.labels):.1f} %\n")


def _write(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    path.chmod(0o644)  # safetensors makes its files readable only by their owner


def digits() -> tuple[Digits, Digits]:
    """Return the digits to train on and the digits to test with (every fifth)."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 - a development dependency, for this alone

    loaded = load_digits()
    is_kept = torch.arange(len(loaded.target)) % 5 == 4
    images, labels = torch.from_numpy(loaded.images), torch.from_numpy(loaded.target)
    return Digits(images[~is_kept], labels[~is_kept]), Digits(images[is_kept], labels[is_kept])


def trained(model: str, learnt: Digits, recipe: Recipe) -> nn.Module:
    """Return the catalogued model with its checkpoint's options, trained by the recipe."""
    torch.manual_seed(SEED)
    options: dict[str, Any] = dict(demo.CHECKPOINTS[model].options)
    module = catalog.build(model, **options).train()
    images = _images(model, learnt)
    matrices, others = ([p for p in module.parameters() if (p.dim() > 1) is wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": recipe.decay}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=recipe.rate)
    steps = recipe.epochs * (len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, recipe.rate, total_steps=steps, pct_start=0.15)
    for chosen in _batches(len(images), recipe.epochs):
        scores = module(_moved(images[chosen]))
        optimiser.zero_grad()
        functional.cross_entropy(scores, learnt.labels[chosen], label_smoothing=0.1).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    return module.eval()


def _images(model: str, part: Digits) -> Tensor:
    entry = catalog.entry(model)
    return data.enlarged(part.images, entry.image_shape(demo.CHECKPOINTS[model].options), entry.inputs)


def _batches(images: int, epochs: int) -> Iterator[Tensor]:
    """Yield the indices of whole batches, with all images in a new order in each epoch."""
    for _ in range(epochs):
        yield from torch.randperm(images)[: images // BATCH * BATCH].split(BATCH)


def _moved(images: Tensor) -> Tensor:
    """Return each image shifted, rotated and scaled by its own random amount, repeating the border outside it."""
    x, y, turn, scale = (2 * torch.rand(4, len(images)) - 1).mul(torch.tensor([[_SHIFT], [_SHIFT], [_TURN], [_SCALE]]))
    cosine, sine = (1 + scale) * turn.cos(), (1 + scale) * turn.sin()
    maps = torch.stack((cosine, -sine, x, sine, cosine, y), dim=1).view(-1, 2, 3)
    grid = functional.affine_grid(maps, list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, padding_mode="border", align_corners=False)


@torch.inference_mode()
def answers_right(model: str, kept: Digits) -> Tensor:
    """Return whether the shipped net classifies each digit correctly in float32, as bool (n,)."""
    checkpoint = demo.CHECKPOINTS[model]
    module = weights.load(model, checkpoint.path, **checkpoint.options)
    scores = torch.cat([module(batch) for batch in _images(model, kept).split(BATCH)])
    return scores.argmax(1) == kept.labels


if __name__ == "__main__":
    main()
