"""The numerical check before any timing: compares a variant with the same model in float64 on the same inputs."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from benchd.daemon.measuring.protocol import Job
from benchd.daemon.measuring.user_inputs import is_mask
from benchd.daemon.records import Check
from benchd.daemon.runtimes import Precision
from benchd.daemon.worker.backends import LoadedModel
from benchd.daemon.worker.check import agreement, blame, doubts, references, truth
from benchd.daemon.worker.check.agreement import Format, Observation, Rule
from benchd.daemon.worker.check.audit import ExpectedAnswers
from benchd.daemon.worker.check.observe import observe, of_batches, untold
from benchd.daemon.worker.check.truth import Reference, Truth
from benchd.daemon.worker.structures import Answers, Batch, cycled, joined, of_batch, rolled, values
from benchd.daemon.worker.workload import Workload, build

# many images are needed for shares: one borderline neuron flips thousands after it, and int8 is judged by classes
SPIKING_IMAGES = 64
FRESH_IMAGES = 4  # images run once, after the clock has stopped
KNOWN_BYTES = 8 * 2**20
UNSEEN = "a fault in few inputs may go unseen"
PROJECTIONS, PROJECTED_IMAGES = 4, 8  # the same for every check, regardless of the number of images


class CheckOutcome(NamedTuple):
    """The check, the expected answers in the timed section, if known, and `Reference.synaptic_flops`."""

    check: Check
    expected: ExpectedAnswers | None
    synaptic_flops: float | None


def check_and_answers(
    workload: Workload, loaded: LoadedModel, job: Job, tell: Callable[[str], None] = untold
) -> CheckOutcome:
    """Compare the loaded variant with the float64 reference; return the results, and `tell` the progress."""
    size = job.case.batch_size
    images, checked, asked, observed = _observed(workload, loaded, job, tell)
    right = truth.find(workload, job, images, rule_of(workload, loaded, job), loaded.device, tell)
    seen_first = range(-(-min(PROJECTED_IMAGES, checked * size) // size))
    first = of_batches(right.exact, seen_first, size, len(images)).outputs
    answers = {} if _draws(workload, job) else dict(sorted(first.items()))
    expected = of_batches(right.exact, range(checked), size, len(images))
    judged = agreement.judge(expected, observed, right.limits, right.rule)
    if not judged.passed and not judged.void:
        right = truth.with_thresholds(right, agreement.off(expected, observed, right.limits, right.rule))
        judged = agreement.judge(expected, observed, right.limits, right.rule)
    doubt = doubts.found(loaded, right, expected, observed) if judged.passed else ""
    blamed = "" if judged.passed else blame.of_model(right, expected, images[: checked * size])
    if unreferred := _without_reference(workload, job):
        judged = msgspec.structs.replace(judged, passed=False, void=True, note=unreferred)
    judged = msgspec.structs.replace(
        judged,
        passed=judged.passed and not doubt,
        reference="float32" if right.why_fp32 else "float64",
        outputs=[" ".join([path, *map(str, exact.shape[1:])]) for path, exact in answers.items()],
        projections=_projections(answers),
        inputs_sha256=references.digest(values(images[: len(seen_first) * size]), size),
        note="; ".join(filter(None, [judged.note, doubt, blamed, right.why_fp32, _undefined(workload, job)]))
        or _note(workload, job),
    )
    if checked < asked:
        few = f"checked on {checked * size} of {asked * size} inputs, because more would take over a minute: {UNSEEN}"
        judged = msgspec.structs.replace(judged, note="; ".join(filter(None, [judged.note, few])))
    return CheckOutcome(judged, _expected(right, observed, checked), right.reference.synaptic_flops())


def _draws(workload: Workload, job: Job) -> bool:
    """Return whether each run draws its own random numbers."""
    return getattr(workload.plain, "encoding", None) == "rate" or job.case.direction == "training"


def _projections(answers: Answers) -> list[float]:
    """Return each output in a few random directions, the same for equal sizes; [] if one is not finite."""
    projections = [along for exact in answers.values() for along in _projected(exact.ravel())]
    return projections if np.isfinite(projections).all() else []


def _projected(values: NDArray[np.float64]) -> list[float]:
    drawn = np.random.default_rng(0)
    return [float(drawn.standard_normal(values.size) @ values) for _ in range(PROJECTIONS)]


def _observed(
    workload: Workload, loaded: LoadedModel, job: Job, tell: Callable[[str], None]
) -> tuple[Batch, int, int, Observation]:
    """Return the images, the number of checked batches and of those asked for, and the variant's answers to the former.

    They differ for a slow model that is not ours.
    """
    size, by_share = job.case.batch_size, workload.judged_by == "codes" or job.case.variant.precision == "int8"
    if job.limits.check_images < SPIKING_IMAGES and not by_share:
        first = observe(loaded, workload.plain, cycled(workload.images, size), size, job.case.seed)
        by_share = any(map(agreement.is_whole, first.outputs.values()))
    asked = checked = -(-max(job.limits.check_images, SPIKING_IMAGES if by_share else 0) // size)
    images = _images(workload, size, asked)
    if job.limits.check_images <= SPIKING_IMAGES:  # a larger number was set by the user
        rule = rule_of(workload, loaded, job)
        most = truth.affordable(workload, job, images, rule, loaded.device, tell, asked * size)
        checked = -(-most // size)
        images = images if checked == asked else _images(workload, size, checked)
    observed = observe(loaded, workload.plain, images[: checked * size], size, job.case.seed, tell=tell)
    return images, checked, asked, observed


def _images(workload: Workload, size: int, checked: int) -> Batch:
    """Return the checked images, followed by images that the variant does not see before the clock stops."""
    count = checked * size
    others = cycled(workload.images, count + -(-FRESH_IMAGES // size) * size, count)
    return joined(cycled(workload.images, count), rolled(others, 1))


def rule_of(workload: Workload, loaded: LoadedModel, job: Job) -> Rule:
    """Return the rule of a case; for int8, the weights of a user's file count as trained."""
    precision = job.case.variant.precision
    is_trained = bool(job.inputs.weights) or (job.onnx is not None and precision == "int8")
    return Rule(number_format(precision, loaded.device), spiking=workload.judged_by == "codes", trained=is_trained)


