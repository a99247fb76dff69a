"""`benchd run`: the long-lived service. It begins what is due and measures one case at a time.

Signals only set flags. What comes in between is dealt with in `_attend`, idle or while a case runs; while one is timed
nothing is written but the connection's keep-alive, health and telemetry.
"""

import os
import select
import signal
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import TypeVar

import msgspec

from benchd.daemon import config
from benchd.daemon.config import Conditions, Config
from benchd.daemon.delivery.broker import configured, parse_url
from benchd.daemon.delivery.commands import Gate
from benchd.daemon.delivery.disk_reserve import Clock, Reserve, tidy
from benchd.daemon.delivery.link import Identity, Link
from benchd.daemon.delivery.messages import Health, Telemetry
from benchd.daemon.delivery.outbox import open_or_salvage
from benchd.daemon.delivery.sinks import JournalSink
from benchd.daemon.delivery.topics import Topics
from benchd.daemon.errors import BenchdError, NotAvailable, UsageError
from benchd.daemon.machine import folders, identity, lock
from benchd.daemon.machine.lock import Busy, MachineLock
from benchd.daemon.machine.signals import on_signals
from benchd.daemon.machine.systemd_notify import Notifier, log
from benchd.daemon.measuring import plan, recording
from benchd.daemon.measuring.plan import Planned
from benchd.daemon.measuring.protocol import Outcome
from benchd.daemon.measuring.recording import RunId
from benchd.daemon.measuring.session import Session, Settings
from benchd.daemon.measuring.supervisor import Supervisor
from benchd.daemon.records import ProcessResult
from benchd.daemon.service import announcements, conditions, prometheus
from benchd.daemon.service.agenda import Agenda
from benchd.daemon.service.announcements import Doing
from benchd.daemon.service.publisher import RUNNING, SCHEDULE, STANDINGS, Publisher, Running
from benchd.daemon.service.regressions import Regressions, Standing, Standings
from benchd.daemon.service.remote import COMMANDS, Remote
from benchd.daemon.service.schedule import Progress, State

TICK_S = 1.0
LOOK_S = 5.0  # between two looks at the schedule, the conditions and a lock that another holds
WATCHDOG_S = 5.0
HEALTH_S = 30.0
TELEMETRY_S = 1.0
TIDY_S = 3600.0
PROMETHEUS_S = 60.0
INSTANCE = "instance"
MANY_CPUS = 3  # with fewer, telemetry would run beside a CPU case on its own cores
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Kept = TypeVar("Kept")


@dataclass(frozen=True)
class Places:
    """Where the service keeps its state and says what it does: systemd's folders, else the XDG ones."""

    state: Path
    runtime: Path

    @classmethod
    def here(cls) -> "Places":
        """Return the folders, made where they are absent; raise UsageError where that fails."""
        state = folders.state()
        places = cls(state, Path(os.environ.get("RUNTIME_DIRECTORY") or state))
        try:
            for folder in (places.state, places.runtime):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"the state folder {state} cannot be made: {error.strerror}") from error
        return places


def run(path: Path, artifacts: Path | None = None) -> int:
    """Run the service with the configuration in `path` until a signal ends it; return the exit code.

    `artifacts` holds exported files that are used before any is made.
    """
    if artifacts is not None and not artifacts.is_dir():
        raise UsageError(f"--artifacts {artifacts}: no such folder; `benchd export MODEL --out {artifacts}` makes one")
    places = Places.here()
    with MachineLock(places.state / "service.lock"):  # two services would share an outbox and an identity
        Service(path, places, artifacts and artifacts.resolve()).run()
    return 0


