"""Models of timm by name, with its own preprocessing; no weights are ever downloaded."""

from collections.abc import Mapping
from typing import Any, cast

import timm
import timm.data
from torch import Tensor, nn

from benchd.kernels.dispatch import Unavailable
from benchd.models import random_weights
from benchd.models.catalog import Kernels


def build(*, name: str, kernels: Kernels, image_size: int, is_random: bool = True, **shape: Any) -> nn.Module:
    """Return the model `name`, `timm:NAME` or `timm:NAME.TAG`, in eval mode on plain PyTorch.

    Normalised images (B, 3, H, W) to scores (B, classes). `image_size` is their side length, or 0 for the model's
    default; `shape` comes from `shape_from`. Random weights are settled for images of that size. The module's
    `input_shape` is the shape of its input, and `preprocess` converts a PIL image to it. Raises Unavailable for
    `kernels` "custom".
    """
    if kernels != "torch":
        raise Unavailable(f"{name} has no custom kernels")
    net: Any = timm.create_model(name.partition(":")[2], pretrained=False, **shape)
    if image_size and net.pretrained_cfg.get("fixed_input_size"):  # the positions are parameters, of this size only
        net = timm.create_model(name.partition(":")[2], pretrained=False, img_size=image_size, **shape)
    data = timm.data.resolve_model_data_config(net)
    data |= {"input_size": (3, image_size, image_size)} if image_size else {}
    net.input_shape = tuple(data["input_size"])
    net.preprocess = timm.data.create_transform(**data, is_training=False)
    if is_random:
        random_weights.settle(net, net.input_shape)
    return cast("nn.Module", net.eval())


def shape_from(state: Mapping[str, Tensor], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `build` that a checkpoint determines; `options` includes the model's name."""
    built: Any = build(kernels="torch", is_random=False, **options)
    heads = {
        len(state[key])
        for key, own in built.state_dict().items()
        if key in state and state[key].dim() and state[key].shape != own.shape and len(own) == built.num_classes
    }
    return {"is_random": False} | ({"num_classes": heads.pop()} if len(heads) == 1 else {})
