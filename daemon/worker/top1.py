"""Measures the top-1 accuracy of a variant and of plain eager fp32 on the same images, read part by part."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchd.daemon.errors import UsageError
from benchd.daemon.measuring.protocol import Job
from benchd.daemon.records import Accuracy, Variant
from benchd.daemon.verdicts import accuracy
from benchd.daemon.worker import backends
from benchd.daemon.worker.backends import LoadedModel
from benchd.daemon.worker.check import references
from benchd.daemon.worker.check.observe import observe
from benchd.daemon.worker.structures import Batch, cycled, leading
from benchd.daemon.worker.workload import Workload
from benchd.models import data
from benchd.models.data import ImageSet

PART_IMAGES = 64  # images read at once, or a batch if that is larger, because a whole data set does not fit into memory
NO_CLASS = -1  # the class of an image with a NaN score, which is never correct


class _UnscoredOutput(Exception):
    """The model's output cannot be compared with the labels; the message says why."""


@dataclass(frozen=True)
class _Answers:
    """The predicted and the correct classes, both (images,), and a hash of all inputs."""

    classes: NDArray[np.int64]
    labels: NDArray[np.int64]
    sha256: str


def measure(
    workload: Workload, dataset: ImageSet, loaded: LoadedModel, job: Job, go_on: Callable[[str], None]
) -> Accuracy | str:
    """Return the accuracy over as many images of `dataset` as the job requests, or why there is none.

    `go_on` receives the progress after each part.
    """
    indices = dataset.spread(len(dataset) if job.inputs.accuracy == "full" else int(job.inputs.accuracy or 0))

    def answers_of(model: LoadedModel) -> _Answers:
        return _answers(model, workload, dataset, indices, job, go_on)

    try:
        answers = answers_of(loaded)
    except _UnscoredOutput as reason:
        return str(reason)
    reference = _fp32_classes(workload, loaded, job, answers, answers_of)
    ours, theirs = answers.classes == answers.labels, reference == answers.labels
    return accuracy.counted(
        right=int(ours.sum()),
        gained=int((ours & ~theirs).sum()),
        lost=int((theirs & ~ours).sum()),
        images=len(indices),
        data=f"{len(indices)} of the {len(dataset)} images of {dataset.spec}",
        data_sha256=answers.sha256,
        is_reference=job.case.variant == Variant(),
    )


def _fp32_classes(
    workload: Workload, loaded: LoadedModel, job: Job, answers: _Answers, answers_of: Callable[[LoadedModel], _Answers]
) -> NDArray[np.int64]:
    """Return plain eager fp32's classes for the same images, computed once, or the variant's if it is plain fp32."""

    def compute() -> dict[str, NDArray[np.int64]]:
        if job.case.variant == Variant():
            return {"classes": answers.classes}
        return {"classes": answers_of(plain_fp32(workload, loaded, job)).classes}

    name = f"classes-{answers.sha256}"
    facts = references.facts(name, workload, job, workload.images[:1], job.case.batch_size, loaded.device)
    classes: NDArray[np.int64] = references.kept(Path(job.cache) / "references", facts, compute)["classes"]
    return classes


def plain_fp32(workload: Workload, loaded: LoadedModel, job: Job) -> LoadedModel:
    """Return the plain model in eager fp32, on the device of the loaded variant."""
    source = replace(workload.source, module=workload.plain)
    return backends.load(Variant(), source, loaded.device, workload.example(job.case.batch_size))


def _answers(
    model: LoadedModel,
    workload: Workload,
    dataset: ImageSet,
    indices: list[int],
    job: Job,
    go_on: Callable[[str], None],
) -> _Answers:
    digest = hashlib.sha256()
    classes: list[NDArray[np.int64]] = []
    labels: list[NDArray[np.int64]] = []
    for start, part in parts(indices, job.case.batch_size):
        images, right = dataset.read(part)
        refuse_calibrated(images, workload.source.calibrated, dataset.spec)
        digest.update(images.numpy().tobytes() + right.numpy().tobytes())
        # seeded as in the check, so that a rate-encoded image gets the same draws in any position
        padded = cycled(images, -(-len(part) // job.case.batch_size) * job.case.batch_size)
        unwatched = replace(model, module=None)
        observation = observe(unwatched, workload.plain, padded, job.case.batch_size, job.case.seed + start)
        scores = next(iter(observation.outputs.values()))
        classes.append(_classes(scores[: len(part)], dataset))
        labels.append(right.numpy())
        go_on(f"image {start + len(part)} of {len(indices)}")
    return _Answers(np.concatenate(classes), np.concatenate(labels), digest.hexdigest())


def refuse_calibrated(images: Batch, calibrated: set[str], spec: str) -> None:
    """Raise UsageError for the int8 file's own calibration items, because they would flatter its accuracy."""
    both = calibrated.intersection(data.digests(leading(images))) if calibrated else set()
    if both:
        raise UsageError(
            f"{len(both)} of {len(images)} items of {spec} were also used for calibration: give --calibration items "
            "that are not measured"
        )


def parts(indices: list[int], batch_size: int) -> Iterator[tuple[int, list[int]]]:
    """Yield the indices in parts of whole batches, each with the position of its first index."""
    size = -(-PART_IMAGES // batch_size) * batch_size
    for start in range(0, len(indices), size):
        yield start, indices[start : start + size]


def _classes(outputs: NDArray[np.float64], dataset: ImageSet) -> NDArray[np.int64]:
    """Return the class with the largest score for each image; raise _UnscoredOutput if outputs are not class scores."""
    if outputs.ndim != 2:
        sizes = "x".join(map(str, outputs.shape[1:])) or "one number"
        raise _UnscoredOutput(f"top-1 needs one score per class, but the first output is {sizes} for each image")
    reason = dataset.why_unlabelled(outputs.shape[1])
    if reason:
        raise _UnscoredOutput(reason)
    return np.where(np.isnan(outputs).any(axis=1), NO_CLASS, outputs.argmax(axis=1))
