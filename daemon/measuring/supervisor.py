"""Runs a plan once: the supervisor runs the processes of each case and makes its Record. It never imports torch.

Competing cases run in rounds of one process each, so that drift during the run affects all of them equally.
"""

import math
import os
import random
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import msgspec

from benchd.daemon.machine.signals import ending
from benchd.daemon.measuring import neighbours, plan, recording
from benchd.daemon.measuring.plan import PlannedCase
from benchd.daemon.measuring.process import KILLED, Worker
from benchd.daemon.measuring.protocol import Accompany, Job, Measure, Outcome, Recipe, unmeasured
from benchd.daemon.measuring.recording import RunId
from benchd.daemon.measuring.session import Ending, Session, spare_cpu
from benchd.daemon.records import PLAIN, Case, ImageCount, Probes, Record
from benchd.daemon.runtimes import Precision
from benchd.daemon.sampling import energy
from benchd.daemon.verdicts.statistics import StopRule

PROGRESS_S = 1.0  # interval between progress reports of a stage
NOT_RUN = "the worker could not be run"  # a fault of the machine, not of the case
NOT_SUSPENDED = "it could not be suspended between its blocks; --preset standard measures the two one after the other"
INTERLEAVED_BLOCK_S = 0.006
ABREAST = 2  # processes that import torch at the same time; each takes 0.3 GiB while it waits
T = TypeVar("T")


@dataclass(frozen=True)
class Turn:
    """One process of a case, run according to its recipe; `name` is used for its raw times and its log.

    `python` is a different interpreter, if any, and `variables` are set in addition to ours.
    """

    planned: PlannedCase
    name: str
    index: int
    recipe: Recipe
    python: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    accuracy: ImageCount | None = None

    @property
    def is_interleaved(self) -> bool:
        """Return whether its blocks alternate with those of another process."""
        rule = self.planned.limits.rule
        return rule == interleaved_rule(rule.cap_s)


@dataclass
class MeasuredCase:
    """A case being measured: its identity and the outcomes of its processes so far."""

    planned: PlannedCase
    run_id: RunId = field(default_factory=RunId.new)
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def is_incomplete(self) -> bool:
        """Return whether more processes are needed and none has failed."""
        is_ok = all(outcome.process.status == "ok" for outcome in self.outcomes)
        return is_ok and len(self.outcomes) < self.planned.limits.processes


