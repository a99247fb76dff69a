"""The application's folders: from systemd for the service, else from the XDG base directory specification."""

import errno
import os
import pwd
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def cache() -> Path:
    """Return the folder for everything that is compiled, computed or exported once."""
    return _folder("CACHE_DIRECTORY", "XDG_CACHE_HOME", ".cache")


def state() -> Path:
    """Return the folder for data that outlives a run."""
    return _folder("STATE_DIRECTORY", "XDG_STATE_HOME", ".local/state")


def _folder(of_service: str, of_user: str, at_home: str) -> Path:
    if given := os.environ.get(of_service):
        return Path(given)
    return Path(os.environ.get(of_user) or _home() / at_home) / "benchd"


def _home() -> Path:
    """Return the user's home; for a user without one, as in a container, a temporary folder.

    Raises PermissionError unless the folder belongs to this user alone, because code is loaded from it.
    """
    with suppress(RuntimeError):  # no HOME, and no passwd entry
        return Path.home()
    folder = Path(tempfile.gettempdir()) / f"benchd-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        reason = "not owned exclusively by this user, who has no home: set HOME to a folder"
        raise PermissionError(errno.EACCES, reason, str(folder))
    return folder


def user() -> str:
    """Return the name of the user whose folders are used, or the user id if it has no name, as in a container."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def artifacts() -> Path:
    """Return the folder of exported files."""
    return state() / "artifacts"


def file_id(path: Path) -> tuple[int, int] | None:
    """Return an id that distinguishes the file at this path from a later one at the same path; None without a file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk, so that they survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, parts: Iterable[bytes | memoryview], mode: int | None = None) -> None:
    """Replace or create the file once all of it is written, even if others do so at the same time; raise OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=path.parent) as folder:
        part = Path(folder) / "part"
        with part.open("wb") as file:
            file.writelines(parts)
        if mode is not None:
            part.chmod(mode)
        part.replace(path)


def write_through(path: Path, content: bytes) -> None:
    """Replace a file that only this process writes; on return, it survives a power cut. Raises OSError."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync(path.parent)


def listed(folder: Path) -> list[tuple[str, int, int]]:
    """Return the name, size in bytes and modification time in ns of each file below a folder, sorted; raise OSError."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [(str(path), status.st_size, status.st_mtime_ns) for path in files for status in [path.stat()]]
