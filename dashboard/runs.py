"""Reads each board's measurements, board by board, and caches them, so that a page never waits for all boards.

Only boards with a new record are read again.
"""

import itertools
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from sqlalchemy import ColumnElement, Connection, Select, func, select
from sqlalchemy.exc import DBAPIError

from benchd.daemon.records import PROFILED, ProcessResult, Record
from benchd.daemon.verdicts import results
from benchd.dashboard.limits import READ, SHOWN
from benchd.dashboard.messages import Result
from benchd.dashboard.queries import NEWEST_FIRST, columns
from benchd.dashboard.schema import BODY, DEVICE, RESULT
from benchd.dashboard.store import Store

BUDGET_S = 0.4  # per update; several updates are needed for a fleet that is new to this process
# bytes read at once: 50 records of 7 processes on a GPU; invented records take ten times the memory
RECORDS_BYTES = 3_000_000

T = TypeVar("T")


class _StoredRecord(Record, frozen=True, kw_only=True):
    """A record from the store, without the slow check for finite numbers, which was made on arrival."""

    # limited, because an empty process takes 40 times as much memory as in JSON
    processes: Annotated[list[ProcessResult], msgspec.Meta(max_length=1000)] = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        """Skip the repeated check."""


class Runs:
    """Reads one board's measurements, without profiles, from a single state of the database."""

    def __init__(self, connection: Connection, device_id: str) -> None:
        self._connection, self.device_id = connection, device_id

    def setups(self, before_s: float | None = None) -> dict[str, list[Result]]:
        """Return the newest result, before `before_s`, in each setup of the newest cases, newest first."""
        group, run = RESULT.alias(), RESULT.alias()
        setup = [group.c[name] for name in ("device_id", "case_id", "tool_version", "fingerprint")]
        runs = [run.c[column.name] == column for column in setup] + [~run.c.flags.contains(PROFILED)]
        runs += [] if before_s is None else [run.c.measured_s < before_s]
        # max() would look up the flags of every result, whereas walking the index stops at the first run
        newest = select(run.c.id).where(*runs).order_by(run.c.measured_s.desc()).limit(1)
        ids = select(newest.scalar_subquery().label("id")).where(group.c.device_id == self.device_id).group_by(*setup)
        wanted = select(*columns(RESULT)).where(RESULT.c.id.in_(select(ids.subquery().c.id)))
        by_case: dict[str, list[Result]] = defaultdict(list)
        for row in self._connection.execute(wanted.order_by(RESULT.c.measured_s.desc()).limit(10 * READ)):
            by_case[row.case_id].append(Result(*row))
        return dict(list(by_case.items())[:SHOWN])

    def keys(self, of: Result, limit: int, since_s: float | None = None, before_s: float | None = None) -> list[str]:
        """Return the keys of the newest runs of a result's case in its setup, newest first."""
        wanted = _alike(of, RESULT.c.key, since_s)
        wanted = wanted if before_s is None else wanted.where(RESULT.c.measured_s < before_s)
        newest = wanted.order_by(*NEWEST_FIRST).limit(limit)
        return list(self._connection.execute(newest).scalars())

    def first_s(self, of: Result, since_s: float | None = None) -> float:
        """Return when a result's case was first measured in its setup, not before `since_s`."""
        first = _alike(of, RESULT.c.measured_s, since_s).order_by(RESULT.c.measured_s).limit(1)
        return float(self._connection.execute(first).scalar() or of.measured_s)

    def records(self, keys: Iterable[str]) -> list[Record]:
        """Return records in the order of their keys, up to a total of RECORDS_BYTES."""
        order = list(keys)
        sizes = select(BODY.c.key, func.length(BODY.c.body).label("size")).where(BODY.c.key.in_(order))
        bytes_ = {row.key: row.size for row in self._connection.execute(sizes)}
        order = [key for key in order if key in bytes_]
        ends = itertools.accumulate(bytes_[key] for key in order)
        fitting = [key for key, end in zip(order, ends, strict=True) if end <= RECORDS_BYTES]
        if left := len(order) - len(fitting):
            logging.getLogger(__name__).warning("%s: left out %d records that are too large", self.device_id, left)
        rows = self._connection.execute(select(BODY.c.key, BODY.c.body).where(BODY.c.key.in_(fitting)))
        records = {key: _decoded(body) for key, body in rows}
        return [records[key] for key in fitting]


def _alike(of: Result, wanted: ColumnElement[Any], since_s: float | None) -> Select[Any]:
    """Return the query for this column over the runs of a result's case in its setup."""
    same = [RESULT.c[name] == getattr(of, name) for name in ("device_id", "case_id", "tool_version", "fingerprint")]
    since = [] if since_s is None else [RESULT.c.measured_s >= since_s]
    return select(wanted).where(*same, *since, ~RESULT.c.flags.contains(PROFILED))


def _decoded(body: bytes) -> Record:
    """Return a stored record, with the same characters replaced as by `results.decoded`."""
    if results.has_special(body):
        return msgspec.convert(results.printable(msgspec.json.decode(body)), _StoredRecord)
    return msgspec.json.decode(body, type=_StoredRecord)


class BoardCache(Generic[T]):
    """The results of `read` for each board, for all viewers. Thread-safe; pages call it outside the event loop."""

    def __init__(self, store: Store, read: Callable[[Runs], T]) -> None:
        self._store, self._of_board, self._lock = store, read, threading.Lock()
        self._found: dict[str, T] = {}
        self._changed: dict[str, None] = {}
        self._newest = 0

    def update(self) -> tuple[dict[str, T], int, int]:
        """Return the cached results by board, how many boards are left to read, and the id of the newest result."""
        with self._lock:
            until_s = time.monotonic() + BUDGET_S
            with self._store.reading() as connection:
                self._note_changed(connection)
                while self._changed:
                    device_id = next(iter(self._changed))
                    self._read(Runs(connection, device_id))
                    del self._changed[device_id]
                    if time.monotonic() > until_s:
                        break
            return dict(self._found), len(self._changed), self._newest

    def _read(self, board: Runs) -> None:
        """Read one board; unusable records only remove their own board."""
        try:
            self._found[board.device_id] = self._of_board(board)
        except DBAPIError:
            raise
        except Exception:  # whatever a device sent, the page must not keep failing for everybody
            logging.getLogger(__name__).exception("the records of %s cannot be judged", board.device_id)
            self._found.pop(board.device_id, None)

    def _note_changed(self, connection: Connection) -> None:
        """Note every board at first, then those with a newer result."""
        last = connection.execute(select(func.max(RESULT.c.id))).scalar() or 0
        if last == self._newest:
            return
        newer = select(RESULT.c.device_id).where(RESULT.c.id > self._newest, RESULT.c.id <= last).distinct()
        every = select(DEVICE.c.device_id)
        wanted = newer if self._newest else every
        self._changed |= dict.fromkeys(connection.execute(wanted.limit(10 * READ)).scalars())
        self._newest = last
