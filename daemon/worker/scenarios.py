"""Scenarios of deployed models other than back-to-back runs: frames at a fixed rate, and idle gaps before a run."""

import select
import signal
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

from benchd.daemon.machine.signals import on_signals
from benchd.daemon.records import Deadlines, TimeSlice, Window
from benchd.daemon.worker.steps import Step

RATES_HZ = (30, 10, 60)
"""The first rate decides the statistics, as does the first gap."""

GAPS_MS = (1000, 100, 10, 0)
GAP_ROUNDS = 30
SLICES = 20

Values = dict[str, "array[int]"]
IsOver = Callable[[float], bool]


def periodic(step: Step, cap_s: float) -> tuple[Values, list[Deadlines]]:
    """Run at each rate for an equal part of `cap_s`; return latencies in ns by rate, and the deadlines met and missed.

    A latency counts from the release of a frame, and its deadline is the next release. Of the frames released during a
    run the newest is used and the others are dropped, as by a camera with one buffer; dropped frames miss theirs.
    """
    values, deadlines = {}, []
    for rate_hz in RATES_HZ:
        releases = max(1, int(rate_hz * cap_s / len(RATES_HZ)))
        latencies_ns = array("q", _frames(step, 1_000_000_000 // rate_hz, releases))
        values[f"{rate_hz}_hz"] = latencies_ns
        late_ns = [latency - 1_000_000_000 // rate_hz for latency in latencies_ns]
        kept = sum(lateness <= 0 for lateness in late_ns)
        deadlines.append(Deadlines(rate_hz, releases, releases - kept, max(0, *late_ns) / 1e6))
    return values, deadlines


def _frames(step: Step, period_ns: int, releases: int) -> Iterator[int]:
    """Run one frame after another and yield its latency in ns."""
    start_ns, frame = time.monotonic_ns() + period_ns, 0
    while frame < releases:
        release_ns = start_ns + frame * period_ns
        time.sleep(max(0, release_ns - time.monotonic_ns()) / 1e9)
        step(frame)
        end_ns = time.monotonic_ns()
        yield end_ns - release_ns
        frame = max(frame + 1, (end_ns - start_ns) // period_ns)


@contextmanager
def until_sigterm() -> Iterator[IsOver]:
    """Yield what waits so many seconds for SIGTERM and returns whether it has come.

    A handler that sets an Event may wait for the lock that the interrupted code holds; a byte on a socket needs none.
    """
    with on_signals([signal.SIGTERM], lambda *_: None) as (ended, _):
        yield lambda seconds: bool(select.select([ended], [], [], seconds)[0])


def accompany(step: Step, rate_hz: float, is_over: IsOver) -> Values:
    """Run frames at a rate until it is over; return when each was released and its latency from then, in ns.

    `is_over` waits so many seconds. Of the frames released during a run the newest is used, as in `periodic`.
    """
    released_ns, latency_ns = array("q"), array("q")
    period_ns = 1e9 / rate_hz
    start_ns, frame = time.monotonic_ns(), 0
    while True:
        release_ns = start_ns + round(frame * period_ns)
        if is_over(max(0, release_ns - time.monotonic_ns()) / 1e9):
            return {"released": released_ns, "latency": latency_ns}
        step(frame)
        end_ns = time.monotonic_ns()
        released_ns.append(release_ns)
        latency_ns.append(end_ns - release_ns)
        frame = max(frame + 1, int((end_ns - start_ns) / period_ns))


def wake_up(step: Step, cap_s: float) -> Values:
    """Run once after each idle gap, in rounds over all gaps, 30 or as many as `cap_s` allows; return ns by gap."""
    values: Values = {f"gap_{gap_ms}_ms": array("q") for gap_ms in GAPS_MS}
    end, done = time.monotonic() + cap_s, 0
    while done < GAP_ROUNDS and (not done or time.monotonic() < end):
        for gap_ms, column in zip(GAPS_MS, values.values(), strict=True):
            time.sleep(gap_ms / 1e3)
            column.append(step(done)[0])
        done += 1
    return values


def slices(values_ns: "array[int]", window: Window) -> list[TimeSlice]:
    """Return the median run of each of twenty equal parts of a window filled with runs, without empty parts."""
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
