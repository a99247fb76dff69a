"""Checks and applies the configuration when `benchd run` starts or reloads it."""

import time
from pathlib import Path

from benchd.daemon import config
from benchd.daemon.config import Config
from benchd.daemon.delivery.broker import configured, parse_url
from benchd.daemon.delivery.commands import Gate
from benchd.daemon.delivery.delivery import Delivery
from benchd.daemon.delivery.link import Link
from benchd.daemon.delivery.topics import Topics
from benchd.daemon.errors import UsageError
from benchd.daemon.machine import identity
from benchd.daemon.measuring.plan import Machine
from benchd.daemon.sampling import sources
from benchd.daemon.service.agenda import Agenda
from benchd.daemon.service.facts import Facts
from benchd.daemon.service.state import State
from benchd.daemon.verdicts.alarms import Budget


def read(path: Path) -> Config:
    """Return the configuration; raise UsageError even for missing names that only a later case or result needs."""
    settings = config.read(path)
    try:
        sources.check(settings.sampling.sources)
    except UsageError as error:
        raise UsageError(f"configuration {path}: sampling.sources: {error}") from error
    absent = next((run for run in settings.baseline.runs if not Path(run).exists()), None)
    if absent:
        raise UsageError(f"baseline.runs: {absent}: no such file or folder")
    return settings


def checked(path: Path, machine: Machine) -> Config:
    """Return the configuration; raise BenchdError if the service cannot run with it on this machine."""
    settings = read(path)
    identity.device_id(settings.device.id)
    if settings.mqtt.url:
        parse_url(settings.mqtt.url)
    Agenda(settings, machine, Facts())
    return settings


def apply(state: State, settings: Config, machine: Machine) -> None:
    """Apply a configuration: plan its suites for the machine, and connect to its broker."""
    state.settings, state.machine = settings, machine
    state.agenda = Agenda(settings, machine, state.facts)
    results_per_month = state.agenda.results_per_month(time.time())
    state.budget = Budget(settings.baseline.false_alarms_per_month, results_per_month)
    state.topics = Topics(identity.device_id(settings.device.id))
    state.gate = Gate(state.topics, settings.mqtt.commands)
    state.gate.remember(state.facts.commands, time.clock_gettime(time.CLOCK_BOOTTIME))
    state.link, state.environment, state.verify_from_s = None, "", 0.0
    if settings.mqtt.url:
        delivery = Delivery(state.folder, state.records, state.events, state.topics.device_id)
        broker = configured(settings.mqtt.url, settings.mqtt)
        state.link = Link(broker, state.topics, delivery, state.boot_id, state.wake)
        state.link.start()
