"""`benchd run`: the long-lived service. It begins due runs and measures one case at a time.

Signals only set flags, which the loop acts on.
"""

import select
import signal
import time
import uuid
from contextlib import ExitStack, suppress
from importlib.metadata import version
from pathlib import Path
from types import FrameType

import msgspec

from benchd.daemon import config
from benchd.daemon.config import Config
from benchd.daemon.delivery.broker import configured, parse_url
from benchd.daemon.delivery.disk_reserve import Reserve
from benchd.daemon.delivery.link import Identity, Link
from benchd.daemon.delivery.outbox import OUTBOX, open_or_salvage
from benchd.daemon.delivery.sinks import JournalSink
from benchd.daemon.delivery.topics import Topics, is_name
from benchd.daemon.errors import BenchdError, NotAvailable, UsageError
from benchd.daemon.machine import identity, lock
from benchd.daemon.machine.lock import Busy, MachineLock
from benchd.daemon.machine.signals import on_signals
from benchd.daemon.measuring import plan
from benchd.daemon.sampling import sources
from benchd.daemon.service import announcements, deployed, homeassistant, recovery
from benchd.daemon.service.agenda import Agenda
from benchd.daemon.service.between import Between
from benchd.daemon.service.cases import LOOK_S, Cases
from benchd.daemon.service.deployed import Deployments
from benchd.daemon.service.parts import Base, Configured, Places
from benchd.daemon.service.publisher import RUNNING, SCHEDULE, STANDINGS, Publisher, Running
from benchd.daemon.service.regressions import Regressions, Standing, Standings
from benchd.daemon.service.schedule import State
from benchd.daemon.verdicts.alarms import Budget
from benchd.daemon.verdicts.results import JOURNAL

TICK_S = 1.0
GOODBYE_S = 2.0  # with a worker and a sampler that end slowly, less than 5 s in all
INSTANCE = "instance"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(path: Path, artifacts: Path | None = None) -> int:
    """Run the service with the configuration in `path` until a signal ends it; return the exit code.

    Exported files in `artifacts` are used before new ones are made.
    """
    places = Places.here()
    with ExitStack() as stack:
        try:  # two services would share an outbox and an identity
            stack.enter_context(MachineLock(places.state / "service.lock"))
        except Busy as busy:
            message = f"{busy.holder} already runs with the state folder {places.state}; stop it"
            raise NotAvailable(f"{message}, or set XDG_STATE_HOME to another folder") from busy
        Service(path, places, artifacts).run()
    return 0


