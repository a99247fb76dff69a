"""The base of all scenarios: warm-up, the timed loop, its results in the record, and the audit of its answers."""

import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch

from benchd.daemon.measuring.protocol import Job, Outcome, silent
from benchd.daemon.records import Window
from benchd.daemon.verdicts import timings
from benchd.daemon.worker import measure, peaks
from benchd.daemon.worker.backends import LoadedModel
from benchd.daemon.worker.camera import Camera
from benchd.daemon.worker.check import audit
from benchd.daemon.worker.check.audit import ExpectedAnswers
from benchd.daemon.worker.child import StageClock
from benchd.daemon.worker.measure import TimedLoop
from benchd.daemon.worker.steps import NO_RUN, ByLength, SingleInference, Step, lengths
from benchd.daemon.worker.streams import Streams
from benchd.daemon.worker.structures import Batch

Values = Mapping[str, "array[int]"]


@dataclass
class Run:
    """A process that is ready to be timed: each stream's model, the pool, and the expected answers, if known.

    `first_ended_ns` is the time of the first answer. The device rests for `idle_s` before and after, for the energy
    sensor.
    """

    job: Job
    stages: StageClock
    outcome: Outcome
    models: list[LoadedModel]
    pool: list[Batch]
    expected: ExpectedAnswers | None
    camera: Camera | None
    first_ended_ns: int
    idle_s: float = 0.0

    @property
    def known(self) -> list[int]:
        """Return the numbers of the batches whose correct answers are known."""
        return [place for place in self.expected.outputs if place < len(self.pool)] if self.expected else []

    def forget_peaks(self) -> int:
        """Start counting the peak memory of the timed section; return the peak until now."""
        before = peaks.resident()
        if not peaks.forget(self.models[0].device):
            self.outcome.flags.append("rss_peak_since_start")
        return before

    def rest(self, settle_s: float = 0.0) -> None:
        """Keep the device idle with the model loaded, if a power sensor needs that; clocks and sensors settle first."""
        if not self.idle_s:
            return
        self.stages.enter("idle")
        time.sleep(settle_s)
        start = time.monotonic_ns()
        time.sleep(self.idle_s)
        self.outcome.process.idle.append(Window(start, time.monotonic_ns()))

    def take_peaks(self) -> None:
        """Record the peak memory of the section just timed."""
        peaks.take(self.job, self.models[0], self.outcome)

    def record_values(self, values_ns: Values) -> None:
        """Write all values to files; all columns except the first and empty ones become parts."""
        _, *parts = values_ns.items()
        self.outcome.process.parts |= {name: timings.part_timing(column) for name, column in parts if column}
        self.write_raw(values_ns)

    def write_raw(self, values_ns: Values) -> None:
        """Write all values to files."""
        self.outcome.process.raw = measure.write_raw(values_ns, Path(self.job.output), self.job.raw_name)


class Scenario:
    """A scenario: its timing and its part of the record. This base runs back to back, one inference at a time.

    `is_cold` is set if only the first run counts, `is_paused` if the device waits between runs, so that occupancy would
    include the pauses, and `is_inference` if a run is a single inference, whose parts on a GPU can be timed.
    """

    is_cold = False
    is_paused = False
    is_inference = True

    def step(self, run: Run, loaded: LoadedModel) -> Step:
        """Return the step of one stream."""
        varies = len(run.models) == 1 and lengths(run.pool)
        return (ByLength if varies else SingleInference)(loaded, run.pool, run.known)

    def time(self, run: Run) -> list[int]:
        """Warm up, measure and audit; return the batches that were run."""
        if run.job.case.beside:
            run.stages.wait_for_turn()  # the neighbour starts only now, because engines choose kernels by timing them
        before = run.forget_peaks()
        run.rest()
        with warmed_up(run, [self.step(run, loaded) for loaded in run.models]) as streams:
            run.stages.enter("measure", silent(self.silent_s(run)))
            self.measure(run, streams)
        process = run.outcome.process
        if process.memory:
            most = max(before, process.memory.rss_peak_bytes)
            process.memory = msgspec.structs.replace(process.memory, worker_peak_bytes=most)
        _flag_unsteady(run.outcome)
        if run.expected:
            run.stages.enter("check", "of the timed answers")
            _audit(streams.steps, run.models[0], run.expected, run.outcome)
        return list({place: None for step in streams.steps for place in step.sample.met})

    def silent_s(self, run: Run) -> float:
        """Return about how long the timed section takes, in which nothing may be printed."""
        job, warm_up = run.job, run.outcome.process.warm_up
        run_s = warm_up.seconds / warm_up.runs if warm_up and warm_up.runs else 0.0
        return (job.limits.rule.cap_s + run_s) * (2 if job.interleaved else 1) + 2 * job.hold_s

    def measure(self, run: Run, streams: Streams) -> None:
        """Time the runs and record them."""
        back_to_back(run, streams.steps[0])


