"""`records.jsonl`: one record a line, for people and their programs; what is delivered is the outbox's to know."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from benchd.daemon.errors import Full, SchemaError, UsageError


class Journal:
    """A file of records that a crash cannot take back: what `append` has taken is on the disk when it returns.

    The folder is made where it is absent. Raises UsageError with path and cause where it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with _explaining(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab+", buffering=0)
            _sync_folder(path.parent)

    def append(self, record: bytes) -> None:
        """Add one record as a line of its own; raise ValueError if it holds a line's end, UsageError if it won't go.

        That is Full where the disk is; nothing of the record is left in the file then.
        """
        if b"\n" in record:
            raise ValueError("a record of more than one line")
        with _explaining(self._path):
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

    def move(self, path: Path) -> None:
        """Go on in an empty file; what was written so far is at `path` then, in a folder on the same file system."""
        with _explaining(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._path.replace(path)
            self._file.close()
            self._file = self._path.open("ab+", buffering=0)
            _sync_folder(self._path.parent)

    def size_bytes(self) -> int:
        """Return how much is written."""
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read(path: Path) -> Iterator[bytes]:
    """Yield every line of `path` without its end; raise SchemaError at a last line that a crash cut off."""
    with _explaining(path), path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                raise SchemaError(f"{path} line {number}: cut off in the middle; the lines before it are whole")
            yield line[:-1]


@contextmanager
def _explaining(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        cause = error.strerror or error
        if error.errno == errno.ENOSPC:
            raise Full(f"{path}: {cause}; free some space") from error
        raise UsageError(f"{path}: {cause}; choose a folder that can be read and written") from error


def _is_torn(file: FileIO) -> bool:
    """Return whether the file ends in the middle of a line, as a crash leaves it."""
    if file.seek(0, os.SEEK_END) == 0:
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"


def _sync_folder(folder: Path) -> None:
    """Put the folder's entries on the disk: a new file's content alone would be unreachable after a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
