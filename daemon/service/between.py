"""Background work, idle or during a case: commands, events, health, telemetry, the watchdog, the disk.

While a case is timed, only the connection's keep-alive, health and telemetry are written.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec

from benchd.daemon.delivery.commands import Gate
from benchd.daemon.delivery.disk_reserve import tidy
from benchd.daemon.delivery.messages import Deployed, Health, Telemetry
from benchd.daemon.errors import UsageError
from benchd.daemon.machine.systemd_notify import log
from benchd.daemon.measuring.session import Session
from benchd.daemon.service import announcements, prometheus
from benchd.daemon.service.parts import Base, Configured
from benchd.daemon.service.publisher import SCHEDULE
from benchd.daemon.service.remote import COMMANDS, Remote

WATCHDOG_S = 5.0
HEALTH_S = 30.0
TELEMETRY_S = 1.0
TIDY_S = 3600.0
PROMETHEUS_S = 60.0
MANY_CPUS = 3  # with fewer, telemetry would run beside a CPU case on its own cores


class Between:
    """Handles everything except the cases; `ask_reload`, which may raise BenchdError, serves the command.

    `deployed` returns what is known of the shipped folders.
    """

    def __init__(self, base: Base, now: Configured, ask_reload: Callable[[], None]) -> None:
        self._base, self._now, self._activity, self._every = base, now, base.activity, base.every
        self._link = now.publisher.link
        self._saved: dict[str, bytes] = {}
        self._status = ""
        self.deployed: Callable[[], list[Deployed]] = list
        gate = Gate(now.topics, now.settings.mqtt.commands)
        self._remote = Remote(self._link, gate, now.agenda, base.outbox, self.health, self.save, ask_reload)

    def attend(self, session: Session | None) -> str | None:
        """Process what arrived; return why the running case must end, else None."""
        timed = session is not None and self._now.publisher.timed
        self._remote.listen()
        self._remote.carry_out(timed=timed)
        if not timed:
            self.publish_events()
        if session:
            self._publish_telemetry(session, timed=timed)
        if self._every.is_due("health", HEALTH_S):
            self.publish_health()
        if not session:
            self._keep_house()
        self.feed_watchdog()
        running = self._activity.running
        cancelled = running is not None and not self._now.agenda.is_under_way(running[0].suite_id)
        return "cancelled by a command" if cancelled else None

    def event(self, name: str, detail: str) -> None:
        """Publish an event."""
        try:
            self._now.publisher.event(name, detail)
        except UsageError as error:
            log(f"event not stored: {error}")

    def publish_events(self) -> None:
        """Publish what the connection and the outbox have reported."""
        for lost in self._base.outbox.take_lost():
            self.event("state_lost", lost)
        while self._link and self._link.seen.events:
            self.event(*self._link.seen.events.popleft())

    def _publish_telemetry(self, session: Session, *, timed: bool) -> None:
        """Send the sensors' last samples, never during a CPU case that uses all cores."""
        crowded = self._now.machine.device == "cpu" and (os.cpu_count() or 1) < MANY_CPUS
        if self._link is None or self._now.settings.mqtt.telemetry == "off" or (timed and crowded):
            return
        samples = session.latest_samples() if self._every.is_due("telemetry", TELEMETRY_S) else []
        case_id = self._activity.case_id
        if samples and case_id:
            self._link.telemetry(msgspec.json.encode(Telemetry(case_id=case_id, samples=samples)))

    def health(self) -> Health:
        """Return the service's health."""
        base, now = self._base, self._now
        device_id = now.topics.device_id
        return announcements.health(self._activity, now.agenda, device_id, self._link, base.outbox, base.places.state)

    def publish_health(self) -> None:
        """Publish the service's health, retained."""
        if self._link:
            self._link.retain(self._now.topics.of("health"), msgspec.json.encode(self.health()))

    def _keep_house(self) -> None:
        if self._every.is_due("tidy", TIDY_S):
            self._limit_what_is_old()
            self.save()
        path = self._now.settings.service.prometheus_file
        if path and self._every.is_due("prometheus", PROMETHEUS_S):
            try:
                prometheus.write(Path(path), self.health(), self.deployed())
            except OSError as error:
                log(f"prometheus_file {path}: {error.strerror}")

    def _limit_what_is_old(self) -> None:
        runs, now_s = self._base.places.state / "runs", self._base.clock.now_s()
        limits = [
            partial(self._base.journal.put_away, runs, now_s),
            partial(tidy, runs, now_s),
            partial(self._base.outbox.forget_sent, now_s),  # undelivered messages are not touched
        ]
        for limit in limits:
            with _logging_failures():
                limit()

    def feed_watchdog(self) -> None:
        """Report to systemd that loop, outbox and connection are alive; a worker has its own deadline."""
        status = announcements.status_line(self._activity, self._link)
        if status != self._status:
            self._base.notifier.status(status)
            self._status = status
        is_alive = self._link is None or self._link.is_alive()
        if self._every.is_due("watchdog", WATCHDOG_S) and is_alive and self._base.outbox.is_writable():
            self._base.notifier.watchdog()

    def save(self) -> None:
        """Store the schedule and the ids of commands if they have changed."""
        now = {SCHEDULE: msgspec.json.encode(self._now.agenda.state), COMMANDS: self._remote.remembered()}
        changed = {name: value for name, value in now.items() if self._saved.get(name) != value}
        if not changed or self.attempt(lambda: self._now.publisher.keep(changed)):
            self._saved = now

    def attempt(self, write: Callable[[], None]) -> bool:
        """Write facts that the service can do without; return whether that succeeded."""
        try:
            write()
        except UsageError as error:  # a full disk, which the next check reports
            log(f"not kept: {error}")
            return False
        return True


@contextmanager
def _logging_failures() -> Iterator[None]:
    """Log a failure and go on: on a full disk the next step may free space."""
    try:
        yield
    except (OSError, UsageError) as error:
        log(f"old files not removed: {error}")
