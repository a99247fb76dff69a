"""What the service reports about itself: identity, health, status line, and what it retains on the broker."""

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from benchd.daemon.config import DeviceConfig
from benchd.daemon.delivery.link import Link
from benchd.daemon.delivery.messages import Health, Info, SuiteInfo
from benchd.daemon.delivery.outbox import Outbox
from benchd.daemon.machine.sysfs import text
from benchd.daemon.measuring.plan import Machine, Planned
from benchd.daemon.records import wall_now
from benchd.daemon.service.agenda import Agenda, when
from benchd.daemon.service.schedule import Progress

LATEST = "latest"
ANNOUNCED = "announced"
MAX_GONE = 200  # cases, folders or device ids that have left the configuration and are still cleared on the broker


@dataclass
class ServiceActivity:
    """What the service is doing: the running case, what a run waits for, and what is wrong; each may be None.

    `closed` is why it may not open the machine's GPU.
    """

    running: tuple[Progress, Planned] | None = None
    waiting_for: str | None = None
    problem: str | None = None
    slower: str | None = None
    closed: str | None = None
    started_s: float = field(default_factory=time.monotonic)

    @property
    def problems(self) -> str | None:
        """Return all problems."""
        return "; ".join(filter(None, (self.problem, self.closed, self.slower))) or None

    @property
    def case_id(self) -> str | None:
        """Return the running case."""
        return self.running[1].case.case_id if self.running else None


def suites(agenda: Agenda) -> list[SuiteInfo]:
    """Return the suites and their cases."""
    return [SuiteInfo(name=suite.name, when=when(suite), cases=agenda.cases[suite.name]) for suite in agenda.suites]


def info(named: DeviceConfig, device_id: str, boot_id: str, machine: Machine, agenda: Agenda) -> Info:
    """Return the device's identity and what it measures on."""
    return Info(
        device_id=device_id,
        boot_id=boot_id,
        name=named.name,
        site=named.site,
        tags=named.tags,
        tool_version=version("benchd"),
        environment=machine.environment(),
        suites=suites(agenda),
        catalogue_sha256=agenda.digest,
        t_wall=wall_now(),
    )


def clear_gone(link: Link, topic_of: Callable[[str], str], known: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Clear the topics of names in `known` that are no longer wanted; return the names to pass as `known` next time.

    Those that have left remain known: the broker may be unreachable until the next start, or may crash and lose the
    update.
    """
    gone = [name for name in known if name not in wanted]
    for name in gone:
        link.retain(topic_of(name), b"")
    return [*gone[-MAX_GONE:], *wanted]


def health(
    activity: ServiceActivity, agenda: Agenda, device_id: str, link: Link | None, outbox: Outbox, state: Path
) -> Health:
    """Return the service's health; `state` is its folder."""
    now_s = time.monotonic()
    free_bytes, gone = _free(state)
    problems = activity.problems or ""
    counts, unstored = outbox.backlog()
    due = agenda.next_due(device_id)
    acknowledged_s = link.seen.acknowledged_s if link else None
    return Health(
        t_wall=wall_now(),
        uptime_s=round(now_s - activity.started_s, 1),
        rss_bytes=int((text(Path("/proc/self/statm")) or "0 0").split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        activity="measuring" if activity.running else "waiting" if activity.waiting_for else "idle",
        case_id=activity.case_id,
        cases_left=sum(len(entry.left) for entry in agenda.state.passes),
        next_suite=due[0] if due else None,
        next_suite_in_s=round(due[1] - time.time(), 1) if due else None,
        waiting_for=activity.waiting_for,
        problem="; ".join(filter(None, (problems, *_of_disk(problems, gone, link)))) or None,
        outbox_pending=counts.pending,
        outbox_unstored=unstored,
        outbox_refused=counts.refused,
        outbox_bytes=outbox.used_bytes(),
        last_acknowledged_s=None if acknowledged_s is None else round(now_s - acknowledged_s, 1),
        telemetry_dropped=link.seen.telemetry_dropped if link else 0,
        disk_free_bytes=free_bytes,
    )


def status_line(activity: ServiceActivity, link: Link | None) -> str:
    """Return what `systemctl status` shows."""
    parts = [f"measuring {activity.case_id}" if activity.running else activity.waiting_for or "idle"]
    parts += [activity.problems] if activity.problems else []
    parts += [] if link is None else ["mqtt up" if link.seen.connected else f"mqtt down: {link.seen.reason}"]
    return "; ".join(parts)


def _of_disk(problems: str, gone: str | None, link: Link | None) -> list[str]:
    """Return what is wrong with the disk beside what the problems say of it."""
    unwritable = link.seen.unwritable if link and link.seen.connected else None
    found = [gone, f"degraded:outbox: nothing is delivered: {unwritable}" if unwritable else None]
    return [] if "degraded:disk" in problems else [one for one in found if one]


def _free(state: Path) -> tuple[int, str | None]:
    """Return how much space the state folder's disk has, and why that cannot be known, if it cannot."""
    try:
        return shutil.disk_usage(state).free, None
    except OSError as error:
        return 0, f"degraded:disk: {state}: {error.strerror}"