@contextmanager
def warmed_up(run: Run, steps: Sequence[Step]) -> Iterator[Streams]:
    """Warm up all streams, and yield them ready for the timed section."""
    mode = nullcontext if run.job.case.direction == "training" else torch.inference_mode
    with mode(), Streams(steps, run.models[0].device, mode) as streams:
        run.stages.enter("warm_up")
        cap_s = run.job.limits.warm_up_cap_s
        run.outcome.process.warm_up, *_ = streams.together(partial(measure.warm_up, cap_s=cap_s))
        for step in streams.steps:
            step.sample.clear()
        yield streams


def back_to_back(run: Run, step: Step) -> TimedLoop:
    """Run without pauses until the rule says stop; record and return the loop."""
    job, stages = run.job, run.stages
    wait_for_turn = partial(stages.wait_for_turn, "measure") if job.interleaved else None
    measured = measure.measure(step, job.limits.rule, job.hold_s, wait_for_turn)
    total, *parts = measured.values_ns.items()
    end(run, measured, dict([total, *((name, array("q", (v for v in ns if v != NO_RUN))) for name, ns in parts)]))
    runs = measured.summary.runs * step.runs
    run.outcome.process.throughput_per_s = job.case.batch_size * runs / run.outcome.process.measured_s
    return measured


def end(run: Run, measured: TimedLoop, values_ns: Values) -> None:
    """End the timed section and record it; statistics are those of the first values, and the others are parts."""
    run.take_peaks()
    run.rest(settle_s=run.idle_s / 2)
    run.stages.leave()
    total_ns, *_ = values_ns.values()
    summary, process = measured.summary, run.outcome.process
    process.timing = timings.timing(total_ns, summary.interval_ns, summary.median_ns)
    process.blocks = measure.block_statistics(measured)
    process.window = measured.window
    run.record_values(values_ns)


def end_paused(run: Run, start_ns: int, values_ns: Values) -> None:
    """End a section with pauses that began at `start_ns`, and record its parts; statistics are those of the first."""
    process = run.outcome.process
    process.window = Window(start_ns, time.monotonic_ns())
    run.take_peaks()
    run.stages.leave()
    process.parts |= {part: timings.part_timing(values) for part, values in values_ns.items()}
    process.timing = next(iter(process.parts.values()))
    run.write_raw(values_ns)


def by_stream(columns: Sequence["array[int]"]) -> dict[str, "array[int]"]:
    """Return the values of each stream by name, empty for a single stream."""
    return {f"stream_{number}": column for number, column in enumerate(columns, start=1)} if columns[1:] else {}


def _flag_unsteady(outcome: Outcome) -> None:
    warm_up, blocks = outcome.process.warm_up, outcome.process.blocks
    if warm_up and warm_up.slope_share is None and blocks and blocks.is_interleaved:
        return  # the warm-up was too short to tell, but any further drift affects the other process equally
    if warm_up and not warm_up.steady:
        outcome.flags.append("warm_up_not_steady")


def _audit(timed: Sequence[Step], loaded: LoadedModel, expected: ExpectedAnswers, outcome: Outcome) -> None:
    """Compare the answers of the timed runs, and those to unseen inputs, with the reference."""
    if outcome.check is None:
        raise ValueError("an audit comes after the check")
    was = outcome.check
    outcome.check = audit.audited(was, expected, [answer for step in timed for answer in step.sample.answers])
    with torch.inference_mode():
        outcome.check = audit.audited_fresh(outcome.check, expected, loaded)
    if outcome.check.verdict == "failed" != was.verdict:
        outcome.flags.append("output_changed")
