"""Images for measuring and checking a model: seeded random ones, or real ones from a folder on this machine.

Real images get the preprocessing that the model was trained with, chosen by the catalog's `dataset` and `inputs`:
ImageNet is resized to 256/224 of the input's side (bicubic), cropped at the centre and normalised; CIFAR-10 is taken as
it is, normalised for `inputs` "normal" and left in [0, 1] for "unit". torchvision is imported where real images are
read: it takes a second, in each process that is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from torchvision.transforms import v2

_NORMALISATION = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
}
_CLASSES = {"imagenet": 1000, "cifar10": 10}
_SCHEMES = "cifar10:DIR or imagefolder:DIR"


class DataError(ValueError):
    """Images that were asked for cannot be had; the message says what to do."""


@dataclass(frozen=True)
class Images:
    """Preprocessed float32 images (n, C, H, W), class indices (n,), and where they come from, as a sentence.

    `labels` is None where the set has another number of classes than the model.
    """

    images: torch.Tensor
    labels: torch.Tensor | None
    source: str


def random_images(shape: tuple[int, ...], count: int, inputs: Literal["unit", "normal"], seed: int) -> torch.Tensor:
    """Return `count` float32 images of `shape`: uniform in [0, 1) for "unit", standard normal for "normal".

    They depend on the arguments alone: torch's global generator is neither read nor moved.
    """
    draw = {"unit": torch.rand, "normal": torch.randn}[inputs]
    return draw((count, *shape), generator=torch.Generator().manual_seed(seed))


def open_data(
    spec: str,
    input_shape: tuple[int, ...],
    count: int = 256,
    *,
    dataset: str | None = None,
    inputs: Literal["unit", "normal"] = "normal",
    preprocess: Callable[[Any], torch.Tensor] | None = None,
) -> Images:
    """Return `count` images spread evenly over the set that `spec` names, or all where it has fewer.

    `spec` is "cifar10:DIR" (the test set; DIR holds cifar-10-batches-py) or "imagefolder:DIR" (DIR/<class>/<image>).
    `dataset` and `inputs` are those of the model's catalog entry; without them, those that the scheme suggests, and
    `preprocess`, of a PIL image, replaces both. Raises DataError for an unknown scheme, a missing or empty folder, a
    wrong layout or an unreadable image.
    """
    scheme, _, folder = spec.partition(":")
    if scheme not in _OPENERS or not folder:
        raise DataError(f"unknown data {spec!r}: use {_SCHEMES}")
    if not Path(folder).is_dir():
        raise DataError(f"{folder} is not a folder: give the one that holds the images, as {_SCHEMES}")
    dataset = dataset or {"cifar10": "cifar10", "imagefolder": "imagenet"}[scheme]
    if dataset not in _NORMALISATION:
        raise DataError(f"this model reads no images (data set {dataset!r}): leave the data option out")
    opened = _OPENERS[scheme](folder)
    opened.transform = preprocess or _preprocessing(dataset, inputs, input_shape)
    return _take(opened, spec, count, _CLASSES[dataset])


def _open_cifar10(folder: str) -> Any:
    from torchvision import datasets  # noqa: PLC0415 - see above

    try:
        return datasets.CIFAR10(folder, train=False, download=False)
    except RuntimeError as error:
        layout = f"{folder}/{datasets.CIFAR10.base_folder}/"
        raise DataError(
            f"no CIFAR-10 in {folder}, or its files are damaged: unpack the python version so that {layout} exists"
        ) from error


def _open_image_folder(folder: str) -> Any:
    from torchvision import datasets  # noqa: PLC0415 - see above

    try:
        return datasets.ImageFolder(folder)
    except FileNotFoundError as error:
        raise DataError(f"no images in {folder}: expected {folder}/<class>/<image>, one folder a class") from error


_OPENERS = {"cifar10": _open_cifar10, "imagefolder": _open_image_folder}


def _preprocessing(dataset: str, inputs: str, input_shape: tuple[int, ...]) -> v2.Compose:
    from torchvision.transforms import v2  # noqa: PLC0415 - see above

    side = input_shape[-1]
    shorter = round(side * 256 / 224) if dataset == "imagenet" else side
    mean, std = _NORMALISATION[dataset]
    steps = [
        v2.Resize(shorter, interpolation=v2.InterpolationMode.BICUBIC),
        v2.CenterCrop(side),
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
    ]
    return v2.Compose([*steps, v2.Normalize(mean, std)] if inputs == "normal" else steps)


def _take(opened: Any, spec: str, count: int, classes: int) -> Images:
    taken = min(count, len(opened))
    indices = [i * len(opened) // taken for i in range(taken)]
    try:
        images, labels = zip(*(opened[i] for i in indices), strict=True)
    except OSError as error:
        raise DataError(f"an image of {spec} cannot be read, replace or remove it: {error}") from error
    source = f"{taken} of the {len(opened)} images of {spec}"
    if taken < count:
        source = f"all {taken} images of {spec}, fewer than the {count} asked for"
    known = len(opened.classes) == classes
    return Images(torch.stack(images), torch.tensor(labels) if known else None, source)
