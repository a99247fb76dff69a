"""Runs several streams of a model at the same time, in threads of one process; the first is the main thread."""

import math
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from itertools import chain, pairwise
from statistics import median
from threading import Event
from typing import TypeVar

import msgspec
import torch

from benchd.daemon.records import Window
from benchd.daemon.verdicts.statistics import StopRule, block_estimate
from benchd.daemon.worker import measure
from benchd.daemon.worker.measure import TimedLoop
from benchd.daemon.worker.steps import Step

T = TypeVar("T")


class Streams:
    """A step for each stream, run in `mode`; on a GPU, each thread launches on a separate CUDA stream.

    The threads live until this is closed, because libraries keep threads and memory for each thread that calls them.
    """

    def __init__(
        self, steps: Sequence[Step], device: torch.device, mode: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self.steps, self._mode, self._opened = steps, mode, ExitStack()
        self._cuda = [torch.cuda.Stream() if device.type == "cuda" and len(steps) > 1 else None for _ in steps]
        self._threads = [self._opened.enter_context(ThreadPoolExecutor(1)) for _ in steps[1:]]

    def __enter__(self) -> "Streams":
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def together(self, work: Callable[[Step], T]) -> list[T]:
        """Run `work` with all streams' steps simultaneously and return the results; raise the first error."""
        beside = zip(self._threads, self.steps[1:], self._cuda[1:], strict=True)
        others = [thread.submit(self._run, work, step, stream) for thread, step, stream in beside]
        try:
            first = self._run(work, self.steps[0], self._cuda[0])
        finally:
            for other in others:
                other.exception()
        return [first, *(other.result() for other in others)]

    def _run(self, work: Callable[[Step], T], step: Step, stream: "torch.cuda.Stream | None") -> T:
        with self._mode(), torch.cuda.stream(stream) if stream else nullcontext():
            return work(step)


def back_to_back(
    streams: Streams, rule: StopRule, hold_s: float
) -> tuple[TimedLoop, "list[array[int]]", "array[int]", float]:
    """Time the first stream until the rule says stop, while the others also run without pauses.

    Return the first stream's result, with estimate and block medians over all streams; each stream's runs inside the
    window; the runs of all streams in the order of their ends; and the number of runs in the window, where runs at its
    edges count by their share inside.
    """
    is_over = Event()
    measured: list[TimedLoop] = []

    def work(step: Step) -> tuple["array[int]", "array[int]"]:
        if step is not streams.steps[0]:
            return _until(is_over, step)
        try:
            measured.append(measure.measure(step, rule, hold_s))
        finally:
            is_over.set()
        return measured[0].ended_ns, measured[0].values_ns[step.parts[0]]

    timed = streams.together(work)
    (first,) = measured
    runs = [_within(first.window, *stream) for stream in timed]
    run_count = math.fsum(_held(first.window, *stream) for stream in timed)
    together = sorted(chain.from_iterable(runs))
    medians_ns = _block_medians(first.bounds_ns, together)
    median_ns, interval_ns = block_estimate(medians_ns)
    summary = msgspec.structs.replace(
        first.summary, block_medians_ns=medians_ns, median_ns=median_ns, interval_ns=interval_ns
    )
    return replace(first, summary=summary), [_values(run) for run in runs], _values(together), run_count


def _block_medians(bounds_ns: Sequence[int], runs: Sequence[tuple[int, int]]) -> list[float]:
    """Return the median of the runs that end in each block, which include at least the first stream's last run."""
    ended_ns = [end for end, _ in runs]
    places = [bisect_right(ended_ns, bound) for bound in bounds_ns]
    return [median([value for _, value in runs[start:end]]) for start, end in pairwise(places)]


def _values(runs: Sequence[tuple[int, int]]) -> "array[int]":
    return array("q", (value for _, value in runs))


def _until(is_over: Event, step: Step) -> tuple["array[int]", "array[int]"]:
    """Run without pauses until `is_over`; return when each run ended and how long it took, in ns."""
    ended_ns, values_ns = array("q"), array("q")
    while not is_over.is_set():
        values_ns.append(step(len(values_ns))[0])
        ended_ns.append(time.monotonic_ns())
    return ended_ns, values_ns


def _within(window: Window, ended_ns: "array[int]", values_ns: "array[int]") -> list[tuple[int, int]]:
    return [
        (end, value)
        for end, value in zip(ended_ns, values_ns, strict=True)
        if window.start_ns <= end - value and end <= window.end_ns
    ]


def _held(window: Window, ended_ns: "array[int]", values_ns: "array[int]") -> float:
    """Return how many runs the window contains, each counted by the share of its time inside."""
    shares = (
        (min(end, window.end_ns) - max(end - value, window.start_ns)) / value
        for end, value in zip(ended_ns, values_ns, strict=True)
    )
    return math.fsum(share for share in shares if share > 0.0)
