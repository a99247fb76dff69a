"""The outbox: a table on disk with every message to deliver and its state, the truth of delivery.

A message is committed here before it is sent and stays until a broker has acknowledged it or, if a collector is known,
until the collector reports it stored: a broker that dies may lose what it has acknowledged. After a crash in between
it is sent again, and its key lets the receiver deduplicate. The service commits its few other facts together with it.
"""

import errno
import hashlib
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TypeVar

import msgspec

from benchd.daemon.errors import Full, UsageError
from benchd.daemon.machine.folders import file_id

OUTBOX = "outbox.db"
JOURNALLED = "journalled"  # the run id of the last record that came from the journal; empty in a new outbox
DELIVERED = "delivered"  # the keys of what a damaged outbox had delivered
BUSY_S = 5.0  # wait for another writer; transactions take milliseconds, more on a slow disk
PART_ROWS = 200  # per commit, so that no commit keeps other writers waiting
LOGS = ("-wal", "-shm")  # SQLite's files beside an open database
APPLICATION_ID = 0x62636864  # marks the file as ours among SQLite databases

STREAM = "stream"
VERSION = 1
"""The layout of the file; one of another layout is refused."""

# `unstored`: a collector has still to store it; `sent_s`: since the epoch, when a broker acknowledged it; `may_retry`:
# another connection may have the right that was missing. `numbered` counts the results without a gap, also after they
# are deleted; `stream` differs in every outbox. The columns after `body` cost a walk through it, so an index has those
# that its rows are chosen by.
_TABLES = (
    f"PRAGMA application_id={APPLICATION_ID}",
    """CREATE TABLE outbox(
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        key TEXT NOT NULL UNIQUE,
        topic TEXT NOT NULL,
        qos INTEGER NOT NULL,
        body BLOB NOT NULL,
        state TEXT NOT NULL DEFAULT 'pending' CHECK (state IN ('pending', 'sent', 'refused')),
        reason TEXT,
        sent_s REAL,
        unstored INTEGER NOT NULL DEFAULT 0,
        may_retry INTEGER NOT NULL DEFAULT 0
    )""",
    "CREATE INDEX outbox_pending ON outbox(seq) WHERE state = 'pending'",
    "CREATE INDEX outbox_unstored ON outbox(seq, unstored) WHERE unstored",
    "CREATE INDEX outbox_sent ON outbox(seq, unstored, sent_s) WHERE state = 'sent'",
    "CREATE INDEX outbox_refused ON outbox(seq, may_retry) WHERE state = 'refused'",
    "CREATE TABLE kept(name TEXT PRIMARY KEY, value BLOB NOT NULL)",
    "CREATE TABLE numbered(number INTEGER PRIMARY KEY AUTOINCREMENT, seq INTEGER NOT NULL UNIQUE)",
    """CREATE TRIGGER outbox_added AFTER INSERT ON outbox WHEN instr(NEW.topic, '/result/')
        BEGIN INSERT INTO numbered(seq) VALUES (NEW.seq); END""",
    "CREATE TRIGGER outbox_deleted AFTER DELETE ON outbox BEGIN DELETE FROM numbered WHERE seq = OLD.seq; END",
    "INSERT INTO kept VALUES ('stream', CAST(lower(hex(randomblob(8))) AS BLOB))",
    f"INSERT INTO kept VALUES ('{JOURNALLED}', x'')",  # noqa: S608 - our own words
    f"PRAGMA user_version={VERSION}",
)
LAST_SEQ = 2**63 - 1
CLOCK_SET_S = 1.7e9  # since the epoch; earlier dates come from a clock that was not yet set
KEEP_SENT_S = 7 * 86400.0
UNREAD = 2  # in the column `unstored`: a collector has received it and could not read it
KEEP_SENT_ROWS = 100_000
_UNSTORED = f"unstored AND unstored != {UNREAD}"  # the first word lets SQLite use the index

# each count uses an index: counting by state would read every body
_COUNT = """SELECT (SELECT count(*) FROM outbox),
    (SELECT count(*) FROM outbox WHERE state = 'pending'), (SELECT count(*) FROM outbox WHERE state = 'sent')"""
