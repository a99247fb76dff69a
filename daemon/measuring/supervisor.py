"""The supervisor owns the lock, the sampler, one worker at a time and the sinks; it takes each case to its Record.

Torch never enters this process. Signals only set a flag; the loop that waits for the worker acts on it.
"""

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Protocol

import msgspec

from benchd.daemon.errors import BenchdError
from benchd.daemon.machine import gpu
from benchd.daemon.machine.lock import MachineLock
from benchd.daemon.machine.signals import on_signals
from benchd.daemon.measuring import recording, search
from benchd.daemon.measuring.plan import OwnFile, OwnModule, Planned
from benchd.daemon.measuring.process import Worker
from benchd.daemon.measuring.protocol import ImageCount, Job, Outcome, StageName
from benchd.daemon.measuring.recording import Begun, Pass
from benchd.daemon.records import (
    Case,
    Energy,
    Interference,
    Precision,
    Probes,
    ProcessResult,
    Record,
    Sample,
    Status,
    TimeSlice,
    Window,
)
from benchd.daemon.sampling import energy, interference
from benchd.daemon.sampling.child import SamplerProcess
from benchd.models import catalog

ATTEND_S = 1.0
PROGRESS_S = 10.0  # between two lines on how far a stage is

FEWEST_CPUS = 4  # with fewer, a CPU of its own would cost the case more than the sampler does


class Sink(Protocol):
    """Where records go. Nothing but `stage` is called while a case is being timed."""

    def begin(self, plan: Sequence[Planned]) -> None:
        """Take note of what will be measured."""
        ...

    def stage(self, planned: Planned, process: int, stage: StageName, percent: int | None = None) -> None:
        """Take note of what runs now, and how much of it is done where that is known."""
        ...

    def publish(self, record: Record, body: bytes) -> None:
        """Take one finished record and its wire form."""
        ...

    def end(self) -> None:
        """Deliver what is left."""
        ...


@dataclass(frozen=True)
class Settings:
    """What a pass needs besides its plan. Paths come from the command line or the configuration alone."""

    output: Path
    cache: Path
    artifacts: Path
    device: str
    sources: list[str]
    period_s: float
    given_artifacts: Path | None = None
    gpu_uuid: str | None = None
    workspace_bytes: int | None = None


