"""Reads AOTInductor packages without torch: the parts that they may contain, and what they were compiled for.

A package is a zip file whose only program is one library. torch's own loaders also unpickle weights and compile any C++
in a package, so a package with other parts is not opened.
"""

import re
from pathlib import Path
from typing import Any, NoReturn
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import msgspec

from benchd.daemon.errors import UsageError

FORMAT = "pt2"
_FOLDER = "data/aotinductor/model"
_PARTS = re.compile(
    rf"[\w-]+/({_FOLDER}/[\w.-]+\.(so|json|cubin)|archive_format|archive_version|byteorder|version|\.data/\w+)"
)
_SOURCE = re.compile(rf"[\w-]+/{_FOLDER}/[\w.-]+\.wrapper\.cpp")
"""The name under which torch before 2.10 looks for the library's metadata; the file is empty."""

_FACTS = "benchd"


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """What a package was compiled for: it requires the same torch, CPU or GPU, and number of threads.

    `outputs` are the paths of its answers in order, and `ops` counts its calls to each of our kernels.
    """

    torch: str
    cpu: str
    gpu: str
    threads: int
    outputs: list[str] = []
    ops: dict[str, int] = {}

    def differs(self, wanted: "Made") -> str:
        """Return how this differs from `wanted`; empty if it does not."""
        pairs = ((name, getattr(self, name), getattr(wanted, name)) for name in ("torch", "gpu", "threads"))
        differences = [f"{name} {was or 'none'}, not {now or 'none'}" for name, was, now in pairs if was != now]
        return "; ".join([*differences, *(["different CPU or instruction set"] if self.cpu != wanted.cpu else [])])


def metadata(made: Made) -> dict[str, str]:
    """Return the metadata for the compiler to write into the package, which `read` returns."""
    return {_FACTS: msgspec.json.encode(made).decode()}


def keep_library(package: Path) -> None:
    """Rewrite a package without its library's sources, which contain paths from the machine that made it."""
    slim = package.with_name(f"{package.name}.slim")
    with ZipFile(package) as old, ZipFile(slim, "w", ZIP_STORED) as new:
        for part in old.infolist():
            if _PARTS.fullmatch(part.filename):
                new.writestr(part, old.read(part))
            elif _SOURCE.fullmatch(part.filename):
                new.writestr(part, b"")
    slim.replace(package)


def read(package: Path) -> Made:
    """Return what the package was compiled for; raise UsageError if it is not one of ours or has other parts."""
    try:
        with ZipFile(package) as file:
            names = file.namelist()
            other = [part.filename for part in file.infolist() if not _is_ours(part)]
            if other or len(names) != len(set(names)) or sum(name.endswith(".so") for name in names) != 1:
                _refuse(package, f"it has {other[0][:80]!r}" if other else "it does not contain exactly one library")
            (entry,) = (name for name in names if name.endswith(".wrapper_metadata.json"))
            facts: dict[str, Any] = msgspec.json.decode(file.read(entry))
            return msgspec.json.decode(facts[_FACTS], type=Made)
    except (OSError, BadZipFile, ValueError, KeyError, TypeError, NotImplementedError, RecursionError) as error:
        _refuse(package, f"{type(error).__name__}: {error}")


def _is_ours(part: ZipInfo) -> bool:
    is_empty_source = bool(_SOURCE.fullmatch(part.filename)) and part.file_size == 0
    return ".." not in part.filename and (is_empty_source or bool(_PARTS.fullmatch(part.filename)))


def _refuse(package: Path, why: str) -> NoReturn:
    raise UsageError(f"{package.name} is not an AOTInductor package written by benchd: {why}")
