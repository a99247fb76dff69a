"""The temporary folder of children that use torch; it is emptied when the last child ends, for whatever reason."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# kept for torch: inductor's compiled headers, which cannot be moved to its cache, and the socket of the process that
# `strays` spares
KEPT = "torch"
# in bytes; socket paths are limited to 107, of which multiprocessing and torch use up to 33 for the name
LONGEST = 70


@contextmanager
def shared(folder: Path) -> Iterator[None]:
    """Create the folder if missing and protect its contents during a `with` block; raise OSError if it is unusable."""
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield
    finally:
        with suppress(OSError):  # another child is still using it
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _empty(folder)
        os.close(fd)


def variable(folder: Path) -> dict[str, str]:
    """Return the environment variable that gives a child this folder; empty if socket paths in it would be too long."""
    path = str(folder.absolute())
    return {"TMPDIR": path} if len(os.fsencode(path)) <= LONGEST else {}


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if not path.name.startswith(KEPT):
            shutil.rmtree(path, ignore_errors=True)
            with suppress(OSError):  # a folder, or another user's file
                path.unlink()
