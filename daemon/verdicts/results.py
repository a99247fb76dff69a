"""Result files read back: the records of a pass, or what is wrong with the first line that is none."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchd.daemon import journal, records
from benchd.daemon.errors import SchemaError, UsageError
from benchd.daemon.records import PROFILED, Record

JOURNAL = "records.jsonl"


def read(path: Path) -> list[Record]:
    """Return the records in a file, or in the `records.jsonl` of a folder, each once, those of profiles left out.

    Raises UsageError where there is none, SchemaError that names file and line at the first that is not one.
    """
    file = _file(path)
    found = _measured(_decoded(file, number, line) for number, line in enumerate(journal.read(file), 1))
    if not found:
        raise UsageError(f"{file}: holds no record; give a file or a folder that bench-once has written")
    return found


def of_case(path: Path, case_id: str) -> list[Record]:
    """Return the records of one case as `read` does; lines of others are not decoded, and there may be none."""
    file, name = _file(path), case_id.encode()
    found = _measured(_decoded(file, number, line) for number, line in enumerate(journal.read(file), 1) if name in line)
    return [record for record in found if record.case_id == case_id]


def _measured(found: Iterable[Record]) -> list[Record]:
    """Return the records without those of profiles, each once: what is delivered twice stands in a file twice."""
    return _once(record for record in found if PROFILED not in record.flags)


def _once(found: Iterable[Record]) -> list[Record]:
    return list({record.key: record for record in found}.values())


def _file(path: Path) -> Path:
    return path / JOURNAL if path.is_dir() else path


def read_all(paths: Sequence[Path]) -> list[Record]:
    """Return the records of several files, each record once."""
    return _once(_each(paths))


def _each(paths: Sequence[Path]) -> Iterator[Record]:
    for path in paths:
        yield from read(path)


def _decoded(file: Path, number: int, line: bytes) -> Record:
    try:
        return records.decode(line)
    except SchemaError as error:
        raise SchemaError(f"{file} line {number}: {error}") from error


def process_medians_ms(found: Sequence[Record]) -> list[float]:
    """Return the median of every process that ended well of the records that did."""
    processes = [process for record in found if record.status == "ok" for process in record.processes]
    return [process.timing.median_ms for process in processes if process.timing and process.status == "ok"]
