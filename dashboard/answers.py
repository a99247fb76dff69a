"""What ships on each board, by the rule of `benchd recommend`, from the newest record of each of its cases.

The decisions are kept in memory. Only a board with a new record is read again, so that a page never waits for all.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec
from sqlalchemy import Connection, func, select

from benchd.daemon.records import PROFILED, Environment, Record
from benchd.daemon.verdicts import one_environment, one_model
from benchd.daemon.verdicts.effects import FEWEST_PROCESSES, Effect, Verdict, judge, judge_plan, runs_effect
from benchd.daemon.verdicts.recommend import Place, Requirements, decide, line, place, wrong
from benchd.daemon.verdicts.results import process_medians_ms
from benchd.dashboard import queries
from benchd.dashboard.limits import READ, SHOWN
from benchd.dashboard.messages import Result, flat
from benchd.dashboard.store import Store

BUDGET_S = 0.4  # of one update; a fleet that is new to this process takes several
RUNS = 5  # of each setup that a change is judged by
RUNS_READ = 200  # of a case, to find them
NAMED = 2  # differences between two setups
SETUPS = 5  # how many earlier setups are looked at for one in the same power mode

Outcome = Literal["ships", "inconclusive", "nothing"]


class Change(NamedTuple):
    """The time in the newest setup against that in the one before, whose difference `since` tells.

    `verdict` is corrected for the number of changes in the whole fleet. What of the setup caused it is not separable.
    """

    effect: Effect
    since: str
    verdict: Verdict


class Kind(NamedTuple):
    """What boards of one kind share: SoC, GPU or CPU, the power mode, and the device that computes."""

    chip: str
    power_mode: str
    device: str


class Choice(NamedTuple):
    """The decision on one model on one board.

    `variant` ships, or comes first if the outcome is inconclusive; `result` is its record. `words` is the line of
    `benchd recommend`, `failed` are the variants that fail their check.
    """

    subject: str
    device_id: str
    kind: Kind
    outcome: Outcome
    variant: str
    result: Result | None
    agreed: str
    words: str
    failed: tuple[str, ...]
    change: Change | None


class _Run(NamedTuple):
    key: str
    tool_version: str
    fingerprint: str


_Last = tuple[int, str]  # the id of a case's last result, and the case


class _Stored(Record, frozen=True, kw_only=True):
    """A record from the store: its numbers were found finite when it arrived, which takes longer than reading it."""

    def __post_init__(self) -> None:
        """Check nothing again."""


class Answers:
    """The choices of every board, for all viewers. Thread-safe; the pages call it outside the event loop."""

    def __init__(self, store: Store) -> None:
        self._store, self._lock = store, threading.Lock()
        self._read: dict[str, tuple[_Last, ...]] = {}
        self._choices: dict[str, list[Choice]] = {}
        self._newest = 0

    def update(self) -> tuple[dict[str, list[Choice]], int]:
        """Return the choices by board, and how many boards are still to be read for them to be up to date."""
        with self._lock:
            last = queries.newest(self._store)[0]
            left = 0
            if last != self._newest:
                left = self._read_changed()
                self._newest = 0 if left else last
                self._choices = _judged(self._choices)
            return dict(self._choices), left

    def _read_changed(self) -> int:
        until_s = time.monotonic() + BUDGET_S
        newest = _newest(self._store)
        changed = [device_id for device_id, cases in newest.items() if self._read.get(device_id) != cases]
        for done, device_id in enumerate(changed, 1):
            self._choices[device_id] = choices(self._store, device_id, [case_id for _, case_id in newest[device_id]])
            self._read[device_id] = newest[device_id]
            if time.monotonic() > until_s:
                return len(changed) - done
        return 0


def _judged(found: dict[str, list[Choice]]) -> dict[str, list[Choice]]:
    """Return the choices with the changes of all boards judged together: few of many are false by chance."""
    changes = [choice.change for of_board in found.values() for choice in of_board if choice.change]
    verdicts = iter(judge_plan([change.effect for change in changes]))
    return {device_id: [_with(choice, verdicts) for choice in of_board] for device_id, of_board in found.items()}


def _with(choice: Choice, verdicts: Iterator[Verdict]) -> Choice:
    change = choice.change
    return choice._replace(change=change._replace(verdict=next(verdicts))) if change else choice


def _newest(store: Store) -> dict[str, tuple[_Last, ...]]:
    """Return the cases of each board with the id of their last result, from the index result_case alone."""
    table = store.tables["result"]
    last = func.max(table.c.id)
    wanted = select(table.c.device_id, table.c.case_id, last).group_by(table.c.device_id, table.c.case_id)
    found: dict[str, list[_Last]] = defaultdict(list)
    with store.reading() as connection:
        for device_id, case_id, number in connection.execute(wanted.limit(10 * READ)):
            found[device_id].append((number, case_id))
    return {device_id: tuple(sorted(cases, reverse=True)[:SHOWN]) for device_id, cases in found.items()}


def choices(store: Store, device_id: str, case_ids: Iterable[str]) -> list[Choice]:
    """Return the choices on one board among these cases."""
    with store.reading() as connection:
        board = _Board(store, connection)
        runs = {case_id: found for case_id in case_ids if (found := board.runs(device_id, case_id))}
        measured: dict[Place, list[Record]] = defaultdict(list)
        for record in board.records(found[0].key for found in runs.values()):
            measured[place(record)].append(record)
        return [choice for found in measured.values() for choice in _choices(board, found, runs)]


class _Board:
    """Reads what one board has measured, from one state of the database."""

    def __init__(self, store: Store, connection: Connection) -> None:
        self._tables, self._connection = store.tables, connection

    def runs(self, device_id: str, case_id: str) -> list[_Run]:
        """Return the newest runs of a case, the newest first; a profile is never ranked."""
        table = self._tables["result"]
        columns = [table.c[name] for name in (*_Run._fields, "arrived_s", "flags")]
        mine = select(*columns).where(table.c.device_id == device_id, table.c.case_id == case_id)
        last = mine.order_by(table.c.id.desc()).limit(RUNS_READ).subquery()
        wanted = select(*(last.c[name] for name in _Run._fields)).where(~last.c.flags.contains(PROFILED))
        return [_Run(*row) for row in self._connection.execute(wanted.order_by(last.c.arrived_s.desc()))]

    def records(self, keys: Iterable[str]) -> list[Record]:
        """Return records, in no order."""
        table = self._tables["body"]
        bodies = self._connection.execute(select(table.c.body).where(table.c.key.in_(list(keys)))).scalars()
        return [msgspec.json.decode(body, type=_Stored) for body in bodies]


def _choices(board: _Board, found: list[Record], runs: Mapping[str, Sequence[_Run]]) -> Iterator[Choice]:
    wrongs = {reason for record in found if (reason := wrong(record))}
    for decision in decide(found, Requirements()):
        name, record = next(iter(decision.candidates.items()), ("", None))
        yield Choice(
            subject=decision.subject,
            device_id=found[0].device_id,
            kind=_kind(found[0].environment),
            outcome="ships" if decision.ship else "inconclusive" if record else "nothing",
            variant=name,
            result=flat(record, 0.0) if record else None,
            agreed=_agreed(record) if record else "",
            words=line(decision),
            failed=tuple(name for name, reason in decision.excluded.items() if reason in wrongs),
            change=_change(board, record, runs[record.case_id]) if record else None,
        )


def _kind(environment: Environment) -> Kind:
    chip = environment.soc or (environment.cpu_model if environment.device == "cpu" else environment.gpu)
    return Kind(chip or environment.machine, environment.power_mode or "", environment.device)


def _agreed(record: Record) -> str:
    """Return how the answers compare with float64's, or with the labels if there are any."""
    if record.accuracy:
        return f"top-1 {100 * record.accuracy.top1:.1f} %"
    check = record.check
    if check is None or check.agreeing is None or not check.decided:
        return "check ok"
    return f"{check.agreeing} of {check.decided} agree"


