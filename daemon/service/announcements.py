"""What the service says of itself: who it is, how it is, what its status line reads, and what stands on the broker."""

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import msgspec

from benchd.daemon.config import DeviceConfig
from benchd.daemon.delivery.link import Link
from benchd.daemon.delivery.messages import Health, Info, SuiteInfo, wall_now
from benchd.daemon.delivery.outbox import Outbox
from benchd.daemon.delivery.topics import Topics
from benchd.daemon.machine.sysfs import text
from benchd.daemon.measuring.plan import Machine, Planned
from benchd.daemon.service import homeassistant
from benchd.daemon.service.agenda import Agenda, when
from benchd.daemon.service.schedule import Progress

LATEST = "latest"
MAX_GONE = 200  # cases that have left the plan and are still taken away


@dataclass
class Doing:
    """What the service is at: the case that runs, what a pass waits for, and what is wrong, None for nothing each."""

    running: tuple[Progress, Planned] | None = None
    waiting_for: str | None = None
    problem: str | None = None
    slower: str | None = None
    started_s: float = field(default_factory=time.monotonic)

    @property
    def problems(self) -> str | None:
        """Return all that is wrong."""
        return "; ".join(filter(None, (self.problem, self.slower))) or None

    @property
    def case_id(self) -> str | None:
        """Return the case that runs."""
        return self.running[1].case.case_id if self.running else None


def suites(agenda: Agenda) -> list[SuiteInfo]:
    """Return the suites and their cases."""
    return [SuiteInfo(name=suite.name, when=when(suite), cases=agenda.cases[suite.name]) for suite in agenda.suites]


def info(named: DeviceConfig, device_id: str, boot_id: str, machine: Machine, agenda: Agenda) -> Info:
    """Return who the device is, and what it measures on."""
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


def introduce(link: Link, topics: Topics, said: Info, known: Sequence[str], *, home_assistant: bool) -> list[str]:
    """Retain info and discovery, and take away what belongs to those of the `known` cases that have left the plan.

    Returns the cases to be known the next time. Those that have left stay among them: the broker may be away until the
    next start, and one that dies forgets what it was told.
    """
    link.retain(topics.of("info"), msgspec.json.encode(said))
    if home_assistant:
        link.retain(homeassistant.topic(topics.device_id), homeassistant.discovery(topics, said))
    planned = {case_id for suite in said.suites for case_id in suite.cases}
    gone = [case_id for case_id in known if case_id not in planned]
    for case_id in gone:
        link.retain(topics.latest(case_id), b"")
    return gone[-MAX_GONE:] + sorted(planned)


def health(doing: Doing, agenda: Agenda, device_id: str, link: Link | None, outbox: Outbox, state: Path) -> Health:
    """Return how the service is; `state` is its folder."""
    now_s = time.monotonic()
    counts, unstored = outbox.backlog()
    due = agenda.next_due(device_id)
    return Health(
        t_wall=wall_now(),
        uptime_s=round(now_s - doing.started_s, 1),
        rss_bytes=_rss_bytes(),
        activity="measuring" if doing.running else "waiting" if doing.waiting_for else "idle",
        case_id=doing.case_id,
        cases_left=sum(len(entry.left) for entry in agenda.state.passes),
        next_suite=due[0] if due else None,
        next_suite_in_s=round(due[1] - time.time(), 1) if due else None,
        waiting_for=doing.waiting_for,
        problem=doing.problems,
        outbox_pending=counts.pending,
        outbox_unstored=unstored,
        outbox_refused=counts.refused,
        outbox_bytes=outbox.used_bytes(),
        last_acknowledged_s=_since(link.seen.acknowledged_s if link else None, now_s),
        telemetry_dropped=link.seen.telemetry_dropped if link else 0,
        disk_free_bytes=shutil.disk_usage(state).free,
    )


def status_line(doing: Doing, link: Link | None) -> str:
    """Return what `systemctl status` shows."""
    parts = [f"measuring {doing.case_id}" if doing.running else doing.waiting_for or "idle"]
    parts += [doing.problems] if doing.problems else []
    parts += [] if link is None else ["mqtt up" if link.seen.connected else f"mqtt down: {link.seen.reason}"]
    return "; ".join(parts)


def _since(then_s: float | None, now_s: float) -> float | None:
    return None if then_s is None else round(now_s - then_s, 1)


def _rss_bytes() -> int:
    return int((text(Path("/proc/self/statm")) or "0 0").split()[1]) * os.sysconf("SC_PAGE_SIZE")