@dataclass
class Supervisor:
    """Runs a plan once in a session; `records` contains the results of `run`.

    For equal settings, the device's peak rates are probed in the run's first and last process. After an interrupt,
    cases keep their finished processes; with `needs_all`, incomplete cases are aborted.
    """

    session: Session
    plan: Sequence[PlannedCase]
    suite_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    needs_all: bool = False
    records: list[Record] = field(default_factory=list)
    _rates: dict[tuple[Precision, int | None, int], Probes | None] = field(default_factory=dict)

    def run(self) -> None:
        """Measure every case of the plan while holding the machine's lock."""
        with self.session.measuring(ending()):
            self.session.sampler(self.plan)
            for sink in self.session.sinks:
                sink.begin(self.plan)
            for group in plan.in_rounds(self.plan):
                if self.session.interrupted:
                    break
                first = group[0]
                if not (first.is_searched and plan.search_is_over(first.case, self.records)):
                    self.records += self.measure(group)
            self.session.end()

    def measure(
        self, group: Sequence[PlannedCase], begins: Callable[[MeasuredCase], None] | None = None
    ) -> list[Record]:
        """Measure these cases of the plan in rounds; return their Records, already passed to the sinks.

        `begins` is called with the case before each of its processes. A case left without any process by an interrupt
        has no Record.
        """
        cases = [MeasuredCase(planned) for planned in group]
        self._measure(cases, begins or (lambda _: None))
        records = [self._record(case) for case in cases if case.outcomes]
        for record in records:
            self.session.publish(record)
        return records

    def _measure(self, cases: Sequence[MeasuredCase], begins: Callable[[MeasuredCase], None]) -> None:
        """Run these cases in rounds of one process each, until each has finished, failed or been ended."""
        for case in cases:
            if case.planned.reason:
                case.outcomes.append(unmeasured("unsupported", case.planned.reason))

        def turn(case: MeasuredCase) -> Turn:
            begins(case)
            number, planned = len(case.outcomes), case.planned
            recipe = self._recipe(planned, is_first=not number, is_last=self._is_last(case, cases))
            accuracy = None if number else planned.inputs.accuracy
            return Turn(planned, f"{case.run_id.run_id}.{number}", number, recipe, accuracy=accuracy)

        while left := [case for case in cases if case.is_incomplete]:
            for case, outcome in self.in_turn(random.sample(left, len(left)), turn, abreast=1):
                self._keep(case, outcome)
                if outcome.process.status == "aborted":
                    self._abort(cases, outcome)
                    return

    def _abort(self, cases: Sequence[MeasuredCase], aborted: Outcome) -> None:
        """Mark the incomplete cases as aborted for the same reason, if all of their processes are needed."""
        for case in cases:
            if self.needs_all and case.outcomes and case.is_incomplete:
                case.outcomes.append(unmeasured("aborted", aborted.process.reason))

    def _keep(self, case: MeasuredCase, outcome: Outcome) -> None:
        """Store the outcome of a case's process, and the rates that it probed."""
        planned = case.planned
        failed = "probes" in outcome.missing and planned.case.scenario != "cold_start"
        if outcome.process.probes or failed:  # a failed probe is not repeated
            self._rates.setdefault(_rates_of(planned.case), outcome.process.probes)
        case.outcomes.append(_end_of_search(outcome, planned.case.batch_size) if planned.is_searched else outcome)

    def _is_last(self, case: MeasuredCase, cases: Sequence[MeasuredCase]) -> bool:
        """Return whether no later process of the run depends on the same rates; `cases` alternate with this one."""
        groups = plan.in_rounds(self.plan)
        place = next((place for place, group in enumerate(groups) if case.planned in group), len(groups))
        others = [other.planned for other in cases if other is not case and other.is_incomplete]
        later = others + [entry for group in groups[place + 1 :] for entry in group]
        rates = _rates_of(case.planned.case)
        probing = [entry for entry in later if not entry.reason and _waits(entry)]
        is_complete = len(case.outcomes) == case.planned.limits.processes - 1
        return is_complete and rates not in {_rates_of(entry.case) for entry in probing}

    def _record(self, case: MeasuredCase) -> Record:
        planned, run = case.planned, self.session.run(self.suite_id)
        rates = self._rates.get(_rates_of(planned.case))
        return recording.of_planned(planned, run, case.run_id, case.outcomes, rates)

    def process(self, turn: Turn) -> Outcome:
        """Run one process of a case to its end, preceded by an uncounted one for the first cold start."""
        if turn.index == 0 and turn.planned.case.scenario == "cold_start":
            name = f"{turn.name.rpartition('.')[0]}.ready"
            ready = self._process(replace(turn, name=name))  # uncounted, because it writes files and fills caches
            if ready.process.status != "ok":
                return ready
        return self._process(turn)

    def _process(self, turn: Turn) -> Outcome:
        job = self._job(turn)
        try:
            outcome = self._accompanied(job, turn)
        except OSError as error:
            outcome = _not_run(error)
        return self._with_samples(outcome, turn)

    def in_turn(
        self, entrants: Sequence[T], turn: Callable[[T], Turn], abreast: int = ABREAST
    ) -> Generator[tuple[T, Outcome], None, None]:
        """Run a process for each entrant in order, and yield each entrant with its outcome when the process ends.

        `abreast` processes at a time import torch together, then measure one after the other, or alternate block by
        block. `turn` is called for their processes once the previous ones have ended.
        """
        for first in range(0, len(entrants), abreast):
            some = entrants[first : first + abreast]
            turns = [turn(entrant) for entrant in some]
            with closing(self._abreast(turns)) as running:
                for ended, outcome in running:
                    yield some[turns.index(ended)], outcome

    def _abreast(self, turns: Sequence[Turn]) -> Generator[tuple[Turn, Outcome], None, None]:
        if len(turns) == 1 or not all(_waits(turn.planned) for turn in turns):
            yield from ((turn, self.process(turn)) for turn in turns)
            return
        interleaved = all(turn.is_interleaved for turn in turns)
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

    def can_interleave(self, entries: Sequence[PlannedCase]) -> bool:
        """Return whether the blocks of these cases can alternate: back to back on a CPU, without energy.

        Energy requires an uninterrupted window.
        """
        cases = [entry.case for entry in entries]
        return (
            self.session.machine.device == "cpu"
            and all(case.scenario in PLAIN and case.streams == 1 and case.beside is None for case in cases)
            and not self.session.sampler(self.plan).samples.power
        )

    def _shared_cpus(self, turns: Sequence[Turn]) -> list[int]:
        """Choose random CPUs for a pair to share, excluding the sampler's; none if a process needs all CPUs."""
        cpus = os.sched_getaffinity(0)
        needed = max(turn.planned.case.threads or len(cpus) for turn in turns)
        free = cpus - {spare_cpu(cpus, self.session.machine.device, needed)}
        return random.sample(sorted(free), needed) if needed < len(free) else []

    def _interleaved(self, pairs: Sequence[tuple[Worker, Turn]], ended: list[Ending]) -> Iterator[tuple[Turn, Outcome]]:
        """Let each worker prepare, then alternate measured blocks, and yield each worker's outcome when it ends.

        They prepare one at a time, because two thread pools that each fill the CPUs take ten times as long together.
        The order is drawn at random for each block, so that neither side is always the first after a pause.
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
        """End everything that the worker started, before another is measured; return its outcome with the samples."""
        worker.close()
        return self._with_samples(outcome, turn)

    def _job(self, turn: Turn) -> Job:
        session = self.session
        power, period_s = session.sampler(self.plan).samples.power, session.config.sampling.period_s
        job = session.job(turn.planned, self.suite_id)
        return msgspec.structs.replace(
            job,
            recipe=turn.recipe,
            inputs=msgspec.structs.replace(job.inputs, accuracy=turn.accuracy),
            raw_name=turn.name,
            spawned_ns=time.monotonic_ns(),
            hold_s=energy.hold_s(power, period_s),
        )

    def _recipe(self, planned: PlannedCase, *, is_first: bool, is_last: bool) -> Measure:
        power, period_s = self.session.sampler(self.plan).samples.power, self.session.config.sampling.period_s
        # leaves time for the clocks to settle, which takes at most half as long again
        longest_s = planned.limits.deadline_s("idle") / 2
        idle_s = min(longest_s, energy.idle_s(power, period_s))
        probes = self._is_to_probe(planned, is_last=is_last) and not planned.beside
        return Measure(idle_s, probes, counts=is_first)

    def _worker(self, job: Job, turn: Turn) -> Worker:
        return Worker(job, self.session.output / "logs" / f"{job.raw_name}.log", turn.python, turn.variables)

    def _with_samples(self, outcome: Outcome, turn: Turn) -> Outcome:
        session = self.session
        samples, period_s = session.sampler(self.plan), session.config.sampling.period_s
        return recording.with_samples(outcome, turn.planned.case, samples, session.machine, period_s)

    def _end(self, worker: Worker, turn: Turn, *beside: int) -> Outcome:
        self.session.sampler(self.plan).watch(worker.pid, *beside)
        return worker.outcome(*self._wait(worker, turn))

    def _accompanied(self, job: Job, turn: Turn) -> Outcome:
        """Run one worker to its end; the case's neighbour starts after the worker has built and checked alone."""
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
            recipe=Accompany(planned.case.beside.rate_hz),
            raw_name=f"{turn.name}.beside",
            spawned_ns=time.monotonic_ns(),
        )

    def _is_to_probe(self, planned: PlannedCase, *, is_last: bool) -> bool:
        """Return whether this process probes the device's rates: the first and the last with its settings do.

        Because the end of a search is not known in advance, any of its cases may be the last.
        """
        rates = _rates_of(planned.case)
        if rates not in self._rates:
            return True
        return self._rates[rates] is not None and (planned.is_searched or is_last)

    def _wait(self, worker: Worker, turn: Turn, *, until_ready: bool = False) -> Ending:
        """Wait until the worker ends or waits for its turn; return how and why we ended it, else (None, None)."""
        announced_s = 0.0
        while not (until_ready and worker.is_waiting):
            state = worker.stage, worker.done
            is_new = worker.stage != worker.announced[0]
            is_later = state != worker.announced and time.monotonic() - announced_s >= PROGRESS_S
            if (is_new or is_later) and worker.stage != "ready":
                worker.announced, announced_s = state, time.monotonic()
                for sink in self.session.sinks:
                    sink.stage(turn.planned, turn.index, *state)
            limit_s = turn.planned.limits.deadline_s(worker.stage)
            too_long = f"stage {worker.stage} took longer than {limit_s:g} s"
            ended = self.session.follow(worker, worker.remaining_s(), too_long)
            if ended:
                return ended
        return None, None


