"""Periodic: frames at fixed rates, as from a camera with a single buffer, and how many deadlines are met."""

import time
from array import array
from collections.abc import Callable, Iterator

from benchd.daemon.records import Deadlines
from benchd.daemon.worker.scenarios import base
from benchd.daemon.worker.scenarios.base import Run, Scenario
from benchd.daemon.worker.steps import Step
from benchd.daemon.worker.streams import Streams

RATES_HZ = (30, 10, 60)
"""The statistics are those of the first rate."""


class Periodic(Scenario):
    """Runs one rate after the other, each as a part."""

    is_paused = True
    is_inference = False

    def measure(self, run: Run, streams: Streams) -> None:
        """Time the frames and record them with their deadlines."""
        start_ns = time.monotonic_ns()
        values_ns, run.outcome.process.deadlines = periodic(streams.steps[0], run.job.limits.rule.cap_s)
        base.end_paused(run, start_ns, values_ns)


SCENARIO = Periodic()


def periodic(step: Step, cap_s: float) -> tuple["dict[str, array[int]]", list[Deadlines]]:
    """Run at each rate for an equal part of `cap_s`; return latencies in ns and deadlines met and missed, by rate.

    A latency counts from the release of a frame, and its deadline is the next release. Of the frames released during a
    run, the newest is used and the others are dropped, as a camera with a single buffer would do; dropped frames miss
    their deadlines.
    """
    values, deadlines = {}, []
    for rate_hz in RATES_HZ:
        releases = max(1, int(rate_hz * cap_s / len(RATES_HZ)))
        time.sleep(1.0 / rate_hz)  # also before the first frame
        latencies_ns = array("q", (latency for _, latency in frames(step, 1e9 / rate_hz, releases, time.sleep)))
        values[f"{rate_hz}_hz"] = latencies_ns
        late_ns = [latency - 1_000_000_000 // rate_hz for latency in latencies_ns]
        met = sum(lateness <= 0 for lateness in late_ns)
        deadlines.append(Deadlines(rate_hz, releases, releases - met, max(0, *late_ns) / 1e6))
    return values, deadlines


def frames(
    step: Step, period_ns: float, releases: float, is_over: Callable[[float], object]
) -> Iterator[tuple[int, int]]:
    """Run the newest released frames, one after another; yield each release time and the latency since, in ns.

    `is_over` waits for the given number of seconds and ends the frames if it returns true.
    """
    start_ns, frame = time.monotonic_ns(), 0
    while frame < releases:
        release_ns = start_ns + round(frame * period_ns)
        if is_over(max(0, release_ns - time.monotonic_ns()) / 1e9):
            return
        step(frame)
        end_ns = time.monotonic_ns()
        yield release_ns, end_ns - release_ns
        frame = max(frame + 1, int((end_ns - start_ns) / period_ns))
