"""Finds out whether this machine is a Jetson, which JetPack it runs, and where its packages come from.

Also a script for use without an environment and with an old Python: `python3 exporters/tegra.py WHAT [ROOT]` prints
one of this board's facts in `main`, or exits with a message if benchd cannot run on it.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchd.daemon.runtimes import Package

WHEELS = "https://pypi.jetson-ai-lab.io/"
"""The community index of NVIDIA's Jetson AI Lab: PyPI has no builds for a board's GPU."""


@dataclass(frozen=True)
class Release:
    """A release of JetPack and the packages that a board needs with it.

    `l4t` lists the L4T versions that it is based on, without the last part; `repository` is NVIDIA's library repository
    for its Ubuntu, and `beside` lists packages that the index's torch links to without requiring them.
    """

    jetpack: str
    l4t: tuple[str, ...]
    ubuntu: str
    python: str
    cuda: str
    index: str
    constraints: str
    repository: str
    beside: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        """The bundle's name, for `make bundle`."""
        return self.constraints.replace("constraints-jetson", "jetpack").replace(".txt", "")


_JP6 = (WHEELS + "jp6/cu126", "constraints-jetson62.txt", "ubuntu2204/arm64")
_BESIDE = ("nvpl-blas", "nvpl-lapack", "nvidia-cudss-cu13")
_SBSA = (WHEELS + "sbsa/cu130", "constraints-jetson72.txt", "ubuntu2404/sbsa", _BESIDE)
RELEASES = (
    Release("6.1 to 6.2.1", ("36.4",), "22.04", "3.10", "12.6", *_JP6),
    Release("6.2.2", ("36.5",), "22.04", "3.10", "12.6", *_JP6),
    Release("7.0 to 7.1", ("38.0", "38.2", "38.4"), "24.04", "3.12", "13.0", *_SBSA),
    Release("7.2", ("39.2",), "24.04", "3.12", "13.2", *_SBSA),
)
"""Oldest first. Sources: NVIDIA's release notes, OE4T/meta-tegra 2224."""

_KEYRING = "cuda-keyring_1.1-1_all.deb"
_LIBRARY = f"""with NVIDIA's CUDA repository, whose key comes first:
  wget https://developer.download.nvidia.com/compute/cuda/repos/{{repository}}/{_KEYRING}
  sudo dpkg -i {_KEYRING} && sudo apt update && sudo apt install {{package}}"""
# libraries that the torch from a board's index links to, but that neither it nor a flashed board includes
_LIBRARIES = {"libcudss": "cudss", "libcusparseLt": "libcusparselt0", "libnvpl_blas": "nvpl", "libnvpl_lapack": "nvpl"}


OLDEST_KERNEL = (5, 15)  # JetPack 6's


class TooOld(Exception):
    """The board's JetPack is too old for benchd; the message says by what that is `seen`, and what to do."""

    def __init__(self, seen: str, *, is_6: bool = False) -> None:
        name = "JetPack 6.0" if is_6 else "JetPack 5 or older"
        remedy = "upgrade it with apt, as NVIDIA's page on JetPack 6.2 says" if is_6 else "flash JetPack 6.2 or newer"
        super().__init__(f"this board runs {name} ({seen}), and benchd needs JetPack 6.1 or newer: {remedy}")


def is_tegra(root: Path = Path("/")) -> bool:
    """Return whether this is an NVIDIA Tegra SoC, as on a Jetson and in a container there.

    This is known from the device tree or the kernel: an unprivileged container cannot see the tree (jetson-gpio 73).
    """
    telling = (root / file for file in ("proc/device-tree/compatible", "proc/sys/kernel/osrelease"))
    return any("tegra" in _text(file) for file in telling)


def l4t(root: Path = Path("/")) -> str:
    """Return the L4T version, such as "36.4.3"; empty if the board does not say, as in most containers."""
    match = re.match(r"# R(\d+) \(release\), REVISION: (\d+(?:\.\d+)*)", _text(root / "etc/nv_tegra_release"))
    return f"{match[1]}.{match[2]}" if match else ""


