"""Warm-up to a steady state and the timed loop; the statistics are in benchd.daemon.verdicts.statistics."""

import gc
import hashlib
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import msgspec

from benchd.daemon.records import BlockStatistics, Level, RawFile, WarmUp, Window
from benchd.daemon.verdicts import statistics, timings
from benchd.daemon.verdicts.statistics import Blocks, BlockSummary, StopRule
from benchd.daemon.worker.steps import Step

WARM_UP_BLOCK_S = 0.1
LEAD_IN_S = 0.002  # time to fill the caches and raise the clock again


@dataclass(frozen=True)
class TimedLoop:
    """A timed loop's result: nanoseconds of each part by run, when each run ended, the blocks and the window.

    `starts_ns` contains the start of each block if the process waited between blocks.
    """

    values_ns: dict[str, "array[int]"]
    summary: BlockSummary
    window: Window
    bounds_ns: list[int]
    ended_ns: "array[int]"
    starts_ns: list[int] = field(default_factory=list)


def warm_up(step: Step, cap_s: float) -> WarmUp:
    """Run until the block medians no longer drift or a run ends after `cap_s`; do nothing if `cap_s` is 0."""
    start = time.monotonic()
    blocks: list[tuple[float, float]] = []
    runs, settled, share = 0, False, None
    while not settled and time.monotonic() - start < cap_s:
        block_start = time.monotonic()
        values: list[float] = []
        while not values or time.monotonic() - block_start < WARM_UP_BLOCK_S:
            values.append(float(step(runs + len(values))[0]))
            if time.monotonic() - start >= cap_s:
                break
        runs += len(values)
        blocks.append((median(values), time.monotonic()))
        settled, share = statistics.steady(blocks)
    return WarmUp(runs, time.monotonic() - start, settled, share)


def measure(
    step: Step, rule: StopRule, hold_s: float = 0.0, wait_for_turn: Callable[[], None] | None = None
) -> TimedLoop:
    """Time runs until the rule says stop, without anything else in the loop: no garbage collection, output or files.

    The same load runs for `hold_s` before the first block and after the last, so that a slow energy counter has values
    on both sides of the window. With `wait_for_turn`, a different process runs before each block; the first runs after
    that, at least one, are not counted, and the centre is the median of the blocks, as for the ratio of two processes.
    """

    def begin() -> int:
        """Return the start time of a block."""
        if wait_for_turn:
            wait_for_turn()
            _hold(step, LEAD_IN_S)
        return time.monotonic_ns()

    scaled = msgspec.structs.replace(rule, min_block_s=rule.min_block_s / step.runs)  # a value is for several runs
    blocks = Blocks(scaled, is_odd=wait_for_turn is not None)  # few runs a block
    values_ns: dict[str, array[int]] = {part: array("q") for part in step.parts}
    columns = list(values_ns.values())
    ended_ns = array("q")
    index, elapsed_ns = 0, 0
    with no_collection():
        _hold(step, hold_s)
        starts_ns = [begin()]
        while True:
            times = step(index)
            index += 1
            for column, value in zip(columns, times, strict=True):
                column.append(value)
            ended_ns.append(time.monotonic_ns())
            if not blocks.add(times[0]):
                continue
            elapsed_ns += ended_ns[-1] - starts_ns[-1]
            if blocks.stop_reason(elapsed_ns / 1e9):
                break
            starts_ns.append(begin())
        _hold(step, hold_s)
    summary = blocks.summary()
    if wait_for_turn:  # after a pause, a pool's threads may share one CPU for a whole block, or another program runs
        medians_ns = summary.block_medians_ns
        interval_ns = statistics.median_interval(medians_ns)
        summary = msgspec.structs.replace(summary, median_ns=median(medians_ns), interval_ns=interval_ns)
    bounds = [starts_ns[0], *(ended_ns[last - 1] for last in summary.ends)]
    window = Window(bounds[0], bounds[-1])
    return TimedLoop(values_ns, summary, window, bounds, ended_ns, starts_ns if wait_for_turn else [])


def _hold(step: Step, seconds: float) -> None:
    until, index = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        step(index)
        index += 1


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable the garbage collector inside the block."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def block_statistics(measured: TimedLoop) -> BlockStatistics:
    """Return the blocks in the form stored in a record."""
    summary = measured.summary
    return BlockStatistics(
        count=summary.count,
        runs_per_block=summary.runs_per_block,
        medians_ms=[value / 1e6 for value in summary.block_medians_ns],
        bounds_ns=measured.bounds_ns,
        starts_ns=measured.starts_ns,
        lag1=summary.lag1,
        doublings=summary.doublings,
        half_width=summary.half_width,
        converged=summary.converged,
        stop_reason=summary.stop_reason or "",
        levels=[Level(level.ms / 1e6, level.share) for level in timings.two_levels(summary.pieces_ns)],
        is_correlated=summary.is_correlated,
    )


def write_raw(values_ns: Mapping[str, "array[int]"], folder: Path, name: str) -> dict[str, RawFile]:
    """Write each part's run times as little-endian int64 nanoseconds and return the files."""
    files = {}
    for part, values in values_ns.items():
        path = folder / "raw" / f"{name}.{part}.i64"
        path.parent.mkdir(parents=True, exist_ok=True)
        body = values.tobytes()
        path.write_bytes(body)
        files[part] = RawFile(str(path.relative_to(folder)), hashlib.sha256(body).hexdigest(), len(values))
    return files
