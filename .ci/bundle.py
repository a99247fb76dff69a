"""Gathers what install.sh needs at a site without a network into dist/bundle-TARGET, laid out like a checkout.

Usage: python3.10 .ci/bundle.py TARGET WHEEL. The Python has to be the target's, because pip looks at its own for what a
requirement depends on. JETSON_INDEX, where it is set, gives the packages that only the board's index has.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from exporters.tegra import RELEASES  # noqa: E402 - of the checkout, which is not installed for this Python

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


@dataclass(frozen=True)
class Target:
    """A platform: the wheels it takes, and what no public index holds for it, with what that requires in turn."""

    python: tuple[int, int]
    machine: str
    glibc_minor: int
    extra: str
    constraints: str
    board: dict[str, str]
    board_requires: tuple[str, ...]

    @property
    def beside(self) -> tuple[str, ...]:
        """Return what its torch is linked with."""
        return next(known.beside for known in RELEASES if known.constraints == self.constraints)


TORCH_REQUIRES = ("filelock", "fsspec", "jinja2", "networkx", "numpy", "pillow", "sympy", "typing-extensions")
TARGETS = {
    "jetpack62": Target(
        python=(3, 10),
        machine="aarch64",
        glibc_minor=35,
        extra="jetson",
        constraints="constraints-jetson62.txt",
        board={"torch": "2.8.0", "torchvision": "0.23.0", "triton": "3.4.0"},
        board_requires=TORCH_REQUIRES,
    ),
    "jetpack72": Target(
        python=(3, 12),
        machine="aarch64",
        glibc_minor=39,
        extra="jetson",
        constraints="constraints-jetson72.txt",
        board={"torch": "2.9.1", "torchvision": "0.24.1", "triton": "3.5.1"},
        board_requires=(*TORCH_REQUIRES, "setuptools"),
    ),
}


def main() -> int:
    """Fill the bundle and print what it holds and lacks; return the exit status."""
    name, wheel = sys.argv[1], Path(sys.argv[2])
    target = TARGETS.get(name)
    if target is None:
        return _fail(f"no TARGET {name!r}; there is {', '.join(TARGETS)}")
    if sys.version_info[:2] != target.python:
        number = ".".join(map(str, target.python))
        return _fail(f"{name} needs Python {number} here too: install it, by pyenv or apt")
    bundle = ROOT / "dist" / f"bundle-{name}"
    shutil.rmtree(bundle, ignore_errors=True)
    _copy(bundle, target)
    _download(bundle / "wheels", target, wheel)
    lacking = _download_board(bundle / "wheels", target)
    _sum(bundle)
    _report(bundle, lacking)
    return 0


def _copy(bundle: Path, target: Target) -> None:
    for name in (*COPIED, target.constraints):
        source, to = ROOT / name, bundle / name
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, to) if source.is_dir() else shutil.copy(source, to)


def _download(wheels: Path, target: Target, ours: Path) -> None:
    """Download all that ours requires but the board's packages, for which pip is given stand-ins."""
    with tempfile.TemporaryDirectory() as folder:
        for name, number in target.board.items():
            _stand_in(Path(folder), name, f"{number}+board", target.board_requires)
        _pip(wheels, target, "--find-links", folder, f"{ours}[{target.extra}]")
        for stand_in in Path(folder).iterdir():
            (wheels / stand_in.name).unlink(missing_ok=True)


def _download_board(wheels: Path, target: Target) -> list[str]:
    """Download the board's packages where its index is given; return those that are lacking."""
    named = [f"{name}=={number}" for name, number in target.board.items()]
    index = os.environ.get("JETSON_INDEX")
    if not index:
        return [*named, "onnxruntime-gpu", *target.beside]
    _pip(wheels, target, "--no-deps", "--index-url", index, *named, "onnxruntime-gpu", *target.beside)
    return []


def _pip(wheels: Path, target: Target, *arguments: str) -> None:
    tags = [f"manylinux_2_{minor}_{target.machine}" for minor in range(17, target.glibc_minor + 1)]
    tags += [f"manylinux2014_{target.machine}", f"linux_{target.machine}"]
    platforms = [word for tag in tags for word in ("--platform", tag)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", *platforms]
    command += ["--constraint", str(ROOT / target.constraints), "--dest", str(wheels), *arguments]
    subprocess.run(command, check=True)


def _stand_in(folder: Path, name: str, number: str, requires: tuple[str, ...]) -> None:
    info = f"{name}-{number}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {number}"]
    lines += [f"Requires-Dist: {needed}" for needed in requires]
    with zipfile.ZipFile(folder / f"{name}-{number}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def _sum(bundle: Path) -> None:
    files = sorted(path for path in bundle.rglob("*") if path.is_file())
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(bundle)}\n" for path in files]
    (bundle / "SHA256SUMS").write_text("".join(lines))


def _report(bundle: Path, lacking: list[str]) -> None:
    wheels = list((bundle / "wheels").glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in wheels) / 2**20
    sys.stdout.write(f"{bundle.relative_to(ROOT)}: {len(wheels)} wheels, {size:.1f} MiB\n")
    sys.stdout.write("On the board: sha256sum --check SHA256SUMS && sudo ./systemd/install.sh --wheels wheels\n")
    if lacking:
        sys.stdout.write(
            f"Not in it: {', '.join(lacking)}. They come from the index of the board's JetPack, for a board that has "
            "none of its own: make bundle JETSON_INDEX=URL\n"
        )


def _fail(reason: str) -> int:
    sys.stderr.write(f"benchd: {reason}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
