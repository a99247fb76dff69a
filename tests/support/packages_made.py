"""Packages as an installer leaves them, and environments made of them."""

import os
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from benchd.daemon.why.environments import InstalledDistribution, InstalledPackages

BASE = os.path.realpath(sys._base_executable)


def package(
    folder: Path,
    name: str,
    version: str,
    requires: Sequence[str] = (),
    *,
    content: str | None = None,
    listed: bool = True,
) -> InstalledDistribution:
    """Write a package of one module, whose VERSION is its version, to `folder`."""
    content = f"VERSION = {version!r}\n" if content is None else content
    metadata = f"{name}-{version}.dist-info"
    (folder / metadata).mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(content)
    needs = "".join(f"Requires-Dist: {each}\n" for each in requires)
    (folder / metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
    files = [f"{name}.py", f"{metadata}/METADATA"] if listed else []
    return InstalledDistribution(
        name, version, str(folder), files, sha256(content.encode()).hexdigest(), list(requires)
    )


def environment(
    packages: Sequence[InstalledDistribution], *, base: str = BASE, version: str = sys.version.split()[0]
) -> InstalledPackages:
    return InstalledPackages(base, version, list(packages))
