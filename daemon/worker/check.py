"""The numerical check before any timing: a variant against the same model in eager float64 on the same inputs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from benchd.daemon.protocol import Job
from benchd.daemon.records import Check, Precision, Variant
from benchd.daemon.worker import audit, backends, references
from benchd.daemon.worker.audit import Expected
from benchd.daemon.worker.backends import Loaded
from benchd.daemon.worker.subject import Subject

ERROR_SHARE = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1}
FLIPPED_SHARE = {"fp32": 1e-6, "fp16": 1e-3, "bf16": 1e-2}
# one neuron at the edge flips thousands behind it; in few images eager may have none, and nothing would be allowed
CODES_IMAGES = 64
KNOWN_BYTES = 8 * 2**20
OVERFLOW = 1e99  # in place of inf and NaN, which no record holds


@dataclass(frozen=True)
class Observation:
    """What a model answers: outputs (N, ...) in float64 and inner codes (N, features) as int8, None where hidden."""

    outputs: np.ndarray
    codes: np.ndarray | None


def check(subject: Subject, loaded: Loaded, job: Job) -> Check:
    """Compare the loaded variant with the float64 reference and judge it by the rule of its kind."""
    return check_and_answers(subject, loaded, job)[0]


def check_and_answers(subject: Subject, loaded: Loaded, job: Job) -> tuple[Check, Expected | None]:
    """Return the check, and what the timed section has to answer, None where that is not known."""
    images = _check_images(subject, job)
    facts = references.facts("float64", subject, job, images, subject.reference_batch, loaded.device)
    reference = _cached(job, facts, lambda: _reference(subject, loaded.device, images, job))
    observed = observe(loaded, subject.plain, images, job.case.batch_size, job.case.seed)
    if subject.judged_by == "outputs":
        result = _judge_outputs(reference, observed, numbers(job.case.variant.precision, loaded.device))
    else:
        result = _judge_codes(reference, observed, _baseline(subject, loaded, job, images, observed), job, loaded)
    result = msgspec.structs.replace(result, note=_note(job))
    return result, _expected(subject, loaded, job, result, reference.outputs)


def _expected(subject: Subject, loaded: Loaded, job: Job, judged: Check, outputs: np.ndarray) -> Expected | None:
    """Return what a timed run has to answer; None where it draws random numbers of its own, or where it trains.

    As few batches as fit KNOWN_BYTES, at least one: they stay in memory while it is measured.
    """
    if getattr(subject.plain, "encoding", None) == "rate" or job.case.direction == "training":
        return None
    size = job.case.batch_size
    share = ERROR_SHARE[numbers(job.case.variant.precision, loaded.device)]
    batches = max(1, KNOWN_BYTES // outputs[:size].nbytes)
    return Expected(outputs[: batches * size].copy(), audit.allowed(judged, share, outputs))


def _check_images(subject: Subject, job: Job) -> Tensor:
    """Return whole batches that hold the number of images the preset asks for, and enough for a share of flips."""
    count = job.limits.check_images
    if subject.judged_by == "codes":
        count = max(count, CODES_IMAGES)
    return _whole_batches(subject.images, count, job.case.batch_size)


def _whole_batches(images: Tensor, at_least: int, batch_size: int) -> Tensor:
    count = -(-at_least // batch_size) * batch_size
    return images[torch.arange(count) % len(images)]


def numbers(precision: Precision, device: torch.device) -> str:
    """Return the number format that decides the tolerance; amp computes in fp16 on CUDA and in bf16 on a CPU."""
    if precision != "amp":
        return precision
    return "fp16" if device.type == "cuda" else "bf16"


def observe(loaded: Loaded, plain: nn.Module, images: Tensor, batch_size: int, seed: int) -> Observation:
    """Run all images batch by batch and gather the outputs and, where they can be seen, the neurons' codes.

    `plain` says which random numbers the model takes, which what is loaded may hide.
    """
    outputs, codes = [], []
    with torch.inference_mode():
        for start in range(0, len(images), batch_size):
            batch = images[start : start + batch_size]
            inputs = [batch, *_uniforms(plain, start, batch, seed)]
            with _Codes(loaded.module, len(batch)) as watched:
                output = loaded.run(*(value.to(loaded.device, loaded.dtype) for value in inputs))
            outputs.append(output.double().cpu().numpy())
            codes.append(watched.codes())
    visible = [part for part in codes if part is not None]
    return Observation(np.concatenate(outputs), np.concatenate(visible) if visible else None)


def _uniforms(module: nn.Module, start: int, batch: Tensor, seed: int) -> list[Tensor]:
    """Return the random numbers of a rate-encoded model, (T, B, ...): the same ones for the same image in any batch."""
    if getattr(module, "encoding", None) != "rate":
        return []
    steps = int(getattr(module, "time_steps"))  # noqa: B009 - the attribute of whichever module encodes by rate
    draws = [torch.Generator().manual_seed(seed + start + image) for image in range(len(batch))]
    return [torch.stack([torch.rand(steps, *batch.shape[1:], generator=draw) for draw in draws], dim=1)]


class _Codes:
    """Forward hooks on a module's neurons, for as long as the context lasts."""

    def __init__(self, module: nn.Module | None, batch: int) -> None:
        neurons = getattr(module, "neurons", list)
        self._neurons: list[nn.Module] = neurons()
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


