"""One run over a plan: the supervisor runs the processes of each case and makes its Record. It never imports torch."""

import math
import os
import random
import time
import uuid
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import msgspec

from benchd.daemon.machine.signals import ending
from benchd.daemon.measuring import neighbours, plan, recording
from benchd.daemon.measuring.plan import Planned
from benchd.daemon.measuring.process import KILLED, Worker
from benchd.daemon.measuring.protocol import ImageCount, Job, Outcome, unmeasured
from benchd.daemon.measuring.recording import RunId
from benchd.daemon.measuring.session import Ending, Session, spare_cpu
from benchd.daemon.records import Case, Precision, Probes, Record
from benchd.daemon.sampling import energy
from benchd.daemon.verdicts.statistics import StopRule

PROGRESS_S = 10.0  # between two progress lines of a stage
NOT_RUN = "the worker could not be run"  # the machine refused it, whatever the case
NOT_SUSPENDED = "it could not be suspended between its blocks; --preset standard measures one after the other"
INTERLEAVED_BLOCK_S = 0.006
ABREAST = 2  # processes that import torch side by side; one that waits holds 0.3 GiB
PLAIN = ("single_stream", "offline")  # scenarios of nothing but runs, of which any stretch is like any other


@dataclass(frozen=True)
class Turn:
    """One process of a case; its raw times and its log are called `name`.

    `python` is another interpreter. The blocks of `interleaved` turns alternate.
    """

    planned: Planned
    name: str
    index: int
    python: str = ""
    accuracy: ImageCount | None = None
    is_compared: bool = True
    interleaved: bool = False


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
        with self.session.measuring(ending()):
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
        elif planned.case.scenario == "cold_start":  # an uncounted process makes the files and fills the caches
            ready = self.process(Turn(planned, f"{run_id.run_id}.ready", 0, is_compared=False))
            outcomes += [] if ready.process.status == "ok" else [ready]
        while len(outcomes) < planned.limits.processes and all(o.process.status == "ok" for o in outcomes):
            accuracy = None if outcomes else planned.accuracy
            name, index = f"{run_id.run_id}.{len(outcomes)}", len(outcomes)
            outcome = self.process(Turn(planned, name, index, accuracy=accuracy, is_compared=False))
            failed = "probes" in outcome.missing and planned.case.scenario != "cold_start"
            if outcome.process.probes or failed:  # what failed once is not tried again
                self._rates.setdefault(_rates_of(planned.case), outcome.process.probes)
            outcomes.append(_end_of_search(outcome, planned.case.batch_size) if planned.is_searched else outcome)
        rates = self._rates.get(_rates_of(planned.case))
        return recording.record(planned.case, planned.preset, run, run_id, outcomes, rates, planned.limits)

    def process(self, turn: Turn) -> Outcome:
        """Run one process of a case to its end."""
        job = self._job(turn)
        try:
            outcome = self._accompanied(job, turn)
        except OSError as error:
            outcome = _not_run(error)
        return self._with_samples(outcome, turn)

    def in_turn(self, turns: Sequence[Turn]) -> Generator[tuple[Turn, Outcome], None, None]:
        """Run these processes one after the other, or interleaved, and yield each turn with its outcome as it ends.

        Two at a time import torch side by side.
        """
        for first in range(0, len(turns), ABREAST):
            yield from self._abreast(turns[first : first + ABREAST])

    def _abreast(self, turns: Sequence[Turn]) -> Iterator[tuple[Turn, Outcome]]:
        if len(turns) == 1 or not all(_waits(turn) for turn in turns):
            yield from ((turn, self.process(turn)) for turn in turns)
            return
        interleaved = all(turn.interleaved for turn in turns)
        cpus = self._shared_cpus(turns) if interleaved else []
        waiting = partial(msgspec.structs.replace, waits=True, interleaved=interleaved, cpus=cpus)
        with ExitStack() as started:
            try:
                pairs = [(started.enter_context(self._worker(waiting(self._job(turn)), turn)), turn) for turn in turns]
            except OSError as error:
                yield from ((turn, self._with_samples(_not_run(error), turn)) for turn in turns)
                return
            ended = [self._wait(worker, turn, until_ready=True) for worker, turn in pairs]
            if interleaved:
                yield from self._interleaved(pairs, ended)
                return
            for (worker, turn), early in zip(pairs, ended, strict=True):
                worker.go_on()
                outcome = worker.outcome(*early) if any(early) else self._end(worker, turn)
                yield turn, self._closed(worker, turn, outcome)

    def can_interleave(self, entries: Sequence[Planned]) -> bool:
        """Return whether the blocks of these can alternate: back to back on a CPU, without joules.

        Joules need an unbroken window.
        """
        cases = [entry.case for entry in entries]
        return (
            self.session.machine.device == "cpu"
            and all(case.scenario in PLAIN and case.streams == 1 and case.beside is None for case in cases)
            and not self.session.sampler(self.plan).samples.power
        )

    def _shared_cpus(self, turns: Sequence[Turn]) -> list[int]:
        """Draw the CPUs of a pair, not the sampler's; none if a process needs all."""
        cpus = os.sched_getaffinity(0)
        needed = max(turn.planned.case.threads or len(cpus) for turn in turns)
        free = cpus - {spare_cpu(cpus, self.session.machine.device, needed)}
        return random.sample(sorted(free), needed) if needed < len(free) else []

    def _interleaved(self, pairs: Sequence[tuple[Worker, Turn]], ended: list[Ending]) -> Iterator[tuple[Turn, Outcome]]:
        """Let each worker prepare, then measure one block after the other, and yield its outcome when it ends.

        They prepare alone: side by side, two thread pools that each fill the CPUs take ten times as long. The order is
        drawn anew for each block, so that neither side is always the first after a pause.
        """
        self.session.sampler(self.plan).watch(*(worker.pid for worker, _ in pairs))
        left = [*range(len(pairs))]
        while left:
            for place in random.sample(left, len(left)):
                worker, turn = pairs[place]
                if worker.is_waiting:
                    worker.go_on()
                    ended[place] = self._wait(worker, turn, until_ready=True)
                if worker.is_waiting and not worker.suspend():
                    worker.stop()
                    ended[place] = "failed", NOT_SUSPENDED
                if not worker.is_waiting:
                    left.remove(place)
                    yield turn, self._closed(worker, turn, worker.outcome(*ended[place]))

    def _closed(self, worker: Worker, turn: Turn, outcome: Outcome) -> Outcome:
        """End all that the worker started, before another one is measured; return its outcome with the samples."""
        worker.close()
        return self._with_samples(outcome, turn)

    def _job(self, turn: Turn) -> Job:
        session = self.session
        power, period_s = session.sampler(self.plan).samples.power, session.config.sampling.period_s
        longest_s = turn.planned.limits.deadline_s("idle") / 2  # clocks settle in half as long again
        return msgspec.structs.replace(
            session.job(turn.planned, self.suite_id),
            raw_name=turn.name,
            spawned_ns=time.monotonic_ns(),
            hold_s=energy.hold_s(power, period_s),
            idle_s=min(longest_s, energy.idle_s(power, period_s)),
            probes=self._is_to_probe(turn.planned, turn.index) and not turn.planned.beside,
            repeats=not turn.is_compared or turn.index == 0,
            is_compared=turn.is_compared,
            accuracy=turn.accuracy,
        )

    def _worker(self, job: Job, turn: Turn) -> Worker:
        return Worker(job, self.session.output / "logs" / f"{job.raw_name}.log", turn.python)

    def _with_samples(self, outcome: Outcome, turn: Turn) -> Outcome:
        session = self.session
        samples, period_s = session.sampler(self.plan), session.config.sampling.period_s
        return recording.with_samples(outcome, turn.planned.case, samples, session.machine, period_s)

    def _end(self, worker: Worker, turn: Turn, *beside: int) -> Outcome:
        self.session.sampler(self.plan).watch(worker.pid, *beside)
        return worker.outcome(*self._wait(worker, turn))

    def _accompanied(self, job: Job, turn: Turn) -> Outcome:
        """Run one worker to its end; a neighbour of the case starts once the worker has built and checked alone."""
        beside = self._job_beside(turn)
        if beside is None:
            with self._worker(job, turn) as worker:
                return self._end(worker, turn)
        with self._worker(msgspec.structs.replace(job, waits=True), turn) as worker:
            early = self._wait(worker, turn, until_ready=True)
            if not worker.is_waiting:
                return worker.outcome(*early)

            def measured(pid: int) -> Outcome:
                worker.go_on()
                return self._end(worker, turn, pid)

            return neighbours.accompanied(self.session, beside, measured)

    def _job_beside(self, turn: Turn) -> Job | None:
        """Return the job of the case's neighbour, None if it has none."""
        planned = turn.planned
        if planned.beside is None or planned.case.beside is None:
            return None
        return msgspec.structs.replace(
            self.session.job(planned.beside, self.suite_id),
            raw_name=f"{turn.name}.beside",
            spawned_ns=time.monotonic_ns(),
            probes=False,
            repeats=False,
            neighbour_hz=planned.case.beside.rate_hz,
        )

    def _is_to_probe(self, planned: Planned, index: int) -> bool:
        """Return whether this process probes the device's rates: the first and the last with the same settings do.

        It is unknown where a search ends, so each of its cases may be the last.
        """
        rates = _rates_of(planned.case)
        if rates not in self._rates:
            return True
        if planned.is_searched or self._rates[rates] is None:
            return self._rates[rates] is not None
        alone = [entry for entry in self.plan if not entry.reason and not entry.beside]
        probing = [entry for entry in alone if entry.case.scenario != "cold_start"]
        alike = [entry for entry in probing if _rates_of(entry.case) == rates]  # none if the GPU was gone when planned
        return alike[-1:] == [planned] and index == planned.limits.processes - 1

    def _wait(self, worker: Worker, turn: Turn, *, until_ready: bool = False) -> Ending:
        """Wait for the worker to end, or to wait for its turn; return how and why we ended it, else (None, None)."""
        percent: int | None = None
        announced_s = 0.0
        while not (until_ready and worker.is_waiting):
            is_later = worker.percent != percent and time.monotonic() - announced_s >= PROGRESS_S
            if (worker.stage != worker.announced or is_later) and worker.stage != "ready":
                worker.announced, percent, announced_s = worker.stage, worker.percent, time.monotonic()
                for sink in self.session.sinks:
                    sink.stage(turn.planned, turn.index, worker.stage, percent)
            limit_s = turn.planned.limits.deadline_s(worker.stage)
            too_long = f"stage {worker.stage} took longer than {limit_s:g} s"
            ended = self.session.follow(worker, worker.remaining_s(), too_long)
            if ended:
                return ended
        return None, None


