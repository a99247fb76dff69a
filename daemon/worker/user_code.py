"""Which code a user's module is: a hash over its file and over every file that it imports and that is not installed."""

import hashlib
import sys
import sysconfig
from pathlib import Path

_INSTALLED = {"site-packages", "dist-packages"}
_STDLIB = Path(sysconfig.get_path("stdlib")).resolve()


def sha256(file: Path) -> str:
    """Return the hash, the same wherever the files lie; to be called after the module was built.

    What has no file of its own, such as a module in a zip archive, is not in it: no hash sees all that code depends on,
    and so nothing of a user's module is kept beyond one run.
    """
    digest = hashlib.sha256()
    for name, path in sorted({"": file, **_imported()}.items()):
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _imported() -> dict[str, Path]:
    """Return the files of modules by name, without those of Python, of installed packages and of benchd."""
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    paths = {name: Path(file).resolve() for name, file in files.items() if file and not _is_ours(name)}
    return {name: path for name, path in paths.items() if path.is_file() and not _is_installed(path)}


def _is_ours(name: str) -> bool:
    return name in {"__main__", "benchd"} or name.startswith("benchd.")


def _is_installed(path: Path) -> bool:
    return bool(_INSTALLED & set(path.parts)) or path.is_relative_to(_STDLIB)
