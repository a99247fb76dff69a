"""The service's state: its facts, its configuration, and its current activity."""

import signal
import time
from collections import deque
from pathlib import Path
from socket import socket
from types import FrameType

import msgspec

from benchd.daemon.config import Config
from benchd.daemon.delivery.commands import Command, Gate
from benchd.daemon.delivery.link import Link
from benchd.daemon.delivery.log import Log
from benchd.daemon.delivery.messages import Event, Judgement
from benchd.daemon.delivery.topics import Topics
from benchd.daemon.errors import UsageError
from benchd.daemon.machine import identity
from benchd.daemon.machine.systemd_notify import Notifier, log
from benchd.daemon.measuring.plan import Machine, PlannedCase
from benchd.daemon.measuring.session import Session
from benchd.daemon.measuring.supervisor import Supervisor
from benchd.daemon.records import Record, wall_now
from benchd.daemon.service.agenda import Agenda
from benchd.daemon.service.conditions import Judge
from benchd.daemon.service.facts import STATE, FactsFile
from benchd.daemon.service.schedule import StartedSuite
from benchd.daemon.verdicts.alarms import Budget
from benchd.daemon.verdicts.results import JOURNAL

EVENTS = "events.jsonl"


class RateLimits:
    """Rate limits for periodic tasks: the last time that each one ran."""

    def __init__(self) -> None:
        self._done_s: dict[str, float] = {}

    def is_due(self, name: str, period_s: float) -> bool:
        """Return whether the task last ran at least `period_s` ago, and record this run if so."""
        now_s = time.monotonic()
        if now_s - self._done_s.get(name, -period_s) < period_s:
            return False
        self._done_s[name] = now_s
        return True


class State:
    """The state of a service with the configuration at `path`; `folder` contains its logs and `state.json`.

    `facts` survive a restart. Signals and commands only set `stop_asked` and `reload_asked`, which the loop acts on.
    """

    woken: socket
    wake: socket
    """A byte sent here, by a signal or the link, wakes the loop, which waits on `woken`."""

    # set by the configuration; without a broker there is no link
    settings: Config
    machine: Machine
    agenda: Agenda
    budget: Budget
    topics: Topics
    gate: Gate
    session: Session
    link: Link | None = None
    supervisors: dict[str, Supervisor]
    """The supervisors by run; they keep its probed rates."""

    environment: str = ""
    """The fingerprint of the machine for which shipped folders are verified."""

    def __init__(self, path: Path, folder: Path, artifacts: Path | None = None) -> None:
        self.path, self.folder, self.artifacts = path, folder, artifacts
        self.boot_id, self.started_s = identity.boot_id(), time.monotonic()
        self.booted_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        self.notifier, self.every, self.judge = Notifier(), RateLimits(), Judge()
        self.damaged = deque[str]()  # damaged lines reported by the logs, still to be published
        self.records, self.events = (Log(folder / name, self.damaged.append) for name in (JOURNAL, EVENTS))
        self.file = FactsFile(folder / STATE)
        self.facts = self.file.now
        self.owed: list[tuple[Record, bytes]] = []  # records that a full disk has not stored
        self.commands = deque[Command]()
        self.stop_asked = self.reload_asked = self.is_timed = False
        self.running: tuple[StartedSuite, PlannedCase] | None = None
        self.waiting_for: str | None = None
        self.problem: str | None = None
        # start of the first process, or time of the last record of cases measured in rounds
        self.since_s: float | None = None
        self.verify_from_s = 0.0
        self._status = self._unsaved = ""

    def close(self) -> None:
        """Close the logs."""
        self.records.close()
        self.events.close()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if number == signal.SIGHUP:
            self.reload_asked = True
        else:
            self.stop_asked = True

    @property
    def is_stopping(self) -> bool:
        """Return whether a signal has arrived, here or in the session."""
        return self.stop_asked or self.session.interrupted

    @property
    def case_id(self) -> str | None:
        """Return the running case."""
        return self.running[1].case.case_id if self.running else None

    def hold(self, *, timed: bool) -> None:
        """Hold the link while a case is timed."""
        self.is_timed = timed
        if self.link:
            self.link.is_held = timed

    def retain(self, topic: str, message: msgspec.Struct) -> None:
        """Retain a message on the broker, if there is one."""
        if self.link:
            self.link.retain(topic, msgspec.json.encode(message))

    def event(self, name: str, detail: str, judgement: Judgement | None = None) -> None:
        """Publish an event."""
        log(f"{name}: {detail}")
        event = Event(event=name, detail=detail, judgement=judgement, t_wall=wall_now(), boot_id=self.boot_id)
        try:
            self.events.append(msgspec.json.encode(event))
        except UsageError as error:
            log(f"event not stored: {error}")

    def save(self) -> None:
        """Store the facts if they have changed; raise UsageError, or Full, if that fails."""
        self.facts.commands = self.gate.remembered(command.id for command in self.commands)
        self.file.save()

    def attempt_save(self) -> None:
        """Store the facts; if the disk is full, which the next check reports, they stay in memory."""
        try:
            self.save()
            self._unsaved = ""
        except UsageError as error:
            if str(error) != self._unsaved:  # logged once, not at every attempt
                log(f"not kept: {error}")
            self._unsaved = str(error)

    def show(self, status: str) -> None:
        """Set the status line of `systemctl status`."""
        if status != self._status:
            self.notifier.status(status)
            self._status = status