def _expected(right: Truth, observed: Observation, checked: int) -> ExpectedAnswers | None:
    """Return the expected answers of a timed run; None if it draws its own random numbers, or trains.

    They are limited to those of the `checked` batches that fit KNOWN_BYTES, at least one, because they stay in memory
    during timing.
    """
    job, images = right.reference.job, right.reference.images
    dtype, device, tell = right.reference.dtype, right.reference.device, right.reference.tell
    if _draws(right.reference.workload, job):
        return None
    size = job.case.batch_size
    total = len(images) // size

    def part(observation: Observation, place: int, batches: int) -> Answers:
        answers = of_batch(observation.outputs, place, size, batches * size)
        return {path: values.copy() for path, values in answers.items()}

    batch_bytes = sum(values.nbytes for values in right.exact.outputs.values()) // total
    places = range(max(1, min(KNOWN_BYTES // max(1, 2 * batch_bytes), checked)))
    return ExpectedAnswers(
        outputs={place: part(right.exact, place, total) for place in places},
        own={place: part(observed, place, checked) for place in places},
        fresh=images[checked * size :],
        fresh_outputs=[part(right.exact, place, total) for place in range(checked, total)],
        batch_size=size,
        limits=right.limits,
        rule=right.rule,
        reference=lambda: Reference(build(job), job, images, dtype, device, tell),
    )


def number_format(precision: Precision, device: torch.device) -> Format:
    """Return the number format that determines the tolerance; amp computes in fp16 on CUDA and in bf16 on a CPU."""
    if precision != "amp":
        return precision
    return "fp16" if device.type == "cuda" else "bf16"


def _without_reference(workload: Workload, job: Job) -> str:
    """Return why the check of a user's quantised file proves nothing; empty if the check is meaningful."""
    if job.onnx is None or not getattr(workload.plain, "is_quantised", False):
        return ""
    return f"no fp32 reference: {job.onnx.name} was compared with itself; give its original as --reference"


def _undefined(workload: Workload, job: Job) -> str:
    """Return the integer inputs that are limited to 0 and 1 because their range is unknown; empty if there are none."""
    ranged = {spec.name for spec in job.own.inputs if spec.span} if job.own and job.module else set()
    drawn = [
        spec.name or f"input {place}"
        for place, spec in enumerate(workload.facts.inputs, 1)
        if spec.span == (0, 1) and "int" in (spec.dtype or "") and not is_mask(spec.name) and spec.name not in ranged
    ]
    return f"{', '.join(drawn)}: drawn as 0 or 1; for a range, give --input NAME=TYPE:SIZES:LOW-HIGH" if drawn else ""


def _note(workload: Workload, job: Job) -> str:
    """Return the check's caveats about the model's answers and weights; empty if there are none."""
    caveats = ["" if job.module else getattr(workload.plain, "caveat", "")]
    if not (job.inputs.weights or job.onnx or job.inputs.accuracy):
        caveats.append(
            "accuracy not measured (--metric)" if job.module else "agreement on random weights, accuracy unknown"
        )
    return "; ".join(filter(None, caveats))
