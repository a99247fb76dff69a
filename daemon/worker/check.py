"""The numerical check before any timing: a variant against the same model in eager float64 on the same inputs."""

import copy
import hashlib
import os
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from benchd.daemon.errors import BenchdError, UnfitModel
from benchd.daemon.protocol import Job
from benchd.daemon.records import Check, Precision, Variant
from benchd.daemon.worker import audit, backends
from benchd.daemon.worker.audit import Expected
from benchd.daemon.worker.backends import Loaded
from benchd.daemon.worker.structures import (
    OF_BATCH,
    ONLY,
    Answers,
    Batch,
    Tensors,
    cast,
    gathered,
    numbers,
    of_batch,
    spread,
    tensors,
    values,
)
from benchd.daemon.worker.subject import Subject, shows_codes
from benchd.models import catalog

ERROR_SHARE = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1}
FLIPPED_SHARE = {"fp32": 1e-6, "fp16": 1e-3, "bf16": 1e-2}
KEPT_FORM = 3  # what the file holds; one more where that changes
# one neuron at the edge flips thousands behind it; in few images eager may have none, and nothing would be allowed
CODES_IMAGES = 64
KNOWN_BYTES = 8 * 2**20
OVERFLOW = 1e99  # in place of inf and NaN, which no record holds


@dataclass(frozen=True)
class Observation:
    """What a model answers: outputs (N, ...) by path in float64, inner codes (N, features) as int8, None where hidden.

    N counts the inputs, or the batches for an output whose batch does not lead, such as a loss.
    """

    outputs: Answers
    codes: np.ndarray | None


def check(subject: Subject, loaded: Loaded, job: Job) -> Check:
    """Compare the loaded variant with the float64 reference and judge it by the rule of its kind."""
    return check_and_answers(subject, loaded, job)[0]


def check_and_answers(subject: Subject, loaded: Loaded, job: Job) -> tuple[Check, Expected | None]:
    """Return the check, and what the timed section has to answer, None where that is not known."""
    images = _check_images(subject, job)
    reference, why_fp32 = _reference(subject, loaded.device, images, job)
    observed = observe(loaded, subject.plain, images, job.case.batch_size, job.case.seed)
    if subject.judged_by == "outputs":
        result = _judge_outputs(reference, observed, number_format(job.case.variant.precision, loaded.device))
    else:
        result = _judge_codes(reference, observed, _baseline(subject, loaded, job, images, observed), job, loaded)
    note = "; ".join(filter(None, [_forms(reference, observed), why_fp32, _note(job)]))
    kind: Literal["float64", "float32"] = "float32" if why_fp32 else "float64"
    result = msgspec.structs.replace(result, top1=_top1(subject, loaded, job), note=note, reference=kind)
    return result, _expected(subject, loaded, job, result, reference.outputs, len(images))