_REBUILD = "move it away; `benchd replay` builds a new one from records.jsonl"
_ADVICE = {
    "locked": "another process uses it; try again when that process has ended",
    "not a database": _REBUILD,
    "malformed": _REBUILD,
    "is full": "free some space",
    "unable to open": "check that it can be written and that the disk has free inodes",
    "disk I/O error": "free some space, and look for a failing disk in the kernel's log",
}
# SQLite also reports the second one if the write-ahead log does not fit on the disk
_FULL = ("is full", "disk I/O error")


Value = TypeVar("Value")


def body_digest(body: bytes) -> str:
    """Return what an acknowledgement must name to prove that its sender has received these bytes: SHA-256, in hex."""
    return hashlib.sha256(body).hexdigest()


class Message(NamedTuple):
    """A message to deliver, once per key."""

    key: str
    topic: str
    qos: int
    body: bytes


class Row(NamedTuple):
    """One message. `seq` is the order of delivery; `number` counts the results of this outbox, from 1."""

    seq: int
    key: str
    topic: str
    qos: int
    body: bytes
    number: int | None = None


class Refusal(NamedTuple):
    """A message that the broker refuses, and why."""

    key: str
    reason: str


class Counts(NamedTuple):
    """How many messages are in each state."""

    pending: int
    sent: int
    refused: int


