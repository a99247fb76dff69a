"""Offline: as many inferences as fit, in chunks without waiting in between."""

import time
from collections.abc import Sequence

import torch

from benchd.daemon.worker.backends import LoadedModel
from benchd.daemon.worker.scenarios import base
from benchd.daemon.worker.scenarios.base import Run, Scenario
from benchd.daemon.worker.steps import AuditSample, SingleInference, Step, bound
from benchd.daemon.worker.streams import Streams
from benchd.daemon.worker.structures import Batch

CHUNK_S = 0.1
WATCHED_RUNS = 10


class Offline(Scenario):
    """Chunks run back to back; the throughput excludes the untimed inferences between chunks."""

    def step(self, run: Run, loaded: LoadedModel) -> Step:
        """Return the step for a chunk of about a tenth of a second, at least two inferences."""
        with torch.inference_mode():
            runs = max(2, int(CHUNK_S * 1e9 / SingleInference(loaded, run.pool)(0)[0]))
        return Chunk(loaded, run.pool, runs, run.known)

    def measure(self, run: Run, streams: Streams) -> None:
        """Time the chunks and record them."""
        (step,) = streams.steps
        measured = base.back_to_back(run, step)
        timed_ns = sum(measured.values_ns["total"])
        run.outcome.process.throughput_per_s = run.job.case.batch_size * measured.summary.runs / timed_ns * 1e9
        if isinstance(step, Chunk) and step.waits():
            run.outcome.flags.append("one_in_flight")


SCENARIO = Offline()


class Chunk:
    """A chunk of inferences without waiting in between: two in flight on a GPU, one after another on a CPU.

    The last one takes one of the `known` batches, whose correct answers are known. Before about every second chunk, at
    random, an untimed inference runs, so that a fault in every Nth run does not stay in phase with the chunks.
    """

    parts: tuple[str, ...] = ("total",)
    runs: int

    def __init__(self, loaded: LoadedModel, pool: Sequence[Batch], runs: int, known: Sequence[int] = ()) -> None:
        self._run, self._pool, self._device, self.runs = loaded.run, bound(pool, loaded), loaded.device, runs
        self.sample = AuditSample(known)
        self._streams = [torch.cuda.Stream() for _ in range(2)] if loaded.device.type == "cuda" else []

    def __call__(self, index: int) -> tuple[int, ...]:
        """Return the nanoseconds per inference as the mean over the chunk."""
        places = [(index * self.runs + run) % len(self._pool) for run in range(self.runs)]
        places[-1] = self.sample.place(places[-1], share=1.0)
        self.sample.met.update(dict.fromkeys(places))
        if self.sample.coin():
            self._newest(places[:1])
        start = time.monotonic_ns()
        output = self._newest(places)
        taken_ns = time.monotonic_ns() - start
        self.sample.keep(places[-1], output)
        return (taken_ns // self.runs,)

    def waits(self) -> bool:
        """Return whether, on a GPU, calls return only at the end of the run, judging by a few more runs."""
        return bool(self._streams) and all(self._has_ended(run) for run in range(WATCHED_RUNS))

    def _has_ended(self, run: int) -> bool:
        stream = self._streams[run % 2]
        with torch.cuda.stream(stream):
            self._run(self._pool[run % len(self._pool)].to(self._device, non_blocking=True))
        ended = stream.query()
        stream.synchronize()
        return ended

    def _newest(self, places: Sequence[int]) -> Batch:
        """Run these batches and return the output of the last one."""
        if self._streams:
            return self._two_in_flight(places)
        for place in places:
            output: Batch = self._run(self._pool[place])
        return output

    def _two_in_flight(self, places: Sequence[int]) -> Batch:
        for run, place in enumerate(places):
            stream = self._streams[run % 2]
            stream.synchronize()
            with torch.cuda.stream(stream):
                images = self._pool[place].to(self._device, non_blocking=True)
                output: Batch = self._run(images).to("cpu", non_blocking=True)
        torch.cuda.synchronize()
        return output
