"""Collects what install.sh needs at a site without a network in dist/bundle-TARGET, laid out like a checkout.

Usage: python3.10 .ci/bundle.py TARGET. The Python version must be the target's, because pip evaluates conditional
requirements for its own. JETSON_INDEX, if set, provides the packages that only the board's index has.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from exporters.tegra import RELEASES, Release  # noqa: E402 - of the checkout, which is not installed for this Python

COPIED = (
    "systemd",
    "docs/benchd.toml",
    "docs/integrations/mosquitto.acl",
    ".ci/setup",
    ".ci/jetson_board.py",
    "exporters/tegra.py",
    "README.md",
    "LICENSE",
)


TARGETS = {known.target: known for known in RELEASES}
MACHINE = "aarch64"
GLIBC_MINOR = {"22.04": 35, "24.04": 39}  # by Ubuntu release
OF_BOARD = re.compile(r"^(torch|torchvision|triton)==([\w.]+)", re.MULTILINE)
TORCH_REQUIRES = (
    *("filelock", "fsspec", "jinja2", "networkx", "numpy"),
    *("pillow", "setuptools", "sympy", "typing-extensions"),
)


def main() -> int:
    """Fill the bundle and print what it contains and lacks; return the exit status."""
    name = sys.argv[1]
    target = TARGETS.get(name)
    if target is None:
        return _fail(f"no TARGET {name!r}; there is {', '.join(TARGETS)}")
    if "{}.{}".format(*sys.version_info) != target.python:
        return _fail(f"{name} needs Python {target.python} here too: install it with pyenv or apt")
    bundle = ROOT / "dist" / f"bundle-{name}"
    shutil.rmtree(bundle, ignore_errors=True)
    subprocess.run(["make", "wheel"], cwd=ROOT, check=True)
    (wheel,) = (ROOT / "dist").glob("benchd-*.whl")
    _copy(bundle, target)
    _download(bundle / "wheels", target, wheel)
    lacking = _download_board(bundle / "wheels", target)
    _sum(bundle)
    _report(bundle, lacking, f"TARGET={name} JETSON_INDEX={target.index}")
    return 0


def _copy(bundle: Path, target: Release) -> None:
    for name in (*COPIED, target.constraints):
        source, to = ROOT / name, bundle / name
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, to) if source.is_dir() else shutil.copy(source, to)


def _download(wheels: Path, target: Release, ours: Path) -> None:
    """Download everything that `ours` requires except the board's packages, for which pip gets stand-ins."""
    with tempfile.TemporaryDirectory() as folder:
        for name, number in _of_board(target):
            _stand_in(Path(folder), name, f"{number}+board")
        _pip(wheels, target, "--find-links", folder, f"{ours}[jetson]")
        for stand_in in Path(folder).iterdir():
            (wheels / stand_in.name).unlink(missing_ok=True)


def _download_board(wheels: Path, target: Release) -> list[str]:
    """Download what torch links to and, given an index, the board's packages; return what is missing."""
    if target.beside:
        _pip(wheels, target, "--no-deps", *target.beside)
    named = [*(f"{name}=={number}" for name, number in _of_board(target)), "onnxruntime-gpu"]
    index = os.environ.get("JETSON_INDEX")
    if not index:
        return named
    _pip(wheels, target, "--no-deps", "--index-url", index, *named)
    return []


def _of_board(target: Release) -> list[tuple[str, str]]:
    """Return the packages for a board that are not in any public index, with their pinned versions."""
    return OF_BOARD.findall((ROOT / target.constraints).read_text())


def _pip(wheels: Path, target: Release, *arguments: str) -> None:
    tags = [f"manylinux_2_{minor}_{MACHINE}" for minor in range(17, GLIBC_MINOR[target.ubuntu] + 1)]
    tags += [f"manylinux2014_{MACHINE}", f"linux_{MACHINE}"]
    platforms = [word for tag in tags for word in ("--platform", tag)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", *platforms]
    command += ["--constraint", str(ROOT / target.constraints), "--dest", str(wheels), *arguments]
    subprocess.run(command, check=True)


def _stand_in(folder: Path, name: str, number: str) -> None:
    info = f"{name}-{number}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {number}"]
    lines += [f"Requires-Dist: {needed}" for needed in TORCH_REQUIRES]
    with zipfile.ZipFile(folder / f"{name}-{number}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def _sum(bundle: Path) -> None:
    files = sorted(path for path in bundle.rglob("*") if path.is_file())
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(bundle)}\n" for path in files]
    (bundle / "SHA256SUMS").write_text("".join(lines))


def _report(bundle: Path, lacking: list[str], settings: str) -> None:
    wheels = list((bundle / "wheels").glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in wheels) / 2**20
    sys.stdout.write(f"{bundle.relative_to(ROOT)}: {len(wheels)} wheels, {size:.1f} MiB\n")
    sys.stdout.write("On the board: sha256sum --check SHA256SUMS && sudo ./systemd/install.sh --wheels wheels\n")
    if lacking:
        sys.stdout.write(
            f"Not in it: {', '.join(lacking)}. They come from the index of the board's JetPack, for a board that has "
            f"none of its own: make bundle {settings}\n"
        )


def _fail(reason: str) -> int:
    sys.stderr.write(f"benchd: {reason}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
