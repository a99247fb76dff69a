"""Gives the outbox what only the journal has: a record goes there first, and an outbox may be lost or damaged."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchd.daemon import journal, records
from benchd.daemon.delivery.outbox import DELIVERED, PART_ROWS, Message, Outbox
from benchd.daemon.delivery.topics import RESULT_QOS, Topics
from benchd.daemon.errors import BenchdError, SchemaError
from benchd.daemon.records import Record
from benchd.daemon.verdicts.results import JOURNAL


class Refilled(NamedTuple):
    """How many results were added, the last record's run id, and a line for each line that is not a record."""

    added: int
    last: str
    unreadable: list[str]


def journals(folder: Path) -> list[Path]:
    """Return the journals in an output or state folder, oldest first: those that were put away, then the last one."""
    away = [path for end in ("jsonl", "jsonl.gz") for path in (folder / "runs").glob(f"records-*.{end}")]
    return [path for path in (*sorted(away), folder / JOURNAL) if path.exists()]


def refill(outbox: Outbox, paths: Sequence[Path], wanted: Callable[[Record], bool] = lambda record: True) -> Refilled:
    """Add the wanted records of these journals as their original bytes, unless they are there or were delivered."""
    delivered: set[str] = outbox.kept_as(DELIVERED, msgspec.json.Decoder(set[str]).decode, set())
    before, last, unreadable = sum(outbox.counts()), "", list[str]()
    found = (result for path in paths for result in results(path, unreadable))
    while part := list(islice(found, PART_ROWS)):
        outbox.add_all([message for record, message in part if wanted(record) and record.key not in delivered])
        last = part[-1][0].run_id
    return Refilled(sum(outbox.counts()) - before, last, unreadable)


def after(path: Path, run_id: bytes) -> list[tuple[Record, Message]]:
    """Return the records after the one with this id: all if it is empty or in a journal that was put away since."""
    last = 0
    with suppress(SchemaError):  # the last line is truncated
        for number, line in enumerate(journal.read(path), 1):
            last = number if run_id and run_id in line else last
    return list(results(path, [], last))


def results(path: Path, unreadable: list[str], after_line: int = 0) -> Iterator[tuple[Record, Message]]:
    """Yield each record with its message; describe lines that are not records, or a damaged archive, in `unreadable`.

    Raises UsageError if the file cannot be read.
    """
    try:
        for number, line in islice(enumerate(journal.read(path), 1), after_line, None):
            found = _result(line)
            if isinstance(found, BenchdError):
                unreadable.append(f"{path} line {number}: {found}")
            else:
                yield found
    except SchemaError as error:
        unreadable.append(str(error))


def _result(line: bytes) -> tuple[Record, Message] | BenchdError:
    try:
        record = records.decode(line)
        return record, Message(record.key, Topics(record.device_id).result(record.run_id), RESULT_QOS, line)
    except BenchdError as error:
        return error
