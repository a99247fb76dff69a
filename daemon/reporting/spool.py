"""The records of a report on disk: a report of any number of records fits into memory."""

import tempfile
import zlib
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec
from msgspec import Struct

from benchd.daemon import records
from benchd.daemon.records import Record, of_range
from benchd.daemon.reporting.brief import Brief, decisive, is_measured
from benchd.daemon.reporting.cells import cells
from benchd.daemon.reporting.essentials import Essentials
from benchd.daemon.reporting.results_table import machine
from benchd.daemon.verdicts import results
from benchd.daemon.verdicts.recommend import impossible, place
from benchd.daemon.verdicts.rows import Row, row

T = TypeVar("T", bound=Hashable)


class _Entry(Struct, frozen=True, array_like=True):
    record: msgspec.Raw
    row: dict[str, Any]
    cells: list[str]


@contextmanager
def spooled(paths: Sequence[Path], folder: Path) -> Iterator["Spool"]:
    """Yield the records of these files, which lie in an unnamed file in `folder`, or where it will be made.

    A pipe is read only once, and the folder for temporary files may be in memory.
    """
    existing = next(one for one in (folder, *folder.absolute().parents) if one.is_dir())
    with tempfile.TemporaryFile(dir=existing) as file:
        yield Spool(paths, file)


class Spool:
    """The records of these files in order of time: `briefs` of all, the essentials of the `decisive` ones, rows."""

    def __init__(self, paths: Sequence[Path], file: IO[bytes]) -> None:
        self._file = file
        self._shared: dict[Hashable, Any] = {}
        self.briefs = sorted(results.kept(paths, self._keep), key=lambda brief: brief.t_wall)
        whole = (records.decode(self._entry(brief).record) for brief in decisive(self.briefs))
        self.decisive = list(map(Essentials(), whole))

    def rows(self) -> Iterator[Row]:
        """Yield each record as a flat row."""
        return (self._entry(brief).row for brief in self.briefs)

    def cells(self, newest: int = 0) -> Iterator[list[str]]:
        """Yield the cells of the `newest` records, of all by default."""
        return (self._entry(brief).cells for brief in self.briefs[-newest:])

    def _entry(self, brief: Brief) -> _Entry:
        self._file.seek(brief.start)
        return msgspec.json.decode(zlib.decompress(self._file.read(brief.size)), type=_Entry)

    def _keep(self, record: Record) -> Brief:
        """Write the record and return what memory holds of it; equal parts of records are one."""
        entry = _Entry(msgspec.Raw(msgspec.json.encode(record)), row(record), cells(record))
        start = self._file.tell()
        processes = record.processes
        return Brief(
            t_wall=record.t_wall,
            t_mono_ns=record.t_mono_ns,
            boot_id=self._one(record.boot_id),
            place=self._one(place(record)),
            machine=self._one(machine(record.environment)),
            comparable_part=self._one(record.environment.comparable_part),
            clock_hz=of_range(record.environment, record.clocks),
            case_id=self._one(record.case_id),
            variant=self._one(record.case.variant),
            weights_sha256=self._one(record.model.weights_sha256) if record.model else None,
            is_inference=record.case.direction == "inference",
            is_measured=is_measured(record),
            impossible=self._one(impossible(record)),
            scope=self._one(record.energy.scope) if record.energy else None,
            median_ms=record.timing.median_ms if record.timing else 0.0,
            processes=len(processes),
            process_ms=tuple(process.timing.median_ms for process in processes if process.timing),
            start=start,
            # the first level takes a fifth of the time of the default one
            size=self._file.write(zlib.compress(msgspec.json.encode(entry), level=1)),
        )

    def _one(self, value: T) -> T:
        """Return the first value that was equal to this one."""
        found: T = self._shared.setdefault(value, value)
        return found
