"""Finds the service's next case, or what it waits for, and measures cases in its session."""

import time
from collections.abc import Callable, Sequence
from functools import cache, partial

from benchd.daemon.config import Conditions
from benchd.daemon.delivery import disk
from benchd.daemon.errors import BenchdError, Full, NotAvailable, UsageError
from benchd.daemon.machine.lock import Busy, MachineLock
from benchd.daemon.machine.systemd_notify import log
from benchd.daemon.measuring import recording
from benchd.daemon.measuring.plan import PlannedCase, in_rounds
from benchd.daemon.measuring.protocol import unmeasured
from benchd.daemon.measuring.recording import RunId
from benchd.daemon.measuring.session import Session
from benchd.daemon.measuring.supervisor import MeasuredCase, Supervisor
from benchd.daemon.service import announcements, background, conditions, results
from benchd.daemon.service.conditions import Readings
from benchd.daemon.service.facts import Running
from benchd.daemon.service.schedule import StartedSuite
from benchd.daemon.service.state import State

# interval between checks of the schedule, the conditions, shipped folders and a lock held by another process
LOOK_S = 5.0


def open_session(state: State) -> None:
    """Begin the session in which cases are measured until the configuration changes."""
    flags = ("mqtt", "service") if state.link else ("service",)
    state.supervisors = {}
    state.session = Session(
        state.settings,
        state.machine,
        state.folder / "runs",
        [results.ResultSink(state)],
        partial(background.attend, state),
        given_artifacts=state.artifacts,
        flags=flags,
    )


def next_step(state: State) -> tuple[StartedSuite, list[PlannedCase]] | None:
    """Return the remaining cases to measure now; if there are none, note what the service waits for."""
    if not (state.agenda.runs or state.owed):
        state.waiting_for = None
        return None
    if state.waiting_for and not state.every.is_due("judge", LOOK_S):
        return None
    # read once for all runs, because a tool may hang
    readings = cache(partial(conditions.read, state.machine.gpu_uuid))
    step = disk_problem(state) or state.agenda.next(partial(_unmet, state, readings))
    if isinstance(step, tuple):
        step = _not_free() or step
    _wait_for(state, step if isinstance(step, str) else None)
    return step if isinstance(step, tuple) else None


def _not_free() -> str | None:
    """Return why the machine cannot be measured now, checked before a case reads or reports anything."""
    try:
        with MachineLock():
            return None
    except NotAvailable as error:
        return str(error)


def _wait_for(state: State, reason: str | None) -> None:
    if reason and not state.waiting_for:
        log(f"waiting: {reason}")
    state.waiting_for = reason


def _unmet(state: State, readings: Callable[[], Readings], entry: StartedSuite) -> str | None:
    if entry.by_command or entry.suite.conditions == Conditions():
        return None
    return state.judge.unmet(entry.suite.conditions, readings(), time.monotonic())


def disk_problem(state: State) -> str | None:
    """Return why nothing new may be measured; first of all, because a full disk has not stored a record."""
    full = disk.lacks(state.folder)
    try:
        results.settle(state)
    except UsageError as error:
        full = str(error)
    state.problem = f"degraded:disk: {full}" if full else None
    return state.problem


def measure(state: State, entry: StartedSuite, left: Sequence[PlannedCase]) -> None:
    """Measure the first remaining case, together with those it competes with in rounds, under the machine's lock."""
    session, (planned, *_) = state.session, left
    group = in_rounds(left)[0]
    state.running = (entry, planned)
    announcements.publish_health(state)  # otherwise subscribers would wait for up to half a minute
    supervisor = _supervisor(state, entry, left)
    try:
        with session.measuring():
            session.sampler(supervisor.plan)
            background.feed_watchdog(state)  # starting the sampler took time, and describing the machine may, too
            supervisor.measure(group, partial(_begin, state, entry))
    except Busy as busy:  # another process was faster
        _wait_for(state, str(busy))
    except Full as full:  # also after an I/O error, whatever the earlier check found
        state.problem = f"degraded:disk: {full}"
        _wait_for(state, state.problem)
    except OSError as error:  # no free process or descriptor, before a worker was started
        _end_unstarted(state, entry, planned, str(error.strerror))
    except NotAvailable as error:  # the sampler was killed when it started
        _end_unstarted(state, entry, planned, str(error))
    except BenchdError as error:
        state.problem = str(error)
        state.event("pass_failed", f"{entry.suite.name or 'run'}: {error}")
        state.agenda.cancel(entry.suite_id)
        state.attempt_save()
    finally:
        _end(state)
    while session.failures:
        state.problem = session.failures.pop(0)
        log(f"not kept: {state.problem}")


def _begin(state: State, entry: StartedSuite, case: MeasuredCase) -> None:
    """Store the case whose process is next, so that a crash can be attributed to it."""
    planned, run_id = case.planned, case.run_id
    state.running = (entry, planned)
    state.since_s = state.since_s or time.monotonic()
    began = run_id.t_wall, run_id.t_mono_ns
    state.facts.running = Running(entry.suite_id, planned.case, planned.preset, state.boot_id, *began)
    state.save()


def _end(state: State) -> None:
    """Let the link send again, whatever the case's result."""
    state.hold(timed=False)
    state.running = state.since_s = None
    announcements.publish_health(state)


def _end_unstarted(state: State, entry: StartedSuite, planned: PlannedCase, reason: str) -> None:
    run, run_id = state.session.run(entry.suite_id), RunId.new()
    outcomes = [unmeasured("failed", f"the case did not start: {reason}")]
    state.session.publish(recording.of_planned(planned, run, run_id, outcomes))


def _supervisor(state: State, entry: StartedSuite, left: Sequence[PlannedCase]) -> Supervisor:
    """Return the run's supervisor, which keeps its probed rates; drop those of other runs."""
    supervisor = state.supervisors.get(entry.suite_id)
    supervisor = supervisor or Supervisor(state.session, left, entry.suite_id, needs_all=True)
    state.supervisors = {name: known for name, known in state.supervisors.items() if state.agenda.is_under_way(name)}
    state.supervisors[entry.suite_id] = supervisor
    return supervisor
