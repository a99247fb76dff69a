"""The service's next case, what it waits for, and the measurement of one case in its session."""

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from benchd.daemon.config import Conditions
from benchd.daemon.errors import BenchdError, Full, NotAvailable, UsageError
from benchd.daemon.machine.lock import Busy
from benchd.daemon.machine.systemd_notify import log
from benchd.daemon.measuring import recording
from benchd.daemon.measuring.plan import Planned, in_rounds
from benchd.daemon.measuring.protocol import unmeasured
from benchd.daemon.measuring.recording import RunId
from benchd.daemon.measuring.session import INTERRUPTED, Session
from benchd.daemon.measuring.supervisor import Measured, Supervisor
from benchd.daemon.records import Record
from benchd.daemon.service import conditions
from benchd.daemon.service.between import Between
from benchd.daemon.service.conditions import Readings
from benchd.daemon.service.parts import Base, Configured
from benchd.daemon.service.publisher import Running
from benchd.daemon.service.schedule import Progress

DIED = "the service died while this case ran"
LOOK_S = 5.0  # between two checks of the schedule, the conditions, shipped folders and a lock held by another process


class Cases:
    """Measures the agenda's cases, those that compete in rounds; `session` lasts until the configuration changes.

    A case ends when `is_stopping`.
    """

    def __init__(
        self, base: Base, now: Configured, between: Between, artifacts: Path | None, is_stopping: Callable[[], bool]
    ) -> None:
        self._base, self._now, self._between, self._activity = base, now, between, base.activity
        self.session = Session(
            now.settings,
            now.machine,
            base.places.state / "runs",
            [base.journal, now.publisher],
            # a signal that came before the session took them over ends the case too
            lambda: INTERRUPTED if is_stopping() else between.attend(self.session),
            given_artifacts=artifacts,
            lock=self._machine,
        )
        self._flags = ("mqtt", "service") if now.publisher.link else ("service",)
        self._supervisors: dict[str, Supervisor] = {}
        self._waited_for = ""

    def next(self) -> tuple[Progress, list[Planned]] | None:
        """Return the remaining cases to measure now; if there are none, record what the service waits for."""
        if not (self._now.agenda.state.passes or self._base.journal.owes):
            self._wait_for(None)
            return None
        if self._activity.waiting_for and not self._base.every.is_due("judge", LOOK_S):
            return None
        readings = cache(partial(conditions.read, self._now.machine.gpu_uuid))  # once for all runs: a tool may hang
        found = self.disk_problem() or self._now.agenda.next(partial(self._unmet, readings))
        if isinstance(found, tuple):
            found = self._not_free(found[0]) or found
        self._wait_for(found if isinstance(found, str) else None)
        return found if isinstance(found, tuple) else None

    def _not_free(self, entry: Progress) -> str | None:
        """Return why the machine cannot be measured now, before a case reads or reports anything."""
        try:
            with self._base.lock.held(entry.suite_id):
                return None
        except NotAvailable as error:
            return str(error)

    @contextmanager
    def _machine(self) -> Iterator[None]:
        """Hold the machine for the running case, whose record says if somebody else kept the common lock too long."""
        suite_id = self._activity.running[0].suite_id if self._activity.running else ""
        with self._base.lock.held(suite_id) as ignored:
            self.session.flags = (*self._flags, "lock_ignored") if ignored else self._flags
            if ignored:
                self._between.event("lock_ignored", ignored)
            yield

    def _wait_for(self, reason: str | None) -> None:
        if reason and not self._activity.waiting_for and reason != self._waited_for:
            log(f"waiting: {reason}")
            self._waited_for = reason
        self._activity.waiting_for = reason

    def _unmet(self, readings: Callable[[], Readings], entry: Progress) -> str | None:
        if entry.by_command or entry.suite.conditions == Conditions():
            return None
        return self._base.judge.unmet(entry.suite.conditions, readings(), time.monotonic())

    def disk_problem(self) -> str | None:
        """Return why nothing new may be measured, after trying to free space by deleting sent messages."""
        outbox, quota_bytes = self._base.outbox, self._now.settings.service.quota_bytes
        try:
            if outbox.used_bytes() > quota_bytes:
                outbox.forget_sent(time.time(), keep_rows=0)
            full = "the outbox exceeds its quota" if outbox.used_bytes() > quota_bytes else self._base.reserve.hold()
            if not full:
                self._base.journal.settle()
        except UsageError as error:
            full = str(error)
        self._activity.problem = f"degraded:disk: {full}" if full else None
        return self._activity.problem

    def measure(self, entry: Progress, left: Sequence[Planned]) -> None:
        """Measure the first remaining case, and in rounds with it those that compete, under the machine's lock."""
        session, publisher, (planned, *_) = self.session, self._now.publisher, left
        group = in_rounds(left)[0]
        self._activity.running = (entry, planned)
        self._between.publish_health()  # subscribers need not wait for the next half minute
        supervisor = self._supervisor(entry, left)

        def begins(one: Measured) -> None:
            self._activity.running = (entry, one.planned)
            publisher.begin_case(entry.suite_id, one.planned, one.run_id, sum(other.seconds for other in group))

        try:
            with session.measuring():
                session.sampler(supervisor.plan)
                self._between.feed_watchdog()  # starting the sampler took time, and describing the machine may too
                supervisor.measure(group, begins)
        except Busy as busy:  # another process was faster
            self._wait_for(str(busy))
        except Full as full:  # nor does it with an I/O error, whatever the check before it has found
            self._activity.problem = f"degraded:disk: {full}"
            self._wait_for(self._activity.problem)
        except OSError as error:  # no free process or descriptor, before there was a worker
            self._end_unstarted(entry, planned, str(error.strerror))
        except NotAvailable as error:  # the sampler was killed at its start
            self._end_unstarted(entry, planned, str(error))
        except BenchdError as error:
            self._activity.problem = str(error)
            self._between.event("pass_failed", f"{entry.suite.name or 'run'}: {error}")
            self._now.agenda.cancel(entry.suite_id)
            self._between.save()
        finally:
            publisher.end()
            self._activity.running = None
            self._activity.slower = self._now.regressions.problem()
            self._between.publish_health()
        while session.failures:
            self._activity.problem = session.failures.pop(0)
            log(f"not kept: {self._activity.problem}")

    def _end_unstarted(self, entry: Progress, planned: Planned, reason: str) -> None:
        run, run_id = self.session.run(entry.suite_id), RunId.new()
        outcomes = [unmeasured("failed", f"the case did not start: {reason}")]
        self.session.publish(recording.record(planned.case, planned.preset, run, run_id, outcomes))

    def _supervisor(self, entry: Progress, left: Sequence[Planned]) -> Supervisor:
        """Return the supervisor of the run, which keeps its probed rates; drop those of other runs."""
        agenda = self._now.agenda
        self._supervisors = {name: one for name, one in self._supervisors.items() if agenda.is_under_way(name)}
        made = Supervisor(self.session, left, entry.suite_id, needs_all=True)
        return self._supervisors.setdefault(entry.suite_id, made)

    def end_interrupted(self, running: Running) -> None:
        """Publish the case during which the last service died as aborted, and skip it in this run.

        It may have killed the service.
        """
        outcome = unmeasured("aborted", DIED)
        run_id = RunId(uuid.uuid4().hex, running.t_wall, running.t_mono_ns)
        run = replace(self.session.run(running.suite_id), boot_id=running.boot_id, flags=())
        record = recording.record(running.case, running.preset, run, run_id, [outcome])
        self._skip(record)
        self.session.publish(record)

    def take_up(self, record: Record, body: bytes) -> None:
        """Publish a record that the last service only put into the journal before it died."""
        if record.reason == DIED:
            self._skip(record)
        self._now.publisher.publish(record, body)

    def _skip(self, record: Record) -> None:
        if self._now.agenda.is_under_way(record.suite_id):
            self._now.agenda.skip(record.suite_id, record.case_id)
