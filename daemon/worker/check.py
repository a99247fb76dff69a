"""The numerical check before any timing: a variant against the same model in float64 on the same inputs."""

from collections.abc import Iterable, Mapping
from dataclasses import astuple
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from benchd.daemon.protocol import Job
from benchd.daemon.records import Check, Precision
from benchd.daemon.worker import agreement, references
from benchd.daemon.worker.agreement import ROUNDING, Bound, Bounds, Format, Observation, Rule
from benchd.daemon.worker.audit import Expected
from benchd.daemon.worker.backends import Loaded
from benchd.daemon.worker.structures import Batch, Tensors, cast, each, gathered, numbers, of_batch, spread, tensors
from benchd.daemon.worker.subject import Subject

# of a network with thresholds one neuron at the edge flips thousands behind it: a share of such images needs many
SPIKING_IMAGES = 64
UNSEEN_IMAGES = 8  # that audits of the timed section draw and the check does not
NOISE_DRAWS = 2
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
    exact = _exact(subject, job, images, loaded.device)
    limits = _bounds(subject, job, images, rule, loaded.device, exact)
    observed = observe(loaded, subject.plain, images[: checked * size], size, job.case.seed)
    seen = _of_batches(exact, range(checked), size, len(images))
    found = agreement.judge(seen, observed, limits, rule)
    found = msgspec.structs.replace(found, note=found.note or _note(job))
    return found, _expected(subject, job, exact, limits, rule, checked)


def _batch_counts(subject: Subject, job: Job) -> tuple[int, int]:
    """Return how many batches are checked, and how many more only the audits of the timed section see."""
    least = max(job.limits.check_images, SPIKING_IMAGES if subject.judged_by == "codes" else 0)
    return -(-least // job.case.batch_size), -(-UNSEEN_IMAGES // job.case.batch_size)


def _rule(subject: Subject, loaded: Loaded, job: Job) -> Rule:
    number_format_ = number_format(job.case.variant.precision, loaded.device)
    return Rule(number_format_, subject.judged_by == "codes", bool(job.weights))


def _of_batches(found: Observation, places: Iterable[int], batch_size: int, count: int) -> Observation:
    """Return the part of what was observed of `count` images that belongs to these batches."""
    chosen = list(places)
    outputs = gathered(
        [of_batch(found.outputs, place, batch_size, count) for place in chosen], [batch_size] * len(chosen)
    )
    rows = [row for place in chosen for row in range(place * batch_size, (place + 1) * batch_size)]
    return Observation(outputs, None if found.codes is None else found.codes[rows])


def _expected(
    subject: Subject, job: Job, exact: Observation, limits: Bounds, rule: Rule, checked: int
) -> Expected | None:
    """Return what a timed run has to answer; None where it draws random numbers of its own, or where it trains.

    Batches that the check has seen and others take turns, as few as fit KNOWN_BYTES, but one of each: they stay in
    memory while it is measured.
    """
    if getattr(subject.plain, "encoding", None) == "rate" or job.case.direction == "training":
        return None
    size, unseen = job.case.batch_size, -(-UNSEEN_IMAGES // job.case.batch_size)
    count = (checked + unseen) * size
    batch_bytes = sum(values.nbytes for values in exact.outputs.values()) // (checked + unseen)
    each_of = max(1, min(unseen, checked, KNOWN_BYTES // max(1, 2 * batch_bytes)))
    places = [place for number in range(each_of) for place in (checked + number, number)]
    kept = {place: _copied(of_batch(exact.outputs, place, size, count)) for place in places}
    return Expected(kept, size, limits, rule)


def _copied(answers: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {path: values.copy() for path, values in answers.items()}


def number_format(precision: Precision, device: torch.device) -> Format:
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


def _exact(subject: Subject, job: Job, images: Batch, device: torch.device) -> Observation:
    facts = references.facts("float64", subject, job, images, subject.reference_batch, device)

    def compute() -> dict[str, np.ndarray]:
        found = _reference(subject, subject.reference(), images, job, device)
        held = {f"output {path}": values for path, values in found.outputs.items()}
        return held | ({} if found.codes is None else {"codes": found.codes})

    kept = references.kept(Path(job.cache) / "references", facts, compute)
    outputs = {name.removeprefix("output "): values for name, values in kept.items() if name != "codes"}
    return Observation(outputs, kept.get("codes"))


def _bounds(subject: Subject, job: Job, images: Batch, rule: Rule, device: torch.device, exact: Observation) -> Bounds:
    """Return what limits a variant in the rule's number format, from draws of its rounding noise in float64."""
    facts = references.facts(f"noise-{rule.format}", subject, job, images, subject.reference_batch, device)

    def compute() -> dict[str, np.ndarray]:
        noisy = (_noisy(subject, images, rule.format, seed, job, device) for seed in range(NOISE_DRAWS))
        found = agreement.bounds(exact, list(noisy), rule)
        held = {f"output {path}": np.array(astuple(bound)) for path, bound in found.outputs.items()}
        return held | {
            "codes": np.array(np.nan if found.codes is None else found.codes),
            "stable": np.array(found.stable),
        }

    kept = references.kept(Path(job.cache) / "references", facts, compute)
    outputs = {name.removeprefix("output "): _bound(kept[name]) for name in kept if name.startswith("output ")}
    codes = float(kept["codes"])
    return Bounds(outputs, None if np.isnan(codes) else codes, bool(kept["stable"]))


def _bound(values: np.ndarray) -> Bound:
    figures = dict(zip(Bound.__annotations__, values.tolist(), strict=True))
    return Bound(**figures | {"jumps": bool(figures["jumps"])})


def _noisy(
    subject: Subject, images: Batch, number_format_: Format, seed: int, job: Job, device: torch.device
) -> Observation:
    """Return what the reference answers when its weights and inputs are off by up to the rounding of a format."""
    draw = torch.Generator().manual_seed(seed)

    def off(values: Tensor) -> Tensor:
        if not values.is_floating_point():
            return values
        share = 2 * torch.rand(values.shape, generator=draw, dtype=torch.float64) - 1
        return (values * (1 + ROUNDING[number_format_] * share)).to(values.dtype)

    module = subject.reference()
    module.load_state_dict({name: off(values) for name, values in module.state_dict().items()})
    return _reference(subject, module, each(images, off), job, device)


def _reference(subject: Subject, module: nn.Module, images: Batch, job: Job, device: torch.device) -> Observation:
    module = module.to(device)
    loaded = Loaded(spread(module) if isinstance(images, Tensors) else module, torch.float64, device, module)
    return observe(loaded, module, images, subject.reference_batch, job.case.seed)


def _note(job: Job) -> str:
    return "" if job.weights or job.onnx else "agreement on random weights, accuracy unknown"
