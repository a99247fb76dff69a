"""One run over a plan: the supervisor runs the processes of each case and makes its Record. It never imports torch."""

import time
import uuid
from collections.abc import Sequence
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
            outcome = self.process(planned, f"{run_id.run_id}.{len(outcomes)}", len(outcomes), accuracy=accuracy)
            failed = "probes" in outcome.missing and planned.case.scenario != "cold_start"
            if outcome.process.probes or failed:  # what failed once is not tried again
                self._rates.setdefault(_rates_of(planned.case), outcome.process.probes)
            outcomes.append(_end_of_search(outcome) if planned.is_searched else outcome)
        rates = self._rates.get(_rates_of(planned.case))
        return recording.record(planned.case, planned.preset, run, run_id, outcomes, rates, planned.limits)

    def _make_ready(self, planned: Planned, run_id: str) -> list[Outcome]:
        """Let an uncounted process make the files and fill the caches; return its outcome if it failed."""
        outcome = self.process(planned, f"{run_id}.ready", 0)
        return [] if outcome.process.status == "ok" else [outcome]

    def process(
        self,
        planned: Planned,
        name: str,
        index: int,
        python: str = "",
        *,
        is_compared: bool = False,
        accuracy: ImageCount | None = None,
    ) -> Outcome:
        """Run one process of a case, under our interpreter or `python`; `name` names its raw times and its log."""
        session, samples = self.session, self.session.sampler(self.plan)
        power, period_s = samples.power(), session.config.sampling.period_s
        job = msgspec.structs.replace(
            session.job(planned, self.suite_id),
            raw_name=name,
            spawned_ns=time.monotonic_ns(),
            hold_s=energy.hold_s(power, period_s),
            idle_s=energy.idle_s(power, period_s),
            probes=self._is_to_probe(planned, index) and not planned.beside,
            repeats=not is_compared or index == 0,
            is_compared=is_compared,
            accuracy=accuracy,
        )
        try:
            outcome = self._accompanied(job, planned, index, python)
        except OSError as error:  # no free process, descriptor or inode, a disk that is full or read-only
            outcome = unmeasured("failed", f"the worker could not be run: {error.strerror}")
        return recording.with_samples(outcome, planned.case, samples, session.machine, period_s)

    def _run(self, job: Job, planned: Planned, index: int, python: str) -> Outcome:
        """Run one worker to its end."""
        with Worker(job, self.session.output / "logs" / f"{job.raw_name}.log", python) as worker:
            self.session.sampler(self.plan).watch(worker.pid)
            ended_by, reason = self._wait(worker, planned, index)
            return worker.outcome(ended_by, reason)

    def _accompanied(self, job: Job, planned: Planned, index: int, python: str) -> Outcome:
        """Run one worker to its end, beside a neighbour if the case has one."""
        if planned.beside is None or planned.case.beside is None:
            return self._run(job, planned, index, python)
        beside = msgspec.structs.replace(
            self.session.job(planned.beside, self.suite_id),
            raw_name=f"{job.raw_name}.beside",
            spawned_ns=time.monotonic_ns(),
            probes=False,
            repeats=False,
            neighbour_hz=planned.case.beside.rate_hz,
        )
        return neighbours.accompanied(self.session, beside, lambda: self._run(job, planned, index, python))

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

    def _wait(self, worker: Worker, planned: Planned, index: int) -> tuple[Status | None, str | None]:
        """Wait for the worker to end; return how and why we ended it, or (None, None) if it ended by itself."""
        stage: StageName | None = None
        percent: int | None = None
        announced_s = 0.0
        while True:
            is_later = worker.percent != percent and time.monotonic() - announced_s >= PROGRESS_S
            if worker.stage != stage or is_later:
                stage, percent, announced_s = worker.stage, worker.percent, time.monotonic()
                for sink in self.session.sinks:
                    sink.stage(planned, index, stage, percent)
            remaining_s = worker.remaining_s()
            if remaining_s <= 0:
                worker.stop()
                return "timeout", f"stage {stage} took longer than {planned.limits.deadline_s(stage):g} s"
            is_ready = self.session.wait(worker, remaining_s)
            reason = self.session.reason_to_end()
            if reason:
                worker.stop()
                return "aborted", reason
            if is_ready and worker.receive():
                return None, None


def _end_of_search(outcome: Outcome) -> Outcome:
    """Return the outcome of a batch that may be too large: not fitting is a result, not a failure."""
    process = outcome.process
    if process.status != "failed" or not (process.reason or "").startswith("out of memory"):
        return outcome
    return msgspec.structs.replace(outcome, process=msgspec.structs.replace(process, status="unsupported"))


def _rates_of(case: Case) -> tuple[Precision, int | None, int]:
    """Return the settings on which the device's rates depend."""
    return case.variant.precision, case.threads, case.streams
