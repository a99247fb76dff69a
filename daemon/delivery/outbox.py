"""What is to be delivered and what became of it: a table on the disk, the truth of delivery.

A message is committed here before anyone hears of it and stays until a broker has acknowledged it. A crash in between
sends it again; its key lets the receiver tell.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from benchd.daemon.errors import UsageError

BUSY_S = 2.0  # how long to wait for another process; its transactions take milliseconds
APPLICATION_ID = 0x62636864  # marks the file as ours among SQLite databases

# Entry n takes a file of `user_version` n to n + 1; an entry that was released is never edited.
_MIGRATIONS = (
    (
        f"PRAGMA application_id={APPLICATION_ID}",
        """CREATE TABLE outbox(
            seq INTEGER PRIMARY KEY AUTOINCREMENT,
            key TEXT NOT NULL UNIQUE,
            topic TEXT NOT NULL,
            qos INTEGER NOT NULL,
            body BLOB NOT NULL,
            state TEXT NOT NULL DEFAULT 'pending' CHECK (state IN ('pending', 'sent', 'refused')),
            reason TEXT
        )""",
        "CREATE INDEX outbox_pending ON outbox(seq) WHERE state = 'pending'",
    ),
)

_REBUILD = "move it away; `benchd replay` builds a new one from records.jsonl"
_ADVICE = {
    "locked": "another process uses it; try again when that one has ended",
    "not a database": _REBUILD,
    "malformed": _REBUILD,
    "is full": "free some space",
}


class Row(NamedTuple):
    """One message. `seq` is the order of delivery."""

    seq: int
    key: str
    topic: str
    qos: int
    body: bytes


class Refusal(NamedTuple):
    """A message that the broker will not take, and why."""

    key: str
    reason: str


class Counts(NamedTuple):
    """How many messages are in each state."""

    pending: int
    sent: int
    refused: int


class Outbox:
    """The outbox in the file `path`, made where it is absent; for one thread, and a context manager that closes it.

    Every change is on the disk when its method returns. Raises UsageError with path, cause and remedy for a file that
    cannot be used: unreadable, locked, of a newer benchd, or no outbox at all.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with _explaining(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
            try:
                self._prepare()
            except BaseException:
                self._db.close()
                raise

    def add(self, key: str, topic: str, qos: int, body: bytes) -> None:
        """Take a message; one whose key is known already changes nothing."""
        sql = "INSERT INTO outbox(key, topic, qos, body) VALUES (?, ?, ?, ?) ON CONFLICT(key) DO NOTHING"
        with _explaining(self._path):
            self._db.execute(sql, (key, topic, qos, body))

    def pending(self, limit: int, after: int = 0) -> list[Row]:
        """Return the first `limit` pending messages with a `seq` above `after`, in order."""
        sql = "SELECT seq, key, topic, qos, body FROM outbox WHERE state = 'pending' AND seq > ? ORDER BY seq LIMIT ?"
        with _explaining(self._path):
            return [Row(*row) for row in self._db.execute(sql, (after, limit))]

    def mark_sent(self, *seqs: int) -> None:
        """Record that a broker has acknowledged these, in one commit."""
        with _explaining(self._path), self._transaction():
            self._db.executemany("UPDATE outbox SET state = 'sent' WHERE seq = ?", [(seq,) for seq in seqs])

    def mark_refused(self, seq: int, reason: str) -> None:
        """Record that the broker will not take this one; it is not sent again until `retry_refused`."""
        with _explaining(self._path):
            self._db.execute("UPDATE outbox SET state = 'refused', reason = ? WHERE seq = ?", (reason, seq))

    def retry_refused(self) -> None:
        """Make every refused message pending again."""
        with _explaining(self._path):
            self._db.execute("UPDATE outbox SET state = 'pending', reason = NULL WHERE state = 'refused'")

    def refused(self) -> list[Refusal]:
        """Return the refused messages in order."""
        with _explaining(self._path):
            rows = self._db.execute("SELECT key, reason FROM outbox WHERE state = 'refused' ORDER BY seq")
            return [Refusal(*row) for row in rows]

    def counts(self) -> Counts:
        """Return how many messages are in each state."""
        with _explaining(self._path):
            found = dict(self._db.execute("SELECT state, count(*) FROM outbox GROUP BY state"))
        return Counts(**{state: found.get(state, 0) for state in Counts._fields})

    def close(self) -> None:
        """Close the file; the last one to do so folds the write-ahead log into it."""
        with _explaining(self._path):
            self._db.close()

    def __enter__(self) -> "Outbox":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prepare(self) -> None:
        self._refuse_foreign()
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        if self._pragma("user_version") < len(_MIGRATIONS):
            with self._transaction():
                self._migrate()

    def _refuse_foreign(self) -> None:
        version = self._pragma("user_version")
        (entries,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if entries and self._pragma("application_id") != APPLICATION_ID:
            raise UsageError(f"outbox {self._path}: a database of another program; choose another folder")
        if version > len(_MIGRATIONS):
            raise UsageError(f"outbox {self._path}: written by a newer benchd (version {version}); use that one")

    def _migrate(self) -> None:
        # read again inside the transaction: another process may have done it meanwhile
        for version in range(self._pragma("user_version"), len(_MIGRATIONS)):
            for statement in _MIGRATIONS[version]:
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version={version + 1}")

    def _pragma(self, name: str) -> int:
        (value,) = self._db.execute(f"PRAGMA {name}").fetchone()
        return int(value)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        with self._db:
            yield


@contextmanager
def _explaining(path: Path) -> Iterator[None]:
    """Turn what the file system and SQLite say into one line with path and remedy."""
    try:
        yield
    except sqlite3.ProgrammingError:
        raise  # a mistake of the caller, such as another thread
    except (OSError, sqlite3.Error) as error:
        cause = getattr(error, "strerror", None) or str(error)
        remedy = next((advice for word, advice in _ADVICE.items() if word in cause), "check that it can be written")
        raise UsageError(f"outbox {path}: {cause}; {remedy}") from error
