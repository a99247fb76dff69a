"""What a network with thresholds still has to show when the check lets some of its images be off.

One spike that rounding moves takes thousands with it, so that such an image says nothing by itself. A fault shows in
where these images are: always in the same place of the batch, or where no rounding moves anything.
"""

import numpy as np

from benchd.daemon.worker import agreement, truth
from benchd.daemon.worker.agreement import Observation
from benchd.daemon.worker.backends import Loaded
from benchd.daemon.worker.observe import observe, of_images
from benchd.daemon.worker.truth import Truth

IMAGES_IN_PLACE = 12


def found(loaded: Loaded, right: Truth, observed: Observation) -> str:
    """Return why those images that are off are none that rounding moves, else nothing.

    `observed` are the answers to the first images of the truth.
    """
    exact = of_images(right.exact, range(max(map(len, observed.outputs.values()))))
    place = _place_in_batch(loaded, right, agreement.excess(exact, observed, right.limits, right.rule))
    if place is not None:
        return f"the answer in place {place} of the batch is off for most of {IMAGES_IN_PLACE} images that stood there"
    off = agreement.off(exact, observed, right.limits, right.rule)
    if right.rule.format != "fp32" or not off.any():  # rounding to half precision moves most images
        return ""
    firm = truth.unmoved(right, off)
    drawn = f"{truth.EXCUSES} draws of {truth.EXCUSE_TIMES:g} times its rounding"
    return f"image {firm[0]} is off, and float64 answers it alike in {drawn} ({len(firm)} such)" if firm else ""


def _place_in_batch(loaded: Loaded, right: Truth, excess: np.ndarray) -> int | None:
    """Return the first place of the batch that is off for half of the images that stand there, if there is one.

    `excess` is that of the check. Others come to each place by batches that begin one image later, until that is clear.
    """
    case, plain, images = right.reference.job.case, right.reference.workload.plain, right.reference.images
    size = case.batch_size
    by_place = list(excess.reshape(-1, size))
    for first in range(1, len(images) - size + 1):
        if size == 1 or not _suspect(by_place).any() or len(by_place) >= IMAGES_IN_PLACE:
            break
        rows = range(first, first + size)
        answer = observe(loaded, plain, images[first : first + size], size, case.seed, rows)
        by_place.append(agreement.excess(of_images(right.exact, rows), answer, right.limits, right.rule))
    suspects = _suspect(by_place)
    return int(np.argmax(suspects)) if suspects.any() and size > 1 else None


def _suspect(by_place: list[np.ndarray]) -> np.ndarray:
    found: np.ndarray = np.median(by_place, axis=0) > 1
    return found
