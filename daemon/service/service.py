"""`benchd run`: the long-running service, which begins due runs and measures one case at a time.

Signals only set flags, which the loop acts on.
"""

import select
import signal
import time
from contextlib import ExitStack, closing, suppress
from importlib.metadata import version
from pathlib import Path

from benchd.daemon.config import Config
from benchd.daemon.errors import BenchdError, NotAvailable, UsageError
from benchd.daemon.machine import folders
from benchd.daemon.machine.lock import SERVICE, Busy, MachineLock
from benchd.daemon.machine.signals import on_signals
from benchd.daemon.measuring import plan
from benchd.daemon.measuring.plan import Machine
from benchd.daemon.service import (
    announcements,
    background,
    cases,
    configuration,
    deployed,
    regressions,
    results,
)
from benchd.daemon.service.state import State

TICK_S = 1.0
GOODBYE_S = 2.0  # a worker and a sampler that are slow to end come on top; all of it must stay below 5 s
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(path: Path, artifacts: Path | None = None) -> int:
    """Run the service with the configuration in `path` until a signal ends it; return the exit code.

    Exported files in `artifacts` are used in preference to making new ones.
    """
    folder = folders.state()
    with ExitStack() as stack:
        try:  # otherwise two services could write to the same log
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(MachineLock(folder / SERVICE))
        except OSError as error:
            raise UsageError(f"cannot create the state folder {folder}: {error.strerror}") from error
        except Busy as busy:
            message = f"{busy.holder} already runs with the state folder {folder}; stop it"
            raise NotAvailable(f"{message}, or set XDG_STATE_HOME to a different folder") from busy
        settings = configuration.read(path)
        state = stack.enter_context(closing(State(path, folder, artifacts)))
        state.woken, state.wake = stack.enter_context(on_signals(SIGNALS, state.on_signal))
        serve(state, settings)
    return 0


def serve(state: State, settings: Config) -> None:
    """Run until SIGTERM or SIGINT."""
    startup(state, settings)
    while not state.is_stopping:
        background.attend(state)
        background.keep_house(state)
        if state.reload_asked:
            reload(state)
        begin_due(state)
        if (step := cases.next_step(state)) and not state.is_stopping:
            cases.measure(state, *step)
        else:
            verify_due(state)
            state.session.rest()
        rest(state)  # even after a case, so that a process that waits for the machine gets it
    shutdown(state)


def startup(state: State, settings: Config) -> None:
    """Apply the configuration, process what the last service left behind, and notify systemd."""
    configure(state, settings, plan.inspect("auto"))
    if state.file.lost:
        state.event("state_lost", state.file.lost)
    results.recover(state)
    state.event("started", f"benchd {version('benchd')}, boot {state.boot_id}")
    state.attempt_save()
    state.notifier.ready()


def configure(state: State, settings: Config, machine: Machine) -> None:
    """Apply a configuration, process what the last connection received, and introduce the service to the broker."""
    before = state.link
    if before:
        before.stop()
    configuration.apply(state, settings, machine)
    if before:
        background.hear(state, before)
    cases.open_session(state)
    deployed.forget_unconfigured(state)
    regressions.forget_unplanned(state)
    announcements.introduce(state)
    state.attempt_save()


def configure_again(state: State, settings: Config, machine: Machine, why: str) -> None:
    """Replace the current configuration."""
    state.session.rest()
    configure(state, settings, machine)
    state.event("reloaded", why)


def reload(state: State) -> None:
    """Read the configuration again; if it is invalid, the old one stays in effect."""
    state.reload_asked = False
    state.notifier.reloading()
    try:
        settings = configuration.checked(state.path, state.machine)
    except BenchdError as error:
        state.event("reload_failed", str(error))
    else:
        configure_again(state, settings, plan.inspect("auto"), str(state.path))
    state.notifier.ready()


def begin_due(state: State) -> None:
    """Begin the runs that are due, with a GPU even if its driver started after the service."""
    if not (state.every.is_due("look", cases.LOOK_S) or state.agenda.runs):
        return
    if state.every.is_due("gpu", cases.LOOK_S):
        find_gpu(state)
    if state.agenda.look(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME), state.topics.device_id):
        state.attempt_save()


def find_gpu(state: State) -> None:
    """Plan again if a GPU has appeared; if one disappears, its cases fail."""
    if not plan.has_missed_gpu(state.machine):
        return
    before, now = state.machine, plan.inspect("auto")
    if (now.device, now.gpu_uuid, now.closed_gpu) != (before.device, before.gpu_uuid, before.closed_gpu):
        why = now.closed_gpu or f"a GPU became available: {now.gpu_uuid or now.device}"
        configure_again(state, state.settings, now, why)


def verify_due(state: State) -> None:
    """Verify a shipped folder that is due, unless the disk is full: workers would then fail for any folder."""
    if state.is_stopping or not state.every.is_due("verify", cases.LOOK_S):
        return
    folder = deployed.next_due(state)
    if folder and not cases.disk_problem(state):
        deployed.verify(state, folder)


def rest(state: State) -> None:
    """Wait for a signal or a command, up to a second."""
    if not state.is_stopping:
        select.select([state.woken], [], [], TICK_S)
    with suppress(BlockingIOError):
        while state.woken.recv(4096):
            pass


def shutdown(state: State) -> None:
    """Store unsaved data, say goodbye to the broker, and notify systemd."""
    state.notifier.stopping()
    state.session.rest()
    state.event("stopped", "by a signal")
    with suppress(UsageError):  # records that a full disk cannot store are measured again
        results.settle(state)
    state.attempt_save()
    if state.link:
        state.link.stop(GOODBYE_S)
    state.notifier.close()