def _expected(
    subject: Subject, loaded: Loaded, job: Job, judged: Check, outputs: Answers, count: int
) -> Expected | None:
    """Return what a timed run has to answer; None where it draws random numbers of its own, or where it trains.

    As few batches as fit KNOWN_BYTES, at least one: they stay in memory while it is measured.
    """
    if getattr(subject.plain, "encoding", None) == "rate" or job.case.direction == "training":
        return None
    size = job.case.batch_size
    share = ERROR_SHARE[number_format(job.case.variant.precision, loaded.device)]
    total_bytes = sum(values.nbytes for values in outputs.values())
    batches = min(count // size, max(1, KNOWN_BYTES * (count // size) // max(1, total_bytes)))
    parts = [of_batch(outputs, place, size, count) for place in range(batches)]
    copies = [{path: values.copy() for path, values in part.items()} for part in parts]
    by_path = {path.partition(OF_BATCH)[0]: audit.allowed(judged, share, values) for path, values in outputs.items()}
    return Expected(copies, by_path)


def _check_images(subject: Subject, job: Job) -> Batch:
    """Return whole batches that hold the number of images the preset asks for, and enough for a share of flips."""
    count = job.limits.check_images
    if subject.judged_by == "codes":
        count = max(count, CODES_IMAGES)
    return _whole_batches(subject.images, count, job.case.batch_size)


def _whole_batches(images: Batch, at_least: int, batch_size: int) -> Batch:
    count = -(-at_least // batch_size) * batch_size
    return images[torch.arange(count) % len(images)]


def number_format(precision: Precision, device: torch.device) -> str:
    """Return the number format that decides the tolerance; amp computes in fp16 on CUDA and in bf16 on a CPU."""
    if precision != "amp":
        return precision
    return "fp16" if device.type == "cuda" else "bf16"


def observe(loaded: Loaded, plain: nn.Module, images: Batch, batch_size: int, seed: int) -> Observation:
    """Run all images batch by batch and gather the outputs and, where they can be seen, the neurons' codes.

    `plain` says which random numbers the model takes, which what is loaded may hide.
    """
    outputs, codes, sizes = [], [], []
    with torch.inference_mode():
        for start in range(0, len(images), batch_size):
            batch = images[start : start + batch_size]
            inputs = [batch, *_uniforms(plain, start, batch, seed)]
            with _Codes(loaded.module, len(batch)) as watched:
                output = loaded.run(*(cast(value, loaded.dtype).to(loaded.device) for value in inputs))
            outputs.append({path: numbers(value) for path, value in tensors(output).items()})
            codes.append(watched.codes())
            sizes.append(len(batch))
    visible = [part for part in codes if part is not None]
    return Observation(gathered(outputs, sizes), np.concatenate(visible) if visible else None)


def _uniforms(module: nn.Module, start: int, batch: Batch, seed: int) -> list[Tensor]:
    """Return the random numbers of a rate-encoded model, (T, B, ...): the same ones for the same image in any batch."""
    if getattr(module, "encoding", None) != "rate" or isinstance(batch, Tensors):
        return []
    steps = int(getattr(module, "time_steps"))  # noqa: B009 - the attribute of whichever module encodes by rate
    draws = [torch.Generator().manual_seed(seed + start + image) for image in range(len(batch))]
    return [torch.stack([torch.rand(steps, *batch.shape[1:], generator=draw) for draw in draws], dim=1)]


class _Codes:
    """Forward hooks on a module's neurons, for as long as the context lasts."""

    def __init__(self, module: nn.Module | None, batch: int) -> None:
        neurons: Any = getattr(module, "neurons", None)
        self._neurons: list[nn.Module] = neurons() if module and shows_codes(module) else []
        self._steps, self._batch = int(getattr(module, "time_steps", 1)), batch
        self._seen: list[np.ndarray] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> "_Codes":
        self._hooks = [neuron.register_forward_hook(self._keep) for neuron in self._neurons]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keep(self, neuron: nn.Module, _: object, output: Tensor) -> None:
        codes = torch.round(output / getattr(neuron, "scale", 1.0)).to(torch.int8)
        by_image = codes.reshape(self._steps, self._batch, -1).transpose(0, 1).reshape(self._batch, -1)
        self._seen.append(by_image.cpu().numpy())

    def codes(self) -> np.ndarray | None:
        """Return the codes (B, features) of all neurons in forward order."""
        return np.concatenate(self._seen, axis=1) if self._seen else None


def _reference(subject: Subject, device: torch.device, images: Batch, job: Job) -> tuple[Observation, str]:
    """Return what the plain model answers in float64, and why in float32 on the CPU where float64 cannot run it."""

    def in_float64() -> Observation:
        module = subject.reference().to(device)
        return _trusted(Loaded(module, torch.float64, device, module), subject, images, job)

    def in_float32() -> Observation:
        module = copy.deepcopy(subject.plain)
        return _trusted(Loaded(module, torch.float32, torch.device("cpu"), module), subject, images, job)

    try:
        return _cached("float64", subject, job, len(images), in_float64), ""
    except Exception as error:
        if job.case.model in catalog.MODELS or isinstance(error, BenchdError):
            raise
        told = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
    found = _cached("float32", subject, job, len(images), in_float32)
    return found, f"compared with float32 on the CPU, because float64 cannot run this model ({told})"


def _trusted(loaded: Loaded, subject: Subject, images: Batch, job: Job) -> Observation:
    """Return what the plain model answers; of a user's own, raise UnfitModel for what nothing can be held against.

    That is an answer that is not finite or changes from run to run, and a model that writes to its input.
    """
    if isinstance(images, Tensors):
        loaded = replace(loaded, run=spread(loaded.run))
    size = subject.reference_batch
    found = observe(loaded, subject.plain, images, size, job.case.seed)
    if job.case.model in catalog.MODELS:
        return found
    _refuse_odd(found, loaded, images[:size], len(images), subject.facts.data)
    return found


def _refuse_odd(found: Observation, loaded: Loaded, first: Batch, count: int, data: str) -> None:
    """Run the `first` batch of `count` inputs again; raise UnfitModel where what was `found` is no reference."""
    batch = cast(first, loaded.dtype).to(loaded.device).clone()
    before = batch.clone()
    with torch.inference_mode():
        again = {path: numbers(value) for path, value in tensors(loaded.run(batch)).items()}
    if not all(map(torch.equal, values(batch), values(before))):
        raise UnfitModel("forward writes to its input, which the next run reads again: let it work on a copy")
    for path, answer in of_batch(found.outputs, 0, len(first), count).items():
        called = "the model's answer" + ("" if path == ONLY else f" {path}")
        if not np.isfinite(found.outputs.get(path, answer)).all():
            kind = str(loaded.dtype).removeprefix("torch.")
            raise UnfitModel(
                f"{called} is NaN or infinite in {kind} (inputs: {data}), and nothing can be compared with that: give "
                "data or weights for which it is a number (--data, --weights), or leave it out of the answer"
            )
        if path not in again or not np.allclose(again[path].reshape(answer.shape), answer, rtol=1e-6, atol=1e-9):
            raise UnfitModel(
                f"{called} to the same input changes from run to run: take what is random or kept between calls out of "
                "forward, such as dropout that ignores eval mode"
            )


def _baseline(subject: Subject, loaded: Loaded, job: Job, images: Batch, observed: Observation) -> Observation:
    """Return what plain eager answers in the same precision: how far this number format alone leads away."""
    plain = Variant("eager", job.case.variant.precision)
    if job.case.variant == plain:
        return observed
    name = f"{plain.name}-{loaded.device.type}"

    def run() -> Observation:
        source = replace(subject.source, module=subject.plain)
        eager = backends.load(plain, source, loaded.device, images[:1])
        return observe(eager, subject.plain, images, job.case.batch_size, job.case.seed)

    return _cached(name, subject, job, len(images), run)


def _judge_outputs(reference: Observation, observed: Observation, numbers: str) -> Check:
    error, share = _errors(reference, observed)
    return Check(
        passed=share <= ERROR_SHARE[numbers],
        rule="outputs",
        images=_count(reference),
        max_abs_error=error,
        error_share=share,
        tolerance=ERROR_SHARE[numbers],
        argmax_disagreements=_disagreements(reference, observed),
    )


def _judge_codes(
    reference: Observation, observed: Observation, baseline: Observation, job: Job, loaded: Loaded
) -> Check:
    """Judge by flipped codes where they can be seen, else by the argmax and twice eager's error."""
    error, share = _errors(reference, observed)
    eager_error, _ = _errors(reference, baseline)
    disagreements, allowed = _disagreements(reference, observed), _disagreements(reference, baseline) + 1
    flipped, eager_flipped = _flipped(reference, observed), _flipped(reference, baseline)
    kind = number_format(job.case.variant.precision, loaded.device)
    if flipped is not None and eager_flipped is not None:
        tolerance = max(2 * eager_flipped, FLIPPED_SHARE[kind])
        agrees = flipped <= tolerance
    else:
        tolerance = 2 * eager_error
        agrees = error <= tolerance
    return Check(
        passed=agrees and disagreements <= allowed,
        rule="codes" if flipped is not None else "argmax",
        images=_count(reference),
        max_abs_error=error,
        error_share=share,
        tolerance=tolerance,
        argmax_disagreements=disagreements,
        baseline_argmax_disagreements=allowed - 1,
        flipped_share=flipped,
        baseline_flipped_share=eager_flipped,
        baseline_max_abs_error=eager_error,
    )


def _errors(reference: Observation, observed: Observation) -> tuple[float, float]:
    """Return the largest absolute error and the largest share of a path's largest output; overflow counts as 1e99."""
    if _forms(reference, observed):
        return OVERFLOW, OVERFLOW
    found = [_error(values, observed.outputs[path]) for path, values in reference.outputs.items()]
    return max(error for error, _ in found), max(share for _, share in found)


def _error(wanted: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    with np.errstate(invalid="ignore"):  # inf - inf
        difference = wanted - values
    error, largest = (
        float(np.nan_to_num(np.abs(values), nan=OVERFLOW, posinf=OVERFLOW).max(initial=0.0))
        for values in (difference, wanted)
    )
    return error, error / (largest or 1.0)


def _count(reference: Observation) -> int:
    return max(map(len, reference.outputs.values()))


def _disagreements(reference: Observation, observed: Observation) -> int:
    """Return for how many inputs the largest value of an output lies elsewhere, in the output where most do."""
    if _forms(reference, observed):
        return _count(reference)
    pairs = [(wanted, observed.outputs[path]) for path, wanted in reference.outputs.items() if wanted.size]
    answers = [[part.reshape(len(part), -1).argmax(axis=1) for part in pair] for pair in pairs]
    return max((int((theirs != ours).sum()) for theirs, ours in answers), default=0)


def _forms(reference: Observation, observed: Observation) -> str:
    """Return in words how the answers' form differs, nothing where it is the same."""
    for path in dict.fromkeys([*reference.outputs, *observed.outputs]):
        sides = [one.outputs.get(path) for one in (reference, observed)]
        wanted, found = ("nothing" if one is None else "x".join(map(str, one.shape)) for one in sides)
        if wanted != found:
            return f"{path} is {found} and in the reference {wanted}"
    return ""


def _flipped(reference: Observation, observed: Observation) -> float | None:
    if reference.codes is None or observed.codes is None:
        return None
    return float((reference.codes != observed.codes).mean())


def _top1(subject: Subject, loaded: Loaded, job: Job) -> float | None:
    """Return the share of right answers over the pool, where labels and trained weights are there."""
    if subject.labels is None or not job.weights:
        return None
    count = len(subject.labels)
    images = _whole_batches(subject.images, count, job.case.batch_size)
    observed = observe(loaded, subject.plain, images, job.case.batch_size, job.case.seed)
    outputs = next(iter(observed.outputs.values()))[:count]
    return float((outputs.argmax(axis=1) == subject.labels.numpy()).mean())


def _note(job: Job) -> str:
    return "" if job.weights or job.onnx else "agreement on random weights, accuracy unknown"


def _cached(name: str, subject: Subject, job: Job, count: int, run: Callable[[], Observation]) -> Observation:
    """Return the observation kept from an earlier process, else make and keep it."""
    facts = subject.facts
    inputs = [facts.data, facts.input_shape, facts.inputs, job.case.seed, count, subject.reference_batch]
    key = [KEPT_FORM, name, job.case.model, facts.options, facts.weights_sha256, inputs, str(torch.__version__)]
    pieces = msgspec.json.encode(key)
    path = Path(job.cache) / "references" / f"{hashlib.sha256(pieces).hexdigest()[:32]}.npz"
    if path.exists():
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as kept:
                outputs = {name.removeprefix("output "): kept[name] for name in kept.files if name != "codes"}
                return Observation(outputs, kept.get("codes"))
        except (OSError, ValueError, KeyError, EOFError, BadZipFile, zlib.error):
            path.unlink(missing_ok=True)  # a torn or foreign file: made again below
    observation = run()
    _keep(path, observation)
    return observation


def _keep(path: Path, observation: Observation) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    held = {f"output {path}": values for path, values in observation.outputs.items()}
    held |= {} if observation.codes is None else {"codes": observation.codes}
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        np.savez_compressed(file, allow_pickle=False, **held)
    os.replace(file.name, path)  # noqa: PTH105 - the atomic rename
