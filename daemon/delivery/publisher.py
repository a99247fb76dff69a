"""The service's sink: a record and the schedule in one commit, and the link held while a case is timed."""

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from benchd.daemon.agenda import Agenda
from benchd.daemon.delivery.link import Link
from benchd.daemon.delivery.messages import Event, latest, wall_now
from benchd.daemon.delivery.outbox import Full, Outbox
from benchd.daemon.delivery.room import Reserve
from benchd.daemon.delivery.topics import RESULT_QOS, Topics
from benchd.daemon.lock import Activity
from benchd.daemon.plan import Planned
from benchd.daemon.protocol import StageName
from benchd.daemon.records import Case, Record

SCHEDULE, RUNNING = "schedule", "running"
TIMED: tuple[StageName, ...] = ("warm_up", "measure")


class Running(Struct, frozen=True):
    """The case that runs, kept on the disk so that a service that died with it can say so."""

    suite_id: str
    case: Case
    preset: str
    boot_id: str
    t_wall: str
    t_mono_ns: int


class Publisher:
    """Takes records and events. `link` is None where no broker is configured; then nothing but the schedule is kept.

    While a case runs `activity` says so, for `bench-once` of any user to read.
    """

    def __init__(
        self, outbox: Outbox, reserve: Reserve, topics: Topics, boot_id: str, agenda: Agenda, activity: Path
    ) -> None:
        self.link: Link | None = None
        self.topics = topics
        self.planned_cases: set[str] = set()
        self.timed = False
        self._outbox, self._reserve, self._boot_id = outbox, reserve, boot_id
        self._agenda, self._activity = agenda, activity
        self._begun_s = time.monotonic()
        self._suite_id = ""

    def begin(self, plan: Sequence[Planned]) -> None:
        """Keep what runs next, so that a crash is known to have happened in it."""
        self._begun_s = time.monotonic()
        (planned,) = plan
        running = Running(self._suite_id, planned.case, planned.preset, self._boot_id, wall_now(), time.monotonic_ns())
        self._outbox.keep({RUNNING: msgspec.json.encode(running)})
        with suppress(OSError):  # for information only, on a file system of its own
            self._activity.write_bytes(
                msgspec.json.encode(Activity(planned.case.case_id, time.monotonic() + planned.seconds))
            )
            self._activity.chmod(0o644)

    def of_suite(self, suite_id: str) -> None:
        """Take note of the pass that the next case belongs to."""
        self._suite_id = suite_id

    def stage(self, planned: Planned, process: int, stage: StageName) -> None:
        """Hold the link while the case warms up and is timed."""
        self._hold(stage in TIMED)

    def publish(self, record: Record, body: bytes) -> None:
        """Commit the record and the schedule, then let the link send it; on a full disk by means of the reserve."""
        self._hold(False)
        state = self._agenda.after(record, time.monotonic() - self._begun_s)
        kept = {SCHEDULE: msgspec.json.encode(state), RUNNING: b""}
        self._commit(record.key, self.topics.result(record.run_id), body, kept)
        self._agenda.state = state
        if self.link and record.case_id in self.planned_cases:
            self.link.retain(self.topics.latest(record.case_id), msgspec.json.encode(latest(record)))

    def end(self) -> None:
        """Let the link send again, however the case ended."""
        self._hold(False)
        self._activity.unlink(missing_ok=True)

    def _hold(self, timed: bool) -> None:
        self.timed = timed
        if self.link:
            self.link.hold() if timed else self.link.release()

    def event(self, name: str, detail: str) -> None:
        """Publish something that happened."""
        event = Event(event=name, detail=detail, t_wall=wall_now(), boot_id=self._boot_id)
        key = f"{self.topics.device_id}:event:{self._boot_id}:{time.monotonic_ns()}"
        self._commit(key, self.topics.of("event"), msgspec.json.encode(event), {})

    def _commit(self, key: str, topic: str, body: bytes, kept: dict[str, bytes]) -> None:
        try:
            self._add(key, topic, body, kept)
        except Full:
            self._reserve.release()
            self._add(key, topic, body, kept)
        if self.link:
            self.link.poke()

    def _add(self, key: str, topic: str, body: bytes, kept: dict[str, bytes]) -> None:
        if self.link:
            self._outbox.add(key, topic, RESULT_QOS, body, kept)
        else:
            self._outbox.keep(kept)


def read_running(outbox: Outbox) -> Running | None:
    """Return the case during which the last service died."""
    body = outbox.kept(RUNNING)
    return msgspec.json.decode(body, type=Running) if body else None
