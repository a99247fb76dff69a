"""Disk space: checks that there is enough for one more case, and limits old files."""

import errno
import gzip
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchd.daemon.machine.folders import sync
from benchd.daemon.verdicts.when import EARLIEST_S

CASE_BYTES = 32 * 2**20  # for a record, its raw times and log, the cursor and the state, each written twice
CASE_FILES = 64  # including those of compiler and exporter
PROBE_BYTES = 4096
KEEP_S = 90 * 86400.0
KEEP_BYTES = 256 * 2**20
PART = ".part"


def lacks(folder: Path) -> str | None:
    """Return what prevents the folder's disk from storing another case, or None.

    Writes a block through to the disk, which is the only way to notice a failing or read-only disk.
    """
    try:
        disk = os.statvfs(folder)
        if disk.f_bavail * disk.f_frsize < CASE_BYTES:
            return f"{os.strerror(errno.ENOSPC)}: less than {CASE_BYTES >> 20} MiB are free"
        if disk.f_files and disk.f_favail < CASE_FILES:  # a total of 0 means a file system without a limit
            return "too few free inodes; delete small files"
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror
    return None


def file_time_s(booted_s: float) -> float:
    """Return the current time for judging the age of files, which does not change when the clock is set ahead.

    It advances by at most the uptime since `booted_s`, the wall time of the boot as seen when this process started.
    """
    return min(time.time(), booted_s + time.clock_gettime(time.CLOCK_BOOTTIME))


def tidy(
    folder: Path,
    now_s: float,
    keep_s: float = KEEP_S,
    keep_bytes: int = KEEP_BYTES,
    *,
    undelivered: Collection[Path] = (),
) -> None:
    """Compress raw times, logs and full journals under `folder` and delete the oldest beyond an age and a size.

    `undelivered` files stay. A record refers to its raw file without `.gz` and hashes the uncompressed bytes. Files
    dated by a clock that had not been set have no age, but are deleted first when the size limit is reached. A failing
    file does not stop the others: the first OSError is raised at the end.
    """
    failures: list[OSError] = []
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix not in (".gz", PART):
            with _collecting(failures):
                _compress(path)
    archives = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in folder.rglob("*.gz"))
    undelivered_names = {path.name.removesuffix(".gz") for path in undelivered}
    archives = [entry for entry in archives if entry[2].name.removesuffix(".gz") not in undelivered_names]
    size = sum(entry[1] for entry in archives)
    for written_s, file_bytes, path in archives:
        if size > keep_bytes or EARLIEST_S < written_s < now_s - keep_s:
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
    """Compress a file; the new file keeps the original time, and replaces the old one only when it is complete."""
    part = path.with_name(f"{path.name}.gz{PART}")
    try:
        with path.open("rb") as source, gzip.open(part, "wb", compresslevel=6) as target:
            shutil.copyfileobj(source, target)
        written_s = path.stat().st_mtime
        os.utime(part, (written_s, written_s))
        sync(part)
    except OSError:
        part.unlink(missing_ok=True)  # frees what little space is left on a full disk
        raise
    part.replace(path.with_name(f"{path.name}.gz"))
    sync(path.parent)
    path.unlink()
