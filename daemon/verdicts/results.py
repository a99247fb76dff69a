"""Reads result files: the records of a run, or the error in the first line that is not a record."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchd.daemon import journal, records
from benchd.daemon.errors import SchemaError, UsageError
from benchd.daemon.records import PROFILED, Record

JOURNAL = "records.jsonl"
SPECIAL = re.compile(rb"\\u|[^ -~]")  # what a record without control characters may lack


def _whole(record: Record) -> Record:
    return record


def read(path: Path, keep: Callable[[Record], Record] = _whole) -> list[Record]:
    """Return the records in a file, or in the `records.jsonl` of a folder, each once, without those of profiles.

    `keep` returns what stays of each in memory: all of it by default. Raises UsageError if there is none, and
    SchemaError with file and line at the first line that is not a record.
    """
    file = _file(path)
    found = _measured(keep(_decoded(file, number, line)) for number, line in enumerate(journal.read(file), 1))
    if not found:
        raise UsageError(f"{file}: contains no record; give a file or folder written by bench-once")
    return found


def of_case(path: Path, case_id: str) -> list[Record]:
    """Return the records of one case as `read` does, possibly none; lines of other cases are not decoded."""
    file, name = _file(path), case_id.encode()
    found = _measured(_decoded(file, number, line) for number, line in enumerate(journal.read(file), 1) if name in line)
    return [record for record in found if record.case_id == case_id]


def _measured(found: Iterable[Record]) -> list[Record]:
    """Return the records without those of profiles, each once: a record delivered twice is in the file twice."""
    return _once(record for record in found if PROFILED not in record.flags)


def _once(found: Iterable[Record]) -> list[Record]:
    return list({record.key: record for record in found}.values())


def _file(path: Path) -> Path:
    file = path / JOURNAL if path.is_dir() else path
    if not file.exists():
        raise UsageError(f"{file}: no such file; give a result file, or the --output folder of a bench-once")
    return file


def read_all(paths: Sequence[Path], keep: Callable[[Record], Record] = _whole) -> list[Record]:
    """Return what `keep` returns of the records of several files, each record once."""
    return _once(record for path in paths for record in read(path, keep))


def _decoded(file: Path, number: int, line: bytes) -> Record:
    try:
        return decoded(line)
    except SchemaError as error:
        raise SchemaError(f"{file} line {number}: {error}") from error


def decoded(line: bytes) -> Record:
    """Return a foreign record; control characters are replaced, because a terminal or a browser would obey them."""
    record = records.decode(line)
    return msgspec.convert(printable(msgspec.to_builtins(record)), Record) if SPECIAL.search(line) else record


def printable(value: Any) -> Any:
    """Return what was decoded from JSON with each control or formatting character in its texts replaced."""
    if isinstance(value, str):
        return "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in value)
    if isinstance(value, dict):
        return {printable(name): printable(inner) for name, inner in value.items()}
    return [printable(inner) for inner in value] if isinstance(value, list | tuple) else value


def process_medians_ms(found: Sequence[Record]) -> list[float]:
    """Return the median of every successful process of the successful records."""
    processes = [process for record in found if record.status == "ok" for process in record.processes]
    return [process.timing.median_ms for process in processes if process.timing and process.status == "ok"]