def release_of(version: str, system: str = "", kernel: str = "") -> tuple[Release, bool]:
    """Return the release for an L4T version, with or without its R, and whether RELEASES lists that version.

    An unlisted version counts as the last known release before it. Without a version, the release is the last one for
    the Ubuntu in `system`, such as "Ubuntu 22.04.5 LTS", else the newest. Raises TooOld for JetPack 6.0 and older, and
    without a version for a `kernel` older than JetPack 6's, which a container shares with its board.
    """
    if not version:
        if (numbers := re.match(r"(\d+)\.(\d+)", kernel)) and tuple(map(int, numbers.groups())) < OLDEST_KERNEL:
            raise TooOld(f"Linux {kernel.strip()}")
        return next((known for known in reversed(RELEASES) if f"Ubuntu {known.ubuntu}" in system), RELEASES[-1]), False
    major, minor = (int(part) for part in (version.lstrip("R") + ".0").split(".")[:2])
    before = [known for known in RELEASES if _numbers(known.l4t[0]) <= (major, minor)]
    if not before:
        raise TooOld(f"L4T {version}", is_6=major == 36)
    return before[-1], f"{major}.{minor}" in before[-1].l4t


def release(root: Path = Path("/")) -> tuple[Release, bool]:
    """Return the release of this board; raises the errors of `release_of`."""
    system = re.search(r"^PRETTY_NAME=(.+)", _text(root / "etc/os-release"), re.MULTILINE)
    return release_of(l4t(root), system[1] if system else "", _text(root / "proc/sys/kernel/osrelease"))


def described(root: Path = Path("/")) -> str:
    """Return a description of this board's JetPack; raise TooOld like `release_of`."""
    (known, is_known), version = release(root), l4t(root)
    why = (
        f"the last known before L4T {version}" if version else "assumed: its L4T version is unknown, as in a container"
    )
    return known.jetpack + ("" if is_known else f", {why}")


def install(packages: str, root: Path = Path("/")) -> str:
    """Return the command that installs these packages on this machine, on a Jetson from its board's index."""
    usual = f"pip install {packages}"  # on a Jetson, the packages are installed first, and this adds their requirements
    if not is_tegra(root):
        return usual
    try:
        known, _ = release(root)
    except TooOld as error:
        return str(error)
    if known.beside and "torch" in packages.split():
        return f"`make once` in a checkout, which links torch of {known.index} with {', '.join(known.beside)}"
    return f"{install_from(known.index, packages)} && {usual}"


def library(error: str, root: Path = Path("/")) -> str | None:
    """Return the command that installs the library named in torch's import error, or None if every board has it."""
    package = next((package for name, package in _LIBRARIES.items() if name in error), None)
    return package and _LIBRARY.format(repository=release(root)[0].repository, package=package)


def remedy(package: Package, root: Path = Path("/")) -> str:
    """Return the command that installs a runtime's package on this machine."""
    if is_tegra(root) and (package.wheel or package.on_board):
        return package.on_board or install(package.wheel, root)
    from benchd.daemon.machine.installed import adding  # noqa: PLC0415 - the script runs without benchd

    return adding(package.extra)


def install_from(board_index: str, packages: str) -> str:
    """Return the command that installs these packages from a board's index, without their requirements."""
    return f"pip install --no-deps --index-url {board_index} {packages}"


def _text(file: Path) -> str:
    """Return the file's text, empty if it cannot be read; a damaged one may contain anything."""
    try:
        return file.read_bytes().decode(errors="replace")
    except OSError:  # Docker also makes a folder of a file that its host lacks
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def main(question: str, root: str = "/") -> int:
    """Print one fact about the board; return the exit status."""
    try:
        known, _ = release(Path(root))
    except TooOld as error:
        sys.stderr.write(f"benchd: {error}\n")
        return 1
    facts = {
        "release": f"JetPack {described(Path(root))}",
        "beside": " ".join(known.beside),
        "index": known.index,
        "constraints": known.constraints,
        "python": known.python,
        "bundle": f"make bundle TARGET={known.target}",
    }
    sys.stdout.write(f"{facts[question]}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