@dataclass
class Supervisor:
    """One pass over a plan; `records` holds what came of it and `interrupted` whether a signal ended it early.

    `failures` names what a sink could not keep. `attend` is called about once a second while a case runs, and a reason
    that it returns ends the case and the pass.
    """

    plan: Sequence[Planned]
    settings: Settings
    shared: Pass
    sinks: Sequence[Sink]
    attend: Callable[["Supervisor"], str | None] | None = None
    records: list[Record] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    interrupted: bool = False
    _probes: dict[tuple[Precision, int | None], Probes] = field(default_factory=dict)

    def run(self) -> None:
        """Measure every case of the plan, under the machine's lock."""
        with self.session():
            self._startup()
            self._main_loop()
            self._shutdown()

    @contextmanager
    def session(self, ending: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM)) -> Iterator[None]:
        """Hold the machine's lock, the signals and the sampler, so that `process` can be called."""
        signals = on_signals(ending, self._interrupt)
        with MachineLock(), signals as (self._wake, _), self._sampler() as self._samples:
            yield

    def _startup(self) -> None:
        for sink in self.sinks:
            sink.begin(self.plan)

    def _main_loop(self) -> None:
        for planned in self.plan:
            if self.interrupted:
                return
            if not (planned.is_searched and search.is_over(planned.case, self.records)):
                self._publish(self._case(planned))

    def _shutdown(self) -> None:
        for sink in self.sinks:
            sink.end()

    def _publish(self, record: Record) -> None:
        body = msgspec.json.encode(record)
        self.records.append(record)
        for sink in self.sinks:
            self._hand_over(sink, record, body)

    def _hand_over(self, sink: Sink, record: Record, body: bytes) -> None:
        try:
            sink.publish(record, body)
        except BenchdError as error:  # a full disk: the other sinks, and the next case, go on
            self.failures.append(f"{record.case_id}: {error}")

    def _case(self, planned: Planned) -> Record:
        """Run the processes of one case, one after the other, until one does not end well."""
        begun = Begun.now(time.monotonic_ns())
        outcomes: list[Outcome] = []
        if planned.reason:
            outcomes.append(Outcome(process=ProcessResult(status="unsupported", reason=planned.reason)))
        elif planned.case.scenario == "cold_start":
            outcomes += self._make_ready(planned, begun.run_id)
        while len(outcomes) < planned.limits.processes and all(o.process.status == "ok" for o in outcomes):
            accuracy = None if outcomes else planned.accuracy
            outcome = self.process(planned, f"{begun.run_id}.{len(outcomes)}", len(outcomes), accuracy=accuracy)
            self._keep_probes(planned.case, outcome)
            outcomes.append(_end_of_search(outcome) if planned.is_searched else outcome)
        probes = self._probes.get(_rates_of(planned.case))
        return recording.record(planned.case, planned.preset, self.shared, begun, outcomes, probes)

    def _make_ready(self, planned: Planned, run_id: str) -> list[Outcome]:
        """Let a process that does not count make the files and fill the caches; return it where it did not end well."""
        outcome = self.process(planned, f"{run_id}.ready", 0)
        return [] if outcome.process.status == "ok" else [outcome]

    def process(
        self,
        planned: Planned,
        name: str,
        index: int,
        python: str = sys.executable,
        *,
        is_compared: bool = False,
        accuracy: ImageCount | None = None,
    ) -> Outcome:
        """Run one process of a case under this interpreter; its raw times and its log go by `name`."""
        job = msgspec.structs.replace(
            self._job(planned, name),
            probes=self._is_to_probe(planned, index),
            repeats=not is_compared or index == 0,
            is_compared=is_compared,
            accuracy=accuracy,
        )
        with Worker(job, self.settings.output / "logs" / f"{name}.log", python) as worker:
            self._samples.watch(worker.pid)
            ended_by, reason = self._wait(worker, planned, index)
            outcome = worker.outcome(ended_by, reason)
        return self._with_samples(outcome, planned.case.batch_size)

    def _is_to_probe(self, planned: Planned, index: int) -> bool:
        """Say whether this process takes the device's rates: the first and the last of the pass that need the same.

        Where a search ends is not known, and each of its cases may be the last.
        """
        rates = _rates_of(planned.case)
        if rates not in self._probes or planned.is_searched:
            return True
        probing = [entry for entry in self.plan if not entry.reason and entry.case.scenario != "cold_start"]
        last = [entry for entry in probing if _rates_of(entry.case) == rates][-1]
        return planned == last and index == planned.limits.processes - 1

    def _keep_probes(self, case: Case, outcome: Outcome) -> None:
        if outcome.process.probes:
            self._probes.setdefault(_rates_of(case), outcome.process.probes)

    def _job(self, planned: Planned, name: str) -> Job:
        settings, case, own = self.settings, planned.case, planned.own
        return Job(
            case=case,
            suite_id=self.shared.suite_id,
            options=case.options if own else catalog.entry(case.model).resolve(case.options),
            limits=planned.limits,
            device=settings.device,
            threads=case.threads,
            output=str(settings.output),
            raw_name=name,
            cache=str(settings.cache),
            spawned_ns=time.monotonic_ns(),
            weights=planned.weights,
            data=planned.data,
            labels=planned.labels,
            module=own.path if isinstance(own, OwnModule) else None,
            module_folder=own.folder if isinstance(own, OwnModule) else "",
            onnx=own.path if isinstance(own, OwnFile) else None,
            inputs=own.inputs if own else [],
            artifacts=str(settings.artifacts),
            given_artifacts=str(settings.given_artifacts) if settings.given_artifacts else None,
            workspace_bytes=settings.workspace_bytes,
            hold_s=energy.hold_s(self._samples.power(), settings.period_s),
            idle_s=energy.idle_s(self._samples.power(), settings.period_s),
            gpu_uuid=settings.gpu_uuid,
        )

    def _wait(self, worker: Worker, planned: Planned, index: int) -> tuple[Status | None, str | None]:
        """Wait for the worker's end; return how we ended it and why, or (None, None) where it ended by itself."""
        stage: StageName | None = None
        percent: int | None = None
        announced_s = 0.0
        while True:
            is_later = worker.percent != percent and time.monotonic() - announced_s >= PROGRESS_S
            if worker.stage != stage or is_later:
                stage, percent, announced_s = worker.stage, worker.percent, time.monotonic()
                self._announce(planned, index, stage, percent)
            remaining_s = worker.remaining_s()
            if remaining_s <= 0:
                worker.stop()
                return "timeout", f"stage {stage} took longer than {planned.limits.deadline_s(stage):g} s"
            waiting: list[Worker | SamplerProcess | socket.socket] = [worker, self._samples, self._wake]
            ready, _, _ = select.select(waiting, [], [], min(remaining_s, ATTEND_S) if self.attend else remaining_s)
            if self._samples in ready:
                self._samples.receive()
            if self._wake in ready:
                self._wake.recv(4096)
            reason = self._reason_to_end()
            if reason:
                worker.stop()
                return "aborted", reason
            if worker in ready and worker.receive():
                return None, None

    def _reason_to_end(self) -> str | None:
        if self.interrupted:
            return "interrupted by a signal"
        return self.attend(self) if self.attend else None

    def latest_samples(self) -> list[Sample]:
        """Return the last sample of every sensor."""
        return self._samples.latest()

    def _announce(self, planned: Planned, index: int, stage: StageName, percent: int | None) -> None:
        for sink in self.sinks:
            sink.stage(planned, index, stage, percent)

    def _with_samples(self, outcome: Outcome, batch_size: int) -> Outcome:
        """Cut the sensors' samples to the window of the process and add them to its result."""
        window = outcome.process.window
        if window is None:
            return outcome
        self._samples.flush()
        telemetry, report = self._samples.cut(window)
        samples = self._samples.raw(Window(0, time.monotonic_ns()))
        found = self._energy(outcome, window, samples, batch_size)
        process = msgspec.structs.replace(
            outcome.process,
            telemetry=telemetry,
            timeline=[self._with_means(part, window.start_ns) for part in outcome.process.timeline],
            sampler=report,
            energy=found if isinstance(found, Energy) else None,
            interference=_interference(outcome.process, samples, self.settings.device),
        )
        missing = outcome.missing if isinstance(found, Energy) else {"energy": found, **outcome.missing}
        return msgspec.structs.replace(outcome, process=process, missing=missing)

    def _energy(self, outcome: Outcome, window: Window, samples: Sequence[Sample], batch_size: int) -> Energy | str:
        """Return the energy of the window, or why there is none."""
        settings, process = self.settings, outcome.process
        if settings.gpu_uuid and outcome.device_uuid:
            mismatch = gpu.mismatch(settings.gpu_uuid, outcome.device_uuid)
            if mismatch:
                return mismatch
        inferences = _inferences(outcome.process, window, batch_size)
        idle = (process.idle[0], process.idle[1]) if len(process.idle) == 2 else None
        sources = self._samples.power()
        return energy.measure(samples, sources, window, inferences, settings.period_s, idle)

    def _with_means(self, part: TimeSlice, start_ns: int) -> TimeSlice:
        """Add the sensors' means to a part of a sustained run."""
        window = Window(start_ns + round(part.start_s * 1e9), start_ns + round(part.end_s * 1e9))
        means = {name: summary.mean for name, summary in self._samples.cut(window)[0].items()}
        return msgspec.structs.replace(part, telemetry=means)

    def _sampler(self) -> SamplerProcess:
        settings, cpus = self.settings, os.sched_getaffinity(0)
        threads = max(entry.case.threads or len(cpus) for entry in self.plan)
        spare = spare_cpu(cpus, settings.device, threads)
        return SamplerProcess(settings.sources, settings.period_s, spare)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True


