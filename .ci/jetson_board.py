"""Prints constraints that keep a Jetson's torch, or explains why torch cannot use the board's GPU and how to fix it.

Usage: python .ci/jetson_board.py constraints-jetson62.txt [PACKAGE ...]. The constraints go to stdout: those of the
file, except that torch and packages built against it get the versions installed on the board. The libraries of each
PACKAGE are linked next to torch's. Exit status 1 if torch is unusable.
"""

import os
import sys
import sysconfig
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, files, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pip._vendor.packaging.version import Version

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from exporters import tegra

OLDEST_TORCH = "2.8"  # as in pyproject.toml; pip rejects an older version without suggesting a fix
BOARD_PACKAGES = ("torch", "torchvision", "triton", "onnxruntime-gpu")
RETRY = os.environ.get("RETRY", "make once SETTING").replace("SETTING", "JETSON_INDEX=URL")
OTHER_LIBRARY = f"install the library it names, or take the wheel for this JetPack: {RETRY}"
BOARD = Path(os.environ.get("BOARD", "/"))


class BoardError(Exception):
    """Why the board's torch is unusable, and the command that fixes it."""

    def __init__(self, cause: str, cure: str) -> None:
        super().__init__(f"{cause}\nTo cure it: {cure}")


def main() -> int:
    """Check the board, print the constraints, return the exit status."""
    link(sys.argv[2:])
    try:
        check_board()
    except BoardError as error:
        sys.stderr.write(f"benchd: {error}\n")
        return 1
    sys.stdout.write(board_constraints(Path(sys.argv[1]).read_text()))
    return 0


def link(packages: Sequence[str]) -> None:
    """Link the libraries of these packages next to torch's own, if torch is installed in this environment."""
    torch = find_spec("torch")
    libraries = Path(torch.origin or "").parent / "lib" if torch else None
    if libraries is None or not libraries.is_relative_to(sys.prefix):
        return
    for package in filter(_version, packages):
        for file in files(package) or []:
            target = libraries / file.name
            if ".so" in file.name and not target.exists():
                target.symlink_to(Path(str(file.locate())).resolve())


def check_board() -> None:
    """Raise BoardError if torch or torchvision is missing, broken, too old or cannot use the GPU."""
    torch = _imported("torch")
    location = Path(torch.__file__).parent
    if Version(torch.__version__) < Version(OLDEST_TORCH):
        cause = f"torch {torch.__version__} in {location} is too old: benchd needs {OLDEST_TORCH}."
        raise BoardError(cause, _replacement(location))
    if torch.version.cuda is None:
        raise BoardError(f"torch {torch.__version__} in {location} is a CPU-only build.", _replacement(location))
    if not torch.cuda.is_available():
        raise BoardError(
            f"torch {torch.__version__} (CUDA {torch.version.cuda}) in {location} sees no GPU: this user is not "
            "allowed to open the board's devices, or the wheel was built for another JetPack.",
            f"sudo usermod -aG video,render $USER, then log in again; for another wheel: {_replacement(location)}",
        )
    _imported("torchvision")


def board_constraints(pinned: str) -> str:
    """Return the text of a constraints file, with the installed versions of BOARD_PACKAGES in place of its own."""
    found = {name: _version(name) for name in BOARD_PACKAGES}
    lines = [line for line in pinned.splitlines() if not found.get(line.partition("==")[0])]
    lines += [f"{name}=={number}" for name, number in found.items() if number]
    return "\n".join(lines) + "\n"


def _imported(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            raise BoardError(f"{name} is missing from the board's Python.", RETRY) from None
        raise BoardError(f"{name} does not import: {error}.", RETRY) from error
    except Exception as error:  # a torch of another JetPack may raise anything
        raise BoardError(
            f"{name} does not import: {error}.", tegra.library(str(error), BOARD) or OTHER_LIBRARY
        ) from error


def _replacement(location: Path) -> str:
    if location.is_relative_to(sys.prefix):
        return f"rm -rf {sys.prefix} && {RETRY}"
    is_system = not location.is_relative_to(Path.home())
    # Ubuntu 24.04's Python refuses to uninstall without being told so
    is_managed = Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").exists()
    pip = f"{'sudo ' * is_system}{sys.base_prefix}/bin/python3 -m pip uninstall"
    return f"{pip}{' --break-system-packages' * is_managed} torch torchvision && {RETRY}"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
