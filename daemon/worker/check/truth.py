"""The reference for a variant: its model's answers in float64, and the effect of rounding on them.

If a user's model cannot run in float64, float32 on the CPU replaces it.
"""

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import astuple, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchd.daemon.errors import BenchdError, UnfitModel
from benchd.daemon.measuring.protocol import Job
from benchd.daemon.measuring.user_inputs import GIVING
from benchd.daemon.records import UserFile
from benchd.daemon.shipping.manifest import JUMPING_SHARE
from benchd.daemon.worker import operations
from benchd.daemon.worker.backends import LoadedModel
from benchd.daemon.worker.check import agreement, references
from benchd.daemon.worker.check.agreement import Bound, Bounds, Format, Observation, Rule
from benchd.daemon.worker.check.depthwise import Depthwise
from benchd.daemon.worker.check.observe import observe, of_batches, of_images, untold
from benchd.daemon.worker.check.rounding import Rounding
from benchd.daemon.worker.structures import (
    ONLY,
    Batch,
    Tensors,
    answered,
    cast,
    each,
    of_batch,
    rows_of,
    spread,
    trimmed,
    values,
)
from benchd.daemon.worker.user_onnx import OnnxModule
from benchd.daemon.worker.workload import Workload
from benchd.exporters import doubled
from benchd.exporters.artifacts import ArtifactError
from benchd.models import catalog

# draws of noise and images per draw: many channels need many draws, and shares need many images; Vision Mamba takes
# half a second per image
NOISE, NOISE_OF_OURS, NOISE_OF_SHARES = (8, 4), (8, 2), (2, 72)
# in one of 10,000 cases, an image that the variant's own rounding changes is unchanged in all of these draws
EXCUSES, EXCUSE_TIMES = 16, 4.0
TRIALS = 16  # pairs of runs, because dropout of a few numbers often keeps the same ones
SLOW_CHECK_S = 60.0  # about how long a check may take before it uses fewer images
FEWEST_IMAGES = 8  # fewer have no typical error (`agreement.FEWEST_ROWS`) and are not enough for `Check.projections`
WHOLE_BELOW = 2**24  # all larger 32-bit floats are integers
OF_FILE = "compared with {} on the CPU without graph optimisation, in its own number format"


@dataclass(frozen=True)
class Truth:
    """A reference's exact answers, a variant's limits under a rule, and the reason if the answers are in float32."""

    reference: "Reference"
    rule: Rule
    exact: Observation
    limits: Bounds
    why_fp32: str = ""


def find(
    workload: Workload,
    job: Job,
    images: Batch,
    rule: Rule,
    device: torch.device,
    tell: Callable[[str], None] = untold,
) -> Truth:
    """Return the truth for these images; raise UnfitModel for a model that has none, and the model's own errors."""
    double = Reference(workload, job, images, torch.float64, device, tell)
    try:
        return Truth(double, rule, double.answers(), double.bounds(rule), _of_file(job.onnx) if job.onnx else "")
    except Exception as error:
        if job.case.model in catalog.MODELS or isinstance(error, BenchdError | ArtifactError):
            raise
        words = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
    single = Reference(workload, job, images, torch.float32, torch.device("cpu"), tell)
    why = f"compared with float32 on the CPU, because float64 cannot run this model ({words})"
    return Truth(single, rule, single.answers(), single.bounds(rule), why)


