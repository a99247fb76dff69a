"""Sessions of a test's own, in a folder, with no sinks."""

from pathlib import Path

from benchd.daemon.measuring.plan import Machine
from benchd.daemon.measuring.session import Session, Settings


def settings(folder: Path, *, sources: list[str] | None = None, machine: Machine | None = None) -> Settings:
    return Settings(
        device_id="d",
        machine=machine or Machine("cpu", has_cxx=True),
        output=folder,
        artifacts=folder / "artifacts",
        cache=folder / "cache",
        sources=sources or ["procfs"],
        period_s=0.05,
    )


def session(folder: Path, *, sources: list[str] | None = None) -> Session:
    return Session(settings(folder, sources=sources))
