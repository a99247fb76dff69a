"""Images for measuring and checking a model: seeded random ones, or real ones from a folder on this machine.

Real images get the preprocessing that the model was trained with, chosen by the catalog's `dataset` and `inputs`:
ImageNet is resized to 256/224 of the input's side (bicubic), centre-cropped and normalised; CIFAR-10 is used as is,
normalised for `inputs` "normal" and left in [0, 1] for "unit". The included digits, "demo", are enlarged to the input's
side, with equal channels. A user's own model may define its own preprocessing. torchvision is imported only to read
images from a folder: it takes a second in each measured process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import safetensors.torch
import torch
from torch.nn import functional

from benchd.models import data_named, demo
from benchd.models.data_named import DataError

if TYPE_CHECKING:
    from torchvision.transforms import v2

_NORMALISATION = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
}
_DIGITS_MEAN, _DIGITS_STD = 0.3053, 0.3236  # mean and standard deviation of the enlarged digits
_DIGITS_MAX, _DIGITS_CLASSES = 16, 10


def normalisation(
    dataset: str | None, inputs: Literal["unit", "normal"]
) -> tuple[Sequence[float], Sequence[float]] | None:
    """Return each channel's mean and standard deviation for normalising a data set's images, None for "unit"."""
    return _NORMALISATION.get(dataset or "imagenet", _NORMALISATION["imagenet"]) if inputs == "normal" else None


Preprocess = Callable[[Any], torch.Tensor]
"""Converts a PIL image to one input of a model."""


@dataclass(frozen=True)
class ImageSet:
    """Labelled images on this machine, each read and preprocessed on demand.

    `classes` is the number of classes, or a lower bound if the labels come from a file, which may omit classes.
    `preprocessing` describes how an image becomes an input.
    """

    spec: str
    classes: int
    has_label_file: bool
    preprocessing: str
    opened: Any

    def __len__(self) -> int:
        return len(self.opened)

    def spread(self, count: int) -> list[int]:
        """Return `count` indices spread evenly over the set, or all of them if it has fewer."""
        return spread(len(self), count)

    def read(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float32 images (n, C, H, W) and class indices (n,); raise DataError if an image cannot be read."""
        images, labels = zip(*(self.opened[i] for i in indices), strict=True)
        return torch.stack(images), torch.tensor(labels)

    def taken(self, count: int) -> Images:
        """Return `count` images spread evenly over the set, or all if it has fewer; raise the errors of `read`."""
        images, classes = self.read(self.spread(count))
        source = f"{len(images)} of the {len(self)} images of {self.spec}"
        if len(images) < count:
            source = f"all {len(images)} images of {self.spec}, fewer than the {count} asked for"
        return Images(images, source, classes, self)

    def why_unlabelled(self, classes: int) -> str | None:
        """Return why a model with this number of classes does not fit the labels, else None."""
        if self.has_label_file:
            largest = self.classes - 1
            return f"the labels go up to {largest}, but the model has {classes} classes" if largest >= classes else None
        if self.classes == classes:
            return None
        return (
            f"{self.spec} has {self.classes} classes, but the model has {classes}: provide one folder per class, or "
            "give the class indices with --labels"
        )


@dataclass(frozen=True)
class Images:
    """Float32 images (n, C, H, W) and a description of their origin; real images also have labels (n,) and the set."""

    images: torch.Tensor
    source: str
    labels: torch.Tensor | None = None
    of: ImageSet | None = None