def interleaved_rule(cap_s: float) -> StopRule:
    """Return the rule of processes that measure in turns of one block, for `cap_s` each.

    It asks for more blocks than fit, so that none are merged: those of both processes correspond.
    """
    return StopRule(math.ceil(cap_s / INTERLEAVED_BLOCK_S) + 1, 1, INTERLEAVED_BLOCK_S, cap_s, None)


def _waits(turn: Turn) -> bool:
    """Return whether a process may import torch first; a cold start is timed from its start, beside its neighbour."""
    return turn.planned.case.scenario != "cold_start" and not turn.planned.beside


def _not_run(error: OSError) -> Outcome:
    """Return the outcome of no free process, descriptor or inode, or of a disk that is full or read-only."""
    return unmeasured("failed", f"{NOT_RUN}: {error.strerror}")


def _end_of_search(outcome: Outcome, batch_size: int) -> Outcome:
    """Return the outcome of a batch that may be too large: not fitting is a result, not a failure.

    A worker that was killed counts as too large if a smaller batch ran: the kernel, unlike torch, gives no reason.
    """
    process = outcome.process
    too_large = ("out of memory", KILLED) if batch_size > 1 else "out of memory"
    if process.status != "failed" or not (process.reason or "").startswith(too_large):
        return outcome
    return msgspec.structs.replace(outcome, process=msgspec.structs.replace(process, status="unsupported"))


def _rates_of(case: Case) -> tuple[Precision, int | None, int]:
    """Return the settings on which the device's rates depend."""
    return case.variant.precision, case.threads, case.streams
