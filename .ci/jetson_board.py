"""Prints the constraints that keep a Jetson's torch, or says why torch cannot use the board's GPU, and the cure.

Usage: python .ci/jetson_board.py constraints-jetson62.txt. The constraints go to stdout: the file's, with the versions
found on the board in place of its own for torch and what is built against it. Exit status 1 where torch is of no use.
"""

import os
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pip._vendor.packaging.version import Version

OLDEST_TORCH = "2.8"  # as pyproject.toml says; pip refuses an older one without a cure
BOARD_PACKAGES = ("torch", "torchvision", "triton", "onnxruntime-gpu")
RETRY = os.environ.get("RETRY", "make once SETTING").replace("SETTING", "JETSON_INDEX=URL")
INSTALL = f"{RETRY}   # the index of wheels for this board's JetPack; for 6.1 and 6.2: https://pypi.jetson-ai-lab.io/jp6/cu126"
# torch 2.8 of JetPack 6.2's index is linked with cuDSS, which a flashed board lacks
CUDSS = """with NVIDIA's CUDA repository, whose key comes first:
  wget https://developer.download.nvidia.com/compute/cuda/repos/ubuntu2204/arm64/cuda-keyring_1.1-1_all.deb
  sudo dpkg -i cuda-keyring_1.1-1_all.deb && sudo apt update && sudo apt install cudss"""


class BoardError(Exception):
    """Why the board's torch is of no use here, and the command that cures it."""

    def __init__(self, cause: str, cure: str) -> None:
        super().__init__(f"{cause}\nTo cure it: {cure}")


def main() -> int:
    """Check the board, print the constraints, return the exit status."""
    try:
        check_board()
    except BoardError as error:
        sys.stderr.write(f"benchd: {error}\n")
        return 1
    sys.stdout.write(board_constraints(Path(sys.argv[1]).read_text()))
    return 0


def check_board() -> None:
    """Raise BoardError if torch or torchvision is missing, broken, too old or without the GPU."""
    torch = _imported("torch")
    location = Path(torch.__file__).parent
    if Version(torch.__version__) < Version(OLDEST_TORCH):
        cause = f"torch {torch.__version__} in {location} is too old: benchd needs {OLDEST_TORCH}."
        raise BoardError(cause, _replacement(location))
    if torch.version.cuda is None:
        raise BoardError(f"torch {torch.__version__} in {location} is a CPU-only build.", _replacement(location))
    if not torch.cuda.is_available():
        raise BoardError(
            f"torch {torch.__version__} (CUDA {torch.version.cuda}) in {location} sees no GPU: the user may not open "
            "the board's devices, or the wheel was built for another JetPack.",
            f"sudo usermod -aG video,render $USER, then log in again; for another wheel: {_replacement(location)}",
        )
    _imported("torchvision")


def board_constraints(pinned: str) -> str:
    """Return the text of a constraints file with the installed versions of BOARD_PACKAGES in place of its own."""
    found = {name: _version(name) for name in BOARD_PACKAGES}
    lines = [line for line in pinned.splitlines() if not found.get(line.partition("==")[0])]
    lines += [f"{name}=={number}" for name, number in found.items() if number]
    return "\n".join(lines) + "\n"


def _imported(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            raise BoardError(f"{name} is missing from the board's Python.", INSTALL) from None
        raise BoardError(f"{name} does not import: {error}.", INSTALL) from error
    except (ImportError, OSError, RuntimeError) as error:
        cure = f"install the library it names, or take the wheel for this JetPack: {INSTALL}"
        raise BoardError(f"{name} does not import: {error}.", CUDSS if "libcudss" in str(error) else cure) from error


def _replacement(location: Path) -> str:
    if location.is_relative_to(sys.prefix):
        return f"rm -rf {sys.prefix} && {INSTALL}"
    return f"python3 -m pip uninstall torch torchvision && {INSTALL}"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
