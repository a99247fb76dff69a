"""A log: a journal with numbered lines, so that readers can detect and request missing lines.

Each line is a JSON object that starts with the log's random id and the line's `seq`, which counts up from 1
indefinitely. Full files move to an archive folder and include the numbers in their names.
"""

import os
import re
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from benchd.daemon import journal
from benchd.daemon.errors import SchemaError
from benchd.daemon.journal import Journal, explaining
from benchd.daemon.machine.systemd_notify import log

ARCHIVES = "runs"
ROTATE_BYTES = 64 * 2**20
LAST_SEQ = 10**18 - 1
TAIL_BYTES = 4 * 2**20  # enough to include the last line, because a record has at most 2 MB
HEAD = re.compile(rb'\{"log":"([0-9a-f]{16})","seq":([1-9][0-9]{0,17})[,}]')
_ARCHIVE = re.compile(r"-([0-9a-f]{16})-(\d+)-(\d+)\.jsonl(\.gz)?$")


class Numbers(msgspec.Struct, frozen=True):
    """The start of each line."""

    log: str
    seq: int


class Entry(NamedTuple):
    """One line and its number."""

    seq: int
    body: bytes


class _File(NamedTuple):
    log: str
    first: int
    last: int
    path: Path


class Log:
    """The log in the file `path`, for one writer and one reading thread, with archives in the folder `runs` next to it.

    `report` is called once for each damaged line, which is skipped. Raises UsageError, or Full, if the file cannot be
    used.
    """

    def __init__(self, path: Path, report: Callable[[str], None] = log) -> None:
        self.path, self.report = path, report
        self._archives = path.parent / ARCHIVES
        self._journal = Journal(path)
        self._reported: set[bytes] = set()
        self._size = 0
        self._place = (0, (0, 0), 0)  # where the line after this `seq` begins, in the file with this id
        self._moving = threading.Lock()
        self.id, self.last_seq = secrets.token_hex(8), 0
        self._find_last()

    def append(self, body: bytes) -> int:
        """Append a JSON object as one line and return its `seq`; it is on disk once this returns."""
        if self._journal.size_bytes() != self._size:  # another process has written, or the file was moved
            self._find_last()
        if self._journal.set_torn_aside(aside := self.path.with_name(f"{self.path.name}.damaged")):
            self.report(f"{self.path}: the last line was truncated, perhaps by a power cut, and is now in {aside.name}")
        seq = self.last_seq + 1
        self._journal.append(b'{"log":"%s","seq":%d,%s' % (self.id.encode(), seq, body[1:]))
        self.last_seq, self._size = seq, self._journal.size_bytes()
        return seq

    def skip_to(self, seq: int) -> None:
        """Continue numbering after `seq`, because the numbers up to it were used by lost lines."""
        self.last_seq = max(self.last_seq, seq)

    def rotate(self, from_bytes: int = ROTATE_BYTES) -> None:
        """Move a file of at least `from_bytes` to the archives and begin a new one."""
        if self._size < from_bytes:
            return
        first = next((seq for line in journal.read(self.path) if (seq := _seq(line, self.id))), None)
        if first is not None:
            name = f"{self.path.stem}-{self.id}-{first}-{self.last_seq}.jsonl"
            with self._moving:
                self._journal.move(self._archives / name)
            self._size = 0

    def entries(self, after: int = 0, to: int = LAST_SEQ) -> Iterator[Entry]:
        """Yield the lines with numbers after `after`, in order, up to `to` or the last line on disk."""
        to = min(to, self.last_seq)
        while after < to:
            with self._moving:  # files opened here are read to the end, even if they are renamed in the meantime
                file = next(file for file in self._files() if file.last > after)
                current = self.path.open("rb") if file.path == self.path and self.path.exists() else None
            for entry in self._lines(current, after) if current else self._archived_lines(file.path, after):
                if entry.seq > to:
                    return
                after = entry.seq
                yield entry
            after = max(after, file.last)

    def first_seq(self) -> int:
        """Return the number of the first line that still exists, or one beyond the last if there is none."""
        archived = [file.first for file in self._files()[:-1]]
        return archived[0] if archived else next((entry.seq for entry in self.entries()), self.last_seq + 1)

    def archived(self, after: int) -> set[Path]:
        """Return the archives with lines beyond `after`."""
        return {file.path for file in self._files()[:-1] if file.last > after}

    def close(self) -> None:
        """Close the file."""
        self._journal.close()

    def _files(self) -> list[_File]:
        """Return the archives of this log in order, then the file."""
        archives = (file for file in _archives(self._archives, self.path.stem) if file.log == self.id)
        return [*archives, _File(self.id, 0, LAST_SEQ, self.path)]

    def _lines(self, current: BinaryIO, after: int) -> Iterator[Entry]:
        """Yield the lines of the open file after `after`; damaged lines are reported and skipped."""
        with explaining(self.path), current as lines:
            status = os.fstat(lines.fileno())
            id_ = (status.st_dev, status.st_ino)
            if self._place[:2] == (after, id_):
                lines.seek(self._place[2])
            for line in lines:
                if not line.endswith(b"\n"):
                    return  # the rest is not written yet, or was cut off
                if entry := self._entry(line[:-1], after):
                    if entry.seq > self.last_seq:
                        return  # not on the disk yet
                    yield entry
                    self._place = (entry.seq, id_, lines.tell())

    def _archived_lines(self, path: Path, after: int) -> Iterator[Entry]:
        if path == self.path:
            return  # the file was moved away, and its successor does not exist yet
        try:
            for line in journal.read(_present(path)):
                if entry := self._entry(line, after):
                    yield entry
        except SchemaError as error:
            self._report(str(error).encode(), str(error))

    def _entry(self, line: bytes, after: int) -> Entry | None:
        """Return a line after `after`, or None for an earlier or damaged line."""
        seq = _seq(line, self.id)
        if seq is not None and seq <= after:
            return None
        try:
            if seq is None:
                raise ValueError("it does not begin with this log's id and a number")
            msgspec.json.decode(line.decode(), type=Numbers)  # it does not check the bytes of text that it skips
        except (ValueError, RecursionError) as error:
            self._report(line, f"{self.path}: a damaged line is skipped ({error}): {line[:60]!r}")
            return None
        return Entry(seq, line)

    def _report(self, damage: bytes, text: str) -> None:
        if damage not in self._reported:
            self._reported.add(damage)
            self.report(text)

    def _find_last(self) -> None:
        """Find the id and the last number, in the file or else in the newest archive; otherwise start a new log."""
        self._size = self._journal.size_bytes()
        if heads := self._last_heads():
            # the most frequent id, because a line may be damaged
            id_ = Counter(head[1] for head in heads).most_common(1)[0][0]
            self.id = id_.decode()
            self.last_seq = next(int(head[2]) for head in reversed(heads) if head[1] == id_)
        elif not self.last_seq:
            archives = _archives(self._archives, self.path.stem)
            if newest := max(archives, key=lambda file: file.last, default=None):
                self.id, self.last_seq = newest.log, newest.last

    def _last_heads(self) -> list[re.Match[bytes]]:
        """Return the starts of the last lines, or of all lines if the end of the file is damaged."""
        with explaining(self.path), self.path.open("rb") as file:
            for length in (TAIL_BYTES, self._size):
                file.seek(max(0, self._size - length))
                lines = file.read(length).split(b"\n")[:-1]
                if heads := [head for line in lines if (head := HEAD.match(line))]:
                    return heads
        return []


def files(folder: Path, name: str) -> list[Path]:
    """Return the files of the log `name` (`records.jsonl`) in an output or state folder, oldest first."""
    archives = [file.path for file in _archives(folder / ARCHIVES, name.partition(".")[0])]
    return [path for path in (*archives, folder / name) if path.exists()]


def _archives(folder: Path, stem: str) -> list[_File]:
    """Return the archives of the logs with this name, in order of their numbers."""
    matches = {path: match for path in folder.glob(f"{stem}-*") if (match := _ARCHIVE.search(path.name))}
    files = [_File(match[1], int(match[2]), int(match[3]), path) for path, match in matches.items()]
    return sorted(files, key=lambda file: file.first)


def _seq(line: bytes, id_: str) -> int | None:
    match = HEAD.match(line)
    return int(match[2]) if match and match[1] == id_.encode() else None


def _present(path: Path) -> Path:
    """Return the archive's current path, because it may have been compressed meanwhile."""
    compressed = path.with_name(f"{path.name}.gz")
    return compressed if compressed.exists() and not path.exists() else path
