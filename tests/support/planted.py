"""Modules with the names of Python's, torch's and benchd's own that leave a mark if they are imported."""

from pathlib import Path

NAMES = ("argparse", "ctypes", "json", "queue", "runpy", "statistics", "torch", "warnings")
PACKAGES = ("benchd/daemon/sampling/sources", "benchd/daemon/worker")


def planted(folder: Path, mark: Path) -> None:
    """Write them into `folder`; each creates `mark`."""
    text = f"open({str(mark)!r}, 'w').close()\n"
    for name in NAMES:
        (folder / f"{name}.py").write_text(text)
    for name in PACKAGES:
        (folder / name).mkdir(parents=True)
        for file in ("__init__.py", "__main__.py"):
            (folder / name / file).write_text(text)
