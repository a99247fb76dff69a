"""Takes an outbox back to the layout of an earlier benchd: `python -m benchd.daemon.delivery.rollback FILE LAYOUT`.

The copy from before the migration has the service's facts in the shapes that the earlier version reads. The messages
are those of the newer file, with what was added and delivered since.
"""

import os
import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

from benchd.daemon.delivery.outbox import (
    _MIGRATIONS,
    APPLICATION_ID,
    JOURNALLED,
    NEW_STREAM,
    explaining,
    of_layout,
)
from benchd.daemon.errors import BenchdError

NEEDED = {"key", "topic", "qos", "body"}


def take_back(path: Path, layout: int = len(_MIGRATIONS)) -> str | None:
    """Bring the outbox to `layout` if it is of a newer one, and return what happened; None if it was not.

    The newer file stays beside it. A kill at any step leaves one or the other, whole. Raises UsageError for a file that
    another process uses, Full on a full disk.
    """
    if _layout(path) <= layout:
        return None
    unfinished, aside = (path.with_name(f"{path.name}.{end}") for end in ("restoring", "newer"))
    with explaining(path):
        unfinished.unlink(missing_ok=True)
        with closing(sqlite3.connect(path)) as newer:
            newer.execute("PRAGMA journal_mode=DELETE")  # all in one file, or an error if another process uses it
            is_copied = _restored(path, unfinished, layout)
            with closing(sqlite3.connect(unfinished)) as new, new:
                taken = _take_messages(newer, new, with_kept=not is_copied)
                _mark(newer, new, refill=taken is None)
        aside.unlink(missing_ok=True)
        os.link(path, aside)
        unfinished.replace(path)
    facts = "of before its upgrade" if is_copied else "of the newer one, because there is no copy"
    what = "its messages cannot be read" if taken is None else f"{taken} messages taken over"
    return f"outbox {path} was of a newer benchd: {what}, the schedule is {facts}, the newer file is now {aside.name}"


def _layout(path: Path) -> int:
    """Return the layout of the file; 0 for none and for one that is not an outbox, which opening it will report."""
    if not path.exists():
        return 0
    try:
        with closing(sqlite3.connect(path)) as found:
            (application,) = found.execute("PRAGMA application_id").fetchone()
            (version,) = found.execute("PRAGMA user_version").fetchone()
    except sqlite3.DatabaseError:
        return 0
    return int(version) if application == APPLICATION_ID else 0


def _restored(path: Path, unfinished: Path, layout: int) -> bool:
    """Make `unfinished` from the copy of that layout, else an empty outbox; return whether there was a copy."""
    copy = of_layout(path, layout)
    if copy.exists():
        shutil.copyfile(copy, unfinished)
        return True
    with closing(sqlite3.connect(unfinished)) as new, new:
        for statement in (text for migration in _MIGRATIONS[:layout] for text in migration):
            new.execute(statement)
        new.execute(f"PRAGMA user_version={layout}")
    return False


def _take_messages(newer: sqlite3.Connection, new: sqlite3.Connection, *, with_kept: bool) -> int | None:
    """Replace the messages by those of the newer outbox; return how many, None if it has none in a known form."""
    columns = [name for name in _columns(new, "outbox") if name in _columns(newer, "outbox")]
    if not set(columns) >= NEEDED:
        _begin_stream(new)
        return None
    _copy_table(newer, new, "outbox", columns)
    if with_kept and _columns(new, "kept") == _columns(newer, "kept"):
        _copy_table(newer, new, "kept", _columns(new, "kept"))
    _take_numbers(newer, new)
    (taken,) = new.execute("SELECT count(*) FROM outbox").fetchone()
    return int(taken)


def _mark(newer: sqlite3.Connection, new: sqlite3.Connection, *, refill: bool) -> None:
    """Say which record came last from the journal; with `refill` none: the service then takes all."""
    if _columns(new, "kept"):  # the first layout has none
        is_known = not refill and _columns(new, "kept") == _columns(newer, "kept")
        find = "SELECT name, value FROM kept WHERE name = ?"
        marks = newer.execute(find, (JOURNALLED,)) if is_known else [(JOURNALLED, b"")]
        new.executemany("INSERT OR REPLACE INTO kept(name, value) VALUES (?, ?)", marks)


def _take_numbers(newer: sqlite3.Connection, new: sqlite3.Connection) -> None:
    """Let each result keep its number, and give none twice."""
    columns = _columns(new, "numbered")
    if columns != _columns(newer, "numbered"):
        _begin_stream(new)
    elif columns:
        _copy_table(newer, new, "numbered", columns)
        new.execute("DELETE FROM sqlite_sequence WHERE name = 'numbered'")
        last = newer.execute("SELECT name, seq FROM sqlite_sequence WHERE name = 'numbered'")
        new.executemany("INSERT INTO sqlite_sequence(name, seq) VALUES (?, ?)", last)


def _begin_stream(new: sqlite3.Connection) -> None:
    """Give the outbox another identity: numbers of the newer one that are not known would be given twice."""
    if _columns(new, "numbered"):
        new.execute(NEW_STREAM)


def _copy_table(newer: sqlite3.Connection, new: sqlite3.Connection, table: str, columns: list[str]) -> None:
    names, marks = ", ".join(columns), ", ".join("?" * len(columns))
    known = names.replace("state", "CASE WHEN state IN ('sent', 'refused') THEN state ELSE 'pending' END")
    rows = newer.execute(f"SELECT {known} FROM {table}")  # noqa: S608 - our own words
    new.execute(f"DELETE FROM {table}")  # noqa: S608 - likewise
    new.executemany(f"INSERT INTO {table}({names}) VALUES ({marks})", rows)  # noqa: S608 - likewise


def _columns(database: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in database.execute(f"PRAGMA table_info({table})")]


if __name__ == "__main__":
    try:
        said = take_back(Path(sys.argv[1]), int(sys.argv[2]))
    except BenchdError as error:
        sys.exit(f"benchd: {error}")
    if said:
        sys.stdout.write(f"benchd: {said}\n")
