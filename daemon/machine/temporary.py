"""The temporary folder of children with torch: the last one to end empties it, however it ended."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# of torch: the headers that inductor has compiled, which no setting puts into its cache, and the socket of the process
# that `strays` spares
KEPT = "torch"
# in bytes; multiprocessing and torch put sockets into it, whose paths have 107 at most and end in 33 of theirs
LONGEST = 70


@contextmanager
def shared(folder: Path) -> Iterator[None]:
    """Keep what is in the folder, created if absent, over a `with` block; raise OSError if it cannot be used."""
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield
    finally:
        with suppress(OSError):  # another child is still there
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _empty(folder)
        os.close(fd)


def variable(folder: Path) -> dict[str, str]:
    """Return the environment variable that gives a child this folder; none if a socket's path in it were too long."""
    path = str(folder.absolute())
    return {"TMPDIR": path} if len(os.fsencode(path)) <= LONGEST else {}


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if not path.name.startswith(KEPT):
            shutil.rmtree(path, ignore_errors=True)
            with suppress(OSError):  # it was a folder, or is another user's
                path.unlink()
