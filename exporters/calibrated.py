"""What quantising after training needs and says, whoever does it; needs neither torch nor ONNX."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

LEAST_IMAGES = 16


class CannotQuantise(Exception):
    """A model or its calibration images do not allow a quantised file; the message says why."""


class Quantised(msgspec.Struct, frozen=True):
    """What a quantised file is: the layers in int8, those left in float32 with the reason, and its agreement.

    `exact` names the int8 layers whose inputs are exact integers. Errors are against the float32 file on calibration
    images, as shares of its largest output; `agreeing` of `images` rows have the same class.
    """

    layers: list[str]
    left_fp32: dict[str, str]
    exact: list[str]
    nodes: int
    max_error_share: float
    mean_error_share: float
    agreeing: int
    images: int


def refuse_few(images: Sequence[NDArray[Any]], source: str) -> None:
    """Raise CannotQuantise for calibration images from which no range can be learned."""
    if len(images) < LEAST_IMAGES:
        raise CannotQuantise(f"calibration needs at least {LEAST_IMAGES} images, not {len(images)} ({source})")
    if not all(np.isfinite(image).all() for image in images if image.dtype.kind == "f"):
        raise CannotQuantise(f"the calibration images are not finite ({source})")
    if all(np.ptp(image) == 0 for image in images) or all(np.array_equal(images[0], image) for image in images):
        raise CannotQuantise(f"the calibration images are constant or all the same, so they show no range ({source})")
