"""State shared by the parts of the service: folders, stored facts, current activity, configuration."""

import os
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from benchd.daemon.config import Config
from benchd.daemon.delivery.disk_reserve import Clock, Reserve
from benchd.daemon.delivery.outbox import Message, Outbox
from benchd.daemon.delivery.sinks import JournalSink
from benchd.daemon.delivery.topics import Topics
from benchd.daemon.errors import UsageError
from benchd.daemon.machine import folders
from benchd.daemon.machine.lock import OWN, ServiceLock
from benchd.daemon.machine.systemd_notify import Notifier
from benchd.daemon.measuring.plan import Machine
from benchd.daemon.service.agenda import Agenda
from benchd.daemon.service.announcements import ServiceActivity
from benchd.daemon.service.conditions import Judge
from benchd.daemon.service.publisher import Publisher
from benchd.daemon.service.regressions import Regressions


@dataclass(frozen=True)
class Places:
    """The folders of the service's state and current activity: systemd's, else the XDG ones."""

    state: Path
    runtime: Path

    @classmethod
    def here(cls) -> "Places":
        """Return the folders, created if absent; raise UsageError if that fails."""
        state = folders.state()
        places = cls(state, Path(os.environ.get("RUNTIME_DIRECTORY") or state))
        try:
            for folder in (places.state, places.runtime):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot create the state folder {state}: {error.strerror}") from error
        return places


class Every:
    """Rate limits for periodic tasks: the last time of each."""

    def __init__(self) -> None:
        self._done_s: dict[str, float] = {}

    def is_due(self, name: str, period_s: float) -> bool:
        """Return whether the last time is at least `period_s` ago, and record this one if so."""
        now_s = time.monotonic()
        if now_s - self._done_s.get(name, -period_s) < period_s:
            return False
        self._done_s[name] = now_s
        return True


@dataclass(frozen=True)
class Base:
    """Facts that do not change during the service's lifetime."""

    places: Places
    boot_id: str
    reserve: Reserve
    outbox: Outbox
    journal: JournalSink
    notifier: Notifier = field(default_factory=Notifier)
    owed: list[Message] = field(default_factory=list)
    """Results that a full disk has kept from the outbox: they outlive a configuration."""

    activity: ServiceActivity = field(default_factory=ServiceActivity)
    every: Every = field(default_factory=Every)
    judge: Judge = field(default_factory=Judge)
    clock: Clock = field(default_factory=Clock)

    @cached_property
    def lock(self) -> ServiceLock:
        """The hold on the machine, which remembers across configurations since when each run waits for it."""
        return ServiceLock(self.places.runtime / OWN)


@dataclass(frozen=True)
class Configured:
    """State derived from the configuration, and rebuilt with it."""

    settings: Config
    machine: Machine
    topics: Topics
    agenda: Agenda
    regressions: Regressions
    publisher: Publisher
