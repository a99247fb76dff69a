"""Models of torchvision by name, with its own preprocessing; no weights are ever downloaded.

    classification   images (B, 3, H, W) to scores (B, classes)
    segmentation     images (B, 3, H, W) to {"out": (B, classes, H, W)}, and "aux" if the checkpoint has that head
    video            clips (B, 3, 16, H, W) to scores (B, classes)
    detection        one-stage nets without pre- and postprocessing: images (B, 3, H, W) of the net's own size to the
                     scores and boxes of every anchor. Resizing, decoding and suppression are up to the caller, as in
                     most deployments, because their output has a different shape for each image

Images are normalised as in the preset of the model's newest weights.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchvision import models
from torchvision.transforms import Compose, v2
from torchvision.transforms._presets import (
    ImageClassification,
    ObjectDetection,
    SemanticSegmentation,
    VideoClassification,
)

from benchd.kernels.dispatch import Unavailable
from benchd.models import random_weights
from benchd.models.catalog import Kernels

FRAMES = 16
_DETECTION_SIDE = 800  # for a net that accepts any size: the shorter side of its training images
# keys that torchvision renames outside its modules; the modules rename all others when loading
PUBLISHED_NAMES = {r"(denselayer\d+\.(?:norm|conv))\.([12])\.": r"\1\2."}


class OneStageDetector(nn.Module):
    """The network of an SSD, RetinaNet or FCOS, with its state-dict keys."""

    caveat = "scores and boxes of every anchor: decoding and suppression, as in --module, are neither timed nor checked"

    def __init__(self, detector: Any) -> None:
        super().__init__()
        self.backbone, self.head = detector.backbone, detector.head

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Return the heads' outputs for each anchor (B, anchors, ...), for normalised images (B, 3, H, W)."""
        return self.head(list(self.backbone(images).values()))


def build(*, name: str, kernels: Kernels, image_size: int, is_random: bool = True, **shape: Any) -> nn.Module:
    """Return the model `name`, `torchvision:NAME`, in eval mode on plain PyTorch.

    `image_size` is the side length of its images, or 0 for the model's default; `shape` comes from `shape_from`. Random
    weights are settled for images of that size. The module's `input_shape` is the shape of its input, and `preprocess`
    converts a PIL image to it (None for clips). Raises Unavailable for `kernels` "custom".
    """
    if kernels != "torch":
        raise Unavailable(f"{name} has no custom kernels")
    preset, _ = _preset(name)
    net: Any = models.get_model(_own_name(name), **{**_arguments(name, preset, image_size), **shape})
    input_shape = _input_shape(net, preset, image_size)
    preprocess = _preprocess(net, preset, input_shape)
    net = OneStageDetector(net) if isinstance(preset, ObjectDetection) else net
    net.input_shape, net.preprocess = input_shape, preprocess
    if is_random:
        random_weights.settle(net, input_shape)
    return cast("nn.Module", net.eval())


def shape_from(state: Mapping[str, Tensor], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `build` that a checkpoint determines; `options` includes the model's name."""
    shape: dict[str, Any] = {"is_random": False}
    heads = {"aux_classifier.": "aux_loss", "aux1.": "aux_logits", "AuxLogits.": "aux_logits"}
    shape |= {heads[head]: True for head in heads if any(key.startswith(head) for key in state)}
    built, (_, classes) = build(kernels="torch", **options, **shape), _preset(options["name"])
    counts = {
        len(state[key]) * classes / len(own)  # a detector's head has a row for each anchor and class
        for key, own in built.state_dict().items()
        if key in state and state[key].dim() and state[key].shape != own.shape
    }
    if len(counts) == 1 and (count := counts.pop()).is_integer():
        shape["num_classes"] = int(count)
    return shape


def _own_name(name: str) -> str:
    return name.partition(":")[2]


def _preset(name: str) -> tuple[Any, int]:
    """Return the preprocessing and number of classes of the model's newest weights."""
    newest = models.get_model_weights(_own_name(name)).DEFAULT
    return newest.transforms(), len(newest.meta["categories"])


def _arguments(name: str, preset: Any, image_size: int) -> dict[str, Any]:
    """Return the builder's arguments: no weights for any part, and the settings that the model's own weights imply."""
    own_name = _own_name(name)
    arguments: dict[str, Any] = {"weights": None}
    if isinstance(preset, (SemanticSegmentation, ObjectDetection)):
        arguments["weights_backbone"] = None
    if own_name in ("googlenet", "inception_v3"):
        arguments |= {"transform_input": True, "aux_logits": False, "init_weights": True}
    if image_size and own_name.startswith("vit_"):
        arguments["image_size"] = image_size
    if image_size and own_name.startswith("maxvit"):
        arguments["input_size"] = (image_size, image_size)
    return arguments


def _input_shape(net: Any, preset: Any, image_size: int) -> tuple[int, ...]:
    if isinstance(preset, ObjectDetection):
        sides = (net.transform.fixed_size or (_DETECTION_SIDE,))[::-1]  # width before height
    else:
        sides = preset.resize_size if isinstance(preset, SemanticSegmentation) else preset.crop_size
    frames = (FRAMES,) if isinstance(preset, VideoClassification) else ()
    return (3, *frames, image_size or sides[0], image_size or sides[-1])


def _preprocess(net: Any, preset: Any, input_shape: tuple[int, ...]) -> Callable[[Any], Tensor] | None:
    """Return the preset for this image size; segmentation and detection resize a whole image to it."""
    size = list(input_shape[-2:])
    if isinstance(preset, VideoClassification):
        return None
    if isinstance(preset, ImageClassification):
        preset.resize_size = [round(preset.resize_size[0] * size[0] / preset.crop_size[0])]
        preset.crop_size = size
    elif isinstance(preset, SemanticSegmentation):
        preset.resize_size = size
    else:
        normalise = v2.Normalize(net.transform.image_mean, net.transform.image_std)
        preset = v2.Compose([v2.Resize(size), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), normalise])
    return Compose([preset])  # otherwise the preset would become a submodule of the net
