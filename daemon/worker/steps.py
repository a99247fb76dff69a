"""One kind of timed step per class: the work of a run, and the parts of its time.

A step takes the run number and returns nanoseconds, one value per part; statistics are those of the first part.
"""

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchd.daemon.worker.backends import LoadedModel
from benchd.daemon.worker.structures import (
    Batch,
    by_path,
    bytes_of,
    cast,
    cycled,
    each,
    first_scores,
    to_train,
    trimmed,
    values,
)

KNOWN_SHARE = 0.5
NO_RUN = -1
"""The value, in place of nanoseconds, of a part that a run does not have."""

SAMPLE_BYTES, SAMPLE_ANSWERS = 8 * 2**20, 256


class AuditSample:
    """Randomly drawn runs for an audit, and their answers; any run in the timed section may be drawn.

    They are random because faults are periodic: a buffer that is reused too early may show in every second or tenth
    run. `met` contains the numbers of all batches that were run, in order of first use.
    """

    def __init__(self, known: Sequence[int] = ()) -> None:
        self._known, self._lots = known, random.Random(0)  # noqa: S311 - no secrets
        self._seen = 0
        self.answers: list[tuple[int, Batch]] = []
        self.met: dict[int, None] = {}

    def place(self, otherwise: int, share: float = KNOWN_SHARE) -> int:
        """Return the number of the batch to run: one with a known correct answer, or `otherwise`."""
        place = self._lots.choice(self._known) if self._known and self._lots.random() < share else otherwise
        self.met[place] = None
        return place

    def coin(self) -> bool:
        """Return True half of the time."""
        return self._lots.random() < 1 / 2

    def keep(self, place: int, answer: Batch) -> None:
        """Store a copy of the answer to a known batch, or drop it; the next run may overwrite its memory."""
        if place not in self._known:
            return
        self._seen += 1
        most = max(len(self._known), min(SAMPLE_ANSWERS, SAMPLE_BYTES // max(1, bytes_of(answer))))
        if len(self.answers) < most:
            self.answers.append((place, answer.clone()))
        elif (slot := self._lots.randrange(self._seen)) < most:
            self.answers[slot] = (place, answer.clone())

    def clear(self) -> None:
        """Drop all answers so far."""
        self._seen, self.answers = 0, []


class Step(Protocol):
    """One run of the case; `runs` is the number of inferences per call.

    `sample` contains the answers to some of the batches whose correct answers are known.
    """

    parts: tuple[str, ...]
    runs: int
    sample: AuditSample

    def __call__(self, index: int) -> tuple[int, ...]:
        """Execute run number `index` and return the nanoseconds of each part."""
        ...


def batches(images: Batch, batch_size: int, loaded: LoadedModel) -> list[Batch]:
    """Return the pool as batches in host memory, in the model's input type, pinned if a GPU copies them."""
    count = max(1, len(images) // batch_size) * batch_size
    pool = images[:count] if count <= len(images) else cycled(images, count)
    pool = cast(pool, loaded.dtype)
    return pinned((trimmed(pool[start : start + batch_size]) for start in range(0, count, batch_size)), loaded.device)


def pinned(batches: Iterable[Batch], device: torch.device) -> list[Batch]:
    """Return the batches, in pinned host memory if a GPU copies them."""
    return [each(batch, Tensor.pin_memory) for batch in batches] if device.type == "cuda" else list(batches)


def bound(pool: Sequence[Batch], loaded: LoadedModel) -> Sequence[Batch]:
    """Return the pool, prepared for runs that read its batches in place."""
    if loaded.bind:
        for batch in pool:
            loaded.bind(batch)
    return pool


def uniform(loaded: LoadedModel, answer: object) -> LoadedModel:
    """Return the model in the form used by steps, in which a structured answer becomes tensors by path."""
    return loaded if isinstance(answer, Batch) else replace(loaded, run=by_path(loaded.run))


class SingleInference:
    """One synchronised inference, from input on the host to output on the host; inputs rotate through the pool.

    About half of the runs, at random, use one of the `known` batches, whose correct answers are known.
    """

    parts: tuple[str, ...] = ("total",)
    runs: int = 1

    def __init__(self, loaded: LoadedModel, pool: Sequence[Batch], known: Sequence[int] = ()) -> None:
        self._run, self._pool, self._device = loaded.run, bound(pool, loaded), loaded.device
        self.sample = AuditSample(known)
        self._place = 0

    def __call__(self, index: int) -> tuple[int, ...]:
        """Return the nanoseconds of one inference."""
        self._place = place = self.sample.place(index % len(self._pool))
        images = self._pool[place]
        start = time.monotonic_ns()
        output = self._run(images.to(self._device, non_blocking=True)).cpu()
        taken_ns = time.monotonic_ns() - start
        self.sample.keep(place, output)
        return (taken_ns,)


class ByLength(SingleInference):
    """One inference, also timed for its length class (up to 16, 32, 64 and so on); all other classes get -1."""

    def __init__(self, loaded: LoadedModel, pool: Sequence[Batch], known: Sequence[int] = ()) -> None:
        super().__init__(loaded, pool, known)
        self._classes = [f"length_{2 ** max(4, (length - 1).bit_length())}" for length in lengths(pool)]
        self.parts = ("total", *sorted(set(self._classes), key=lambda name: int(name.partition("_")[2])))

    def __call__(self, index: int) -> tuple[int, ...]:
        """Return the nanoseconds of one inference, and of each class."""
        (taken_ns,) = super().__call__(index)
        return taken_ns, *(taken_ns if name == self._classes[self._place] else NO_RUN for name in self.parts[1:])


def lengths(pool: Sequence[Batch]) -> list[int]:
    """Return each batch's length in the first input whose batches differ in length; empty if none does."""
    for inputs in zip(*map(values, pool), strict=True):
        if len({value.shape for value in inputs}) > 1:
            return [value.shape[1] for value in inputs]
    return []


class Training:
    """A forward pass with cross-entropy, then a backward pass; gradients are cleared before the clock starts."""

    parts: tuple[str, ...] = ("total", "forward", "backward")
    runs: int = 1

    def __init__(self, module: nn.Module, device: torch.device, pool: Sequence[Batch], seed: int) -> None:
        self._module, self._device, self._pool = module.train(), device, pool
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._targets = torch.Generator().manual_seed(seed)
        self.sample = AuditSample()  # stays empty, because a loss has no reference

    def __call__(self, index: int) -> tuple[int, ...]:
        """Return the nanoseconds of the whole step, of the forward pass and of the backward pass."""
        images = self._pool[index % len(self._pool)]
        self._module.zero_grad(set_to_none=True)
        start = now(self._device)
        loss = self._loss(images.to(self._device))
        middle = now(self._device)
        loss.backward()
        end = now(self._device)
        return end - start, middle - start, end - middle

    def _loss(self, images: Batch) -> Tensor:
        if not self._parameters:  # without parameters, the input gets the gradient, as in a microbenchmark
            images = each(images, to_train)
        scores = first_scores(self._module(*values(images)))
        targets = torch.randint(scores.shape[1], (len(scores),), generator=self._targets)
        return functional.cross_entropy(scores, targets.to(scores.device))


def now(device: torch.device) -> int:
    """Return the time in nanoseconds once the device has finished its work."""
    wait_for(device)
    return time.monotonic_ns()


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished its work; on a CPU, every call is synchronous."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class DeviceParts:
    """The parts of a GPU inference, timed by CUDA events: copy in, compute, copy out, and the host's enqueueing."""

    parts: tuple[str, ...] = ("compute", "h2d", "d2h", "enqueue")
    runs: int = 1

    def __init__(self, loaded: LoadedModel, pool: Sequence[Batch]) -> None:
        self._run, self._pool, self._device = loaded.run, pool, loaded.device
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        self._buffers: tuple[Tensor, ...] = ()

    def __call__(self, index: int) -> tuple[int, ...]:
        """Return the nanoseconds of compute, copy to the device, copy back and enqueueing."""
        start, copied, computed, done = self._events
        images = self._pool[index % len(self._pool)]
        begin = time.monotonic_ns()
        start.record()
        on_device = images.to(self._device, non_blocking=True)
        copied.record()
        output = self._run(on_device)
        computed.record()
        enqueued = time.monotonic_ns() - begin
        for buffer, part in zip(self._host_buffers(output), values(output), strict=True):
            buffer.copy_(part, non_blocking=True)
        done.record()
        done.synchronize()
        spans = (copied.elapsed_time(computed), start.elapsed_time(copied), computed.elapsed_time(done))
        return (*(round(span * 1e6) for span in spans), enqueued)

    def _host_buffers(self, output: Batch) -> tuple[Tensor, ...]:
        if [buffer.shape for buffer in self._buffers] != [part.shape for part in values(output)]:
            self._buffers = tuple(
                torch.empty(value.shape, dtype=value.dtype, pin_memory=True) for value in values(output)
            )
        return self._buffers
