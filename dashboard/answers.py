"""Decides what to ship on each board, by the rule of `benchd recommend`, from each case's newest record."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Literal, NamedTuple

from benchd.daemon.records import Case, Environment, Record
from benchd.daemon.verdicts import doubts
from benchd.daemon.verdicts.recommend import Decision, Requirements, decide, line, of_processes, unable, wrong
from benchd.dashboard.changes import Change, Changes, by_place
from benchd.dashboard.messages import Result, flat
from benchd.dashboard.runs import BoardCache, Runs
from benchd.dashboard.store import Store

Outcome = Literal["ships", "fastest", "inconclusive", "nothing"]


class Kind(NamedTuple):
    """The common properties of boards of the same kind: SoC, GPU or CPU, power mode, and the device that computes."""

    chip: str
    power_mode: str
    device: str


class Choice(NamedTuple):
    """The decision on a model for a board.

    `variant` ships, or is in the lead if the outcome is inconclusive, or is the fastest despite too few processes.
    `result` is its record, and `doubt` says that the processes are too few and what disturbed them. `words` is the line
    that `benchd recommend` prints, `failed` are the variants that fail their check. `change` is the change since the
    previous setup.
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
    doubt: str = ""


class Newest(NamedTuple):
    """The newest result of a case and place on a board, even a failed one; `why` says why it cannot win, if so."""

    result: Result
    kind: Kind
    case: Case
    why: str | None


class _Board(NamedTuple):
    choices: list[Choice]
    newest: list[Newest]


class Answers:
    """The choices of every board, for all viewers. Thread-safe; pages call it outside the event loop."""

    def __init__(self, store: Store, changes: Changes) -> None:
        self._kept, self._changes = BoardCache(store, _board), changes
        self.changes: list[Change] = []  # changes found in the last update

    def update(self) -> tuple[dict[str, list[Choice]], int]:
        """Return the choices by board, and how many boards have still to be read for them to be up to date."""
        by_board, left, _ = self._kept.update()
        changes, left_of_changes = self._changes.update("setup")
        known = {(change.device_id, change.case_id, *change.where): change for change in changes}
        choices = {
            device_id: [choice._replace(change=known.get(_place(choice))) for choice in of_board.choices]
            for device_id, of_board in by_board.items()
        }
        self.changes = changes
        return choices, max(left, left_of_changes)

    def newest(self) -> tuple[list[Newest], int]:
        """Return the newest result of every case and place, and how many boards have still to be read."""
        by_board, left, _ = self._kept.update()
        return [entry for of_board in by_board.values() for entry in of_board.newest], left


def _place(choice: Choice) -> tuple[str, str, str, str]:
    case_id = choice.result.case_id if choice.result else ""
    return choice.device_id, case_id, choice.kind.device, choice.kind.power_mode


def _board(board: Runs) -> _Board:
    keys: dict[tuple[str, str], list[str]] = defaultdict(list)
    for of_case in board.setups().values():
        for where, (newest, *_) in by_place(of_case, reported=False).items():
            keys[where].append(newest.key)
    content = _Board([], [])
    for of_where in keys.values():  # one at a time, to keep few records in memory
        records = board.records(of_where)
        content.choices.extend(_choices(records))
        why = unable(records)
        content.newest.extend(
            Newest(flat(record, 0.0), _kind(record.environment), record.case, why.get(record.key)) for record in records
        )
    return content


def _choices(records: list[Record]) -> Iterator[Choice]:
    wrongs = {reason for record in records if (reason := wrong(record))}
    for decision in decide(records, Requirements()):
        name, record = next(iter(decision.candidates.items()), ("", None))
        of_few = [f"fastest, {of_processes(decision)}"] if decision.fastest else []
        slowing = sorted(doubts.SLOWED.intersection(record.flags)) if record else []
        yield Choice(
            subject=decision.subject,
            device_id=records[0].device_id,
            kind=_kind(records[0].environment),
            outcome=_outcome(decision),
            variant=name,
            result=flat(record, 0.0) if record else None,
            agreed=_agreed(record) if record else "",
            words=line(decision),
            failed=tuple(name for name, reason in decision.excluded.items() if reason in wrongs),
            change=None,
            doubt=", ".join([*of_few, *([doubts.words(slowing)] if slowing else [])]),
        )


def _outcome(decision: Decision) -> Outcome:
    if decision.ship:
        return "ships"
    return "fastest" if decision.fastest else "inconclusive" if decision.candidates else "nothing"


def _kind(environment: Environment) -> Kind:
    chip = environment.soc or (environment.cpu_model if environment.device == "cpu" else environment.gpu)
    return Kind(chip or environment.machine, environment.power_mode or "", environment.device)


def _agreed(record: Record) -> str:
    """Return how well the answers agree with the labels if available, else with float64's answers."""
    if record.accuracy:
        value = record.accuracy.value
        figure = f"{100 * value:.1f} %" if record.accuracy.is_share else f"{value:.4g}"
        return f"{record.accuracy.metric} {figure}"
    check = record.check
    if check is None or check.agreeing is None or not check.decided:
        return "check ok"
    return f"{check.agreeing} of {check.decided} images agree"
