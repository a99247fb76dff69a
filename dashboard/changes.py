"""Finds how each board's cases changed since an update or a date, judged together by the rule of `benchd compare`."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from benchd.daemon.machine.environment import SOURCES
from benchd.daemon.records import Record
from benchd.daemon.verdicts import doubts, sameness
from benchd.daemon.verdicts.compare import ADVISED_PROCESSES, Pair, both_here, clocks, command, judged, pair
from benchd.daemon.verdicts.effects import Verdict
from benchd.dashboard.limits import day_s
from benchd.dashboard.messages import Result
from benchd.dashboard.runs import BoardCache, Runs
from benchd.dashboard.store import Store
from benchd.dashboard.text import count, percent, short

RUNS = 5  # number of runs compared from each setup
DATES = 4  # maximum number of cached dates; others are read again
NAMED = 2  # number of differences between setups listed in a summary
DIFFERENCES, SEPARATING_CHARS = 200, 1000  # limits per change

UPDATES: dict[str, Callable[[Result], object]] = {
    "setup": lambda run: (run.tool_version, run.fingerprint),
    "benchd": lambda run: (run.tool_version, run.fingerprint.partition("-")[2]),
    "jetpack": lambda run: (run.jetpack, run.l4t),
    "driver": lambda run: run.driver,
    "fingerprint": lambda run: run.fingerprint.partition("-")[0],
}
"""The identity of a setup, by the name of the update: benchd with its sources, or the environment without benchd."""

_Where = tuple[str, str]  # the device that computes, and the power mode


class Change(NamedTuple):
    """A case on a board now and before, each with several runs, and the key and time of the newest.

    `first_s` is when the case was first measured in its current setup, which is the latest time of the change. `mark`
    says what disturbed the runs. `differences` describes how the setups differ, and `separating` how to find out which
    difference counts; both are empty within a setup. The verdict is corrected for all changes in the fleet.
    """

    device_id: str
    case_id: str
    where: _Where
    before_key: str
    now_key: str
    runs: tuple[int, int]
    last_s: tuple[float, float]
    first_s: float
    pair: Pair
    differences: tuple[str, ...]
    separating: str
    is_across: bool
    mark: str
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
        """Return the changes since an entry of UPDATES or a day, and how many boards have still to be read."""
        with self._lock:
            cache = self._kept.get(since) or BoardCache(self._store, partial(_of_board, since=since))
            self._kept[since] = cache
            self._forget_dates()
        by_board, left, newest = cache.update()
        with self._lock:
            state = (left, newest, len(by_board))
            if self._judged.get(since, (None,))[0] != state:
                self._judged[since] = state, _judged([change for of_board in by_board.values() for change in of_board])
            return self._judged[since][1], left

    def _forget_dates(self) -> None:
        for since in [since for since in self._kept if since not in UPDATES][:-DATES]:
            del self._kept[since]
            self._judged.pop(since, None)


def extent(alike: Sequence[Change], of: int) -> str:
    """Return how many of `of` cases became slower or faster, by how much, and what disturbed any of them."""
    shares = sorted(abs(change.verdict.effect or 0.0) for change in alike)
    low, high = (percent(share, "") for share in (shares[0], shares[-1]))
    between, mark = (
        low if low == high else f"{low} to {high}",
        next((marked.mark for marked in alike if marked.mark), ""),
    )
    return f"{len(alike)} of {count(of, 'case')} {alike[0].verdict.answer}, {between} %{mark}"


def _judged(changes: Sequence[Change]) -> list[Change]:
    verdicts = judged([change.pair for change in changes])
    return [change._replace(verdict=verdict) for change, verdict in zip(changes, verdicts, strict=True)]


def _of_board(board: Runs, since: str) -> list[Change]:
    date_s = day_s(since)
    return list(_since_date(board, date_s) if date_s is not None else _since_update(board, UPDATES[since]))


def _since_update(board: Runs, part: Callable[[Result], object]) -> Iterator[Change]:
    """Yield the change of each case from the last setup with a different `part` to the newest setup."""
    for of_case in board.setups().values():
        for now, *earlier in by_place(of_case).values():
            before = next((was for was in earlier if part(was) != part(now)), None)
            if before:
                yield from _change(board, (before, now), board.keys(before, RUNS))


def _since_date(board: Runs, date_s: float) -> Iterator[Change]:
    """Yield the change of each case from the setup at the date to the newest one since then."""
    earlier = board.setups(before_s=date_s)
    for case_id, of_case in board.setups().items():
        at_date = by_place(earlier.get(case_id, []))
        newer = [run for run in of_case if run.measured_s >= date_s]
        for where, (now, *_) in by_place(newer).items():
            if before := next(iter(at_date.get(where, [])), None):
                until = board.keys(before, RUNS, before_s=date_s)
                yield from _change(board, (before, now), until, date_s)


def by_place(of_case: Sequence[Result], *, reported: bool = True) -> dict[_Where, list[Result]]:
    """Return results by device and power mode; `reported` leaves out workers that died before reporting their setup."""
    places: dict[_Where, list[Result]] = defaultdict(list)
    for run in of_case:
        if run.threads is not None or not reported:
            places[run.computes, run.power_mode or ""].append(run)
    return places


def _change(
    board: Runs, of: tuple[Result, Result], before_keys: Sequence[str], since_s: float | None = None
) -> Iterator[Change]:
    """Yield the change between runs in two setups, which may be the same; nothing if there are no runs."""
    now_keys = board.keys(of[1], RUNS, since_s=since_s)
    records = board.records([*before_keys, *now_keys])
    before, now = ([record for record in records if record.key in keys] for keys in (before_keys, now_keys))
    if before and now:
        earlier, later = before[0], now[0]
        is_across = UPDATES["setup"](of[0]) != UPDATES["setup"](of[1])
        sides = before[::-1], now[::-1]  # newest last, as in a file
        yield Change(
            device_id=board.device_id,
            case_id=later.case_id,
            where=(of[1].computes, of[1].power_mode or ""),
            before_key=earlier.key,
            now_key=later.key,
            runs=(len(before), len(now)),
            last_s=(of[0].measured_s, of[1].measured_s),
            first_s=board.first_s(of[1], since_s),
            pair=pair(*sides, across_setups=is_across),
            differences=tuple(map(short, _differences(earlier, later)[:DIFFERENCES])) if is_across else (),
            separating=_separating(earlier, later)[:SEPARATING_CHARS] if is_across else "",
            is_across=is_across,
            mark=doubts.mark(records),
        )


def _differences(before: Record, now: Record) -> list[str]:
    """Return the changes between two setups, each as `name was → is`, with benchd first."""
    is_updated = before.tool_version != now.tool_version
    changes = [_arrow("benchd", before.tool_version, now.tool_version)] if is_updated else []
    changes += [_arrow(*change) for change in sameness.environment_changes(before.environment, now.environment)]
    sources = {record.environment.software.get(SOURCES) for record in (before, now)} - {None}
    changes += ["the sources of benchd"] if len(sources) == 2 and not is_updated else []
    if differing := clocks(before, now):
        name, *means_hz = differing
        changes.append(_arrow(name.removesuffix("_hz").replace("_", " "), *(f"{hz / 1e6:.0f} MHz" for hz in means_hz)))
    return changes


def _arrow(name: str, was: str, now: str) -> str:
    return f"{name} {was} → {now}"


def _separating(before: Record, now: Record) -> str:
    """Return instructions for finding out which difference between two setups changed the time."""
    if sameness.environment_difference(before.environment, now.environment) is None:
        return both_here(now)
    named = _differences(before, now)
    undo = f"undo {named[0]}" if len(named) == 1 else f"undo the {len(named)} differences one at a time"
    run = command(now, ADVISED_PROCESSES)
    return f"{undo}, run {run}, then reapply what was undone: the change in time is its effect"