class Outbox:
    """The outbox in the file `path`, created if absent; for one thread, and a context manager that closes it.

    Every change is on disk when its method returns; with `durable` False a power cut may undo the last ones, which a
    sender can repeat. Raises UsageError with path, cause and remedy for a file that cannot be used: unreadable,
    locked, of another layout, or not an outbox.
    """

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        self._path, self._synchronous = path, "FULL" if durable else "NORMAL"
        self._lost: list[str] = []
        with explaining(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open()

    def _open(self) -> None:
        # what SQLite opens for writing on a read-only disk, it does not close before this process's last connection
        mode = "ro" if _is_read_only(self._path.parent) else "rwc"
        self._db = sqlite3.connect(
            f"{self._path.absolute().as_uri()}?mode={mode}", timeout=BUSY_S, isolation_level=None, uri=True
        )
        try:
            self._prepare_when_free()
        except BaseException:
            self._db.close()
            raise
        self._id = file_id(self._path)

    def _prepare_when_free(self) -> None:
        """Prepare the file; two processes that open it after a kill hit a lock that SQLite itself does not wait for."""
        until_s = time.monotonic() + BUSY_S
        while True:
            try:
                return self._prepare()
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > until_s:
                    raise
            time.sleep(0.02)

    def add(self, key: str, topic: str, qos: int, body: bytes) -> None:
        """Add a message; one with a known key is ignored. Raises Full on a full disk."""
        self.add_all([Message(key, topic, qos, body)])

    def add_all(self, messages: Sequence[Message], kept: Mapping[str, bytes] | None = None) -> None:
        """Add messages in order, as `add` does, and store `kept` as `keep` does, in one commit."""
        sql = "INSERT INTO outbox(key, topic, qos, body) VALUES (?, ?, ?, ?) ON CONFLICT(key) DO NOTHING"
        with explaining(self._path), self._transaction():
            self._db.executemany(sql, messages)
            self._keep(kept or {})

    def keep(self, values: Mapping[str, bytes]) -> None:
        """Store values by name beside the messages, replacing earlier ones, in one commit."""
        with explaining(self._path), self._transaction():
            self._keep(values)

    def kept(self, name: str) -> bytes | None:
        """Return the value stored under this name."""
        with explaining(self._path):
            row = self._db.execute("SELECT value FROM kept WHERE name = ?", (name,)).fetchone()
        return bytes(row[0]) if row else None

    def kept_as(self, name: str, decode: Callable[[bytes], Value], default: Value) -> Value:
        """Return the decoded value stored under this name; `default` if there is none or it cannot be decoded.

        A value of another version of benchd may have another shape; it is deleted, and `take_lost` says so.
        """
        kept = self.kept(name)
        try:
            return decode(kept) if kept else default
        except (msgspec.DecodeError, ValueError, RecursionError, UsageError) as error:
            self._lost.append(f"{name} was stored by another version of benchd: {error}")
            with suppress(UsageError), explaining(self._path):  # a full disk: it is said again at the next start
                self._db.execute("DELETE FROM kept WHERE name = ?", (name,))
            return default

    def take_lost(self) -> list[str]:
        """Return, once, which values could not be decoded and why."""
        lost, self._lost = self._lost, []
        return lost

    def pending(self, limit: int, after: int = 0) -> list[Row]:
        """Return the first `limit` pending messages with a `seq` above `after`, in order."""
        sql = """SELECT seq, key, topic, qos, body, number FROM outbox LEFT JOIN numbered USING (seq)
            WHERE state = 'pending' AND seq > ? ORDER BY seq LIMIT ?"""
        with explaining(self._path):
            return [Row(*row) for row in self._db.execute(sql, (after, limit))]

    def mark_sent(self, *seqs: int, at_s: float | None = None, unstored: bool = False) -> None:
        """Record that a broker has acknowledged these, in one commit; `unstored`: a collector must still store them."""
        rows = [(at_s, unstored, seq) for seq in seqs]
        with explaining(self._path), self._transaction():
            self._db.executemany("UPDATE outbox SET state = 'sent', sent_s = ?, unstored = ? WHERE seq = ?", rows)

    def mark_stored(self, digests: Mapping[str, str | None]) -> int:
        """Delete the messages that a collector has stored, by key; return how many.

        One that no broker has acknowledged stays, and so does one whose body has another digest than the given one.
        """
        return self._acknowledge("DELETE FROM outbox WHERE seq = ?", digests)

    def mark_unread(self, digests: Mapping[str, str | None]) -> int:
        """Record that a collector cannot read these sent messages, which it must prove likewise; return how many."""
        change = f"UPDATE outbox SET unstored = {UNREAD} WHERE seq = ? AND state = 'sent'"  # noqa: S608 - our own words
        return self._acknowledge(change, digests)

    def _acknowledge(self, change: str, digests: Mapping[str, str | None]) -> int:
        if not digests:
            return 0
        with explaining(self._path), self._transaction():
            found = [seq for key, digest in digests.items() for seq in self._sent(key, digest)]
            return self._db.executemany(change, found).rowcount if found else 0

    def _sent(self, key: str, digest: str | None) -> list[tuple[int]]:
        """Return the `seq` of the message, if it was sent and its body has this digest."""
        # a pending one that was sent before may be on its way again
        sql = "SELECT seq, body FROM outbox WHERE key = ? AND (state = 'sent' OR state = 'pending' AND sent_s NOT NULL)"
        rows = self._db.execute(sql, (key,)).fetchall()
        return [(seq,) for seq, body in rows if digest in (None, body_digest(body))]

    def doubt_sent(self, after: int) -> int | None:
        """Count the next PART_ROWS sent results above `after` as not stored.

        Returns the last one's `seq`, None if there are none.
        """
        where = "state = 'sent' AND NOT unstored AND instr(topic, '/result/')"
        return max(self._part("UPDATE outbox SET unstored = 1", where, after), default=None)

    def send_unstored(self, after: int = 0) -> int | None:
        """Mark the next messages above `after` that no collector has stored as pending again, at most PART_ROWS.

        Those that one could not read are not among them. Returns the last one's `seq`, None if there are none.
        """
        return max(self._part("UPDATE outbox SET state = 'pending', unstored = 0", _UNSTORED, after), default=None)

    def send_unread(self) -> int:
        """Mark all messages that a collector could not read as pending again; return how many."""
        return self._in_parts("UPDATE outbox SET state = 'pending', unstored = 0", f"unstored AND unstored = {UNREAD}")

    def is_stored(self, after: int, to: int) -> bool:
        """Return whether none of the messages above `after` up to `to` waits for a broker or a collector's word."""
        sql = f"""SELECT (SELECT count(*) FROM outbox WHERE {_UNSTORED} AND seq > ?1 AND seq <= ?2)
            + (SELECT count(*) FROM outbox WHERE state = 'pending' AND seq > ?1 AND seq <= ?2)"""  # noqa: S608 - ours
        with explaining(self._path):
            (waiting,) = self._db.execute(sql, (after, to)).fetchone()
        return not waiting

    def expect_no_collector(self) -> int:
        """Count messages that a broker has acknowledged as sent after all; return how many."""
        return self._in_parts("UPDATE outbox SET unstored = 0", "unstored")

    def send_again(self, since_seq: int, until_seq: int = LAST_SEQ) -> int:
        """Mark messages that are not pending as pending again, refused ones too; return how many.

        They are the results with these numbers; a `since_seq` of 0 includes the events among them.
        """
        change = "UPDATE outbox SET state = 'pending', unstored = 0, reason = NULL"
        number = "coalesce((SELECT number FROM numbered WHERE numbered.seq = outbox.seq), 0)"
        states = [f"state = '{state}' AND {number} BETWEEN ? AND ?" for state in ("sent", "refused")]
        return sum(self._in_parts(change, where, since_seq, until_seq) for where in states)

    def forget_sent(self, now_s: float, keep_s: float = KEEP_SENT_S, keep_rows: int = KEEP_SENT_ROWS) -> None:
        """Delete messages sent more than `keep_s` ago or not among the last `keep_rows` sent.

        Messages dated by an unset clock have no age.
        """
        done = "state = 'sent' AND NOT unstored"
        self._in_parts("DELETE FROM outbox", f"{done} AND sent_s BETWEEN ? AND ?", CLOCK_SET_S, now_s - keep_s)
        last = f"SELECT seq FROM outbox WHERE {done} ORDER BY seq DESC LIMIT 1 OFFSET ?"  # noqa: S608 - our own words
        with explaining(self._path):
            found = self._db.execute(last, (keep_rows,)).fetchone()
        if found:
            self._in_parts("DELETE FROM outbox", f"{done} AND seq <= ?", *found)

    def used_bytes(self) -> int:
        """Return the size of the used part of the file."""
        with explaining(self._path):
            pages = self._pragma("page_count") - self._pragma("freelist_count")
            return pages * self._pragma("page_size")

    def mark_refused(self, seq: int, reason: str, *, may_retry: bool = False) -> None:
        """Record that the broker refused this message; it is not sent again until `retry_refused`.

        `may_retry`: another connection may be allowed to send it.
        """
        sql = "UPDATE outbox SET state = 'refused', reason = ?, may_retry = ? WHERE seq = ?"
        with explaining(self._path):
            self._db.execute(sql, (reason, may_retry, seq))

    def retry_refused(self, *, every: bool = True) -> None:
        """Mark refused messages as pending again: every one, or those that another connection may send."""
        which = "state = 'refused'" + ("" if every else " AND may_retry")
        self._in_parts("UPDATE outbox SET state = 'pending', reason = NULL", which)

    def refused(self) -> list[Refusal]:
        """Return the refused messages in order."""
        with explaining(self._path):
            rows = self._db.execute("SELECT key, reason FROM outbox WHERE state = 'refused' ORDER BY seq")
            return [Refusal(*row) for row in rows]

    def counts(self) -> Counts:
        """Return how many messages are in each state."""
        with explaining(self._path):
            total, pending, sent = self._db.execute(_COUNT).fetchone()
        return Counts(pending, sent, total - pending - sent)

    def device_ids(self) -> list[str]:
        """Return the ids of the devices that the messages are of, read from the index of the keys."""
        sql = "SELECT DISTINCT substr(key, 1, instr(key, ':') - 1) FROM outbox WHERE instr(key, ':')"
        with explaining(self._path):
            return [device_id for (device_id,) in self._db.execute(sql)]

    def backlog(self) -> tuple[Counts, int]:
        """Return how many messages are in each state, and how many sent ones no collector has stored."""
        with explaining(self._path):
            (unstored,) = self._db.execute("SELECT count(*) FROM outbox WHERE unstored").fetchone()
        return self.counts(), unstored

    def is_writable(self) -> bool:
        """Return whether a commit could begin now; writes nothing."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("ROLLBACK")
        except sqlite3.OperationalError:
            return False
        return True

    def is_moved(self) -> bool:
        """Return whether the file was moved, removed or replaced, and can be put back because its folder exists."""
        return file_id(self._path) != self._id and self._path.parent.is_dir()

    def put_back(self) -> str | None:
        """Put everything back into place if the file was moved, and return what happened; no other may be open.

        A file that was put there instead is moved aside.
        """
        if not self.is_moved():
            return None
        back = self._path.with_name(f"{self._path.name}.back")
        with explaining(self._path):
            _remove(back)
            with closing(sqlite3.connect(back)) as target:
                self._db.backup(target)
                target.execute("PRAGMA journal_mode=DELETE")  # all in one file
            self._db.close()
            aside = f"; the file in its place is now {_move_aside(self._path).name}" if self._path.exists() else ""
            _remove(self._path)
            back.replace(self._path)
            self._open()
        return f"outbox {self._path} was moved or removed while it was open, and was put back with all messages{aside}"

    def close(self) -> None:
        """Close the file; the last process to do so merges the write-ahead log into it."""
        with explaining(self._path):
            self._db.close()

    def __enter__(self) -> "Outbox":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _in_parts(self, change: str, where: str, *given: float) -> int:
        """Change all rows for which `where` holds; return how many."""
        total, seqs = 0, self._part(change, where, 0, *given)
        while seqs:
            total += len(seqs)
            seqs = self._part(change, where, seqs[-1], *given)
        return total

    def _part(self, change: str, where: str, after: int, *given: float) -> list[int]:
        """Change the next PART_ROWS rows above `after`, in one commit; return their `seq` in order."""
        part = f"SELECT seq FROM outbox WHERE {where} AND seq > ? ORDER BY seq LIMIT {PART_ROWS}"  # noqa: S608 - ours
        with explaining(self._path), self._transaction():
            seqs = [seq for (seq,) in self._db.execute(part, (*given, after))]
            self._db.executemany(f"{change} WHERE seq = ?", zip(seqs))
        return seqs

    def _prepare(self) -> None:
        self._refuse_foreign()
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute(f"PRAGMA synchronous={self._synchronous}")
        if not self._pragma("user_version"):
            with self._transaction():
                self._create()

    def _create(self) -> None:
        if not self._pragma("user_version"):  # another process may have done it meanwhile
            for statement in _TABLES:
                self._db.execute(statement)

    def _refuse_foreign(self) -> None:
        version = self._pragma("user_version")
        (entries,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if entries and self._pragma("application_id") != APPLICATION_ID:
            raise UsageError(f"outbox {self._path}: a database of another program; choose another folder")
        if version not in (0, VERSION):
            raise UsageError(f"outbox {self._path}: of another benchd (version {version}, not {VERSION}); {_REBUILD}")

    def _pragma(self, name: str) -> int:
        (value,) = self._db.execute(f"PRAGMA {name}").fetchone()
        return int(value)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        with self._db:
            yield

    def _keep(self, values: Mapping[str, bytes]) -> None:
        sql = "INSERT INTO kept(name, value) VALUES (?, ?) ON CONFLICT(name) DO UPDATE SET value = excluded.value"
        self._db.executemany(sql, values.items())


@contextmanager
def explaining(path: Path) -> Iterator[None]:
    """Turn errors of the file system and SQLite into one line with path and remedy."""
    try:
        yield
    except sqlite3.ProgrammingError:
        raise  # a bug of the caller, such as use from another thread
    except (OSError, sqlite3.Error) as error:
        cause = getattr(error, "strerror", None) or str(error)
        remedy = next((advice for word, advice in _ADVICE.items() if word in cause), "check that it can be written")
        kind = Full if any(word in cause for word in _FULL) or _lacks_inodes(path.parent) else UsageError
        raise kind(f"outbox {path}: {cause}; {remedy}") from error


def _is_read_only(folder: Path) -> bool:
    """Return whether nothing can be created there, which a kernel that found an error tells in no other way."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return False
    except OSError as error:
        return error.errno == errno.EROFS


def _lacks_inodes(folder: Path) -> bool:
    """Return whether the disk takes no further file, which SQLite reports as one that it cannot open."""
    with suppress(OSError):
        disk = os.statvfs(folder)
        return disk.f_files > 0 and disk.f_favail == 0
    return False


def open_or_salvage(path: Path) -> tuple[Outbox, str | None]:
    """Open the outbox; move a damaged one aside, copy its readable messages, and return what happened.

    The copy is complete before the damaged file is touched, so an interrupted start loses nothing.
    Raises UsageError for a file of another program or of another layout, or one that cannot be opened.
    """
    salvaged = path.with_name(f"{path.name}.salvaged")
    damage = "as an earlier start found" if salvaged.exists() else _damage(path)
    if damage is None:
        return Outbox(path), None
    if not salvaged.exists():
        _salvage(path, salvaged)
    aside = _move_aside(path)
    salvaged.replace(path)
    outbox = Outbox(path)
    taken = sum(outbox.counts())
    return outbox, f"outbox {path} was damaged ({damage}): {taken} messages recovered, the old file is now {aside.name}"


def _damage(path: Path) -> str | None:
    """Return what SQLite finds wrong with the file, None for an intact or absent one."""
    if not path.exists():
        return None
    try:
        with closing(sqlite3.connect(path, timeout=BUSY_S)) as database:
            (found,) = database.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.DatabaseError as error:
        # locked or inaccessible is not damage, and opening the file will report it
        return None if isinstance(error, sqlite3.OperationalError) else str(error)
    return None if found == "ok" else str(found)


def _salvage(path: Path, salvaged: Path) -> None:
    """Copy readable, undelivered messages to a new outbox, which gets its name once it is complete."""
    unfinished = path.with_name(f"{path.name}.salvaging")
    _remove(unfinished)
    try:
        with explaining(unfinished):
            Outbox(unfinished).close()
            with closing(sqlite3.connect(path)) as old, closing(sqlite3.connect(unfinished)) as new:
                _copy(old, new)
    except Full:
        _remove(unfinished)  # it would occupy the little space left
        raise
    unfinished.replace(salvaged)


def _copy(old: sqlite3.Connection, new: sqlite3.Connection) -> None:
    """Copy every readable row, one by one, so that a bad page costs only its own rows."""
    kept: dict[str, bytes] = {}
    with suppress(sqlite3.DatabaseError):
        kept.update(old.execute("SELECT name, value FROM kept WHERE name != ?", (DELIVERED,)))
    new.executemany("INSERT OR IGNORE INTO kept VALUES (?, ?)", kept.items())
    new.commit()
    add = "INSERT OR IGNORE INTO outbox(key, topic, qos, body) VALUES (?, ?, ?, ?)"
    delivered: list[str] = []
    for first in range(1, _last_seq(old) + 1, PART_ROWS):
        rows = [row for seq in range(first, first + PART_ROWS) if (row := _row(old, seq))]
        new.executemany(add, [row[1:] for row in rows if not row[0]])
        delivered += [str(row[1]) for row in rows if row[0]]
        new.commit()
    new.execute("INSERT INTO kept VALUES (?, ?)", (DELIVERED, msgspec.json.encode(delivered)))
    new.commit()
    new.execute("PRAGMA journal_mode=DELETE")  # all in one file, or an error, unlike close()


def _last_seq(old: sqlite3.Connection) -> int:
    """Return the last `seq` that was assigned, from either of two places."""
    for sql in ("SELECT seq FROM sqlite_sequence WHERE name = 'outbox'", "SELECT max(seq) FROM outbox"):
        with suppress(sqlite3.DatabaseError):
            row = old.execute(sql).fetchone()
            if row and row[0]:
                return int(row[0])
    return 0


def _row(old: sqlite3.Connection, seq: int) -> tuple[object, ...] | None:
    """Return whether a row was delivered, and the row for the new outbox, where it is pending; None if unreadable."""
    sql = "SELECT state = 'sent' AND NOT unstored, key, topic, qos, body FROM outbox WHERE seq = ?"
    with suppress(sqlite3.DatabaseError):
        found: tuple[object, ...] | None = old.execute(sql, (seq,)).fetchone()
        return found
    return None


def _move_aside(path: Path) -> Path:
    """Move the file and its log to a free name, unless an earlier start has done so; return that name."""
    number = 1
    while path.with_name(f"{path.name}.damaged-{number}").exists():
        number += 1
    if not path.exists():
        return path.with_name(f"{path.name}.damaged-{number - 1}")
    aside = path.with_name(f"{path.name}.damaged-{number}")
    for suffix in LOGS:
        log = path.with_name(path.name + suffix)
        if log.exists():
            log.replace(aside.with_name(aside.name + suffix))
    return path.replace(aside)


def _remove(path: Path) -> None:
    for suffix in ("", *LOGS):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
