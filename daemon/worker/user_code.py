"""The identity of a user's code: a hash over its file and every imported file of its package or of none installed."""

import hashlib
import sys
import sysconfig
from pathlib import Path

_INSTALLED = {"site-packages", "dist-packages"}
_STDLIB = Path(sysconfig.get_path("stdlib")).resolve()


def sha256(file: Path, package: str = "") -> str:
    """Return the hash, independent of the files' location, of a file of `package`; call it after it was built.

    Modules without a file of their own, such as in a zip archive, are not included: no hash covers all dependencies of
    code, so nothing of a user's module is kept beyond one run.
    """
    digest = hashlib.sha256()
    for name, path in sorted({"": file, **imported(package)}.items()):
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def imported(package: str = "") -> dict[str, Path]:
    """Return the files of modules by name, except those of Python, of benchd and of other installed packages."""
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    paths = {name: Path(file).resolve() for name, file in files.items() if file and not _is_ours(name)}
    return {
        name: path
        for name, path in paths.items()
        if path.is_file() and (name.partition(".")[0] == package or not _is_installed(path))
    }


def _is_ours(name: str) -> bool:
    return name in {"__main__", "__mp_main__", "benchd"} or name.startswith("benchd.")


def _is_installed(path: Path) -> bool:
    return bool(_INSTALLED & set(path.parts)) or path.is_relative_to(_STDLIB)