def spread(items: int, count: int) -> list[int]:
    """Return `count` indices spread evenly over this many items, or all of them if there are fewer."""
    sample_size = min(count, items)
    return [i * items // sample_size for i in range(sample_size)]


def random_images(shape: tuple[int, ...], count: int, inputs: Literal["unit", "normal"], seed: int) -> torch.Tensor:
    """Return `count` float32 images of `shape`: uniform in [0, 1) for "unit", standard normal for "normal".

    They depend only on the arguments: torch's global generator is neither read nor advanced.
    """
    draw = {"unit": torch.rand, "normal": torch.randn}[inputs]
    return draw((count, *shape), generator=torch.Generator().manual_seed(seed))


def digests(images: torch.Tensor) -> list[str]:
    """Return a short hash of each image's values, used to exclude calibration images from the accuracy."""
    return [hashlib.sha256(image.contiguous().numpy().tobytes()).hexdigest()[:16] for image in images]


def open_set(
    spec: str,
    input_shape: tuple[int, ...],
    *,
    dataset: str | None = None,
    inputs: Literal["unit", "normal"] = "normal",
    labels: str | None = None,
    preprocess: Preprocess | None = None,
    calibrating: bool = False,
) -> ImageSet:
    """Return the set described by `spec`, without reading an image.

    `spec` is "demo" (the included digits), "cifar10:DIR" (the test set; DIR contains cifar-10-batches-py) or
    "imagefolder:DIR" (DIR/<class>/<image>, with classes numbered in alphabetical order). `labels` is a file that lists
    images of DIR and their classes, instead of folders. `dataset` and `inputs` come from the model's catalog entry, by
    default from the scheme. With `calibrating`, the images are disjoint from those without it: the training part of the
    digits, the training set of CIFAR-10. `preprocess` replaces the preprocessing of a folder's images. Raises DataError
    for an unknown scheme, a missing or empty folder, a wrong layout, and labels that do not fit.
    """
    scheme, folder = data_named.parse(spec, labels)
    if scheme == demo.DEMO:
        digits = _Digits(input_shape, inputs, calibrating)
        return ImageSet(spec, _DIGITS_CLASSES, False, _enlarging(input_shape, inputs), digits)
    dataset = dataset or {"cifar10": "cifar10", "imagefolder": "imagenet"}[scheme]
    if dataset not in _NORMALISATION:
        raise DataError(f"this model does not take images (data set {dataset!r}): leave the data option out")
    opened = _ListedImages(folder, labels) if labels else _OPENERS[scheme](folder, calibrating)
    if preprocess:
        opened.transform, preprocessing = _checked(preprocess, input_shape), described(preprocess)
    else:
        opened.transform, preprocessing = _preprocessing(dataset, inputs, input_shape)
    return ImageSet(spec, len(opened.classes), labels is not None, preprocessing, opened)


def described(preprocess: Preprocess) -> str:
    """Return a function's name, because its str() is an address, or a transform's description of itself."""
    if hasattr(preprocess, "__qualname__"):
        return f"{preprocess.__module__}.{preprocess.__qualname__}"
    return " ".join(str(preprocess).split())


class _Digits:
    """The included digits, for one kind of input."""

    def __init__(self, input_shape: tuple[int, ...], inputs: Literal["unit", "normal"], calibrating: bool) -> None:
        if len(input_shape) != 3:
            raise DataError(f"this model does not take images (its input is {input_shape}): leave the data option out")
        tensors = safetensors.torch.load_file(demo.CALIBRATION if calibrating else demo.IMAGES)
        self._images, self._labels = enlarged(tensors["images"], input_shape, inputs), tensors["labels"].tolist()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._images[index], self._labels[index]


def enlarged(digits: torch.Tensor, input_shape: tuple[int, ...], inputs: Literal["unit", "normal"]) -> torch.Tensor:
    """Return digits (n, 8, 8), 0 to 16, as images (n, *input_shape).

    At 32 pixels they are multiples of 1/1024 before normalisation, which are exact in every precision.
    """
    channels, *sides = input_shape
    grey = digits[:, None].float() / _DIGITS_MAX
    images = functional.interpolate(grey, sides, mode="bilinear", align_corners=False).expand(-1, channels, -1, -1)
    return (images - _DIGITS_MEAN) / _DIGITS_STD if inputs == "normal" else images.contiguous()


def _enlarging(input_shape: tuple[int, ...], inputs: str) -> str:
    """Describe what `enlarged` does."""
    _, height, width = input_shape
    steps = f"grey digits of 8x8, /{_DIGITS_MAX}, enlarged to {height}x{width} (bilinear), equal channels"
    return steps + (f", mean {_DIGITS_MEAN}, deviation {_DIGITS_STD}" if inputs == "normal" else "")


class _ListedImages:
    """The images listed in a file of labels, by their paths inside a folder."""

    def __init__(self, folder: str, labels: str) -> None:
        named = data_named.read_listed(folder, labels)
        self._samples = [(Path(folder, name), label) for name, label in named.items()]
        self.classes = range(max(named.values()) + 1)
        self.transform: Preprocess

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self._samples[index]
        return self.transform(_picture(str(path))), label


def _picture(path: str) -> Any:
    from PIL import Image  # noqa: PLC0415 - see above
    from torchvision.datasets import folder  # noqa: PLC0415

    try:
        return folder.pil_loader(path)
    # Pillow raises SyntaxError for a damaged PNG
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"cannot read {path}; replace or remove it: {error}") from error


