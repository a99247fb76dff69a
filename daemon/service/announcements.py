"""The service's reports about itself: identity, health, status line and retained messages."""

import os
import shutil
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

from benchd.daemon.delivery.link import Link
from benchd.daemon.delivery.messages import Health, Info, SuiteInfo
from benchd.daemon.machine.sysfs import text
from benchd.daemon.records import wall_now
from benchd.daemon.service import homeassistant, regressions
from benchd.daemon.service.agenda import Agenda, when
from benchd.daemon.service.state import State

MAX_GONE = 200  # maximum number of topics, no longer configured, that are still cleared on the broker


def suites(agenda: Agenda) -> list[SuiteInfo]:
    """Return the suites and their cases."""
    return [SuiteInfo(name=suite.name, when=when(suite), cases=agenda.cases[suite.name]) for suite in agenda.suites]


def info(state: State) -> Info:
    """Return the device's identity and the hardware on which it measures."""
    device = state.settings.device
    return Info(
        device_id=state.topics.device_id,
        boot_id=state.boot_id,
        name=device.name,
        site=device.site,
        tags=device.tags,
        tool_version=version("benchd"),
        environment=state.machine.environment(),
        suites=suites(state.agenda),
        catalogue_sha256=state.agenda.digest,
        t_wall=wall_now(),
    )


def introduce(state: State) -> None:
    """Retain the service's identity and the state of its shipped folders, and clear topics no longer configured."""
    if not state.link:
        return
    topics, introduction = state.topics, info(state)
    state.retain(topics.of("info"), introduction)
    shipped = [folder.called for folder in state.settings.shipped]
    wanted = [*map(topics.latest, sorted(state.agenda.planned)), *map(topics.shipped, shipped)]
    if state.settings.mqtt.home_assistant:
        discovery = homeassistant.topic(topics.device_id)
        state.link.retain(discovery, homeassistant.discovery(topics, introduction, shipped))
        wanted.append(discovery)
    state.facts.retained = clear_gone(state.link, state.facts.retained, wanted)
    for name, known in state.facts.shipped.items():
        state.retain(topics.shipped(name), known.published)


def clear_gone(link: Link, known: Sequence[str], wanted: Iterable[str]) -> list[str]:
    """Clear the topics in `known` that are no longer wanted; return the topics to pass as `known` next time.

    Cleared topics remain known, because the broker may be unreachable until the next start, or may crash and lose the
    update.
    """
    now = dict.fromkeys(wanted)
    gone = [topic for topic in known if topic not in now]
    for topic in gone:
        link.retain(topic, b"")
    return [*gone[-MAX_GONE:], *now]


def problems(state: State) -> list[str]:
    """Return the problems of the service itself, excluding its disk and connection."""
    return list(filter(None, (state.problem, state.machine.closed_gpu, regressions.problem(state.facts.standings))))


def health(state: State) -> Health:
    """Return the service's health."""
    link, now_s = state.link, time.monotonic()
    free_bytes, gone = _free(state.folder)
    is_full = (state.problem or "").startswith("degraded:disk")
    wrong = [*problems(state), None if is_full else gone, link.problem() if link else None]
    due = state.agenda.next_due(state.topics.device_id)
    acknowledged_s = link.state.acknowledged_s if link else None
    return Health(
        t_wall=wall_now(),
        uptime_s=round(now_s - state.started_s, 1),
        rss_bytes=int((text(Path("/proc/self/statm")) or "0 0").split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        activity="measuring" if state.running else "waiting" if state.waiting_for else "idle",
        case_id=state.case_id,
        cases_left=sum(len(entry.left) for entry in state.agenda.runs),
        next_suite=due[0] if due else None,
        next_suite_in_s=round(due[1] - state.agenda.time_s(time.time()), 1) if due else None,
        waiting_for=state.waiting_for,
        problem="; ".join(filter(None, wrong)) or None,
        log=state.records.id,
        first_seq=state.records.first_seq(),
        last_seq=state.records.last_seq,
        event_log=state.events.id,
        event_first_seq=state.events.first_seq(),
        event_last_seq=state.events.last_seq,
        pending=link.delivery.pending if link else 0,
        refused=len(link.delivery.refused) if link else 0,
        last_acknowledged_s=None if acknowledged_s is None else round(now_s - acknowledged_s, 1),
        telemetry_dropped=link.state.telemetry_dropped if link else 0,
        disk_free_bytes=free_bytes,
    )


def publish_health(state: State) -> None:
    """Retain the service's health."""
    if state.link:
        state.retain(state.topics.of("health"), health(state))


def status_line(state: State) -> str:
    """Return the line for `systemctl status`."""
    parts = [f"measuring {state.case_id}" if state.running else state.waiting_for or "idle", *problems(state)]
    if link := state.link:
        parts += ["mqtt up" if link.state.connected else f"mqtt down: {link.state.reason}"]
        parts += filter(None, [link.problem()])
    return "; ".join(parts)


def _free(folder: Path) -> tuple[int, str | None]:
    """Return the free space on a folder's disk, or why it is unknown."""
    try:
        return shutil.disk_usage(folder).free, None
    except OSError as error:
        return 0, f"degraded:disk: {folder}: {error.strerror}"
