"""Computes due runs and their remaining cases: pure functions of the time, the schedule and the configuration.

The caller stores the Schedule on disk with each result, so that after a restart a run continues with its next
unfinished case. Times are in Unix time, because a schedule follows the calendar; the measured time of a run is a sum of
durations, which setting the clock does not affect.
"""

import hashlib
import uuid
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from benchd.daemon.config import Suite
from benchd.daemon.trigger import DAY_S, MONTH_S, Cron, Every
from benchd.daemon.verdicts.when import EARLIEST_S

WEEK_S = 7 * DAY_S
QUARTER_S = 13 * WEEK_S
STEP_S = 3600.0
MOST_STARTS = 200  # maximum number of start times to compute


class StartedSuite(Struct, frozen=True, kw_only=True):
    """A run that has begun: a copy of its suite, the ids of its remaining cases, and its origin.

    A run with `again` repeats cases whose SLOWER verdict is not yet confirmed.
    """

    suite: Suite
    suite_id: str
    left: list[str]
    spent_s: float = 0.0
    by_command: bool = False
    again: bool = False


class Schedule(Struct, frozen=True, kw_only=True):
    """The time up to which each suite's triggers have been served, and the runs in the order of their start.

    `again_s` contains the cases to repeat, with their times. `clock_s` is when the schedule was last checked.
    """

    served_s: dict[str, float] = {}
    passes: list[StartedSuite] = []
    again_s: dict[str, float] = {}
    clock_s: float = 0.0


def delay_s(suite: Suite, device_id: str) -> float:
    """Return this device's delay, so that a fleet does not start simultaneously."""
    digest = hashlib.sha256(f"{device_id}:{suite.name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 * suite.random_delay_s


def due_s(suite: Suite, schedule: Schedule, device_id: str) -> float | None:
    """Return the next start of the suite, or None if it has no future trigger."""
    trigger = suite.trigger()
    served_s = schedule.served_s.get(suite.name)
    if trigger is None or served_s is None:
        return None
    next_s = trigger.next_after(served_s)
    return None if next_s is None else next_s + delay_s(suite, device_id)


def serve(schedule: Schedule, suites: Sequence[Suite], now_s: float) -> Schedule:
    """Return the schedule for these suites: a new suite counts as served up to now, a removed one is dropped.

    If the clock was not set at first, or was set back, stored times only tell how long ago events were, and are
    shifted.
    """
    was_unset = 0.0 < schedule.clock_s < EARLIEST_S <= now_s
    shift_s = now_s - schedule.clock_s if was_unset or now_s < schedule.clock_s - STEP_S else 0.0
    served_s = {suite.name: schedule.served_s.get(suite.name, now_s - shift_s) for suite in suites if suite.trigger()}
    again_s = {case_id: at_s for case_id, at_s in schedule.again_s.items() if at_s <= now_s - shift_s + DAY_S}
    return msgspec.structs.replace(
        schedule,
        served_s={name: at_s + shift_s for name, at_s in served_s.items()},
        again_s={case_id: at_s + shift_s for case_id, at_s in again_s.items()},
        clock_s=now_s,
    )


def begin_due(
    schedule: Schedule, suites: Sequence[Suite], cases: Mapping[str, list[str]], now_s: float, device_id: str
) -> Schedule:
    """Begin every due suite that is not still running, once for all missed times."""
    for suite in suites:
        at_s = due_s(suite, schedule, device_id)
        if at_s is not None and at_s <= now_s:
            served_s = schedule.served_s | {suite.name: now_s - delay_s(suite, device_id)}
            schedule = msgspec.structs.replace(schedule, served_s=served_s)
            scheduled = (entry.suite.name for entry in schedule.passes if not (entry.by_command or entry.again))
            if suite.name not in scheduled:
                schedule = begin(schedule, suite, cases[suite.name])
    return _begin_again(schedule, suites, cases, now_s)


def _begin_again(schedule: Schedule, suites: Sequence[Suite], cases: Mapping[str, list[str]], now_s: float) -> Schedule:
    """Begin a run of the cases that are due for repetition.

    Cases that a suite's run has yet to measure stay due until there is a result, because that run may be cancelled
    first.
    """
    waiting = {case_id for entry in schedule.passes if entry.suite.name for case_id in entry.left}
    due = {case_id for case_id, at_s in schedule.again_s.items() if at_s <= now_s} - waiting
    rest = {case_id: at_s for case_id, at_s in schedule.again_s.items() if case_id not in due}
    schedule = msgspec.structs.replace(schedule, again_s=rest)
    for suite in suites:
        left = [case_id for case_id in cases[suite.name] if case_id in due]
        schedule = begin(schedule, suite, left, again=True) if left else schedule
        due -= set(left)
    return schedule


def begin(
    schedule: Schedule, suite: Suite, case_ids: list[str], *, by_command: bool = False, again: bool = False
) -> Schedule:
    """Append a run of these cases to the schedule."""
    entry = StartedSuite(suite=suite, suite_id=uuid.uuid4().hex, left=case_ids, by_command=by_command, again=again)
    return msgspec.structs.replace(schedule, passes=[*schedule.passes, entry])


def finish(schedule: Schedule, suite_id: str, case_id: str, seconds: float) -> Schedule:
    """Remove a measured case from its run, which ends with its last case or when its time limit is reached."""
    passes = [_after(entry, case_id, seconds) if entry.suite_id == suite_id else entry for entry in schedule.passes]
    return msgspec.structs.replace(schedule, passes=[entry for entry in passes if entry.left and not _over(entry)])


def _after(entry: StartedSuite, case_id: str, seconds: float) -> StartedSuite:
    left = [name for name in entry.left if name != case_id]
    return msgspec.structs.replace(entry, left=left, spent_s=entry.spent_s + seconds)


def _over(entry: StartedSuite) -> bool:
    return entry.suite.time_limit_s is not None and entry.spent_s >= entry.suite.time_limit_s


def results_per_month(suites: Sequence[Suite], cases: Mapping[str, list[str]], now_s: float) -> dict[str, float]:
    """Return how many results per month each case gets; a suite without a trigger counts as daily."""
    per_month: dict[str, float] = {}
    for suite in suites:
        results = MONTH_S / _period_s(suite, now_s)
        for case_id in cases[suite.name]:
            per_month[case_id] = per_month.get(case_id, 0.0) + results
    return per_month


def _period_s(suite: Suite, now_s: float) -> float:
    """Return the mean time between two starts, at most a week."""
    trigger = suite.trigger()
    if trigger is None:
        return DAY_S
    if isinstance(trigger, Every):
        return min(trigger.period_s, WEEK_S)
    # a week is too short for starts every fourth day, and the first starts in a quarter may fall on a busy weekend
    return min(_gap_s(trigger, now_s, span_s) for span_s in (WEEK_S, QUARTER_S))


def _gap_s(cron: Cron, now_s: float, span_s: float) -> float:
    """Return the mean time between the first starts in a span."""
    at_s, starts = now_s, 0
    while starts < MOST_STARTS and (next_s := cron.next_after(at_s)) and next_s <= now_s + span_s:
        at_s, starts = next_s, starts + 1
    return (at_s - now_s) / starts if starts == MOST_STARTS else span_s / max(starts, 1)


def drop(schedule: Schedule, suite_id: str) -> Schedule:
    """End a run, whether or not cases remain."""
    return msgspec.structs.replace(schedule, passes=[entry for entry in schedule.passes if entry.suite_id != suite_id])
