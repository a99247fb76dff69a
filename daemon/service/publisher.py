"""The service's sink: a record and the schedule in one commit, and the link held while a case is timed."""

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from benchd.daemon.delivery.disk_reserve import Reserve
from benchd.daemon.delivery.link import Link
from benchd.daemon.delivery.messages import Event, latest
from benchd.daemon.delivery.outbox import JOURNALLED, Message, Outbox
from benchd.daemon.delivery.topics import RESULT_QOS, Topics
from benchd.daemon.machine.lock import Activity
from benchd.daemon.machine.systemd_notify import log
from benchd.daemon.measuring.plan import Planned
from benchd.daemon.measuring.protocol import StageName
from benchd.daemon.measuring.recording import RunId
from benchd.daemon.measuring.session import Sink
from benchd.daemon.records import Case, Record, wall_now
from benchd.daemon.service.agenda import Agenda
from benchd.daemon.service.regressions import Notice, Regressions, Standing, Update, again_in_s

SCHEDULE, RUNNING, STANDINGS = "schedule", "running", "standings"
TIMED: tuple[StageName, ...] = ("warm_up", "measure")


class Running(Struct, frozen=True):
    """The running case, stored on disk so that the next service can report that its predecessor died in it."""

    suite_id: str
    case: Case
    preset: str
    boot_id: str
    t_wall: str
    t_mono_ns: int


class Publisher(Sink):
    """Takes records and events. Without a configured broker `link` is None, and only the service's facts are stored.

    A result that the outbox cannot take is `owed`, and committed with the next one.
    While a case runs, the file `activity` names it, readable for any user's `bench-once`.
    """

    def __init__(
        self,
        outbox: Outbox,
        reserve: Reserve,
        topics: Topics,
        boot_id: str,
        agenda: Agenda,
        regressions: Regressions,
        activity: Path,
        owed: list[Message],
    ) -> None:
        self.link: Link | None = None
        self.topics = topics
        self.planned_cases: set[str] = set()
        self.timed = False
        self._outbox, self._reserve, self._boot_id = outbox, reserve, boot_id
        self._agenda, self._regressions, self._activity = agenda, regressions, activity
        self._since_s: float | None = None  # the first process, or the last record of those measured in rounds
        self._owed = owed

    def begin_case(self, suite_id: str, planned: Planned, run_id: RunId, most_s: float) -> None:
        """Store the case whose process is next, so that a crash can be attributed to it.

        `most_s` is how long it and those measured in rounds with it may take.
        """
        self._since_s = self._since_s or time.monotonic()
        began = run_id.t_wall, run_id.t_mono_ns
        self.keep(
            {RUNNING: msgspec.json.encode(Running(suite_id, planned.case, planned.preset, self._boot_id, *began))}
        )
        with suppress(OSError):  # informational only, and on a separate file system
            ends_s = run_id.t_mono_ns / 1e9 + most_s
            self._activity.write_bytes(msgspec.json.encode(Activity(planned.case.case_id, ends_s)))
            self._activity.chmod(0o644)

    def stage(self, planned: Planned, process: int, stage: StageName, percent: int | None = None) -> None:
        """Hold the link while the case warms up and is timed."""
        self._hold(stage in TIMED)

    def publish(self, record: Record, body: bytes) -> None:
        """Commit the record, its consequences and the schedule, then let the link send it.

        A full disk uses the reserve.
        """
        self._hold(False)
        update = self._update(record)
        in_s = again_in_s(update.standings.get(record.case_id, Standing()), record)
        again_s = None if in_s is None else time.time() + in_s
        now_s = time.monotonic()
        spent_s, self._since_s = now_s - (self._since_s or now_s), now_s
        state = self._agenda.after(record, spent_s, again_s)
        self._owed.append(Message(record.key, self.topics.result(record.run_id), RESULT_QOS, body))
        facts = {SCHEDULE: msgspec.json.encode(state), RUNNING: b""}
        is_unread = self.link and self._outbox.kept(JOURNALLED) == b""  # the next start reads the whole journal
        facts |= {} if is_unread else {JOURNALLED: record.run_id.encode()}
        self._apply(update, facts, *self._owed)
        self._owed.clear()
        self._agenda.state = state
        if self.link and record.case_id in self.planned_cases:
            shown = latest(record, update.judgement)
            self.link.retain(self.topics.latest(record.case_id), msgspec.json.encode(shown))

    def adopt(self, results: Sequence[Message], run_id: str) -> None:
        """Commit results that are in the journal up to this one."""
        self._owed += results
        self._commit(self._owed, {JOURNALLED: run_id.encode()})
        self._owed.clear()

    def _update(self, record: Record) -> Update:
        """Return the consequences of a result; cases listed in a command do not count as results of the plan."""
        if record.case_id in self.planned_cases and self._agenda.is_of_suite(record.suite_id):
            return self._regressions.after(record)
        return Update(self._regressions.standings)

    def plan(self, case_ids: Collection[str]) -> None:
        """Set the planned cases: they have a `latest`, and regressions of other cases are cleared."""
        self.planned_cases = set(case_ids)
        self._apply(self._regressions.of_plan(self.planned_cases), {})

    def _apply(self, update: Update, kept: Mapping[str, bytes], *results: Message) -> None:
        standings = msgspec.json.encode(update.standings)
        self._commit([*results, *map(self._event, update.notices)], {**kept, STANDINGS: standings})
        self._regressions.standings = update.standings

    def end(self) -> None:
        """Let the link send again, whatever the result of the case."""
        self._hold(False)
        self._since_s = None
        with suppress(OSError):
            self._activity.unlink(missing_ok=True)

    def _hold(self, timed: bool) -> None:
        self.timed = timed
        if self.link:
            self.link.hold() if timed else self.link.release()

    def keep(self, values: Mapping[str, bytes]) -> None:
        """Store facts of the service; a full disk uses the reserve."""
        self._commit([], values)

    def event(self, name: str, detail: str) -> None:
        """Publish an event."""
        self._commit([self._event(Notice(name, detail))], {})

    def _event(self, notice: Notice) -> Message:
        log(f"{notice.event}: {notice.detail}")
        event = Event(**notice._asdict(), t_wall=wall_now(), boot_id=self._boot_id)
        key = f"{self.topics.device_id}:event:{self._boot_id}:{time.monotonic_ns()}"
        return Message(key, self.topics.of("event"), RESULT_QOS, msgspec.json.encode(event))

    def _commit(self, messages: Sequence[Message], kept: Mapping[str, bytes]) -> None:
        self._reserve.write(lambda: self._outbox.add_all(messages if self.link else [], kept))
        if self.link:
            self.link.poke()
