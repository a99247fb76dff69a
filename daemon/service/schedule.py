"""Which pass is due and which of its cases are left: pure functions of the time, the state and the configuration.

The caller keeps the State on the disk together with each result, so that after a restart a pass goes on with its next
unfinished case. Times are seconds since the epoch, because a schedule is about the calendar; how long a pass has
measured is added up from durations, which a clock that is set does not change.
"""

import hashlib
import uuid
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from benchd.daemon.config import Suite
from benchd.daemon.trigger import DAY_S


class Progress(Struct, frozen=True, kw_only=True):
    """A pass that has begun: its suite as it was then, the ids of the cases that are left, and who asked for it."""

    suite: Suite
    suite_id: str
    left: list[str]
    spent_s: float = 0.0
    by_command: bool = False


class State(Struct, frozen=True, kw_only=True):
    """By suite the time up to which its triggers have been served, and the passes in the order of their beginning."""

    served_s: dict[str, float] = {}
    passes: list[Progress] = []


def delay_s(suite: Suite, device_id: str) -> float:
    """Return this device's own delay, so that a fleet does not begin as one."""
    digest = hashlib.sha256(f"{device_id}:{suite.name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 * suite.random_delay_s


def due_s(suite: Suite, state: State, device_id: str) -> float | None:
    """Return when the suite begins next, None where no trigger of it is to come."""
    trigger = suite.trigger()
    served_s = state.served_s.get(suite.name)
    if trigger is None or served_s is None:
        return None
    next_s = trigger.next_after(served_s)
    return None if next_s is None else next_s + delay_s(suite, device_id)


def serve(state: State, suites: Sequence[Suite], now_s: float, *, clock_set: bool = False) -> State:
    """Return the state for these suites: a new one is served up to now, one that has gone is forgotten.

    So is a time that lies more than a day ahead, as when a clock that was wrong is set back, and every one once the
    clock was set by more than a day, because by the wrong one nothing tells what was missed.
    """
    known = {suite.name: state.served_s.get(suite.name, now_s) for suite in suites if suite.trigger()}
    served_s = {name: now_s if clock_set or at_s > now_s + DAY_S else at_s for name, at_s in known.items()}
    return msgspec.structs.replace(state, served_s=served_s)


def begin_due(
    state: State, suites: Sequence[Suite], cases: Mapping[str, list[str]], now_s: float, device_id: str
) -> State:
    """Begin every suite that is due, once for all times it was missed, and none that is still under way."""
    for suite in suites:
        at_s = due_s(suite, state, device_id)
        if at_s is not None and at_s <= now_s:
            served_s = state.served_s | {suite.name: now_s - delay_s(suite, device_id)}
            state = msgspec.structs.replace(state, served_s=served_s)
            if not any(entry.suite.name == suite.name and not entry.by_command for entry in state.passes):
                state = begin(state, suite, cases[suite.name])
    return state


def begin(state: State, suite: Suite, case_ids: list[str], *, by_command: bool = False) -> State:
    """Add a pass at the end."""
    entry = Progress(suite=suite, suite_id=uuid.uuid4().hex, left=case_ids, by_command=by_command)
    return msgspec.structs.replace(state, passes=[*state.passes, entry])


def finish(state: State, suite_id: str, case_id: str, seconds: float, *, again: bool = False) -> State:
    """Take a measured case off its pass, or to its end to be measured `again`.

    The pass ends with its last case or its time limit.
    """
    passes = [_after(entry, case_id, seconds, again) if entry.suite_id == suite_id else entry for entry in state.passes]
    return msgspec.structs.replace(state, passes=[entry for entry in passes if entry.left and not _over(entry)])


def _after(entry: Progress, case_id: str, seconds: float, again: bool) -> Progress:
    left = [other for other in entry.left if other != case_id] + [case_id] * again
    return msgspec.structs.replace(entry, left=left, spent_s=entry.spent_s + seconds)


def _over(entry: Progress) -> bool:
    return entry.suite.time_limit_s is not None and entry.spent_s >= entry.suite.time_limit_s


def drop(state: State, suite_id: str) -> State:
    """End a pass whatever is left of it."""
    return msgspec.structs.replace(state, passes=[entry for entry in state.passes if entry.suite_id != suite_id])
