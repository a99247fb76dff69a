"""Builds a release in dist/release: wheel, sdist, checksums and notes, with each file tested in fresh environments.

Usage: .venv/bin/python .ci/release.py PYTHON... With EXTRA=cpu the wheel also measures there, which downloads torch.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RELEASE = ROOT / "dist" / "release"
MEASURED = ROOT / "results/amd-epyc-2-threads/records.jsonl"
EXTRA = os.environ.get("EXTRA", "")


def main(pythons: list[str]) -> int:
    """Build, test and describe the release; return the exit status."""
    shutil.rmtree(RELEASE, ignore_errors=True)
    RELEASE.mkdir(parents=True)
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(RELEASE), str(ROOT))
    built = sorted(RELEASE.iterdir())
    version = built[0].name.split("-")[1]
    (RELEASE / "NOTES.md").write_text(notes((ROOT / "CHANGELOG.md").read_text(), version))
    found = [python for python in pythons if shutil.which(python)]
    for python in found:
        for file in built:
            _prove(python, file, version)
            print(f"{file.name}: installs and works with {python}")  # noqa: T201
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in built]
    (RELEASE / "SHA256SUMS").write_text("".join(sums))
    absent = [python for python in pythons if python not in found]
    lacking = [f"not tested with {python}, which was not found: install it with pyenv or apt" for python in absent]
    sys.stderr.writelines(f"error: {one}\n" for one in lacking)
    print(f"{RELEASE}: {', '.join(sorted(file.name for file in RELEASE.iterdir()))}")  # noqa: T201
    return int(bool(lacking))


def notes(changelog: str, version: str) -> str:
    """Return the changelog's section for a version, or else its unreleased section."""
    sections = dict(re.findall(r"^## \[(.+?)\].*?\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL))
    return f"# benchd {version}\n\n{sections.get(version, sections['Unreleased']).strip()}\n"


def _prove(python: str, file: Path, version: str) -> None:
    """Install a file in a fresh environment; raise CalledProcessError unless the installed programs work."""
    with tempfile.TemporaryDirectory() as folder:
        _run(python, "-m", "venv", folder)
        extra = EXTRA if file.suffix == ".whl" else ""
        _run(f"{folder}/bin/python", "-m", "pip", "install", "--quiet", f"{file}[{extra}]" if extra else str(file))
        told = _run(f"{folder}/bin/benchd", "--version", folder=folder)
        if told.split() != ["benchd", version]:
            raise SystemExit(f"error: {file.name} calls itself {told.strip()}, not benchd {version}")
        _run(f"{folder}/bin/benchd", "recommend", str(MEASURED), "--json", folder=folder, codes=(0, 4))
        if extra:
            _run(f"{folder}/bin/bench-once", "--models", "square", folder=folder)


def _run(*command: str, folder: str | Path = ROOT, codes: tuple[int, ...] = (0,)) -> str:
    """Run a command and return its output; exit with that output if its exit code is not in `codes`."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode not in codes:
        raise SystemExit(f"error: {' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
