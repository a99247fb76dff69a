"""Finds what a user's module is made from: its source files, the files that they open, the variables that they mention.

Hashes cannot include everything that code may depend on, so nothing from a user's module is kept beyond one run, and
its exact answers decide whether two measurements are of the same model. These hashes show what changed it.
"""

import functools
import hashlib
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from benchd.exporters import code
from benchd.exporters.artifacts import sha256_of

MOST_FILES = 64
"""If there are more files than this, those in the same folder count as one."""

_INSTALLED = {"site-packages", "dist-packages"}
_STDLIB = Path(sysconfig.get_path("stdlib")).resolve()
_OURS = tuple(code.ROOT / place for place in (*code.SHIPPED, "daemon"))
_VARIABLE = re.compile(rb"(?:environ(?:\.get\(|\[)|getenv\()\s*[\"'](\w+)[\"']", re.ASCII)
_LOADED = {".py", ".pyc", ".so", ".pyd"}
_SYSTEM = {"dev", "proc", "sys"}
_MADE_BY_TORCH = "_remote_module_"  # prefix of the files that torch 2.9 writes to a temporary folder and imports
_opened: dict[Path, None] | None = None


def watch() -> None:
    """Start recording which files the user's code opens for reading, until `unwatch`."""
    global _opened  # noqa: PLW0603 - an audit hook belongs to the process
    _opened = {}
    _hook()


def unwatch() -> None:
    """Forget the opened files and stop recording, which would slow down the timed section."""
    global _opened  # noqa: PLW0603
    _opened = None


@functools.cache
def _hook() -> None:
    sys.addaudithook(_audit)  # added only once, because it cannot be removed


def _audit(event: str, details: tuple[object, ...]) -> None:
    if _opened is None or event != "open":
        return
    path, _, flags = details
    is_read = isinstance(flags, int) and flags & os.O_ACCMODE == os.O_RDONLY
    if is_read and isinstance(path, str | bytes | os.PathLike) and _is_by_user(sys._getframe(1)):
        _opened[Path(os.fsdecode(path)).absolute()] = None


def _is_by_user(frame: FrameType | None) -> bool:
    """Return whether a user's file made this call, possibly through libraries but not through benchd."""
    while frame and (is_user := _is_file_of_user(frame.f_code.co_filename)) is None:
        frame = frame.f_back
    return bool(frame and is_user)


@functools.cache
def _is_file_of_user(name: str) -> bool | None:
    """Return whether this file's code is a user's: False if it is benchd's, None for libraries and generated code."""
    path = Path(name)
    if any(path.is_relative_to(place) for place in _OURS):
        return False
    return None if path.suffix != ".py" or not path.is_absolute() or _is_installed(path) else True


def read(file: Path, package: str = "", folder: Path | None = None) -> dict[str, str]:
    """Return a short hash of each file and `$VARIABLE` from which a module of `package` was made so far.

    `file` is the module's own file; call this after the module was built, and again after it ran. File names are
    relative to `folder`, by default that of `file`, or start at their last folder if they are outside it; any other
    installed package is a single entry.
    """
    sources = {file.resolve(), *imported(package).values()}
    data = {path.resolve() for path in _opened or {} if path.is_file() and path.suffix not in _LOADED}
    data = {path for path in data if not (path.parts[1] in _SYSTEM or _is_installed(path))}
    root = (folder or file.parent).resolve()
    named = {path: _name(path, root) for path in sorted(sources | data)}
    if len(named) > MOST_FILES:
        named = {path: f"{name.rpartition('/')[0]}/" if "/" in name else name for path, name in named.items()}
    digests: dict[str, str] = {}
    for path, name in named.items():
        digests[name] = hashlib.sha256(f"{digests.get(name, '')} {sha256_of(path)}".encode()).hexdigest()[:12]
    return digests | dict(_variables(sources))


def _name(path: Path, folder: Path) -> str:
    parts = path.parts
    if place := [number for number, part in enumerate(parts) if part in _INSTALLED]:
        return parts[place[-1] + 1]
    return str(path.relative_to(folder) if path.is_relative_to(folder) else Path(*parts[-2:]))


def _variables(sources: set[Path]) -> Iterator[tuple[str, str]]:
    """Yield the variables that the sources mention, with too few digits of a hash to reveal a secret."""
    for name in {name.decode() for path in sources for name in _VARIABLE.findall(path.read_bytes())}:
        value = os.environ.get(name)
        yield f"${name}", "unset" if value is None else hashlib.sha256(value.encode()).hexdigest()[:4]


def imported(package: str = "") -> dict[str, Path]:
    """Return the files of modules by name, except those of Python, of benchd and of other installed packages.

    Modules without a file of their own, for example in a zip archive, are not included.
    """
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    places = {name: _place(file) for name, file in files.items() if file and not _is_other(name)}
    return {
        name: path
        for name, (path, is_installed) in places.items()
        if (name.partition(".")[0] == package or not is_installed) and path.is_file()
    }


@functools.cache
def _place(file: str) -> tuple[Path, bool]:
    """Return the real path and whether it is an installed file; cached, because it takes 0.1 ms for each module."""
    path = Path(file).resolve()
    return path, _is_installed(path)


def _is_other(name: str) -> bool:
    return name in {"__main__", "__mp_main__", "benchd"} or name.startswith(("benchd.", _MADE_BY_TORCH))


def _is_installed(path: Path) -> bool:
    return bool(_INSTALLED & set(path.parts)) or path.is_relative_to(_STDLIB)