class Service:
    """From `run` on: startup, main loop, shutdown."""

    def __init__(self, path: Path, places: Places, artifacts: Path | None = None) -> None:
        self._path, self._places, self._artifacts = path, places, artifacts
        self._settings = config.read(path)
        self._boot_id = identity.boot_id()
        self._doing = Doing()
        self._stopping = self._reload_asked = False
        self._notifier = Notifier()
        self._judge, self._clock = conditions.Judge(), Clock()
        self._done_s: dict[str, float] = {}
        self._saved: dict[str, bytes] = {}
        self._status = self._waited_for = ""

    def run(self) -> None:
        """Run until SIGTERM or SIGINT."""
        with ExitStack() as stack:
            self._wake, self._wake_end = stack.enter_context(on_signals(SIGNALS, self._on_signal))
            self._reserve = Reserve(self._places.state / "reserve")
            self._outbox, salvaged = self._reserve.write(lambda: open_or_salvage(self._places.state / "outbox.db"))
            stack.callback(self._outbox.close)
            self._startup(salvaged)
            self._main_loop()
            self._shutdown()

    def _startup(self, salvaged: str | None) -> None:
        self._reserve.hold()
        self._journal = JournalSink(self._places.state / "records.jsonl", self._reserve)
        state, schedule_lost = self._kept(SCHEDULE, State, State())
        standings, standings_lost = self._kept(STANDINGS, dict[str, Standing], {})
        running, running_lost = self._kept(RUNNING, Running, None)
        self._configure(state, standings)
        if salvaged:
            self._event("outbox_salvaged", salvaged)
        for lost in filter(None, (schedule_lost, standings_lost, running_lost)):
            self._event("schedule_lost", lost)
        if running:
            self._end_interrupted(running)
        elif running_lost:
            self._attempt(lambda: self._publisher.keep({RUNNING: b""}))
        self._event("started", f"benchd {version('benchd')}, boot {self._boot_id}")
        self._notifier.ready()

    def _kept(self, name: str, kind: type[Kept], default: Kept) -> tuple[Kept, str | None]:
        """Return what was kept by that name, or the default and why it cannot be read, as after a rollback."""
        try:
            body = self._outbox.kept(name)
            return msgspec.json.decode(body, type=kind) if body else default, None
        except (msgspec.ValidationError, UsageError) as error:
            return default, f"{name} kept by another version of benchd: {error}"

    def _main_loop(self) -> None:
        while not self._stopping:
            self._attend(measuring=False)
            if self._every("look", LOOK_S) or self._agenda.state.passes:
                self._begin_due()
            step = self._next()
            if step:
                self._measure(*step)
            else:
                self._session.rest()
            self._rest()  # after a case too: whoever waits for the machine gets it now

    def _shutdown(self) -> None:
        self._notifier.stopping()
        self._event("stopped", "by a signal")
        self._save()
        if self._publisher.link:
            self._publisher.link.stop()
        self._notifier.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._reload_asked = True
        else:
            self._stopping = True

    # configuration

    def _configure(self, state: State, standings: Standings) -> None:
        """Take over the present settings: identity, plan, connection, and what stands on the broker."""
        self._machine = plan.inspect("auto")
        self._agenda = Agenda(self._settings, self._machine, state)
        self._regressions = Regressions(self._settings.baseline.runs, standings)
        self._topics = Topics(identity.device_id(self._settings.device.id))
        self._publisher = self._made_publisher()
        self._session = self._made_session()
        self._supervisors: dict[str, Supervisor] = {}
        link = self._publisher.link
        self._remote = Remote(
            link, Gate(self._topics), self._agenda, self._outbox, self._health, self._save, self._ask_reload
        )
        if link:
            self._introduce(link)
        planned = {case for cases in self._agenda.cases.values() for case in cases}
        self._attempt(lambda: self._publisher.plan(planned))
        self._doing.slower = self._regressions.problem()
        self._save()

    def _introduce(self, link: Link) -> None:
        device, topics = self._settings.device, self._topics
        said = announcements.info(device, topics.device_id, self._boot_id, self._machine, self._agenda)
        known = msgspec.json.decode(self._outbox.kept(announcements.LATEST) or b"[]", type=list[str])
        known = announcements.introduce(link, topics, said, known, home_assistant=self._settings.mqtt.home_assistant)
        self._attempt(lambda: self._publisher.keep({announcements.LATEST: msgspec.json.encode(known)}))

    def _made_publisher(self) -> Publisher:
        publisher = Publisher(
            self._outbox,
            self._reserve,
            self._topics,
            self._boot_id,
            self._agenda,
            self._regressions,
            self._places.runtime / lock.ACTIVITY.name,
        )
        publisher.link = self._connected(self._settings.mqtt.url) if self._settings.mqtt.url else None
        return publisher

    def _made_session(self) -> Session:
        settings = Settings.of(
            self._settings,
            self._machine,
            self._places.state / "runs",
            given_artifacts=self._artifacts,
            flags=("service",) if self._publisher.link is None else ("mqtt", "service"),
        )
        return Session(settings, [self._publisher, self._journal], lambda: self._attend(measuring=True))

    def _connected(self, url: str) -> Link:
        given = self._settings.mqtt
        link = Link(
            configured(url, given),
            self._topics,
            self._places.state / "outbox.db",
            Identity(self._boot_id, self._instance()),
            given.collectors,
            self._wake_end,
            self._reserve,
        )
        link.start()
        return link

    def _instance(self) -> str:
        """Return what tells this machine from another that was given the same id: its serial and this state folder."""
        kept = self._outbox.kept(INSTANCE)
        if kept is None:
            kept = uuid.uuid4().hex.encode()
            made = {INSTANCE: kept}
            self._reserve.write(lambda: self._outbox.keep(made))
        return f"{identity.device_id(None)[-6:]}{kept.decode()[:10]}"

    def _reload(self) -> None:
        """Read the configuration again; the old one stays where the new one makes no sense."""
        self._reload_asked = False
        self._notifier.reloading()
        try:
            settings = self._checked_settings()
        except BenchdError as error:
            self._event("reload_failed", str(error))
            self._notifier.ready()
            return
        self._settings = settings
        self._configure_again(str(self._path))
        self._notifier.ready()

    def _configure_again(self, why: str) -> None:
        """Take over the settings in place of earlier ones, and what the last connection has heard and told."""
        old = self._publisher.link
        if old:
            old.stop()
        self._session.rest()
        self._configure(self._agenda.state, self._regressions.standings)
        if old and (new := self._publisher.link):
            new.seen.commands.extend(old.seen.commands)
            new.seen.events.extend(old.seen.events)
        self._event("reloaded", why)

    def _checked_settings(self) -> Config:
        """Return the configuration as it is now; raise BenchdError where it makes no sense."""
        settings = config.read(self._path)
        Agenda(settings, self._machine, State())
        Regressions(settings.baseline.runs, {})
        identity.device_id(settings.device.id)
        if settings.mqtt.url:
            parse_url(settings.mqtt.url)
        return settings

    def _ask_reload(self) -> None:
        """Reload between two cases; raise BenchdError for a configuration that makes no sense."""
        self._checked_settings()
        self._reload_asked = True

    # measuring

    def _begin_due(self) -> None:
        if self._every("gpu", LOOK_S):
            self._find_gpu()
        if self._agenda.look(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME), self._topics.device_id):
            self._save()

    def _find_gpu(self) -> None:
        """Take over a GPU whose driver came up after the service; one that goes away shows in its cases."""
        found = plan.inspect("auto") if plan.has_missed_gpu(self._machine) else self._machine
        if (found.device, found.gpu_uuid) != (self._machine.device, self._machine.gpu_uuid):
            self._configure_again(f"a GPU has come up: {found.gpu_uuid or found.device}")

    def _next(self) -> tuple[Progress, list[Planned]] | None:
        """Return the cases that are left of what to measure now, and take note of what it waits for otherwise."""
        if not self._agenda.state.passes:
            self._wait_for(None)
            return None
        if self._doing.waiting_for and not self._every("judge", LOOK_S):
            return None
        found = self._disk_problem() or self._agenda.next(self._unmet)
        if isinstance(found, tuple):
            found = self._not_free() or found
        self._wait_for(found if isinstance(found, str) else None)
        return found if isinstance(found, tuple) else None

    def _wait_for(self, reason: str | None) -> None:
        if reason and not self._doing.waiting_for and reason != self._waited_for:
            log(f"waiting: {reason}")
            self._waited_for = reason
        self._doing.waiting_for = reason

    def _unmet(self, entry: Progress) -> str | None:
        if entry.by_command or entry.suite.conditions == Conditions():
            return None
        return self._judge.unmet(entry.suite.conditions, conditions.read(self._machine.gpu_uuid), time.monotonic())

    def _not_free(self) -> str | None:
        """Return why the machine cannot be measured now, before anything is read or said for a case."""
        try:
            with MachineLock():
                return None
        except NotAvailable as error:
            return str(error)

    def _disk_problem(self) -> str | None:
        """Return why no new case may begin; what was sent makes room before that is said."""
        if self._outbox.used_bytes() > self._settings.service.quota_bytes:
            with suppress(UsageError):  # a full disk, which is said below
                self._outbox.forget_sent(time.time(), keep_rows=0)
        full = self._outbox.used_bytes() > self._settings.service.quota_bytes or not self._reserve.hold()
        self._doing.problem = "degraded:disk" if full else None
        return self._doing.problem

    def _measure(self, entry: Progress, left: Sequence[Planned]) -> None:
        """Measure the first of the cases that are left, under the machine's lock."""
        session, planned = self._session, left[0]
        self._doing.running = (entry, planned)
        self._publish_health()  # who watches need not wait for the next half minute
        supervisor = self._supervisor(entry, left)
        try:
            with session.measuring():
                session.sampler(supervisor.plan)
                self._feed_watchdog()  # the sampler took its time, and so may the tools that describe the machine
                self._publisher.begin_case(entry.suite_id, planned)
                supervisor.measure(planned)
        except Busy as busy:  # another was faster
            self._wait_for(str(busy))
        except BenchdError as error:
            self._doing.problem = str(error)
            self._event("pass_failed", f"{entry.suite.name or 'run'}: {error}")
            self._agenda.cancel(entry.suite_id)
            self._save()
        finally:
            self._publisher.end()
            self._doing.running = None
            self._doing.slower = self._regressions.problem()
            self._publish_health()
        while session.failures:
            self._doing.problem = session.failures.pop(0)
            log(f"not kept: {self._doing.problem}")
        self._stopping = self._stopping or session.interrupted

    def _supervisor(self, entry: Progress, left: Sequence[Planned]) -> Supervisor:
        """Return the supervisor of the run, which keeps the rates that it has probed; forget those of others."""
        kept = {name: one for name, one in self._supervisors.items() if self._agenda.is_under_way(name)}
        self._supervisors = kept
        return kept.setdefault(entry.suite_id, Supervisor(self._session, left, entry.suite_id))

    def _end_interrupted(self, running: Running) -> None:
        """Publish the case with which the last service died as aborted, and do not begin it again in this pass.

        It may be what killed the service.
        """
        reason = "the service died while this case ran"
        entry = next((one for one in self._agenda.state.passes if one.suite_id == running.suite_id), None)
        outcome = Outcome(process=ProcessResult(status="aborted", reason=reason))
        run_id = RunId(uuid.uuid4().hex, running.t_wall, running.t_mono_ns)
        run = replace(self._session.run(running.suite_id), boot_id=running.boot_id, flags=())
        record = recording.record(running.case, running.preset, run, run_id, [outcome])
        if entry:
            self._agenda.skip(running.suite_id, record.case_id)
        for sink in self._session.sinks:
            sink.publish(record, msgspec.json.encode(record))

    # what comes in between

    def _attend(self, *, measuring: bool) -> str | None:
        """Deal with what has come in; return why the running case has to end, else None."""
        timed = measuring and self._publisher.timed
        self._remote.listen()
        self._remote.carry_out(timed=timed)
        if not timed:
            self._reload_if_asked()
            self._publish_events()
        if measuring:
            self._publish_telemetry(timed=timed)
        if self._every("health", HEALTH_S):
            self._publish_health()
        if not measuring:
            self._keep_house()
        self._feed_watchdog()
        running = self._doing.running
        cancelled = running is not None and not self._agenda.is_under_way(running[0].suite_id)
        return "cancelled by a command" if cancelled else None

    def _reload_if_asked(self) -> None:
        if self._reload_asked and self._doing.running is None:
            self._reload()

    def _publish_events(self) -> None:
        link = self._publisher.link
        while link and link.seen.events:
            self._event(*link.seen.events.popleft())

    def _event(self, name: str, detail: str) -> None:
        try:
            self._publisher.event(name, detail)
        except UsageError as error:
            log(f"event not kept: {error}")

    def _publish_telemetry(self, *, timed: bool) -> None:
        """Send the sensors' last samples, never beside a CPU case that has all cores to itself."""
        link = self._publisher.link
        crowded = self._machine.device == "cpu" and (os.cpu_count() or 1) < MANY_CPUS
        if link is None or self._settings.mqtt.telemetry == "off" or (timed and crowded):
            return
        samples = self._session.latest_samples() if self._every("telemetry", TELEMETRY_S) else []
        case_id = self._doing.case_id
        if samples and case_id:
            link.telemetry(msgspec.json.encode(Telemetry(case_id=case_id, samples=samples)))

    def _health(self) -> Health:
        device_id, link = self._topics.device_id, self._publisher.link
        return announcements.health(self._doing, self._agenda, device_id, link, self._outbox, self._places.state)

    def _publish_health(self) -> None:
        if self._publisher.link:
            self._publisher.link.retain(self._topics.of("health"), msgspec.json.encode(self._health()))

    def _keep_house(self) -> None:
        if self._every("tidy", TIDY_S):
            self._limit_what_is_old()
            self._save()
        path = self._settings.service.prometheus_file
        if path and self._every("prometheus", PROMETHEUS_S):
            try:
                prometheus.write(Path(path), self._health())
            except OSError as error:
                log(f"prometheus_file {path}: {error.strerror}")

    def _limit_what_is_old(self) -> None:
        runs, now_s = self._places.state / "runs", self._clock.now_s()
        try:
            self._journal.put_away(runs, now_s)
            tidy(runs, now_s)
            self._outbox.forget_sent(now_s)
        except (OSError, UsageError) as error:  # a full disk: what waits for delivery is not touched
            log(f"not tidied: {error}")

    def _feed_watchdog(self) -> None:
        """Tell systemd that loop, outbox and connection are alive; a worker has a deadline of its own."""
        status = announcements.status_line(self._doing, self._publisher.link)
        if status != self._status:
            self._notifier.status(status)
            self._status = status
        link = self._publisher.link
        if self._every("watchdog", WATCHDOG_S) and (link is None or link.is_alive()) and self._outbox.is_writable():
            self._notifier.watchdog()

    def _rest(self) -> None:
        select.select([self._wake], [], [], TICK_S)
        with suppress(BlockingIOError):
            while self._wake.recv(4096):
                pass

    def _save(self) -> None:
        """Keep the schedule and the ids of commands where they have changed."""
        now = {SCHEDULE: msgspec.json.encode(self._agenda.state), COMMANDS: self._remote.remembered()}
        changed = {name: value for name, value in now.items() if self._saved.get(name) != value}
        if not changed or self._attempt(lambda: self._publisher.keep(changed)):
            self._saved = now

    def _attempt(self, write: Callable[[], None]) -> bool:
        """Write facts that the service can go on without; return whether that went well."""
        try:
            write()
        except UsageError as error:  # a full disk, which the next look at it reports
            log(f"not kept: {error}")
            return False
        return True

    def _every(self, name: str, period_s: float) -> bool:
        """Say whether this has not been done for so long, and take it as done."""
        now_s = time.monotonic()
        if now_s - self._done_s.get(name, -period_s) < period_s:
            return False
        self._done_s[name] = now_s
        return True
