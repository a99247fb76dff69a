"""Due runs and their remaining cases: pure functions of the time, the state and the configuration.

The caller stores the State on disk together with each result, so that after a restart a run continues with its next
unfinished case. Times are seconds since the epoch, because a schedule follows the calendar; the measured time of a run
is a sum of durations, which setting the clock does not change.
"""

import hashlib
import uuid
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from benchd.daemon.config import Suite
from benchd.daemon.trigger import DAY_S


class Progress(Struct, frozen=True, kw_only=True):
    """A run that has begun: its suite as of then, the ids of its remaining cases, and its origin."""

    suite: Suite
    suite_id: str
    left: list[str]
    spent_s: float = 0.0
    by_command: bool = False


class State(Struct, frozen=True, kw_only=True):
    """The time up to which each suite's triggers have been served, and the runs in the order of their start."""

    served_s: dict[str, float] = {}
    passes: list[Progress] = []


def delay_s(suite: Suite, device_id: str) -> float:
    """Return this device's delay, so that a fleet does not start all at once."""
    digest = hashlib.sha256(f"{device_id}:{suite.name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 * suite.random_delay_s


def due_s(suite: Suite, state: State, device_id: str) -> float | None:
    """Return the next start of the suite, None if it has no future trigger."""
    trigger = suite.trigger()
    served_s = state.served_s.get(suite.name)
    if trigger is None or served_s is None:
        return None
    next_s = trigger.next_after(served_s)
    return None if next_s is None else next_s + delay_s(suite, device_id)


def serve(state: State, suites: Sequence[Suite], now_s: float, *, clock_set: bool = False) -> State:
    """Return the state for these suites: a new suite is served up to now, a removed one is dropped.

    A time more than a day ahead, as after a wrong clock is set back, is also dropped, and all times are if the clock
    was set by more than a day, because a wrong clock cannot say which triggers were missed.
    """
    known = {suite.name: state.served_s.get(suite.name, now_s) for suite in suites if suite.trigger()}
    served_s = {name: now_s if clock_set or at_s > now_s + DAY_S else at_s for name, at_s in known.items()}
    return msgspec.structs.replace(state, served_s=served_s)


def begin_due(
    state: State, suites: Sequence[Suite], cases: Mapping[str, list[str]], now_s: float, device_id: str
) -> State:
    """Begin every due suite, once for all missed times, unless it is still running."""
    for suite in suites:
        at_s = due_s(suite, state, device_id)
        if at_s is not None and at_s <= now_s:
            served_s = state.served_s | {suite.name: now_s - delay_s(suite, device_id)}
            state = msgspec.structs.replace(state, served_s=served_s)
            if not any(entry.suite.name == suite.name and not entry.by_command for entry in state.passes):
                state = begin(state, suite, cases[suite.name])
    return state


def begin(state: State, suite: Suite, case_ids: list[str], *, by_command: bool = False) -> State:
    """Append a run."""
    entry = Progress(suite=suite, suite_id=uuid.uuid4().hex, left=case_ids, by_command=by_command)
    return msgspec.structs.replace(state, passes=[*state.passes, entry])


def finish(state: State, suite_id: str, case_id: str, seconds: float, *, again: bool = False) -> State:
    """Remove a measured case from its run, or move it to the end to be measured `again`.

    The run ends with its last case or its time limit.
    """
    passes = [_after(entry, case_id, seconds, again) if entry.suite_id == suite_id else entry for entry in state.passes]
    return msgspec.structs.replace(state, passes=[entry for entry in passes if entry.left and not _over(entry)])


def _after(entry: Progress, case_id: str, seconds: float, again: bool) -> Progress:
    left = [other for other in entry.left if other != case_id] + [case_id] * again
    return msgspec.structs.replace(entry, left=left, spent_s=entry.spent_s + seconds)


def _over(entry: Progress) -> bool:
    return entry.suite.time_limit_s is not None and entry.spent_s >= entry.suite.time_limit_s


def drop(state: State, suite_id: str) -> State:
    """End a run, whatever remains of it."""
    return msgspec.structs.replace(state, passes=[entry for entry in state.passes if entry.suite_id != suite_id])
