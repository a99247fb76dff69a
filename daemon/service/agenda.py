"""The configuration's suites as cases, and the schedule's state over them: what the service measures next."""

import hashlib
import math
from collections.abc import Callable, Sequence

import msgspec

from benchd.daemon.config import Config, Suite
from benchd.daemon.errors import BenchdError, UsageError
from benchd.daemon.measuring import plan
from benchd.daemon.measuring.plan import Machine, Planned
from benchd.daemon.records import Record
from benchd.daemon.service import schedule
from benchd.daemon.service.schedule import Progress, State
from benchd.daemon.trigger import DAY_S

MAX_PASSES = 20
MAX_CASES = 500
MAX_PRODUCT = 1000  # of a suite's lists: a command of 64 KiB could ask for more cases than the memory holds


class Agenda:
    """Suites, their cases and the passes under way. Raises UsageError for a suite that cannot be planned."""

    def __init__(self, settings: Config, machine: Machine, state: State) -> None:
        self.suites = [suite for suite in settings.suite if suite.name]
        self.state = state
        self._limits, self._machine = settings.limits, machine
        self._booted_s: float | None = None
        self._cases = {suite.name: self._ids(suite) for suite in self.suites}

    @property
    def cases(self) -> dict[str, list[str]]:
        """Return the case ids of each suite."""
        return self._cases

    @property
    def digest(self) -> str:
        """Return a hash of all suites and their cases."""
        return hashlib.sha256(msgspec.json.encode(self._cases, order="sorted")).hexdigest()

    def look(self, now_s: float, boottime_s: float, device_id: str) -> bool:
        """Begin what is due; return whether the state has changed.

        `boottime_s` is on CLOCK_BOOTTIME, which nobody sets: against it shows that the calendar's clock was set.
        """
        booted_s = now_s - boottime_s
        clock_set = self._booted_s is not None and abs(booted_s - self._booted_s) > DAY_S
        self._booted_s = booted_s
        state = schedule.serve(self.state, self.suites, now_s, clock_set=clock_set)
        state = schedule.begin_due(state, self.suites, self._cases, now_s, device_id)
        changed, self.state = state != self.state, state
        return changed

    def begin(self, suite: Suite) -> Progress:
        """Begin a pass that a command asks for; raise UsageError where it cannot be planned or too many wait."""
        if len(self.state.passes) >= MAX_PASSES:
            raise UsageError(f"{MAX_PASSES} passes wait already")
        self.state = schedule.begin(self.state, suite, self._ids(suite), by_command=True)
        return self.state.passes[-1]

    def named(self, name: str) -> Suite:
        """Return the suite of that name; raise UsageError where there is none."""
        found = next((suite for suite in self.suites if suite.name == name), None)
        if found is None:
            raise UsageError("no suite of that name; `list` names them")
        return found

    def cancel(self, suite_id: str | None) -> list[str]:
        """Drop the pass of that id, or all; return the ids of what was dropped."""
        dropped = [entry.suite_id for entry in self.state.passes if suite_id in (None, entry.suite_id)]
        for entry in dropped:
            self.state = schedule.drop(self.state, entry)
        return dropped

    def after(self, record: Record, seconds: float, *, again: bool) -> State:
        """Return the state once this record is there; a case that was interrupted stays in its pass.

        One that is to be measured `again` is the last of its pass.
        """
        if record.status == "aborted":
            return self.state
        return schedule.finish(self.state, record.suite_id, record.case_id, seconds, again=again)

    def is_under_way(self, suite_id: str) -> bool:
        """Say whether a pass is neither through nor cancelled."""
        return any(entry.suite_id == suite_id for entry in self.state.passes)

    def is_of_suite(self, suite_id: str) -> bool:
        """Say whether a pass is of a suite of the configuration, in whatever way it was begun."""
        return any(entry.suite_id == suite_id and entry.suite.name for entry in self.state.passes)

    def skip(self, suite_id: str, case_id: str) -> None:
        """Take a case off its pass without a result."""
        self.state = schedule.finish(self.state, suite_id, case_id, 0.0)

    def next(self, unmet: Callable[[Progress], str | None]) -> tuple[Progress, list[Planned]] | str | None:
        """Return the cases that are left of the first pass that nothing holds up, else what holds up the first one.

        A case that this version or this machine no longer has is skipped, and that is the reason once.
        """
        reasons = []
        for entry in self.state.passes:
            reason, planned = unmet(entry), self._planned(entry)
            if reason is None and planned:
                return entry, planned
            if not planned:
                reason = f"{entry.left[0]} skipped: it is no case of this suite any more"
                self.skip(entry.suite_id, entry.left[0])
            reasons.append(f"{entry.suite.name or 'run'}: {reason}")
        return next(iter(reasons), None)

    def next_due(self, device_id: str) -> tuple[str, float] | None:
        """Return the suite that begins next and when."""
        due = [(suite.name, schedule.due_s(suite, self.state, device_id)) for suite in self.suites]
        known = [(name, at_s) for name, at_s in due if at_s is not None]
        return min(known, key=lambda entry: entry[1], default=None)

    def _planned(self, entry: Progress) -> list[Planned]:
        """Return the cases that are left, none if the next one is no case any more."""
        try:
            planned = {case.case.case_id: case for case in plan.plan([entry.suite], self._limits, self._machine)}
        except BenchdError:  # kept by another version, or its library or file has gone
            return []
        return [planned[name] for name in entry.left if name in planned] if entry.left[0] in planned else []

    def _ids(self, suite: Suite) -> list[str]:
        lists: list[Sequence[object]] = [suite.models, suite.variants, suite.batch_sizes]
        lists += [suite.directions, suite.scenarios, *suite.options.values()]
        product = math.prod([len(values) or 1 for values in lists])
        if product > MAX_PRODUCT:
            raise UsageError(f"lists that multiply to {product}; at most {MAX_PRODUCT}")
        ids = [entry.case.case_id for entry in plan.plan([suite], self._limits, self._machine)]
        if len(ids) > MAX_CASES:
            raise UsageError(f"{len(ids)} cases; at most {MAX_CASES}")
        return ids


def when(suite: Suite) -> str | None:
    """Return what makes the service begin a suite, as the configuration says it."""
    given: Sequence[tuple[str, str | None]] = (("every", suite.every), ("at", suite.at), ("cron", suite.cron))
    return next((f"{name} {value}" for name, value in given if value is not None), None)
