"""The code and the versions that a stored file was made with, for its key and facts; torch-free."""

import functools
import hashlib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[1]  # the folder of the checkout, or of the installed benchd package
SHIPPED = ("models", "kernels", "exporters")
_SUFFIXES = (".py", ".c", ".h")


@functools.cache
def sha256(*places: str) -> str:
    """Return a hash of the source in these files and folders of benchd, the same for a checkout and an installation.

    Without arguments, the code that builds, runs and exports the models is hashed.
    """
    digest = hashlib.sha256()
    for place in places or SHIPPED:
        for path in sorted([ROOT / place, *(ROOT / place).rglob("*")]):
            if path.suffix in _SUFFIXES and path.is_file():
                digest.update(f"{path.relative_to(ROOT).as_posix()} {path.stat().st_size}\n".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def versions(*distributions: str) -> dict[str, str]:
    """Return the version of each of these distributions that is installed, as of the first call."""
    return {name: version for name in distributions if (version := _version(name))}


@functools.cache
def _version(distribution: str) -> str | None:
    """Return the distribution's version, or None; cached, because reading the metadata takes a millisecond."""
    with suppress(PackageNotFoundError):
        return version(distribution)
    return None
