"""How each case on each board changed since an update or a date; judged together by the rule of `benchd compare`."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import NamedTuple

from benchd.daemon.records import Environment
from benchd.daemon.verdicts import setups
from benchd.daemon.verdicts.compare import Pair, judged, pair
from benchd.daemon.verdicts.effects import Verdict
from benchd.dashboard.runs import BoardCache, EnvironmentPart, Runs, Setup
from benchd.dashboard.store import Store
from benchd.dashboard.text import short

RUNS = 5  # of each setup that a change is judged by
DATES = 4  # kept at once; the others are read again
NAMED = 2  # differences between two setups in a summary
DIFFERENCES, SEPARATING_CHARS = 200, 1000  # kept of a change

UPDATES: dict[str, Callable[[Setup, EnvironmentPart], object]] = {
    "setup": lambda setup, _: (setup.tool_version, setup.fingerprint),
    "benchd": lambda setup, _: (setup.tool_version, setup.fingerprint.partition("-")[2]),
    "jetpack": lambda _, environment: (environment.jetpack, environment.l4t),
    "driver": lambda _, environment: environment.driver,
    "fingerprint": lambda setup, _: setup.fingerprint.partition("-")[0],
}
"""What tells two setups apart, by the name of the update: benchd with its sources, the environment without benchd."""

_Where = tuple[str, str]  # the device that computes, and the power mode


class Change(NamedTuple):
    """The time of a case on a board now against before, each of some runs, of which the newest one's key and time.

    `differences` are those of the setups, in words, and `separating` is what would tell which of them counts; both are
    empty in one setup. The verdict is corrected for all changes in the fleet.
    """

    device_id: str
    case_id: str
    where: _Where
    before_key: str
    now_key: str
    runs: tuple[int, int]
    last_s: tuple[float, float]
    pair: Pair
    differences: tuple[str, ...]
    separating: str
    is_across: bool
    verdict: Verdict = Verdict(answer="inconclusive")

    @property
    def since(self) -> str:
        """Return the first differences between the setups."""
        rest = len(self.differences) - NAMED
        return ", ".join(self.differences[:NAMED]) + (f", and {rest} more" if rest > 0 else "")


class Changes:
    """The changes since each kind of update, or since a date. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store, self._lock = store, threading.Lock()
        self._kept: dict[str, BoardCache[list[Change]]] = {}
        self._judged: dict[str, tuple[object, list[Change]]] = {}

    def update(self, since: str) -> tuple[list[Change], int]:
        """Return the changes since an entry of UPDATES or since a day, and how many boards are still to be read."""
        with self._lock:
            kept = self._kept.get(since) or BoardCache(self._store, partial(_of_board, since=since))
            self._kept[since] = kept
            self._forget_dates()
        by_board, left, newest = kept.update()
        with self._lock:
            state = (left, newest, len(by_board))
            if self._judged.get(since, (None,))[0] != state:
                self._judged[since] = state, _judged([change for of_board in by_board.values() for change in of_board])
            return self._judged[since][1], left

    def _forget_dates(self) -> None:
        for since in [since for since in self._kept if since not in UPDATES][:-DATES]:
            del self._kept[since]
            self._judged.pop(since, None)


def day_s(text: str) -> float | None:
    """Return when a day like 2026-11-20 begins in UTC, in Unix time; None if it is no day."""
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        return None


def _judged(changes: Sequence[Change]) -> list[Change]:
    verdicts = judged([change.pair for change in changes])
    return [change._replace(verdict=verdict) for change, verdict in zip(changes, verdicts, strict=True)]


def _of_board(board: Runs, since: str) -> list[Change]:
    date_s = day_s(since)
    return list(_since_date(board, date_s) if date_s is not None else _since_update(board, UPDATES[since]))


def _since_update(board: Runs, part: Callable[[Setup, EnvironmentPart], object]) -> Iterator[Change]:
    """Yield the change of each case from the last setup that differs in `part` to the newest one."""
    environments: dict[str, EnvironmentPart] = {}
    for case_id, of_case in board.setups().items():
        for (now, environment), *earlier in _reported(board, case_id, of_case, environments):
            before = next((setup for setup, was in earlier if part(setup, was) != part(now, environment)), None)
            if before:
                keys = board.keys(case_id, before, RUNS), board.keys(case_id, now, RUNS)
                yield from _change(board, (before, now), *keys)


def _since_date(board: Runs, date_s: float) -> Iterator[Change]:
    """Yield the change of each case from the setup at the date to the newest one since."""
    environments: dict[str, EnvironmentPart] = {}
    earlier = board.setups(before_s=date_s)
    for case_id, of_case in board.setups().items():
        known = _reported(board, case_id, earlier.get(case_id, []), environments)
        at_date = {_where(environment): setup for (setup, environment), *_ in known}
        newer = [setup for setup in of_case if setup.last_s >= date_s]
        for (now, environment), *_ in _reported(board, case_id, newer, environments):
            before = at_date.get(_where(environment))
            if before:
                until = board.keys(case_id, before, RUNS, before_s=date_s)
                yield from _change(board, (before, now), until, board.keys(case_id, now, RUNS, since_s=date_s))


def by_place(
    board: Runs, case_id: str, of_case: Sequence[Setup], environments: dict[str, EnvironmentPart]
) -> dict[_Where, list[tuple[Setup, EnvironmentPart]]]:
    """Return the setups with their environments by device and power mode; profiles have none."""
    places: dict[_Where, list[tuple[Setup, EnvironmentPart]]] = defaultdict(list)
    for setup in of_case:
        if environment := environments.get(setup.fingerprint) or board.environment(case_id, setup):
            environments[setup.fingerprint] = environment
            places[_where(environment)].append((setup, environment))
    return places


def _reported(
    board: Runs, case_id: str, of_case: Sequence[Setup], environments: dict[str, EnvironmentPart]
) -> Iterator[list[tuple[Setup, EnvironmentPart]]]:
    """Yield those of `by_place` whose worker lived to tell its threads, versions and variables: others lack them."""
    for of_place in by_place(board, case_id, of_case, environments).values():
        if told := [one for one in of_place if one[1].threads is not None]:
            yield told


def _where(environment: Environment | EnvironmentPart) -> _Where:
    return environment.device, environment.power_mode or ""


def _change(
    board: Runs, of: tuple[Setup, Setup], before_keys: Sequence[str], now_keys: Sequence[str]
) -> Iterator[Change]:
    """Yield the change between the newest runs of two setups, which may be one; nothing without runs."""
    records = board.records([*before_keys, *now_keys])
    before, now = ([record for record in records if record.key in keys] for keys in (before_keys, now_keys))
    if before and now:
        one, other = before[0], now[0]
        is_across = of[0][:2] != of[1][:2]
        sides = before[::-1], now[::-1]  # the newest last, as in a file
        yield Change(
            device_id=board.device_id,
            case_id=other.case_id,
            where=_where(other.environment),
            before_key=one.key,
            now_key=other.key,
            runs=(len(before), len(now)),
            last_s=(of[0].last_s, of[1].last_s),
            pair=pair(*sides, across_setups=is_across),
            differences=tuple(map(short, setups.changed(one, other)[:DIFFERENCES])) if is_across else (),
            separating=setups.separating(one, other)[:SEPARATING_CHARS] if is_across else "",
            is_across=is_across,
        )
