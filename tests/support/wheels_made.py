"""A folder of wheels that installs offline within seconds: ours, and stubs that lead to the packages installed here."""

import base64
import hashlib
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import torch
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PACKAGES = Path(torch.__file__).parents[1]
LEADING = "msgspec"  # the stub that leads to all the others, because every installation has it


def build_ours(folder: Path) -> Path:
    """Build benchd's wheel into `folder` from a copy of this tree."""
    copy = folder / "copy"
    for name in ("daemon", "models", "kernels", "exporters", "dashboard"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(copy)]
    subprocess.run(command, check=True, capture_output=True)
    return next(folder.glob("benchd-*.whl"))


def fill(folder: Path, ours: Path, constraints: str, packages: Path = PACKAGES, **sources: str) -> Path:
    """Fill `folder` with our wheel, one of setuptools to build with and a stub of each pinned package, and return it.

    `packages` is where the stubs lead, as the machine that installs them sees it. A stub that `sources` names holds
    that text as its module: torch="raise ImportError".
    """
    folder.mkdir(parents=True)
    shutil.copy(ours, folder)
    _repack_setuptools(folder)
    for needed in _pins(ROOT / constraints):
        files = {f"{needed.name}/__init__.py": sources[needed.name]} if needed.name in sources else {}
        leads = {f"{needed.name}_leads.pth": f"{packages}\n"} if needed.name == LEADING else {}
        stub(folder, needed.name, next(iter(needed.specifier)).version, files | leads)
    return folder


def _pins(constraints: Path) -> list[Requirement]:
    lines = [line for line in constraints.read_text().splitlines() if line and not line.startswith("#")]
    pins = map(Requirement, lines)
    return [pin for pin in pins if pin.name != "setuptools" and (pin.marker is None or pin.marker.evaluate())]


def _repack_setuptools(folder: Path) -> None:
    package = distribution("setuptools")
    with zipfile.ZipFile(folder / f"setuptools-{package.version}-py3-none-any.whl", "w") as wheel:
        for file in package.files or []:
            if file.suffix != ".pyc":
                wheel.write(file.locate(), file)


def stub(folder: Path, name: str, version: str, files: dict[str, str], requires: str = "") -> None:
    """Write the wheel of a distribution with these files, which requires another one."""
    needed = f"Requires-Dist: {requires}\n" if requires else ""
    stem = f"{name.replace('-', '_')}-{version}"
    files = files | {
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}",
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},sha256={_digest(text)},{len(text)}\n" for path, text in files.items())
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for path, text in {**files, f"{stem}.dist-info/RECORD": record}.items():
            wheel.writestr(path, text)


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
