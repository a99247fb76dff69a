"""Whether this machine is a Jetson, and where its packages come from: pip's usual index has none for its GPU."""

import re
from pathlib import Path

# By the L4T that a JetPack is built on: the community index that NVIDIA's Jetson AI Lab keeps for it. JetPack 6.1 and
# 6.2 have the CUDA 12.6 and the cuDNN 9 of its builds; 6.0, on R36.2 and R36.3, has CUDA 12.2 and cuDNN 8.
INDEXES = dict.fromkeys(("R36.4", "R36.5"), "https://pypi.jetson-ai-lab.io/jp6/cu126")


def is_tegra(root: Path = Path("/")) -> bool:
    """Return whether the device tree names one of NVIDIA's Tegra SoCs, as on a Jetson."""
    compatible = root / "proc/device-tree/compatible"
    return compatible.exists() and b"nvidia,tegra" in compatible.read_bytes()


def index(root: Path = Path("/")) -> str:
    """Return the index of wheels for this Jetson's JetPack; "URL" if none is known for it."""
    release = root / "etc/nv_tegra_release"
    found = re.match(r"# (R\d+) \(release\), REVISION: (\d+)", release.read_text() if release.exists() else "")
    return index_of(f"{found[1]}.{found[2]}" if found else "")


def index_of(l4t: str) -> str:
    """Return the index of wheels for an L4T such as R36.4.3; "URL" if none is known for it."""
    return INDEXES.get(".".join(l4t.split(".")[:2]), "URL")


def install(packages: str, root: Path = Path("/")) -> str:
    """Return the line that installs these packages on this machine: on a Jetson from its board's index."""
    usual = f"pip install {packages}"  # on a Jetson they are there by then, and it adds what they require
    return f"{install_from(index(root), packages)} && {usual}" if is_tegra(root) else usual


def install_from(board_index: str, packages: str) -> str:
    """Return the line that installs these packages from the index of a board, without what they require."""
    return f"pip install --no-deps --index-url {board_index} {packages}"
