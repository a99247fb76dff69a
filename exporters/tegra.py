"""Whether this machine is a Jetson, and where its packages come from: pip's usual index has none for its GPU."""

import re
from pathlib import Path

# by major release of L4T, which a JetPack is built on: the community index that NVIDIA's Jetson AI Lab keeps for it
INDEXES = {"36": "https://pypi.jetson-ai-lab.io/jp6/cu126"}


def is_tegra(root: Path = Path("/")) -> bool:
    """Return whether the device tree names one of NVIDIA's Tegra SoCs, as on a Jetson."""
    compatible = root / "proc/device-tree/compatible"
    return compatible.exists() and b"nvidia,tegra" in compatible.read_bytes()


def index(root: Path = Path("/")) -> str:
    """Return the index of wheels for this Jetson's JetPack; "URL" if none is known for it."""
    release = root / "etc/nv_tegra_release"
    major = re.match(r"# R(\d+)", release.read_text() if release.exists() else "")
    return index_of(major[1] if major else "")


def index_of(major: str) -> str:
    """Return the index of wheels for a major release of L4T; "URL" if none is known for it."""
    return INDEXES.get(major, "URL")


def install(packages: str, root: Path = Path("/")) -> str:
    """Return the line that installs these packages on this machine: on a Jetson from its board's index."""
    usual = f"pip install {packages}"  # on a Jetson they are there by then, and it adds what they require
    return f"{install_from(index(root), packages)} && {usual}" if is_tegra(root) else usual


def install_from(board_index: str, packages: str) -> str:
    """Return the line that installs these packages from the index of a board, without what they require."""
    return f"pip install --no-deps --index-url {board_index} {packages}"
