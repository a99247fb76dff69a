"""The application's folders: from systemd for the service, else from the XDG base directory specification."""

import os
import pwd
import tempfile
from collections.abc import Iterable
from pathlib import Path


def cache() -> Path:
    """Return the folder for everything that is compiled, computed or exported once."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("CACHE_DIRECTORY") or Path(home) / "benchd")


def state() -> Path:
    """Return the folder for data that outlives a run."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    return Path(os.environ.get("STATE_DIRECTORY") or Path(home) / "benchd")


def user() -> str:
    """Return the name of the user whose folders these are, or the number of one without a name, as in a container."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def artifacts() -> Path:
    """Return the folder of exported files."""
    return state() / "artifacts"


def file_id(path: Path) -> tuple[int, int] | None:
    """Return what tells the file at this path from another one that is put there, None without a file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def sync(path: Path) -> None:
    """Write a file, or the entries of a folder, through to the disk, so that a power cut does not take it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, parts: Iterable[bytes | memoryview], mode: int | None = None) -> None:
    """Replace the file, or create it, once all of it is written, even if others do so meanwhile; raise OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=path.parent) as folder:
        part = Path(folder) / "part"
        with part.open("wb") as file:
            file.writelines(parts)
        if mode is not None:
            part.chmod(mode)
        part.replace(path)


def listed(folder: Path) -> list[tuple[str, int, int]]:
    """Return name, size in bytes and time of change in ns of each file below a folder, in order; raise OSError."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [(str(path), found.st_size, found.st_mtime_ns) for path in files for found in [path.stat()]]