def interleaved_rule(cap_s: float) -> StopRule:
    """Return the stop rule for processes that alternate block by block, for `cap_s` each.

    It requests more blocks than fit, so that none are merged and the blocks of both processes correspond.
    """
    return StopRule(math.ceil(cap_s / INTERLEAVED_BLOCK_S) + 1, 1, INTERLEAVED_BLOCK_S, cap_s, None)


def _waits(entry: PlannedCase) -> bool:
    """Return whether a process may import torch in advance; not for a cold start, nor with a neighbour."""
    return entry.case.scenario != "cold_start" and not entry.beside


def _not_run(error: OSError) -> Outcome:
    """Return the outcome if processes, descriptors or inodes have run out, or the disk is full or read-only."""
    return unmeasured("failed", f"{NOT_RUN}: {error.strerror}")


def _end_of_search(outcome: Outcome, batch_size: int) -> Outcome:
    """Return the outcome of a batch that may be too large: if it does not fit, that is a result, not a failure.

    If a smaller batch ran, a killed worker means that the batch is too large: unlike torch, the kernel does not give a
    reason.
    """
    process = outcome.process
    too_large = ("out of memory", KILLED) if batch_size > 1 else "out of memory"
    if process.status != "failed" or not (process.reason or "").startswith(too_large):
        return outcome
    return msgspec.structs.replace(outcome, process=msgspec.structs.replace(process, status="unsupported"))


def _rates_of(case: Case) -> tuple[Precision, int | None, int]:
    """Return the settings on which the device's rates depend."""
    return case.variant.precision, case.threads, case.streams
