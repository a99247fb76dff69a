"""Expands the configured suites into cases, and finds the case that the schedule requires next."""

import hashlib
import math
from collections.abc import Callable, Sequence

import msgspec

from benchd.daemon.config import Config, Suite
from benchd.daemon.errors import BenchdError, UsageError
from benchd.daemon.machine.sysfs import memory_bytes
from benchd.daemon.measuring import plan
from benchd.daemon.measuring.plan import Machine, PlannedCase
from benchd.daemon.records import OptionValue, Record
from benchd.daemon.service import schedule
from benchd.daemon.service.facts import Facts
from benchd.daemon.service.schedule import STEP_S, StartedSuite
from benchd.daemon.trigger import DAY_S
from benchd.models import catalog

MAX_PASSES = 20
COMMANDED_S = 7200.0  # time limit for a run started by a command if its suite sets none; no case begins after it
IMAGES_SHARE, VALUE_BYTES = 0.1, 4
LARGE_IMAGE = (3, 224, 224)  # assumed for a library's model, whose size is known only once it is built
MAX_CASES = 500
# maximum number of combinations of a suite's lists: a 64 KiB command could request more cases than fit in memory
MAX_PRODUCT = 1000


class Agenda:
    """Suites, the ids of their `cases`, and the current runs, which are in the schedule of `facts`.

    Raises UsageError for a suite that cannot be planned, and for two suites that give a case different weights or
    images.
    """

    def __init__(self, settings: Config, machine: Machine, facts: Facts) -> None:
        self.suites = [suite for suite in settings.suite if suite.name]
        self._facts = facts
        self._limits, self._machine = settings.limits, machine
        self._booted_s: float | None = None
        self._behind_s = self._believed_s = 0.0
        self.cases = {suite.name: self._ids(suite) for suite in self.suites}
        self.planned = {case_id for case_ids in self.cases.values() for case_id in case_ids}
        if self.suites:  # planned together, because results for the same case share its name
            plan.plan(self.suites, self._limits, machine)

    def results_per_month(self, now_s: float) -> dict[str, float]:
        """Return how many results per month each case gets from the schedules of its suites."""
        return schedule.results_per_month(self.suites, self.cases, now_s)

    @property
    def digest(self) -> str:
        """Return a hash of all suites and their cases."""
        return hashlib.sha256(msgspec.json.encode(self.cases, order="sorted")).hexdigest()

    def look(self, wall_s: float, boottime_s: float, device_id: str) -> bool:
        """Begin the runs that are due; return whether the schedule has changed.

        `boottime_s` is on CLOCK_BOOTTIME, which cannot be set: a comparison shows whether the wall clock was set. If
        the wall clock is behind the last look when the service starts, it has not been set yet: for up to a day, time
        continues from that look.
        """
        booted_s = wall_s - boottime_s
        if self._booted_s is None:
            behind_s = self._facts.schedule.clock_s - wall_s
            self._behind_s, self._believed_s = behind_s if behind_s > STEP_S else 0.0, boottime_s + DAY_S
        elif abs(booted_s - self._booted_s) > STEP_S or boottime_s > self._believed_s:
            self._behind_s = 0.0
        self._booted_s = booted_s
        before, now_s = self._facts.schedule, self.time_s(wall_s)
        served = schedule.serve(before, self.suites, now_s)
        self._facts.schedule = now = schedule.begin_due(served, self.suites, self.cases, now_s, device_id)
        return msgspec.structs.replace(now, clock_s=before.clock_s) != before

    def time_s(self, wall_s: float) -> float:
        """Return the schedule's time for the wall clock time `wall_s`."""
        return wall_s + self._behind_s

    def begin(self, suite: Suite) -> StartedSuite:
        """Begin a run requested by a command; raise UsageError if it cannot be planned or too many runs wait.

        The run has a time limit, and its batches must fit in memory.
        """
        if len(self.runs) >= MAX_PASSES:
            raise UsageError(f"{MAX_PASSES} runs are already waiting")
        case_ids = self._ids(suite)
        _refuse_too_large(suite)
        if suite.time_limit_s is None:
            suite = msgspec.structs.replace(suite, time_limit_s=COMMANDED_S)
        self._facts.schedule = schedule.begin(self._facts.schedule, suite, case_ids, by_command=True)
        return self.runs[-1]

    def named(self, name: str) -> Suite:
        """Return the suite with that name; raise UsageError if there is none."""
        suite = next((suite for suite in self.suites if suite.name == name), None)
        if suite is None:
            raise UsageError("no suite with that name; the command `list` returns them")
        return suite

    def cancel(self, suite_id: str | None) -> list[str]:
        """Drop the run with that id, or all; return the ids of the dropped runs."""
        dropped = [entry.suite_id for entry in self.runs if suite_id in (None, entry.suite_id)]
        for dropped_id in dropped:
            self._facts.schedule = schedule.drop(self._facts.schedule, dropped_id)
        return dropped

    def finish(self, record: Record, seconds: float, again_s: float | None = None) -> None:
        """Record the result of a case; for a result of the plan, `again_s` is when to repeat the measurement.

        An interrupted case stays in its run.
        """
        if record.status == "aborted":
            return
        is_of_suite = self.is_of_suite(record.suite_id)
        self.skip(record.suite_id, record.case_id, seconds)
        if is_of_suite:
            others = {name: at_s for name, at_s in self._facts.schedule.again_s.items() if name != record.case_id}
            now = {} if again_s is None else {record.case_id: again_s}
            self._facts.schedule = msgspec.structs.replace(self._facts.schedule, again_s=others | now)

    @property
    def runs(self) -> list[StartedSuite]:
        """Return the runs that are neither complete nor cancelled."""
        return self._facts.schedule.passes

    def is_under_way(self, suite_id: str) -> bool:
        """Return whether a run is neither complete nor cancelled."""
        return any(entry.suite_id == suite_id for entry in self.runs)

    def is_of_suite(self, suite_id: str) -> bool:
        """Return whether a run belongs to a configured suite, however it was started."""
        return any(entry.suite_id == suite_id and entry.suite.name for entry in self.runs)

    def skip(self, suite_id: str, case_id: str, seconds: float = 0.0) -> None:
        """Remove a case from its run and add `seconds` to the run's measured time."""
        self._facts.schedule = schedule.finish(self._facts.schedule, suite_id, case_id, seconds)

    def next(self, unmet: Callable[[StartedSuite], str | None]) -> tuple[StartedSuite, list[PlannedCase]] | str | None:
        """Return the remaining cases of the first run that need not wait, or why the first run must wait.

        Runs requested by a command come last.

        A case that no longer exists in this version or on this machine is skipped and reported once as the reason.
        """
        reasons = []
        for entry in sorted(self.runs, key=lambda entry: entry.by_command):
            reason, planned = unmet(entry), self._planned(entry)
            if reason is None and not isinstance(planned, str):
                return entry, planned
            if isinstance(planned, str):
                reason = f"{entry.left[0]} skipped: {planned}"
                self.skip(entry.suite_id, entry.left[0])
            reasons.append(f"{entry.suite.name or 'run'}: {reason}")
        return next(iter(reasons), None)

    def next_due(self, device_id: str) -> tuple[str, float] | None:
        """Return the next suite to begin, and its time."""
        due = [(suite.name, schedule.due_s(suite, self._facts.schedule, device_id)) for suite in self.suites]
        known = [(name, at_s) for name, at_s in due if at_s is not None]
        return min(known, key=lambda entry: entry[1], default=None)

    def _planned(self, entry: StartedSuite) -> list[PlannedCase] | str:
        """Return the remaining cases, or why the next one can no longer be planned."""
        try:
            planned = {case.case.case_id: case for case in plan.plan([entry.suite], self._limits, self._machine)}
        except BenchdError as error:  # stored by a different version, or its library or file no longer exists
            return str(error)
        if entry.left[0] not in planned:
            return "no longer a case of this suite"
        return [planned[name] for name in entry.left if name in planned]

    def _ids(self, suite: Suite) -> list[str]:
        lists: list[Sequence[object]] = [suite.models, suite.variants, suite.batch_sizes]
        lists += [suite.directions, suite.scenarios, suite.streams, suite.rates_hz, *suite.options.values()]
        product = math.prod([len(values) or 1 for values in lists])
        if product > MAX_PRODUCT:
            raise UsageError(f"the lists multiply to {product} cases; at most {MAX_PRODUCT} are allowed")
        ids = [entry.case.case_id for entry in plan.plan([suite], self._limits, self._machine)]
        if len(ids) > MAX_CASES:
            raise UsageError(f"{len(ids)} cases; at most {MAX_CASES} are allowed")
        return ids


def _refuse_too_large(suite: Suite) -> None:
    """Raise UsageError if the images of a batch take more than a share of memory: the model needs many times that."""
    for model in suite.models or (() if suite.own else plan.DEFAULT_MODELS):
        values = {name: _largest(given) for name, given in suite.options.items()}
        shape = catalog.entry(model).image_shape(values) or LARGE_IMAGE
        most = int(IMAGES_SHARE * memory_bytes() / (VALUE_BYTES * math.prod(shape)))
        largest = max(suite.batch_sizes, default=1)
        if largest > most:
            raise UsageError(f"batch size {largest}: at most {most} images of {model} fit in memory")


def _largest(values: Sequence[OptionValue]) -> OptionValue:
    return max(values, key=lambda value: value if isinstance(value, int | float) else 0)


def when(suite: Suite) -> str | None:
    """Return the trigger of a suite as written in the configuration."""
    given: Sequence[tuple[str, str | None]] = (("every", suite.every), ("at", suite.at), ("cron", suite.cron))
    return next((f"{name} {value}" for name, value in given if value is not None), None)