class Service:
    """The service from startup to shutdown. A new configuration rebuilds `between` and `cases`."""

    def __init__(self, path: Path, places: Places, artifacts: Path | None = None) -> None:
        self._path, self._places, self._artifacts = path, places, artifacts
        self._settings = self._read()
        self._stopping = self._reload_asked = False

    def run(self) -> None:
        """Run until SIGTERM or SIGINT."""
        with ExitStack() as stack:
            self._wake, self._wake_end = stack.enter_context(on_signals(SIGNALS, self._on_signal))
            reserve = Reserve(self._places.state / "reserve")
            outbox, salvaged = reserve.write(lambda: open_or_salvage(self._places.state / OUTBOX))
            stack.callback(outbox.close)
            reserve.hold()
            journal = reserve.write(lambda: JournalSink(self._places.state / JOURNAL, reserve))
            self._base = Base(self._places, identity.boot_id(), reserve, outbox, journal)
            self._startup(salvaged)
            self._main_loop()
            self._shutdown()

    def _startup(self, salvaged: str | None) -> None:
        outbox = self._base.outbox
        state = outbox.kept_as(SCHEDULE, msgspec.json.Decoder(State).decode, State())
        standings: Standings = outbox.kept_as(STANDINGS, msgspec.json.Decoder(dict[str, Standing]).decode, {})
        running = outbox.kept_as(RUNNING, msgspec.json.Decoder(Running | None).decode, None)
        shipped: deployed.Standings = outbox.kept_as(deployed.SHIPPED, deployed.decode, {})
        self._configure(state, standings, shipped)
        if salvaged:
            self._between.event("outbox_salvaged", salvaged)
        self._between.publish_events()
        recovery.recover(self._base, self._now, self._between, self._cases, running)
        self._between.event("started", f"benchd {version('benchd')}, boot {self._base.boot_id}")
        self._base.notifier.ready()

    def _main_loop(self) -> None:
        while not self._stopping:
            self._between.attend(None)
            if self._base.outbox.is_moved():
                self._configure_again("the outbox was moved or removed")
            if self._reload_asked:
                self._reload()
            if self._base.every.is_due("look", LOOK_S) or self._now.agenda.state.passes:
                self._begin_due()
            step = self._cases.next()
            if step and not self._stopping:
                self._cases.measure(*step)
                self._stopping = self._stopping or self._cases.session.interrupted
            else:
                self._verify_due()
                self._cases.session.rest()
            self._rest()  # after a case too: a process that waits for the machine gets it now

    def _verify_due(self) -> None:
        """Verify a shipped folder whose time has come; on a full disk its workers would fail, whatever the folder."""
        if self._stopping or not self._base.every.is_due("verify", LOOK_S):
            return
        one = self._deployments.next()
        if one and not self._cases.disk_problem():
            self._deployments.verify(one, self._cases.session)
            self._stopping = self._stopping or self._cases.session.interrupted

    def _shutdown(self) -> None:
        self._base.notifier.stopping()
        self._cases.session.rest()
        self._between.event("stopped", "by a signal")
        self._between.attempt(self._base.journal.settle)
        self._between.save()
        if self._now.publisher.link:
            self._now.publisher.link.stop(GOODBYE_S)
        self._base.notifier.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._reload_asked = True
        else:
            self._stopping = True

    def _rest(self) -> None:
        if not self._stopping:
            select.select([self._wake], [], [], TICK_S)
        with suppress(BlockingIOError):
            while self._wake.recv(4096):
                pass

    def _begin_due(self) -> None:
        if self._base.every.is_due("gpu", LOOK_S):
            self._find_gpu()
        now = self._now
        if now.agenda.look(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME), now.topics.device_id):
            self._between.save()

    def _find_gpu(self) -> None:
        """Use a GPU whose driver started after the service; a GPU that disappears shows in its cases."""
        machine = self._now.machine
        found = plan.inspect("auto") if plan.has_missed_gpu(machine) else machine
        if (found.device, found.gpu_uuid, found.closed_gpu) != (machine.device, machine.gpu_uuid, machine.closed_gpu):
            self._configure_again(found.closed_gpu or f"a GPU became available: {found.gpu_uuid or found.device}")

    # configuration

    def _configure(self, state: State, standings: Standings, shipped: deployed.Standings) -> None:
        """Apply the current settings: identity, plan, connection, and the documents retained on the broker."""
        settings, machine = self._settings, plan.inspect("auto")
        agenda = Agenda(settings, machine, state)
        regressions = _regressions(settings, agenda, standings)
        topics = Topics(identity.device_id(settings.device.id))
        activity = self._places.runtime / lock.ACTIVITY.name
        base = self._base
        publisher = Publisher(base.outbox, base.reserve, topics, base.boot_id, agenda, regressions, activity, base.owed)
        publisher.link = self._connected(settings.mqtt.url, topics) if settings.mqtt.url else None
        self._now = Configured(settings, machine, topics, agenda, regressions, publisher)
        self._between = Between(self._base, self._now, self._ask_reload)
        self._cases = Cases(self._base, self._now, self._between, self._artifacts, lambda: self._stopping)
        self._deployments = Deployments(self._base, self._now, self._between, shipped)
        self._between.deployed = lambda: [one.said for one in self._deployments.standings.values()]
        if publisher.link:
            self._introduce(publisher.link)
        planned = {case for cases in agenda.cases.values() for case in cases}
        self._between.attempt(lambda: publisher.plan(planned))
        self._base.activity.slower, self._base.activity.closed = regressions.problem(), machine.closed_gpu
        self._between.save()

    def _introduce(self, link: Link) -> None:
        """Retain what the service is, and clear what has left the configuration."""
        settings, now = self._settings, self._now
        said = announcements.info(settings.device, now.topics.device_id, self._base.boot_id, now.machine, now.agenda)
        link.retain(now.topics.of("info"), msgspec.json.encode(said))
        planned = sorted({case_id for suite in said.suites for case_id in suite.cases})
        shipped = [one.called for one in settings.shipped]
        discovery = [homeassistant.topic(now.topics.device_id)] if settings.mqtt.home_assistant else []
        names = msgspec.json.Decoder(list[str])
        kept: dict[str, bytes] = {}
        for name, topic_of, wanted in (
            (announcements.LATEST, now.topics.latest, planned),
            (announcements.ANNOUNCED, str, discovery),
            (deployed.NAMES, now.topics.shipped, shipped),
        ):
            known = self._base.outbox.kept_as(name, names.decode, list[str]())
            kept[name] = msgspec.json.encode(announcements.clear_gone(link, topic_of, known, wanted))
        for topic in discovery:
            link.retain(topic, homeassistant.discovery(now.topics, said, shipped))
        self._deployments.introduce(link)
        self._between.attempt(lambda: now.publisher.keep(kept))

    def _connected(self, url: str, topics: Topics) -> Link:
        given = self._settings.mqtt
        link = Link(
            configured(url, given),
            topics,
            self._places.state / OUTBOX,
            Identity(self._base.boot_id, self._instance()),
            given.collectors,
            self._wake_end,
            self._base.reserve,
        )
        link.start()
        return link

    def _instance(self) -> str:
        """Return what distinguishes machines with the same device id: the serial number and this state folder."""
        outbox = self._base.outbox
        instance = outbox.kept_as(INSTANCE, _name, "")
        if not instance:
            instance = uuid.uuid4().hex
            made = {INSTANCE: instance.encode()}
            self._base.reserve.write(lambda: outbox.keep(made))
        return f"{identity.device_id(None)[-6:]}{instance[:10]}"

    def _reload(self) -> None:
        """Read the configuration again; an invalid one leaves the old one in force."""
        self._reload_asked = False
        self._base.notifier.reloading()
        try:
            self._settings = self._checked_settings()
        except BenchdError as error:
            self._between.event("reload_failed", str(error))
        else:
            self._configure_again(str(self._path))
        self._base.notifier.ready()

    def _configure_again(self, why: str) -> None:
        """Apply new settings, and keep what the last connection has received and published."""
        old = self._now
        if old.publisher.link:
            old.publisher.link.stop()
        self._cases.session.rest()
        self._base.lock.forget("")  # of verifications, which may be of other folders now
        put_back = self._base.reserve.write(self._base.outbox.put_back)
        self._configure(old.agenda.state, old.regressions.standings, self._deployments.standings)
        if old.publisher.link and (new := self._now.publisher.link):
            new.seen.commands.extend(old.publisher.link.seen.commands)
            new.seen.events.extend(old.publisher.link.seen.events)
            new.seen.session = old.publisher.link.seen.session
        if put_back:
            self._between.event("outbox_salvaged", put_back)
        self._between.event("reloaded", why)

    def _read(self) -> Config:
        """Return the configuration; raise UsageError also for a name that only a later case or result would miss."""
        settings = config.read(self._path)
        try:
            sources.check(settings.sampling.sources)
        except UsageError as error:
            raise UsageError(f"configuration {self._path}: sampling.sources: {error}") from error
        for name in settings.mqtt.collectors:
            if not is_name(name):
                allowed = "use at most 64 letters, digits, '.', '-' and '_'"
                raise UsageError(f"configuration {self._path}: mqtt.collectors {name!r}: {allowed}")
        return settings

    def _checked_settings(self) -> Config:
        """Return the current configuration; raise BenchdError if it is invalid."""
        settings = self._read()
        _regressions(settings, Agenda(settings, self._now.machine, State()), {})
        identity.device_id(settings.device.id)
        if settings.mqtt.url:
            parse_url(settings.mqtt.url)
        return settings

    def _ask_reload(self) -> None:
        """Reload between two cases; raise BenchdError for an invalid configuration."""
        self._checked_settings()
        self._reload_asked = True


def _name(kept: bytes) -> str:
    if not is_name(name := kept.decode()):
        raise ValueError("it is not a name")
    return name


def _regressions(settings: Config, agenda: Agenda, standings: Standings) -> Regressions:
    budget = Budget(settings.baseline.false_alarms_per_month, agenda.results_per_month(time.time()))
    return Regressions(settings.baseline.runs, standings, budget)
