"""Files of JSON lines; each line is on disk before readers are notified."""

import errno
import gzip
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from benchd.daemon.errors import Full, SchemaError, UsageError
from benchd.daemon.machine import folders


class Journal:
    """A crash-safe file of records: when `append` returns, the record is on disk.

    The folder is created if absent. If the file is moved or removed, for example by logrotate, a new one is created.
    Raises UsageError with path and cause if the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with explaining(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        self._open()

    def append(self, record: bytes) -> None:
        """Append one record as a line; raise ValueError if it contains a line break, UsageError if the write fails.

        Raises Full if the disk is full. A failed write does not leave a partial record in the file.
        """
        if b"\n" in record:
            raise ValueError("a record must be one line")
        if folders.file_id(self._path) != self._id:
            self._reopen()
        with explaining(self._path):
            line = (b"\n" if _is_torn(self._file) else b"") + record + b"\n"
            size = self.size_bytes()
            try:
                self._write(line)
            except OSError:
                with suppress(OSError):
                    self._file.truncate(size)
                raise

    def _write(self, line: bytes) -> None:
        rest = memoryview(line)
        while rest:
            rest = rest[self._file.write(rest) :]
        os.fsync(self._file.fileno())

    def set_torn_aside(self, aside: Path) -> bool:
        """Move an incomplete last line, left by a crash, to the file `aside`; return whether there was one."""
        if folders.file_id(self._path) != self._id or not _is_torn(self._file):
            return False
        with explaining(self._path):
            self._file.seek(0)
            torn = self._file.read().rpartition(b"\n")[2]
        with explaining(aside), aside.open("ab") as file:
            file.write(torn + b"\n")
        with explaining(self._path):
            self._file.truncate(self.size_bytes() - len(torn))
        return True

    def move(self, path: Path) -> None:
        """Move the file to `path`, in a folder on the same file system, and continue in an empty file."""
        with explaining(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._path.replace(path)
        self._reopen()

    def _reopen(self) -> None:
        """Continue in the file that is now at the path; if it cannot be opened, the next `append` tries again."""
        moved = self._file
        self._open()
        moved.close()

    def _open(self) -> None:
        """Open the file; raise UsageError for a pipe or a device, which cannot store records."""
        with explaining(self._path):
            if self._path.exists() and not self._path.is_file():
                raise UsageError(f"{self._path}: not a regular file; move it away")
            self._file = self._path.open("ab+", buffering=0)
            folders.sync(self._path.parent)  # otherwise a power cut could lose the new file's name
        self._id = folders.file_id(self._path)

    def size_bytes(self) -> int:
        """Return the size of the file in bytes."""
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read(path: Path) -> Iterator[bytes]:
    """Yield every line of `path`, which may be compressed (`.gz`), without its line break.

    Raises SchemaError if a crash truncated the last line, or a compressed file is damaged.
    """
    with explaining(path), gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                raise SchemaError(
                    f"{path} line {number}: truncated, perhaps by a power cut; delete this line to use those before it"
                )
            yield line[:-1]


def replace(path: Path, parts: Iterable[bytes]) -> None:
    """Create the file or replace it once all parts are written; raise UsageError, or Full, if that fails."""
    with explaining(path):
        folders.replace(path, parts)


@contextmanager
def explaining(path: Path) -> Iterator[None]:
    """Convert a file system error to UsageError or Full, and an error in a damaged archive to SchemaError.

    The message gives the path and the remedy.
    """
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise SchemaError(f"{path}: a damaged archive ({error}); restore it from a copy, or move it away") from error
    except OSError as error:
        cause = error.strerror or error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Full(f"{path}: {cause}; free some space") from error
        kind = Full if error.errno in (errno.EIO, errno.EROFS) else UsageError  # a failing disk is treated as full
        raise kind(f"{path}: {cause}; choose a folder that can be read and written") from error


def _is_torn(file: FileIO) -> bool:
    """Return whether the file ends in the middle of a line, for example after a crash."""
    if file.seek(0, os.SEEK_END) == 0:
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"
