"""Disk space for results: a reserve that is released when the disk is full, and limits on old files."""

import errno
import gzip
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from benchd.daemon.delivery.outbox import CLOCK_SET_S
from benchd.daemon.errors import Full
from benchd.daemon.machine.folders import sync

RESERVE_BYTES = 16 * 2**20
BESIDE_BYTES = 2**20  # for a case's log and raw times, which are written without the reserve
PROBE_BYTES = 4096
RESERVE_FILES = 8  # the outbox alone opens with three
BESIDE_FILES = 64  # with the compiler's and the exporter's
KEEP_S = 90 * 86400.0
KEEP_BYTES = 256 * 2**20
PART = ".part"

Written = TypeVar("Written")


class Reserve:
    """A file of some size and empty ones: their space and inodes let the running case be stored on a full disk."""

    def __init__(self, path: Path, size: int = RESERVE_BYTES) -> None:
        self._path, self._size = path, size
        self._empty = [path.with_name(f"{path.name}-{number}") for number in range(1, RESERVE_FILES)]

    def hold(self) -> str | None:
        """Reserve the space and inodes; return why the disk takes no case, None if it has them and a little more."""
        try:
            if not self._is_held():
                self.release()
                self._take()
            if lack := self._lacks(0):
                return lack
            self._probe()
        except OSError as error:
            return error.strerror
        return None

    def _probe(self) -> None:
        """Write a block through to the disk: one that fails or became read-only looks as before until then."""
        with tempfile.TemporaryFile(dir=self._path.parent) as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())

    def _take(self) -> None:
        """Create the files; raise OSError, and leave none, if that would use up the disk."""
        try:
            if lack := self._lacks(self._size):
                raise OSError(errno.ENOSPC, lack)
            with self._path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, self._size)
            for path in self._empty:
                path.touch()
        except OSError:
            self.release()
            raise

    def _lacks(self, beside: int) -> str | None:
        """Return what the disk has too little of for so many bytes and a case, None if it has enough."""
        disk = os.statvfs(self._path.parent)
        if disk.f_bavail * disk.f_frsize < beside + BESIDE_BYTES:
            return os.strerror(errno.ENOSPC)
        few = disk.f_files and disk.f_favail < BESIDE_FILES  # 0 files in all: a file system without a limit
        return "too few free inodes; delete small files" if few else None

    def write(self, action: Callable[[], Written]) -> Written:
        """Run a writing action and return its result; on a full disk, release the reserve and run it again."""
        try:
            return action()
        except Full:
            self.release()
            return action()

    def _is_held(self) -> bool:
        try:
            return self._path.stat().st_size == self._size and all(path.exists() for path in self._empty)
        except FileNotFoundError:  # another thread may release it at any time
            return False

    def release(self) -> None:
        """Release the space and the inodes."""
        for path in (self._path, *self._empty):
            with suppress(OSError):  # absent, or on a disk that became read-only, as the next write reports
                path.unlink()


def _up_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Clock:
    """The wall clock for the age of files: it never advances more than the machine's uptime since the start.

    Setting the clock ahead makes no file older. Wall time and uptime are given in seconds.
    """

    def __init__(self, wall_s: Callable[[], float] = time.time, up_s: Callable[[], float] = _up_s) -> None:
        self._wall_s, self._up_s = wall_s, up_s
        self._booted_s = wall_s() - up_s()

    def now_s(self) -> float:
        """Return the seconds since the epoch."""
        return min(self._wall_s(), self._booted_s + self._up_s())


def tidy(folder: Path, now_s: float, keep_s: float = KEEP_S, keep_bytes: int = KEEP_BYTES) -> None:
    """Compress raw times, logs and full journals under `folder` and delete the oldest beyond an age and a size.

    A record names its raw file without `.gz` and hashes the uncompressed bytes. Files dated by an unset clock have no
    age, but are deleted first when the size limit is reached. A file that fails stops no other one: the first OSError
    is raised at the end.
    """
    failures: list[OSError] = []
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix not in (".gz", PART):
            with _collecting(failures):
                _compress(path)
    found = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in folder.rglob("*.gz"))
    size = sum(entry[1] for entry in found)
    for written_s, file_bytes, path in found:
        if size > keep_bytes or CLOCK_SET_S < written_s < now_s - keep_s:
            with _collecting(failures):
                path.unlink()
                size -= file_bytes
    if failures:
        raise failures[0]


@contextmanager
def _collecting(failures: list[OSError]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        failures.append(error)


def _compress(path: Path) -> None:
    """Replace a file by its compressed form, complete before it gets its name and with the file's original time."""
    part = path.with_name(f"{path.name}.gz{PART}")
    try:
        with path.open("rb") as source, gzip.open(part, "wb", compresslevel=6) as target:
            shutil.copyfileobj(source, target)
        written_s = path.stat().st_mtime
        os.utime(part, (written_s, written_s))
        sync(part)
    except OSError:
        part.unlink(missing_ok=True)  # on a full disk it would occupy the little space left
        raise
    part.replace(path.with_name(f"{path.name}.gz"))
    sync(path.parent)
    path.unlink()
