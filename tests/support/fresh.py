"""Fresh environments that hold what `pip install` of a few packages would, as links to the packages installed here."""

import shutil
import sys
import venv
import zipfile
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

import wheels_made
from packaging.requirements import Requirement


def python(folder: Path, packages: list[str]) -> Path:
    """Return the interpreter of a new environment with these packages (NAME==VERSION) and what they require."""
    venv.create(folder / "alone", symlinks=True, with_pip=False)
    site = folder / f"alone/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    wanted, done = list(map(Requirement, packages)), set[str]()
    while wanted:
        requirement = wanted.pop()
        if str(requirement) not in done:
            done.add(str(requirement))
            wanted += _required(
                _installed(requirement.name.lower().replace("_", "-"), site, folder), requirement.extras
            )
    return folder / "alone/bin/python"


def _installed(name: str, site: Path, folder: Path) -> Distribution:
    """Put a distribution into the environment and return it; ours from its wheel, for it may be a checkout here."""
    if name == "benchd":
        shutil.rmtree(folder / "copy", ignore_errors=True)
        zipfile.ZipFile(wheels_made.build_ours(folder)).extractall(site)
        return PathDistribution(next(site.glob("benchd-*.dist-info")))
    package = distribution(name)
    for top in {Path(*file.parts[:1]) for file in package.files or [] if file.parts[0] != ".."}:
        _link(site / top, Path(str(package.locate_file(top))))
    return package


def _link(link: Path, target: Path) -> None:
    """Link a file or a folder; folders that several distributions share are linked by their parts."""
    if link.is_symlink() and link.is_dir():
        first = link.resolve()
        link.unlink()
        link.mkdir()
        for part in first.iterdir():
            (link / part.name).symlink_to(part)
    if link.is_dir():
        for part in target.iterdir():
            _link(link / part.name, part)
    elif not link.exists():
        link.symlink_to(target)


def _required(package: Distribution, extras: set[str]) -> list[Requirement]:
    environments = [{"extra": extra} for extra in ("", *extras)]
    needed = map(Requirement, package.requires or [])
    return [
        requirement
        for requirement in needed
        if requirement.marker is None or any(map(requirement.marker.evaluate, environments))
    ]
