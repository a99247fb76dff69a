"""What a network with thresholds still has to show when the check lets some of its images be off.

One spike that rounding moves takes thousands with it, so that such an image says nothing by itself. A fault shows in
where these images are: always in the same place of the batch, or where no rounding moves anything.
"""

import numpy as np

from benchd.daemon.protocol import Job
from benchd.daemon.worker import agreement, truth
from benchd.daemon.worker.agreement import Observation, Rule
from benchd.daemon.worker.backends import Loaded
from benchd.daemon.worker.observe import observe, of_images
from benchd.daemon.worker.structures import Batch
from benchd.daemon.worker.subject import Subject
from benchd.daemon.worker.truth import Truth

IMAGES_IN_PLACE = 12


def found(
    subject: Subject, loaded: Loaded, job: Job, images: Batch, right: Truth, rule: Rule, observed: Observation
) -> str:
    """Return why those images that are off are none that rounding moves, else nothing.

    `observed` are the answers to the first of the images.
    """
    count = max(map(len, observed.outputs.values()))
    off = agreement.off(of_images(right.exact, range(count)), observed, right.limits)
    if not off.any():
        return ""
    place = _place_in_batch(subject, loaded, job, images, right, off[:, 0])
    if place is not None:
        return f"the answer in place {place} of the batch is off whichever of {IMAGES_IN_PLACE} images stands there"
    if rule.format != "fp32":  # rounding moves most images
        return ""
    firm = truth.unmoved(subject, job, images, right, rule, loaded.device, off)
    drawn = f"{truth.EXCUSES} draws of {truth.EXCUSE_TIMES:g} times its rounding"
    return f"image {firm[0]} is off, and float64 answers it alike in {drawn} ({len(firm)} such)" if firm else ""


def _place_in_batch(
    subject: Subject, loaded: Loaded, job: Job, images: Batch, right: Truth, off: np.ndarray
) -> int | None:
    """Return the first place of the batch that is off whichever image stands there, if there is one.

    Other images come to each place by batches that begin one image later.
    """
    size = job.case.batch_size
    suspects = off.reshape(-1, size).all(axis=0)
    for first in range(1, 1 + max(0, IMAGES_IN_PLACE - len(off) // size)):
        if not suspects.any() or first + size > len(images):
            break
        rows = range(first, first + size)
        answer = observe(loaded, subject.plain, images[first : first + size], size, job.case.seed, rows)
        suspects &= agreement.off(of_images(right.exact, rows), answer, right.limits)[:, 0]
    return int(np.argmax(suspects)) if suspects.any() and size > 1 else None