def _open_cifar10(folder: str, train: bool) -> Any:
    from torchvision import datasets  # noqa: PLC0415 - see above

    try:
        return datasets.CIFAR10(folder, train=train, download=False)
    except RuntimeError as error:
        layout = f"{folder}/{datasets.CIFAR10.base_folder}/"
        raise DataError(
            f"no CIFAR-10 in {folder}, or its files are damaged: unpack the python version so that {layout} exists"
        ) from error


def _open_image_folder(folder: str, train: bool) -> Any:
    del train  # a folder is a single set, without separate training images
    from torchvision import datasets  # noqa: PLC0415 - see above

    try:
        return datasets.ImageFolder(folder, loader=_picture)
    except FileNotFoundError as error:
        raise DataError(
            f"no images in {folder}: expected {folder}/<class>/<image>, one folder per class, or --labels FILE"
        ) from error


_OPENERS = {"cifar10": _open_cifar10, "imagefolder": _open_image_folder}


def _preprocessing(dataset: str, inputs: str, input_shape: tuple[int, ...]) -> tuple[v2.Compose, str]:
    """Return the transform of a PIL image, and a description of it."""
    from torchvision.transforms import v2  # noqa: PLC0415 - see above

    if len(input_shape) != 3 or input_shape[0] != 3:
        sizes = "x".join(map(str, input_shape))
        raise DataError(
            f"images have 3 channels, but the model takes {sizes}: give the module an attribute `preprocess`, a "
            "function from a PIL image to such a tensor"
        )
    height, width = input_shape[1:]
    side = max(height, width)
    shorter = round(side * 256 / 224) if dataset == "imagenet" else side
    mean, std = _NORMALISATION[dataset]
    steps = [
        v2.Resize(shorter, interpolation=v2.InterpolationMode.BICUBIC),
        v2.CenterCrop((height, width)),
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
    ]
    words = f"RGB, shorter side to {shorter} (bicubic, antialiased), centre crop {height}x{width}, /255"
    if inputs == "unit":
        return v2.Compose(steps), words
    return v2.Compose([*steps, v2.Normalize(mean, std)]), f"{words}, mean {mean}, deviation {std}"


def _checked(preprocess: Preprocess, input_shape: tuple[int, ...]) -> Preprocess:
    """Return the user's own preprocessing, with a check of its result."""

    def prepare(picture: Any) -> torch.Tensor:
        image = preprocess(picture)
        if not isinstance(image, torch.Tensor) or tuple(image.shape) != tuple(input_shape):
            shape = tuple(image.shape) if isinstance(image, torch.Tensor) else type(image).__name__
            raise DataError(f"the module's `preprocess` returned {shape}, not a tensor of shape {tuple(input_shape)}")
        return image.float()

    return prepare