def affordable(
    workload: Workload,
    job: Job,
    images: Batch,
    rule: Rule,
    device: torch.device,
    tell: Callable[[str], None],
    most: int,
) -> int:
    """Return on how many of `most` images to check a model that is not ours: in about SLOW_CHECK_S, or FEWEST_IMAGES.

    All processes and variants use the times of the first one, so that they check the same images.
    """
    if job.case.model in catalog.MODELS or most <= FEWEST_IMAGES:
        return most
    first = trimmed(images[: workload.reference_batch])
    try:
        seconds = Reference(workload, job, first, torch.float64, device, tell).pace(rule)
    except Exception:  # `find` raises it again, or uses float32, which is faster
        return most
    while most > FEWEST_IMAGES and seconds(most) > SLOW_CHECK_S:
        most = max(most // 2, FEWEST_IMAGES)
    return most


def _of_file(own: UserFile) -> str:
    return OF_FILE.format(f"{Path(own.reference).name} (--reference)" if own.reference else "the file itself")


def with_thresholds(right: Truth, off: NDArray[np.bool_]) -> Truth:
    """Return the truth for a network with thresholds, if rounding alone shifts each of the few images `off`.

    A user's network does not reveal whether it has thresholds, and the few images in its noise may all be far from
    them.
    """
    share = off.any(axis=1).mean()
    if right.rule.format != "fp32" or right.rule.spiking or not 0 < share <= JUMPING_SHARE:
        return right
    if unmoved(right, off, times=1.0):
        return right
    rule = replace(right.rule, spiking=True)
    return replace(right, rule=rule, limits=right.reference.bounds(rule))


def unmoved(right: Truth, off: NDArray[np.bool_], times: float = EXCUSE_TIMES) -> list[int]:
    """Return the images `off` (images, 2, from `agreement.off`) whose errors are not explained by rounding.

    Each draw of noise is `times` the format's rounding, by default four times, to allow for sums in a different order.
    """
    rows = np.flatnonzero(off.any(axis=1)).tolist()
    exact, rule = of_images(right.exact, rows), right.rule

    def compute() -> dict[str, np.ndarray]:
        left = off[rows]
        for trial in range(EXCUSES):
            if not left.any():
                break
            what = f"whether rounding explains the errors, {trial + 1} of {EXCUSES}"
            noisy = right.reference.noisy(rule.format, NOISE[0] + trial, rows, what, times)
            left = left & ~agreement.off(exact, noisy, right.limits, rule)
        return {"unmoved": left.any(axis=1)}

    facts = {"rows": rows, "off": off[rows].tolist(), "times": times, "limits": repr(right.limits.outputs)}
    excuses = right.reference.kept(f"excuses-{rule.format}", compute, **facts)
    return [row for row, is_unmoved in zip(rows, excuses["unmoved"], strict=True) if is_unmoved]


@dataclass(frozen=True)
class Reference:
    """The plain model in one precision on one device, and the images on which it runs."""

    workload: Workload
    job: Job
    images: Batch
    dtype: torch.dtype
    device: torch.device
    tell: Callable[[str], None] = untold

    def answers(self) -> Observation:
        """Return the reference's answers, stored by an earlier process or computed now."""
        arrays = self._exact()
        outputs = {name.removeprefix("output "): arrays[name] for name in arrays if name.startswith("output ")}
        return Observation(outputs, arrays.get("codes"))

    def synaptic_flops(self) -> float | None:
        """Return the minimum FLOPs of the products per image, at the spike rates that these images cause.

        Layers that read plain values are counted in full; None for a network without spikes.
        """
        flops = self._exact().get("synaptic flops")
        return None if flops is None else float(flops)

    def _exact(self) -> references.Arrays:
        """Return the reference's answers and, if it has them, its neurons' codes and its synaptic FLOPs, by name."""

        def compute() -> dict[str, np.ndarray]:
            module, catalogued = self._module(), self.job.case.model in catalog.MODELS
            if catalogued and hasattr(module, "synapses"):
                exact, flops = self._counted(module)
            else:
                exact, flops = self._run(module, self.images), None
            exact = replace(exact, outputs={path: _whole(values) for path, values in exact.outputs.items()})
            if not catalogued:
                first = trimmed(self.images[: self.workload.reference_batch])
                _refuse_odd(exact, self.loaded(module), first, len(self.images), self.workload.facts.data)
            arrays: dict[str, np.ndarray] = {f"output {path}": values for path, values in exact.outputs.items()}
            arrays |= {} if exact.codes is None else {"codes": exact.codes}
            return arrays | ({} if flops is None else {"synaptic flops": np.array(flops)})

        return self.kept("exact", compute)

    def _counted(self, module: Any) -> tuple[Observation, float | None]:
        """Return the answers of a network with synapses, and the FLOPs that its spikes cause."""
        from benchd.daemon.worker.profiling import spikes  # noqa: PLC0415 - imports every network with spikes

        observed: list[Observation] = []
        counted = spikes.count(
            module, lambda: observed.append(self._run(module, self.images)), len(self.images), "fp32"
        )
        return observed[0], spikes.total(counted.values()).flops

    def pace(self, rule: Rule) -> Callable[[int], float]:
        """Return the function from a number of images to the seconds of their check, as the first process timed it."""

        def compute() -> dict[str, np.ndarray]:
            started_s = time.monotonic()
            outputs = self._run(self._module(), self.images, what="first answers").outputs.values()
            exact_s = time.monotonic()
            self.noisy(rule.format, 0, range(len(self.images)), "first rounding noise")
            taken_s = np.array([exact_s - started_s, time.monotonic() - exact_s]) / len(self.images)
            return {"seconds": taken_s, "whole": np.array([*map(agreement.is_whole, map(_whole, outputs))])}

        arrays = self.kept("pace", compute)
        exact_s, noisy_s = arrays["seconds"].tolist()
        draws, images = self._noise(are_counted=rule.spiking or bool(arrays["whole"].any()))
        return lambda count: count * exact_s + draws * min(images, count) * noisy_s

    def _noise(self, *, are_counted: bool) -> tuple[int, int]:
        """Return the number of draws of noise, and of images in each."""
        return NOISE_OF_SHARES if are_counted else NOISE if self.job.own else NOISE_OF_OURS

    def bounds(self, rule: Rule) -> Bounds:
        """Return a variant's limits in the rule's number format, from draws of its rounding noise."""
        exact, total = self.answers(), len(self.images)
        size = min(self.workload.reference_batch, total)
        are_counted = rule.spiking or any(map(agreement.is_whole, exact.outputs.values()))
        is_ours = not self.job.own
        draws, images = self._noise(are_counted=are_counted)
        size = min(size, images) if is_ours else size  # batching does not change the answers of our models
        batches = min(-(-images // size), total // size)

        def draw(seed: int) -> agreement.Draw:
            """Return the noise of the next images, returning to the first after the last."""
            places = sorted((seed * batches + place) % (total // size) for place in range(batches))
            rows = [row for place in places for row in range(place * size, (place + 1) * size)]
            key = rule.format, seed, tuple(rows)
            noisy = self._drawn.get(key) or self.noisy(rule.format, seed, rows, f"rounding noise {seed + 1} of {draws}")
            if are_counted and not rule.spiking:  # the rule for thresholds may need them again
                self._drawn[key] = noisy
            return of_batches(exact, places, size, total), noisy

        def compute() -> dict[str, np.ndarray]:
            bounds = agreement.bounds(exact, map(draw, range(draws)), rule)
            limits = {f"output {path}": np.array(astuple(bound)) for path, bound in bounds.outputs.items()}
            for path, by_axis in bounds.channels.items():
                limits |= {f"axis {axis} {path}": most for axis, most in by_axis.items()}
            return limits | {"stable": np.array(bounds.stable)}

        arrays = self.kept(f"noise-{rule.format}", compute, spiking=rule.spiking)
        outputs = {name.removeprefix("output "): _bound(arrays[name]) for name in arrays if name.startswith("output ")}
        channels = {path: dict[int, np.ndarray]() for path in outputs}
        for name in arrays:
            if name.startswith("axis "):
                _, axis, path = name.split(" ", 2)
                channels[path][int(axis)] = arrays[name]
        return Bounds(outputs, bool(arrays["stable"]), channels)

    def kept(self, name: str, compute: references.Compute, **more: object) -> references.Arrays:
        """Return arrays that an earlier process computed from the same facts and `more`, or compute them."""
        workload, kind = self.workload, str(self.dtype).removeprefix("torch.")
        facts = references.facts(
            f"{kind}-{name}", workload, self.job, self.images, workload.reference_batch, self.device
        )
        return references.kept(Path(self.job.cache) / "references", facts | self._first | more, compute)

    @cached_property
    def _first(self) -> dict[str, str]:
        """Return a hash of the current answer of a user's module to the first batch.

        If it differs from an earlier process's, the model was changed by something that is not hashed.
        """
        if not self.job.module:
            return {}
        first = self._run(self._module(), self.images[: self.workload.reference_batch], what="first answers").outputs
        return {"first": references.digest([torch.from_numpy(values) for values in first.values()], *first)}

    @cached_property
    def _drawn(self) -> dict[tuple[Format, int, tuple[int, ...]], Observation]:
        """Return the noisy answers of this check so far."""
        return {}

    def _module(self) -> nn.Module:
        with torch.inference_mode(mode=False):  # the audit runs in inference mode, whose weights have no gradients
            module = self.workload.reference() if self.dtype == torch.float64 else copy.deepcopy(self.workload.plain)
            return module.to(self.device)

    def loaded(self, module: nn.Module) -> LoadedModel:
        """Return the reference's module, or a copy of it, in the form that runs on its images."""
        run = doubled.reading(module) if self.dtype == torch.float64 else module
        return LoadedModel(spread(run) if isinstance(self.images, Tensors) else run, self.dtype, self.device, module)

    def _run(
        self,
        module: nn.Module,
        images: Batch,
        rows: Sequence[int] | None = None,
        what: str = "reference",
        rounding: Rounding | None = None,
    ) -> Observation:
        """Return a module's answers, with this rounding of each operation; the progress says `what` is computed."""
        size, seed = self.workload.reference_batch, self.job.case.seed
        loaded, tell = self.loaded(module), self.tell
        with Depthwise(), rounding or nullcontext():  # in this order, so that a whole convolution is rounded once
            return observe(loaded, module, images, size, seed, rows, lambda done: tell(f"{what}, {done}"))

    def noisy(
        self, number_format: Format, seed: int, rows: Sequence[int], what: str, times: float = 1.0
    ) -> Observation:
        """Return the answers to the images `rows` with weights and inputs perturbed by rounding.

        The perturbation is up to `times` the format's rounding.
        """
        bits, smallest = agreement.HOLDS[number_format]
        is_float = number_format != "int8"
        rounding = Rounding(bits - np.log2(times), times * smallest, seed, self.device, floating=is_float)
        module = self._module()
        if isinstance(module, OnnxModule):
            module = module.rounded(times * 2.0**-bits, seed << 16, floating=is_float)
        state = module.state_dict()
        as_read = doubled.places(module) if self.dtype == torch.float64 else set()
        with torch.no_grad():
            for tensor in state.values():
                # a quantised module's state also contains other types
                if isinstance(tensor, Tensor) and tensor.data_ptr() not in as_read:
                    tensor.copy_(rounding.rounded(tensor))
        module.load_state_dict(state)  # also updates values derived from weights
        with torch.inference_mode():  # all inputs except those in the pool are created in this mode
            images = each(rows_of(self.images, torch.tensor(rows)), rounding.rounded)
        return self._run(module, images, rows, what, rounding)


def _whole(answers: NDArray[Any]) -> NDArray[Any]:
    """Return float answers as integers if they are all whole numbers, otherwise unchanged."""
    is_whole = answers.size and (np.abs(answers) < WHOLE_BELOW).all() and (answers == np.rint(answers)).all()
    return answers.astype(np.int64) if is_whole else answers


def _refuse_odd(exact: Observation, loaded: LoadedModel, first: Batch, count: int, data: str) -> None:
    """Run the `first` batch of `count` inputs again; raise UnfitModel for a model that cannot serve as a reference.

    Its answer must be finite and must not change between runs, and it must not write to its input.
    """
    batch = cast(first, loaded.dtype).to(loaded.device).clone()
    before = batch.clone()
    with torch.inference_mode():
        again = answered(loaded.run(batch))
    if not all(map(torch.equal, values(batch), values(before))):
        raise UnfitModel("forward writes to its input, which the next run reads again: work on a copy")
    parts = [of_batch(exact.outputs, place, len(first), count) for place in range(count // len(first))]
    for path, answer in parts[0].items():
        called = "the model's answer" + ("" if path == ONLY else f" {path}")
        numbers = np.concatenate([part[path].ravel() for part in parts if path in part])
        if not numbers.size:
            raise UnfitModel(f"{called} is empty: leave it out of the answer")
        if np.isnan(numbers).any() or not np.isfinite(numbers).any():
            kind = str(loaded.dtype).removeprefix("torch.")
            raise UnfitModel(
                f"{called} is NaN or infinite in {kind} (inputs: {data}), so nothing can be compared with it: give "
                f"inputs ({GIVING}), --data or --weights for which it is finite, or leave it out of the answer"
            )
        if path not in again or not np.allclose(again[path].reshape(answer.shape), answer, rtol=1e-6, atol=1e-9):
            raise UnfitModel(f"{called} to the same input changes between runs: {_why_changing(loaded, batch)}")


def _why_changing(loaded: LoadedModel, batch: Batch) -> str:
    """Return why an answer changes between runs: the reason for a user's file, or the operation in a module."""
    if of_file := getattr(loaded.module, "why_changing", ""):
        return str(of_file)
    run = partial(loaded.run, batch)
    with torch.inference_mode():
        trials = (operations.parting(run, run, share=0.0) for _ in range(TRIALS))
        parted = next(filter(None, trials), None)
    return "remove randomness and state from forward, such as dropout that ignores eval mode" + (
        f"; the first operation that differs is {parted}" if parted else ""
    )


def _bound(array: np.ndarray) -> Bound:
    figures = dict(zip(Bound.__annotations__, array.tolist(), strict=True))
    return Bound(**figures | {name: bool(figures[name]) for name in ("jumps", "whole")})