def _change(board: _Board, record: Record, runs: Sequence[_Run]) -> Change | None:
    """Return the change in time since the setup before, the newest in the same power mode; None if there is none."""
    setups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for run in runs:
        setups[run.tool_version, run.fingerprint].append(run.key)
    now = setups.pop((record.tool_version, record.environment.fingerprint))
    for keys in list(setups.values())[:SETUPS]:
        before = [one for one in board.records(keys[:RUNS]) if place(one) == place(record)]
        if before:
            return _between(before, board.records(now[:RUNS]))
    return None


def _between(before: Sequence[Record], now: Sequence[Record]) -> Change | None:
    """Return the change from runs of one setup to runs of the next; None if their times do not allow a verdict."""
    sides = [[times_ms for one in side if (times_ms := process_medians_ms([one]))] for side in (before, now)]
    one, other = before[0], now[0] if now else None
    if not all(sides) or other is None or one_model.older(one.model, other.model):
        return None
    if min(time_ms for side in sides for times_ms in side for time_ms in times_ms) <= 0.0:
        return None
    if sum(map(len, sides)) == 2 and min(map(len, (sides[0][0], sides[1][0]))) < FEWEST_PROCESSES:
        return None
    effect = runs_effect(*sides)
    return Change(effect, _since(one, other), judge(effect))


def _since(before: Record, now: Record) -> str:
    """Return what changed between two setups, in words."""
    versions = (
        [f"benchd {before.tool_version} to {now.tool_version}"] if before.tool_version != now.tool_version else []
    )
    changed = [words.replace(": ", " ", 1).replace(" and ", " to ", 1) for words in _differences(before, now)]
    named = [*versions, *changed] or ["the sources of benchd changed"]
    return ", ".join(named[:NAMED]) + (f", and {len(named) - NAMED} more" if named[NAMED:] else "")


def _differences(before: Record, now: Record) -> Iterator[str]:
    return one_environment.differences(before.environment, now.environment)
