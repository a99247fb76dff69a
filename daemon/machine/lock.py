"""The machine-wide lock: one measurement at a time, because two would disturb each other."""

import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TextIO

from benchd.daemon.errors import NotAvailable
from benchd.daemon.machine.environment import without_credentials
from benchd.daemon.machine.sysfs import text

NAME = "benchd.lock"
FOLDER_VARIABLE = "BENCHD_LOCK_DIR"
SERVICE = "service.lock"  # locked by the process that writes a state folder
MODE = 0o644
RUN_LOCK = Path("/run/lock")
FREE_POLL_S = 0.5
NAMED_CHARS = 50  # maximum length of the quoted command of the lock's holder


def default_path(folder: Path = RUN_LOCK) -> Path:
    """Return the lock's path: in BENCHD_LOCK_DIR if set, else in `folder` if usable, else in the temporary folder."""
    if given := os.environ.get(FOLDER_VARIABLE):
        return Path(given) / NAME
    path = folder / NAME
    if path.exists() or (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        return path
    return Path(tempfile.gettempdir()) / NAME


class Busy(NotAvailable):
    """Another process, the `holder`, is measuring on this machine, as `state` says."""

    def __init__(self, holder: str) -> None:
        self.holder, self.state = holder, f"this machine is already being measured by {holder}"
        super().__init__(f"{self.state}; wait until that ends, or stop it (the service with `systemctl stop benchd`)")


class MachineLock:
    """Holds the lock for a `with` block; entering raises Busy, with the holder's name, if it is taken.

    If `waiting` is given, entering waits for the holder instead, and reports that once to `waiting`.

    The file remains, readable by everyone, so that later processes of any user lock the same file. The lock is released
    when its holder ends, for whatever reason.
    """

    def __init__(self, path: Path | None = None, waiting: TextIO | None = None) -> None:
        self._path, self._waiting = path or default_path(), waiting

    def __enter__(self) -> "MachineLock":
        is_told = False
        while True:
            try:
                self._take()
                return self
            except Busy as busy:
                if self._waiting is None:
                    raise
                if not is_told:
                    self._waiting.write(f"waiting: {busy.state}\n")
                    self._waiting.flush()
                is_told = True
            time.sleep(FREE_POLL_S)

    def _take(self) -> None:
        self._fd = self._open()
        try:
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise NotAvailable(f"the lock {self._path} is not a regular file; remove what is there")
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = _holder(os.fstat(self._fd)) or f"another process, which holds {self._path}"
            os.close(self._fd)
            raise Busy(holder) from error
        except BaseException:
            os.close(self._fd)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._fd)

    def _open(self) -> int:
        """Open the file for reading; create it if missing, but never replace another user's."""
        try:
            with suppress(FileExistsError):  # the file usually exists
                fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
                os.fchmod(fd, MODE)  # regardless of the umask
                os.close(fd)
            # O_NONBLOCK in case somebody has created a named pipe there
            return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise NotAvailable(
                f"the lock {self._path} cannot be opened: {error.strerror}; its folder must exist, and its owner can "
                "remove it or make it readable"
            ) from error


def _holder(file: os.stat_result) -> str | None:
    """Return the command and the id of the process that locks this file according to /proc/locks, None without one."""
    wanted = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    for line in (text(Path("/proc/locks")) or "").splitlines():
        fields = line.split()
        if "FLOCK" in fields and "->" not in fields and fields[5] == wanted and int(fields[4]) > 0:
            words = (text(Path("/proc", fields[4], "cmdline")) or "?").split("\0")
            return f"`{_called(words)}` (process {fields[4]})"
    return None


def _called(words: Sequence[str]) -> str:
    """Return the beginning of a command line as typed by a person, without folders and without Python before it."""
    known = [without_credentials(word) for word in words]  # without credentials, because the service publishes it
    names = [Path(word).name if word.startswith("/") else word for word in known]
    typed = names[1:] if names[0].startswith("python") and names[1:] else names
    line = " ".join(" ".join(typed).split())
    return line if len(line) <= NAMED_CHARS else f"{line[:NAMED_CHARS]}…"
