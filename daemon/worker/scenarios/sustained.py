"""Sustained: a long period of back-to-back runs, and how their times develop."""

from array import array
from statistics import median

from benchd.daemon.records import TimeSlice, Window
from benchd.daemon.worker.scenarios import base
from benchd.daemon.worker.scenarios.base import Run, Scenario
from benchd.daemon.worker.streams import Streams

SLICES = 20


class Sustained(Scenario):
    """One long run."""

    def measure(self, run: Run, streams: Streams) -> None:
        """Time the runs and record them with their timeline."""
        (step,) = streams.steps
        measured = base.back_to_back(run, step)
        run.outcome.process.timeline = slices(measured.values_ns[step.parts[0]], measured.window)


SCENARIO = Sustained()


def slices(values_ns: "array[int]", window: Window) -> list[TimeSlice]:
    """Return the median run time in each of twenty equal parts of a window filled with runs, without empty parts."""
    length_s, total_ns = window.seconds / SLICES, sum(values_ns)
    parts: list[list[float]] = [[] for _ in range(SLICES)]
    elapsed_ns = 0
    for value in values_ns:
        parts[SLICES * elapsed_ns // total_ns].append(value)
        elapsed_ns += value
    return [
        TimeSlice(start_s=number * length_s, end_s=(number + 1) * length_s, median_ms=median(part) / 1e6)
        for number, part in enumerate(parts)
        if part
    ]
