"""Background work while idle or during a case: commands, events, health, telemetry, watchdog, disk.

While a case is timed, only the connection's keep-alive, health and telemetry are sent.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from benchd.daemon.delivery import disk
from benchd.daemon.delivery.link import Link
from benchd.daemon.delivery.log import ARCHIVES
from benchd.daemon.delivery.messages import Telemetry
from benchd.daemon.errors import UsageError
from benchd.daemon.machine.systemd_notify import log
from benchd.daemon.measuring.session import INTERRUPTED
from benchd.daemon.service import announcements, prometheus, remote
from benchd.daemon.service.state import State

WATCHDOG_S = 5.0
HEALTH_S = 30.0
TELEMETRY_S = 1.0
TIDY_S = 3600.0
PROMETHEUS_S = 60.0
MANY_CPUS = 3  # with fewer, telemetry would run on the same cores as a CPU case


def attend(state: State) -> str | None:
    """Process arrived commands and signals; return why the running case must end, or None."""
    if state.stop_asked:  # a signal that arrived before the session handled signals also ends the case
        return INTERRUPTED
    if state.link:
        remote.listen(state, state.link)
    remote.carry_out(state)
    if not state.is_timed:
        _publish_events(state, state.link)
    _publish_telemetry(state)
    if state.every.is_due("health", HEALTH_S):
        announcements.publish_health(state)
    feed_watchdog(state)
    is_cancelled = state.running is not None and not state.agenda.is_under_way(state.running[0].suite_id)
    return "cancelled by a command" if is_cancelled else None


def hear(state: State, link: Link) -> None:
    """Process the commands that a connection received before it ended."""
    remote.listen(state, link)
    _publish_events(state, link)


def _publish_events(state: State, link: Link | None) -> None:
    """Publish the events reported by the logs and the connection."""
    while state.damaged:
        state.event("line_damaged", state.damaged.popleft())
    while link and link.state.events:
        state.event(*link.state.events.popleft())


def _publish_telemetry(state: State) -> None:
    """Send the sensors' last samples during a case, but not while a case that uses all CPU cores is timed."""
    crowded = state.machine.device == "cpu" and (os.cpu_count() or 1) < MANY_CPUS
    if not (state.link and state.case_id) or state.settings.mqtt.telemetry == "off" or (state.is_timed and crowded):
        return
    samples = state.session.latest_samples() if state.every.is_due("telemetry", TELEMETRY_S) else []
    if samples:
        state.link.telemetry(msgspec.json.encode(Telemetry(case_id=state.case_id, samples=samples)))


def feed_watchdog(state: State) -> None:
    """Report to systemd that the loop and the connection are alive; a worker has its own deadline."""
    state.show(announcements.status_line(state))
    is_alive = state.link is None or state.link.is_alive()
    if state.every.is_due("watchdog", WATCHDOG_S) and is_alive:
        state.notifier.watchdog()


def keep_house(state: State) -> None:
    """Limit old files and write the file for Prometheus; called between two cases."""
    if state.every.is_due("tidy", TIDY_S):
        limit_what_is_old(state)
        state.attempt_save()
    path = state.settings.service.prometheus_file
    if path and state.every.is_due("prometheus", PROMETHEUS_S):
        try:
            shipped = [folder.published for folder in state.facts.shipped.values()]
            prometheus.write(Path(path), announcements.health(state), shipped)
        except OSError as error:
            log(f"prometheus_file {path}: {error.strerror}")


def limit_what_is_old(state: State) -> None:
    """Rotate full logs, and delete old files except those with lines that have not been acknowledged by a broker."""
    undelivered: set[Path] = set()
    with _logging_failures():
        for journal in (state.records, state.events):
            journal.rotate()
        for outgoing in state.link.delivery.outgoing.values() if state.link else ():
            undelivered |= outgoing.log.archived(outgoing.acknowledged)
    with _logging_failures():
        disk.tidy(state.folder / ARCHIVES, disk.file_time_s(state.booted_s), undelivered=undelivered)


@contextmanager
def _logging_failures() -> Iterator[None]:
    """Log a failure and continue: on a full disk, the next step may free space."""
    try:
        yield
    except (OSError, UsageError) as error:
        log(f"old files not removed: {error}")
