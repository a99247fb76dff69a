"""The numerical check before any timing: a variant against the same model in float64 on the same inputs."""

from collections.abc import Mapping
from itertools import zip_longest

import msgspec
import numpy as np
import torch

from benchd.daemon.protocol import Job
from benchd.daemon.records import Check, Precision
from benchd.daemon.worker import agreement, truth
from benchd.daemon.worker.agreement import Format, Rule
from benchd.daemon.worker.audit import Expected
from benchd.daemon.worker.backends import Loaded
from benchd.daemon.worker.observe import observe, of_batches
from benchd.daemon.worker.structures import of_batch
from benchd.daemon.worker.subject import Subject
from benchd.daemon.worker.truth import Truth

# of a network with thresholds one neuron at the edge flips thousands behind it: a share of such images needs many
SPIKING_IMAGES = 64
UNSEEN_IMAGES = 4  # that audits of the timed section draw and the check does not
KNOWN_BYTES = 8 * 2**20


def check(subject: Subject, loaded: Loaded, job: Job) -> Check:
    """Compare the loaded variant with the float64 reference."""
    return check_and_answers(subject, loaded, job)[0]


def check_and_answers(subject: Subject, loaded: Loaded, job: Job) -> tuple[Check, Expected | None]:
    """Return the check, and what the timed section has to answer, None where that is not known."""
    size = job.case.batch_size
    checked, unseen = _batch_counts(subject, job)
    places = np.arange((checked + unseen) * size) % len(subject.images)
    images = subject.images[torch.from_numpy(places)]
    rule = _rule(subject, loaded, job)
    right = truth.find(subject, job, images, rule, loaded.device)
    observed = observe(loaded, subject.plain, images[: checked * size], size, job.case.seed)
    seen = of_batches(right.exact, range(checked), size, len(images))
    found = agreement.judge(seen, observed, right.limits, rule)
    found = msgspec.structs.replace(
        found,
        reference="float32" if right.why_fp32 else "float64",
        note="; ".join(filter(None, [found.note, right.why_fp32])) or _note(job),
    )
    return found, _expected(subject, job, right, rule, (checked, unseen))


def _batch_counts(subject: Subject, job: Job) -> tuple[int, int]:
    """Return how many batches are checked, and how many more only the audits of the timed section see."""
    size = job.case.batch_size
    least = max(job.limits.check_images, SPIKING_IMAGES if subject.judged_by == "codes" else 0)
    checked = -(-least // size)
    return checked, max(0, min(-(-UNSEEN_IMAGES // size), len(subject.images) // size - checked))


def _rule(subject: Subject, loaded: Loaded, job: Job) -> Rule:
    in_format = number_format(job.case.variant.precision, loaded.device)
    return Rule(in_format, spiking=subject.judged_by == "codes", trained=bool(job.weights))


def _expected(subject: Subject, job: Job, right: Truth, rule: Rule, batches: tuple[int, int]) -> Expected | None:
    """Return what a timed run has to answer; None where it draws random numbers of its own, or where it trains.

    `batches` that the check has seen and others take turns, as few as fit KNOWN_BYTES, but one of each: they stay in
    memory while it is measured.
    """
    if getattr(subject.plain, "encoding", None) == "rate" or job.case.direction == "training":
        return None
    (checked, unseen), size, outputs = batches, job.case.batch_size, right.exact.outputs
    total = checked + unseen
    batch_bytes = sum(values.nbytes for values in outputs.values()) // total
    of_each = max(1, min(KNOWN_BYTES // max(1, 2 * batch_bytes), checked, unseen or checked))
    turns = zip_longest(range(checked, total)[:of_each], range(of_each))
    places = [place for turn in turns for place in turn if place is not None]
    kept = {place: _copied(of_batch(outputs, place, size, total * size)) for place in places}
    return Expected(kept, size, right.limits, rule)


def _copied(answers: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {path: values.copy() for path, values in answers.items()}


def number_format(precision: Precision, device: torch.device) -> Format:
    """Return the number format that decides the tolerance; amp computes in fp16 on CUDA and in bf16 on a CPU."""
    if precision != "amp":
        return precision
    return "fp16" if device.type == "cuda" else "bf16"


def _note(job: Job) -> str:
    """Return what the check does not say about the weights."""
    if job.weights or job.onnx or job.accuracy:
        return ""
    return "accuracy unknown" if job.module else "agreement on random weights, accuracy unknown"
