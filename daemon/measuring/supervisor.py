"""One run over a plan: the supervisor runs the processes of each case and makes its Record. It never imports torch."""

import time
import uuid
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import msgspec

from benchd.daemon.measuring import neighbours, plan, recording
from benchd.daemon.measuring.plan import Planned
from benchd.daemon.measuring.process import Worker
from benchd.daemon.measuring.protocol import ImageCount, Job, Outcome, StageName, unmeasured
from benchd.daemon.measuring.recording import RunId
from benchd.daemon.measuring.session import Session
from benchd.daemon.records import Case, Precision, Probes, Record, Status
from benchd.daemon.sampling import energy

PROGRESS_S = 10.0  # between two progress lines of a stage
ABREAST = 2  # processes that import torch side by side; one that waits holds 0.3 GiB


@dataclass(frozen=True)
class Turn:
    """One process of a case; its raw times and its log are called `name`.

    `python` is another interpreter, whose worker `may_wait` if its benchd knows how.
    """

    planned: Planned
    name: str
    index: int
    python: str = ""
    accuracy: ImageCount | None = None
    is_compared: bool = True
    may_wait: bool = True


@dataclass
class Supervisor:
    """One run over a plan in a session; `records` holds the results of `run`.

    The device's peak rates are probed in the first and the last process of the run with the same settings.
    """

    session: Session
    plan: Sequence[Planned]
    suite_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    records: list[Record] = field(default_factory=list)
    _rates: dict[tuple[Precision, int | None, int], Probes | None] = field(default_factory=dict)

    def run(self) -> None:
        """Measure every case of the plan, under the machine's lock."""
        with self.session.measuring():
            self.session.sampler(self.plan)
            for sink in self.session.sinks:
                sink.begin(self.plan)
            for planned in self.plan:
                if self.session.interrupted:
                    break
                if not (planned.is_searched and plan.search_is_over(planned.case, self.records)):
                    self.records.append(self.measure(planned))
            self.session.end()

    def measure(self, planned: Planned) -> Record:
        """Measure one case of the plan; return its Record, already passed to the sinks."""
        record = self._case(planned)
        self.session.publish(record)
        return record

    def _case(self, planned: Planned) -> Record:
        """Run the processes of one case in turn, until one fails."""
        run, run_id = self.session.run(self.suite_id), RunId.new()
        outcomes: list[Outcome] = []
        if planned.reason:
            outcomes.append(unmeasured("unsupported", planned.reason))
        elif planned.case.scenario == "cold_start":
            outcomes += self._make_ready(planned, run_id.run_id)
        while len(outcomes) < planned.limits.processes and all(o.process.status == "ok" for o in outcomes):
            accuracy = None if outcomes else planned.accuracy
            name, index = f"{run_id.run_id}.{len(outcomes)}", len(outcomes)
            outcome = self.process(Turn(planned, name, index, accuracy=accuracy, is_compared=False))
            failed = "probes" in outcome.missing and planned.case.scenario != "cold_start"
            if outcome.process.probes or failed:  # what failed once is not tried again
                self._rates.setdefault(_rates_of(planned.case), outcome.process.probes)
            outcomes.append(_end_of_search(outcome) if planned.is_searched else outcome)
        rates = self._rates.get(_rates_of(planned.case))
        return recording.record(planned.case, planned.preset, run, run_id, outcomes, rates, planned.limits)

    def _make_ready(self, planned: Planned, run_id: str) -> list[Outcome]:
        """Let an uncounted process make the files and fill the caches; return its outcome if it failed."""
        outcome = self.process(Turn(planned, f"{run_id}.ready", 0, is_compared=False))
        return [] if outcome.process.status == "ok" else [outcome]

    def process(self, turn: Turn) -> Outcome:
        """Run one process of a case to its end."""
        job = self._job(turn)
        try:
            outcome = self._accompanied(job, turn)
        except OSError as error:
            outcome = _not_run(error)
        return self._with_samples(outcome, turn)

    def in_turn(self, turns: Sequence[Turn]) -> Generator[Outcome, None, None]:
        """Run one turn after the other and yield each outcome; two processes import torch before the first goes on."""
        for first in range(0, len(turns), ABREAST):
            yield from self._abreast(turns[first : first + ABREAST])

    def _abreast(self, turns: Sequence[Turn]) -> Iterator[Outcome]:
        if len(turns) == 1 or not all(_waits(turn) for turn in turns):
            yield from map(self.process, turns)
            return
        with ExitStack() as started:
            try:
                workers = [started.enter_context(self._worker(self._job(turn, waits=True), turn)) for turn in turns]
            except OSError as error:
                yield self._with_samples(_not_run(error), turns[0])
                return
            ended = [self._wait(worker, turn, "ready") for worker, turn in zip(workers, turns, strict=True)]
            for worker, turn, early in zip(workers, turns, ended, strict=True):
                worker.go_on()
                outcome = worker.outcome(*early) if any(early) else self._end(worker, turn)
                worker.close()  # with all it started, before the next one is measured
                yield self._with_samples(outcome, turn)

    def _job(self, turn: Turn, *, waits: bool = False) -> Job:
        session = self.session
        power, period_s = session.sampler(self.plan).power(), session.config.sampling.period_s
        return msgspec.structs.replace(
            session.job(turn.planned, self.suite_id),
            raw_name=turn.name,
            spawned_ns=time.monotonic_ns(),
            hold_s=energy.hold_s(power, period_s),
            idle_s=energy.idle_s(power, period_s),
            probes=self._is_to_probe(turn.planned, turn.index) and not turn.planned.beside,
            repeats=not turn.is_compared or turn.index == 0,
            is_compared=turn.is_compared,
            accuracy=turn.accuracy,
            waits=waits,
        )

    def _worker(self, job: Job, turn: Turn) -> Worker:
        return Worker(job, self.session.output / "logs" / f"{job.raw_name}.log", turn.python)

    def _with_samples(self, outcome: Outcome, turn: Turn) -> Outcome:
        session = self.session
        samples, period_s = session.sampler(self.plan), session.config.sampling.period_s
        return recording.with_samples(outcome, turn.planned.case, samples, session.machine, period_s)

    def _run(self, job: Job, turn: Turn) -> Outcome:
        """Run one worker to its end."""
        with self._worker(job, turn) as worker:
            return self._end(worker, turn)

    def _end(self, worker: Worker, turn: Turn) -> Outcome:
        self.session.sampler(self.plan).watch(worker.pid)
        return worker.outcome(*self._wait(worker, turn))

    def _accompanied(self, job: Job, turn: Turn) -> Outcome:
        """Run one worker to its end, beside a neighbour if the case has one."""
        planned = turn.planned
        if planned.beside is None or planned.case.beside is None:
            return self._run(job, turn)
        beside = msgspec.structs.replace(
            self.session.job(planned.beside, self.suite_id),
            raw_name=f"{job.raw_name}.beside",
            spawned_ns=time.monotonic_ns(),
            probes=False,
            repeats=False,
            neighbour_hz=planned.case.beside.rate_hz,
        )
        return neighbours.accompanied(self.session, beside, lambda: self._run(job, turn))

    def _is_to_probe(self, planned: Planned, index: int) -> bool:
        """Return whether this process probes the device's rates: the first and the last with the same settings do.

        It is unknown where a search ends, so each of its cases may be the last.
        """
        rates = _rates_of(planned.case)
        if rates not in self._rates:
            return True
        if planned.is_searched or self._rates[rates] is None:
            return planned.is_searched
        alone = [entry for entry in self.plan if not entry.reason and not entry.beside]
        probing = [entry for entry in alone if entry.case.scenario != "cold_start"]
        last = [entry for entry in probing if _rates_of(entry.case) == rates][-1]
        return planned == last and index == planned.limits.processes - 1

    def _wait(self, worker: Worker, turn: Turn, until: StageName | None = None) -> tuple[Status | None, str | None]:
        """Wait for the worker to end, or `until` a stage; return how and why we ended it, else (None, None)."""
        stage: StageName | None = None
        percent: int | None = None
        announced_s = 0.0
        while until is None or worker.stage != until:
            is_later = worker.percent != percent and time.monotonic() - announced_s >= PROGRESS_S
            if worker.stage != stage or is_later:
                stage, percent, announced_s = worker.stage, worker.percent, time.monotonic()
                for sink in self.session.sinks:
                    sink.stage(turn.planned, turn.index, stage, percent)
            remaining_s = worker.remaining_s()
            if remaining_s <= 0:
                worker.stop()
                return "timeout", f"stage {stage} took longer than {turn.planned.limits.deadline_s(stage):g} s"
            is_ready = self.session.wait(worker, remaining_s)
            reason = self.session.reason_to_end()
            if reason:
                worker.stop()
                return "aborted", reason
            if is_ready and worker.receive():
                break
        return None, None


def _waits(turn: Turn) -> bool:
    """Return whether a process may import torch first; a cold start is timed from its start, beside its neighbour."""
    return turn.may_wait and turn.planned.case.scenario != "cold_start" and not turn.planned.beside


def _not_run(error: OSError) -> Outcome:
    """Return the outcome of no free process, descriptor or inode, or of a disk that is full or read-only."""
    return unmeasured("failed", f"the worker could not be run: {error.strerror}")


def _end_of_search(outcome: Outcome) -> Outcome:
    """Return the outcome of a batch that may be too large: not fitting is a result, not a failure."""
    process = outcome.process
    if process.status != "failed" or not (process.reason or "").startswith("out of memory"):
        return outcome
    return msgspec.structs.replace(outcome, process=msgspec.structs.replace(process, status="unsupported"))


def _rates_of(case: Case) -> tuple[Precision, int | None, int]:
    """Return the settings on which the device's rates depend."""
    return case.variant.precision, case.threads, case.streams