def _end_of_search(outcome: Outcome) -> Outcome:
    """Return the outcome of a batch that may be too large: that it does not fit is an answer and no failure."""
    process = outcome.process
    if process.status != "failed" or not (process.reason or "").startswith("out of memory"):
        return outcome
    return msgspec.structs.replace(outcome, process=msgspec.structs.replace(process, status="unsupported"))


def _rates_of(case: Case) -> tuple[Precision, int | None]:
    """Return what the device's rates depend on beside the device."""
    return case.variant.precision, case.threads


def spare_cpu(cpus: Collection[int], device: str, threads: int) -> int | None:
    """Return a CPU for the sampler that the cases do not compute on, None where there are too few for one."""
    used = 1 if device == "cuda" else threads
    return max(cpus) if len(cpus) >= FEWEST_CPUS and used < len(cpus) else None


def _inferences(process: ProcessResult, window: Window, batch_size: int) -> int:
    """Return how many inputs the window answered; runs with pauses between them are counted by their parts."""
    if process.throughput_per_s is not None:
        return max(1, round(process.throughput_per_s * window.seconds))
    runs = sum(timing.runs for timing in process.parts.values()) or (process.timing.runs if process.timing else 0)
    return max(1, runs) * batch_size


def _interference(process: ProcessResult, samples: Sequence[Sample], device: str) -> Interference | None:
    """Return which blocks were disturbed, where there are blocks."""
    if process.blocks is None or len(process.blocks.bounds_ns) < 2:
        return None
    blocks = [Window(start, end) for start, end in pairwise(process.blocks.bounds_ns)]
    return interference.assess(samples, blocks, process.blocks.medians_ms, device)
