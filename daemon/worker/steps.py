"""One timed step of each kind: what a run is, and into which parts its time falls.

A step takes the number of the run and returns nanoseconds, one value a part; the first part decides the statistics.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchd.daemon.worker.backends import Loaded
from benchd.daemon.worker.structures import Batch, by_path, cast, each, first_scores, to_train, values

KNOWN_EVERY = 4  # so that a case of thirty runs ends near one whose answer is known


class Step(Protocol):
    """One run of the case; `runs` says how many inferences one call stands for.

    `answers` holds the newest outputs by the number of the batch, of those batches whose right answers are known.
    """

    parts: tuple[str, ...]
    runs: int
    answers: dict[int, Batch]

    def __call__(self, index: int) -> tuple[int, ...]:
        """Do run number `index` and return the nanoseconds of each part."""
        ...


def batches(images: Batch, batch_size: int, loaded: Loaded) -> list[Batch]:
    """Return the pool as batches in host memory, in the type the model reads; pinned where a GPU copies them."""
    count = max(1, len(images) // batch_size) * batch_size
    whole = cast(images[torch.arange(count) % len(images)], loaded.dtype)
    return pinned((whole[start : start + batch_size] for start in range(0, count, batch_size)), loaded.device)


def pinned(batches: Iterable[Batch], device: torch.device) -> list[Batch]:
    """Return batches in host memory as a GPU copies them: from pages that stay where they are."""
    return [each(batch, Tensor.pin_memory) for batch in batches] if device.type == "cuda" else list(batches)


def uniform(loaded: Loaded, answer: object) -> Loaded:
    """Return what is loaded as a step runs it: one that answers in a form of its own does so in tensors by path."""
    return loaded if isinstance(answer, Batch) else replace(loaded, run=by_path(loaded.run))


class SingleStream:
    """One inference, from input on the host to output on the host, synchronised; inputs rotate through the pool.

    Every fourth takes one of the `known` first batches, whose right answers are known.
    """

    parts: tuple[str, ...] = ("total",)
    runs: int = 1

    def __init__(self, loaded: Loaded, pool: Sequence[Batch], known: int = 0) -> None:
        self._run, self._pool, self._device, self._known = loaded.run, pool, loaded.device, known
        self.answers: dict[int, Batch] = {}

    def __call__(self, index: int) -> tuple[int, ...]:
        """Return the nanoseconds of one inference."""
        is_known = self._known and index % KNOWN_EVERY == 0
        place = index // KNOWN_EVERY % self._known if is_known else index % len(self._pool)
        images = self._pool[place]
        start = time.monotonic_ns()
        output = self._run(images.to(self._device, non_blocking=True)).cpu()
        taken_ns = time.monotonic_ns() - start
        if place < self._known:
            self.answers[place] = output.clone()  # the next run may write to the same memory
        return (taken_ns,)


class Offline:
    """A chunk of inferences without waiting in between: two are in flight on a GPU, one follows another on a CPU.

    The last one takes one of the `known` first batches, whose right answers are known.
    """

    parts: tuple[str, ...] = ("total",)
    runs: int

    def __init__(self, loaded: Loaded, pool: Sequence[Batch], runs: int, known: int = 0) -> None:
        self._run, self._pool, self._device, self.runs = loaded.run, pool, loaded.device, runs
        self._known = known
        self._streams = [torch.cuda.Stream() for _ in range(2)] if loaded.device.type == "cuda" else []
        self.answers: dict[int, Batch] = {}

    def __call__(self, index: int) -> tuple[int, ...]:
        """Return the nanoseconds of one inference as the mean over the chunk."""
        places = [(index * self.runs + run) % len(self._pool) for run in range(self.runs)]
        if self._known:
            places[-1] = index % self._known
        start = time.monotonic_ns()
        if self._streams:
            output = self._two_in_flight(places)
        else:
            for place in places:
                output = self._run(self._pool[place])
        taken_ns = time.monotonic_ns() - start
        if self._known:
            self.answers[places[-1]] = output.clone()
        return (taken_ns // self.runs,)

    def _two_in_flight(self, places: Sequence[int]) -> Batch:
        """Run these batches and return the output of the last one."""
        for run, place in enumerate(places):
            stream = self._streams[run % 2]
            stream.synchronize()
            with torch.cuda.stream(stream):
                images = self._pool[place].to(self._device, non_blocking=True)
                output: Batch = self._run(images).to("cpu", non_blocking=True)
        torch.cuda.synchronize()
        return output


class Training:
    """Forward with cross-entropy, then backward; gradients are cleared before the clock starts."""

    parts: tuple[str, ...] = ("total", "forward", "backward")
    runs: int = 1

    def __init__(self, module: nn.Module, device: torch.device, pool: Sequence[Batch], seed: int) -> None:
        self._module, self._device, self._pool = module.train(), device, pool
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._targets = torch.Generator().manual_seed(seed)
        self.answers: dict[int, Batch] = {}  # a loss has no reference

    def __call__(self, index: int) -> tuple[int, ...]:
        """Return the nanoseconds of the whole step, of the forward and of the backward pass."""
        images = self._pool[index % len(self._pool)]
        self._module.zero_grad(set_to_none=True)
        start = self._now()
        loss = self._loss(images.to(self._device))
        middle = self._now()
        loss.backward()
        end = self._now()
        return end - start, middle - start, end - middle

    def _now(self) -> int:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic_ns()

    def _loss(self, images: Batch) -> Tensor:
        if not self._parameters:  # nothing to train: the gradient goes to the input, as in a microbenchmark
            images = each(images, to_train)
        scores = first_scores(self._module(*values(images)))
        targets = torch.randint(scores.shape[1], (len(scores),), generator=self._targets)
        return functional.cross_entropy(scores, targets.to(scores.device))


class DeviceParts:
    """Where a GPU inference spends its time, by CUDA events: copy in, compute, copy out, and the host's enqueueing."""

    parts: tuple[str, ...] = ("compute", "h2d", "d2h", "enqueue")
    runs: int = 1

    def __init__(self, loaded: Loaded, pool: Sequence[Batch]) -> None:
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
            self._buffers = tuple(torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in values(output))
        return self._buffers
