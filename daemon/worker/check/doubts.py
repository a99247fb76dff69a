"""Further tests of a network with thresholds whose check tolerates some wrong images.

One spike that is changed by rounding changes thousands more, so a single wrong image proves nothing. A fault reveals
itself by a pattern: always the same position in the batch, or images that rounding does not change.
"""

import numpy as np

from benchd.daemon.worker.backends import LoadedModel
from benchd.daemon.worker.check import agreement, truth
from benchd.daemon.worker.check.agreement import Observation
from benchd.daemon.worker.check.observe import observe, of_images
from benchd.daemon.worker.check.truth import Truth

IMAGES_IN_PLACE = 12


def found(loaded: LoadedModel, right: Truth, exact: Observation, observed: Observation) -> str:
    """Return why the wrong images are not due to rounding; empty if they may be. `exact` has the first images."""
    place = _place_in_batch(loaded, right, agreement.excess(exact, observed, right.limits, right.rule))
    if place is not None:
        return f"the answer at position {place} of the batch is off for most of {IMAGES_IN_PLACE} images placed there"
    off = agreement.off(exact, observed, right.limits, right.rule)
    is_whole = any(map(agreement.is_whole, right.exact.outputs.values()))
    if not off.any() or (right.rule.format != "fp32" and not is_whole):  # rounding shifts most images
        return ""
    firm = truth.unmoved(right, off)
    drawn = f"{truth.EXCUSES} draws of {truth.EXCUSE_TIMES:g} times its rounding"
    return (
        f"image {firm[0]} is off, but its float64 answer does not move that far in {drawn} ({len(firm)} such images)"
        if firm
        else ""
    )


def _place_in_batch(loaded: LoadedModel, right: Truth, excess: np.ndarray) -> int | None:
    """Return the first position in the batch where half of the images placed there are wrong, None if there is none.

    `excess` is from the check. Batches shifted by one image place different images at each position, until the result
    is clear.
    """
    case, plain, images = right.reference.job.case, right.reference.workload.plain, right.reference.images
    size = case.batch_size
    if size == 1 or not (excess > 1).any():  # an answer may lack separate rows for images
        return None
    by_place = list(excess.reshape(-1, size))
    for first in range(1, len(images) - size + 1):
        if not _suspect(by_place).any() or len(by_place) >= IMAGES_IN_PLACE:
            break
        rows = range(first, first + size)
        answer = observe(loaded, plain, images[first : first + size], size, case.seed, rows)
        by_place.append(agreement.excess(of_images(right.exact, rows), answer, right.limits, right.rule))
    suspects = _suspect(by_place)
    return int(np.argmax(suspects)) if suspects.any() else None


def _suspect(by_place: list[np.ndarray]) -> np.ndarray:
    is_off: np.ndarray = np.median(by_place, axis=0) > 1
    return is_off