def _reference(subject: Subject, device: torch.device, images: Tensor, job: Job) -> Observation:
    module = subject.reference().to(device)
    return observe(
        Loaded(module, torch.float64, device, module), module, images, subject.reference_batch, job.case.seed
    )


def _baseline(subject: Subject, loaded: Loaded, job: Job, images: Tensor, observed: Observation) -> Observation:
    """Return what plain eager answers in the same precision: how far this number format alone leads away."""
    plain = Variant("eager", job.case.variant.precision)
    if job.case.variant == plain:
        return observed
    facts = references.facts(plain.name, subject, job, images, job.case.batch_size, loaded.device)

    def run() -> Observation:
        source = replace(subject.source, module=subject.plain)
        eager = backends.load(plain, source, loaded.device, images[:1])
        return observe(eager, subject.plain, images, job.case.batch_size, job.case.seed)

    return _cached(job, facts, run)


def _judge_outputs(reference: Observation, observed: Observation, numbers: str) -> Check:
    error, share = _errors(reference, observed)
    return Check(
        passed=share <= ERROR_SHARE[numbers],
        rule="outputs",
        images=len(reference.outputs),
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
    kind = numbers(job.case.variant.precision, loaded.device)
    if flipped is not None and eager_flipped is not None:
        tolerance = max(2 * eager_flipped, FLIPPED_SHARE[kind])
        agrees = flipped <= tolerance
    else:
        tolerance = 2 * eager_error
        agrees = error <= tolerance
    return Check(
        passed=agrees and disagreements <= allowed,
        rule="codes" if flipped is not None else "argmax",
        images=len(reference.outputs),
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
    """Return the largest absolute error and its share of the largest absolute output; what overflows counts as 1e99."""
    with np.errstate(invalid="ignore"):  # inf - inf
        difference = reference.outputs - observed.outputs
    error, largest = (
        float(np.nan_to_num(np.abs(values), nan=OVERFLOW, posinf=OVERFLOW).max(initial=0.0))
        for values in (difference, reference.outputs)
    )
    return error, error / (largest or 1.0)


def _disagreements(reference: Observation, observed: Observation) -> int:
    ours, theirs = (o.outputs.reshape(len(o.outputs), -1).argmax(axis=1) for o in (observed, reference))
    return int((ours != theirs).sum())


def _flipped(reference: Observation, observed: Observation) -> float | None:
    if reference.codes is None or observed.codes is None:
        return None
    return float((reference.codes != observed.codes).mean())


def _note(job: Job) -> str:
    return "" if job.weights or job.onnx else "agreement on random weights, accuracy unknown"


def _cached(job: Job, facts: Mapping[str, Any], run: Callable[[], Observation]) -> Observation:
    """Return the observation kept from an earlier process, else make and keep it."""

    def arrays() -> dict[str, np.ndarray]:
        observed = run()
        return {"outputs": observed.outputs} | ({} if observed.codes is None else {"codes": observed.codes})

    kept = references.kept(Path(job.cache) / "references", facts, arrays)
    return Observation(kept["outputs"], kept.get("codes"))
