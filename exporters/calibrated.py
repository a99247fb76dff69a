"""The requirements and results of post-training quantisation, for all tools; needs neither torch nor ONNX."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

LEAST_IMAGES = 16


class CannotQuantise(Exception):
    """The model or its calibration images do not permit quantisation; the message says why."""


class Quantised(msgspec.Struct, frozen=True):
    """A quantised file: its int8 layers, the layers left in float32 with the reasons, and its agreement.

    `exact` lists the int8 layers whose inputs are exact integers. Errors are deviations from the float32 file on
    calibration images, as shares of its largest output; `agreeing` of `images` rows have the same class.
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
    """Raise CannotQuantise if no range can be learned from the calibration images."""
    if len(images) < LEAST_IMAGES:
        raise CannotQuantise(f"calibration needs at least {LEAST_IMAGES} images, not {len(images)} ({source})")
    if not all(np.isfinite(image).all() for image in images if image.dtype.kind == "f"):
        raise CannotQuantise(f"the calibration images are not finite ({source})")
    is_flat = all(image.size > 1 and image.min() == image.max() for image in images)
    if is_flat or all(np.array_equal(images[0], image) for image in images):
        raise CannotQuantise(f"the calibration images are constant or all the same, so they show no range ({source})")


def agreement(exact: Sequence[NDArray[Any]], answers: Sequence[NDArray[Any]], batch: int) -> dict[str, Any]:
    """Return the figures of Quantised, given a model's answers in float (`exact`) and int8, batch by batch.

    An answer has one row per item if its first axis is the batch, else a single row. Raises CannotQuantise if an answer
    is not finite.
    """
    before, after = (
        np.concatenate([part.reshape(batch if part.shape[:1] == (batch,) else 1, -1) for part in parts], dtype=float)
        for parts in (exact, answers)
    )
    if not np.isfinite(after).all():
        raise CannotQuantise("its int8 answers are not finite on the calibration images")
    errors = np.abs(after - before).max(axis=1) / (np.abs(before).max() or 1.0)
    return {
        "max_error_share": float(errors.max()),
        "mean_error_share": float(errors.mean()),
        "agreeing": int((before.argmax(axis=1) == after.argmax(axis=1)).sum()),
        "images": len(before),
    }
