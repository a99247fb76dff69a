"""Reads result files: returns the records of a run, or raises an error for the first line that is not a record."""

import heapq
import re
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from benchd.daemon import journal, records
from benchd.daemon.errors import SchemaError, UsageError
from benchd.daemon.records import PROFILED, Record

JOURNAL = "records.jsonl"
NEWEST = 10_000
"""The largest number of records that a report keeps in memory."""

_SPECIAL = re.compile(rb"\\[bfrtu]|[^ -~]")  # if nothing in a record matches, it contains no control characters
_ORDINARY = bytes(range(ord(" "), ord("~") + 1)).replace(b"\\", b"")


def read(path: Path) -> list[Record]:
    """Return the records in a file or a folder's `records.jsonl`, each only once, excluding those of profiles.

    Raises UsageError if there are none, and SchemaError with file and line for the first line that is not a record.
    """
    return read_all([path])


def read_all(paths: Sequence[Path]) -> list[Record]:
    """Return the records of several files, like `read`."""
    return list(_each_once(paths))


def newest(paths: Sequence[Path]) -> tuple[list[Record], int]:
    """Return the NEWEST records of several files, oldest first, and the number of older ones."""
    counted = count()
    latest = heapq.nlargest(NEWEST, ((record.t_wall, -next(counted), record) for record in _each_once(paths)))
    return [record for *_, record in reversed(latest)], next(counted) - len(latest)


def _each_once(paths: Sequence[Path]) -> Iterator[Record]:
    """Yield each record of several files once; a file contains a record twice if it was delivered twice."""
    keys: set[str] = set()
    for path in paths:
        file, is_empty = _file(path), True
        for number, line in enumerate(journal.read(file), 1):
            record = _decoded(file, number, line)
            if PROFILED not in record.flags:
                is_empty = False
                if record.key not in keys:
                    keys.add(record.key)
                    yield record
        if is_empty:
            raise UsageError(f"{file}: contains no record; give a file or folder written by bench-once")


def of_case(path: Path, wanted: str) -> list[Record]:
    """Return the records with this case or run id, if any; lines without the id are not decoded."""
    file, name = _file(path), wanted.encode()
    decoded = (_decoded(file, number, line) for number, line in enumerate(journal.read(file), 1) if name in line)
    once = {record.key: record for record in decoded if PROFILED not in record.flags}
    return [record for record in once.values() if wanted in (record.case_id, record.run_id)]


def _file(path: Path) -> Path:
    with journal.explaining(path):
        file = path / JOURNAL if path.is_dir() else path
        if file.exists():
            return file
    raise UsageError(f"{file}: no such file; give a result file, or the --output folder of a bench-once run")


def _decoded(file: Path, number: int, line: bytes) -> Record:
    try:
        return decoded(line)
    except SchemaError as error:
        is_record = line.startswith(b"{") and str(error).startswith("not a benchd record")
        cure = "; delete this line to use the others" if is_record else ""
        raise SchemaError(f"{file} line {number}: {error}{cure}") from error


def decoded(line: bytes) -> Record:
    """Return a foreign record, with control characters replaced so that no terminal or browser obeys them."""
    record = records.decode(line)
    return msgspec.convert(printable(msgspec.to_builtins(record)), Record) if has_special(line) else record


def has_special(text: bytes) -> bool:
    """Return whether this JSON may contain a control character."""
    # most records consist of ordinary characters, and this test is several times faster
    return bool(text.translate(None, _ORDINARY) and _SPECIAL.search(text))


def printable(value: Any) -> Any:
    """Return the decoded JSON with each control or formatting character in its strings replaced."""
    if isinstance(value, str):
        return "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in value)
    if isinstance(value, dict):
        return {printable(name): printable(inner) for name, inner in value.items()}
    return [printable(inner) for inner in value] if isinstance(value, list | tuple) else value


def process_medians_ms(records: Sequence[Record]) -> list[float]:
    """Return the median of every successful process of the successful records."""
    processes = [process for record in records if record.status == "ok" for process in record.processes]
    return [process.timing.median_ms for process in processes if process.timing and process.status == "ok"]
