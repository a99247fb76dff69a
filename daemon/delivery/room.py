"""Room on the disk for results: a reserve that is let go when the disk is full, and a limit on what is old."""

import gzip
import os
import shutil
from pathlib import Path

RESERVE_BYTES = 16 * 2**20
KEEP_S = 90 * 86400.0
KEEP_BYTES = 256 * 2**20
PART = ".part"


class Reserve:
    """A file that holds back space, so that on a full disk the result of the running case still finds a place."""

    def __init__(self, path: Path, size: int = RESERVE_BYTES) -> None:
        self._path, self._size = path, size

    def hold(self) -> bool:
        """Hold the space; return False where the disk does not have it."""
        if self._path.exists() and self._path.stat().st_size == self._size:
            return True
        try:
            with self._path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, self._size)
        except OSError:
            self.release()
            return False
        return True

    def release(self) -> None:
        """Let the space go."""
        self._path.unlink(missing_ok=True)


def tidy(folder: Path, now_s: float, keep_s: float = KEEP_S, keep_bytes: int = KEEP_BYTES) -> None:
    """Compress raw times, logs and full journals under `folder` and delete the oldest beyond an age and a size.

    A record names its raw file without `.gz` and hashes what is inside.
    """
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix not in (".gz", PART):
            _compress(path)
    found = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in folder.rglob("*.gz"))
    size = sum(entry[1] for entry in found)
    for written_s, file_bytes, path in found:
        if size > keep_bytes or now_s - written_s > keep_s:
            path.unlink()
            size -= file_bytes


def _compress(path: Path) -> None:
    """Replace a file by its compressed form, which is whole before it has its name, and as old as the file was."""
    part = path.with_name(f"{path.name}.gz{PART}")
    try:
        with path.open("rb") as source, gzip.open(part, "wb", compresslevel=6) as target:
            shutil.copyfileobj(source, target)
    except OSError:
        part.unlink(missing_ok=True)  # on a full disk it would hold what little room there was
        raise
    written_s = path.stat().st_mtime
    os.utime(part, (written_s, written_s))
    part.replace(path.with_name(f"{path.name}.gz"))
    path.unlink()
