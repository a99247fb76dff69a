"""The configured suites as cases, and the schedule's state: which case the service measures next."""

import hashlib
import math
import os
from collections.abc import Callable, Sequence

import msgspec

from benchd.daemon.config import Config, Suite
from benchd.daemon.errors import BenchdError, UsageError
from benchd.daemon.measuring import plan
from benchd.daemon.measuring.plan import Machine, Planned
from benchd.daemon.records import OptionValue, Record
from benchd.daemon.service import schedule
from benchd.daemon.service.schedule import Progress, State
from benchd.daemon.trigger import DAY_S
from benchd.models import catalog

MAX_PASSES = 20
COMMANDED_S = 7200.0  # of a run by command whose suite has no time limit: no case begins after it
IMAGES_SHARE, VALUE_BYTES = 0.1, 4
LARGE_IMAGE = (3, 224, 224)  # of a library's model, which says its size only when it is built
MAX_CASES = 500
MAX_PRODUCT = 1000  # of a suite's lists: a command of 64 KiB could request more cases than fit into memory


class Agenda:
    """Suites, the ids of their `cases`, and the current runs.

    Raises UsageError for a suite that cannot be planned, and for two that give one case other weights or images.
    """

    def __init__(self, settings: Config, machine: Machine, state: State) -> None:
        self.suites = [suite for suite in settings.suite if suite.name]
        self.state = state
        self._limits, self._machine = settings.limits, machine
        self._booted_s: float | None = None
        self.cases = {suite.name: self._ids(suite) for suite in self.suites}
        if self.suites:  # also together: their results of one case have one name
            plan.plan(self.suites, self._limits, machine)

    def results_per_month(self, now_s: float) -> dict[str, float]:
        """Return how many results per month each case gets by its suites' schedules."""
        return schedule.results_per_month(self.suites, self.cases, now_s)

    @property
    def digest(self) -> str:
        """Return a hash of all suites and their cases."""
        return hashlib.sha256(msgspec.json.encode(self.cases, order="sorted")).hexdigest()

    def look(self, now_s: float, boottime_s: float, device_id: str) -> bool:
        """Begin the runs that are due; return whether the state has changed.

        `boottime_s` is on CLOCK_BOOTTIME, which cannot be set: comparing the two shows whether the wall clock was set.
        """
        booted_s = now_s - boottime_s
        clock_set = self._booted_s is not None and abs(booted_s - self._booted_s) > DAY_S
        self._booted_s = booted_s
        state = schedule.serve(self.state, self.suites, now_s, clock_set=clock_set)
        state = schedule.begin_due(state, self.suites, self.cases, now_s, device_id)
        changed, self.state = state != self.state, state
        return changed

    def begin(self, suite: Suite) -> Progress:
        """Begin a run requested by a command; raise UsageError if it cannot be planned or too many wait.

        It has a time limit, and its batches must fit into memory.
        """
        if len(self.state.passes) >= MAX_PASSES:
            raise UsageError(f"{MAX_PASSES} runs are already waiting")
        case_ids = self._ids(suite)
        _refuse_too_large(suite)
        if suite.time_limit_s is None:
            suite = msgspec.structs.replace(suite, time_limit_s=COMMANDED_S)
        self.state = schedule.begin(self.state, suite, case_ids, by_command=True)
        return self.state.passes[-1]

    def named(self, name: str) -> Suite:
        """Return the suite of that name; raise UsageError if there is none."""
        found = next((suite for suite in self.suites if suite.name == name), None)
        if found is None:
            raise UsageError("no suite of that name; the command `list` names them")
        return found

    def cancel(self, suite_id: str | None) -> list[str]:
        """Drop the run of that id, or all; return the ids of the dropped runs."""
        dropped = [entry.suite_id for entry in self.state.passes if suite_id in (None, entry.suite_id)]
        for entry in dropped:
            self.state = schedule.drop(self.state, entry)
        return dropped

    def after(self, record: Record, seconds: float, again_s: float | None = None) -> State:
        """Return the state after this record: as a result of the plan, it says when its case is measured once more.

        An interrupted case stays in its run.
        """
        if record.status == "aborted":
            return self.state
        state = schedule.finish(self.state, record.suite_id, record.case_id, seconds)
        if not self.is_of_suite(record.suite_id):
            return state
        others = {case_id: at_s for case_id, at_s in state.again_s.items() if case_id != record.case_id}
        now = {} if again_s is None else {record.case_id: again_s}
        return msgspec.structs.replace(state, again_s=others | now)

    def is_under_way(self, suite_id: str) -> bool:
        """Return whether a run is neither complete nor cancelled."""
        return any(entry.suite_id == suite_id for entry in self.state.passes)

    def is_of_suite(self, suite_id: str) -> bool:
        """Return whether a run is of a configured suite, however it was started."""
        return any(entry.suite_id == suite_id and entry.suite.name for entry in self.state.passes)

    def skip(self, suite_id: str, case_id: str) -> None:
        """Remove a case from its run without a result."""
        self.state = schedule.finish(self.state, suite_id, case_id, 0.0)

    def next(self, unmet: Callable[[Progress], str | None]) -> tuple[Progress, list[Planned]] | str | None:
        """Return the remaining cases of the first run that need not wait, else why the first one waits.

        Runs requested by a command come after the others.

        A case that this version or machine no longer has is skipped, which is reported as the reason once.
        """
        reasons = []
        for entry in sorted(self.state.passes, key=lambda entry: entry.by_command):
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
        due = [(suite.name, schedule.due_s(suite, self.state, device_id)) for suite in self.suites]
        known = [(name, at_s) for name, at_s in due if at_s is not None]
        return min(known, key=lambda entry: entry[1], default=None)

    def _planned(self, entry: Progress) -> list[Planned] | str:
        """Return the remaining cases, or why the next one cannot be planned any more."""
        try:
            planned = {case.case.case_id: case for case in plan.plan([entry.suite], self._limits, self._machine)}
        except BenchdError as error:  # stored by another version, or its library or file is gone
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
    """Raise UsageError if the images of one batch take more than a share of memory: the model needs many times that."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for model in suite.models or (() if suite.own else plan.DEFAULT_MODELS):
        values = {name: _largest(given) for name, given in suite.options.items()}
        shape = catalog.entry(model).image_shape(values) or LARGE_IMAGE
        most = int(IMAGES_SHARE * memory_bytes / (VALUE_BYTES * math.prod(shape)))
        largest = max(suite.batch_sizes, default=1)
        if largest > most:
            raise UsageError(f"batch size {largest}: at most {most} images of {model} fit this memory")


def _largest(values: Sequence[OptionValue]) -> OptionValue:
    return max(values, key=lambda value: value if isinstance(value, int | float) else 0)


def when(suite: Suite) -> str | None:
    """Return the trigger of a suite as written in the configuration."""
    given: Sequence[tuple[str, str | None]] = (("every", suite.every), ("at", suite.at), ("cron", suite.cron))
    return next((f"{name} {value}" for name, value in given if value is not None), None)
