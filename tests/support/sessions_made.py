"""Sessions of a test's own, in a folder."""

from collections.abc import Sequence
from pathlib import Path

from benchd.daemon.config import Config, DeviceConfig, SamplingConfig
from benchd.daemon.measuring.plan import Machine, PlannedCase
from benchd.daemon.measuring.session import Session, Sink


class Stages(Sink):
    """Keeps the stages of all processes in order, each with the number of its process."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str]] = []

    def stage(self, planned: PlannedCase, process: int, stage: str, done: str = "") -> None:
        self.seen.append((process, stage))


def session(
    folder: Path, sinks: Sequence[Sink] = (), *, source: str = "procfs", machine: Machine | None = None
) -> Session:
    config = Config(device=DeviceConfig(id="d"), sampling=SamplingConfig(sources=[source]))
    return Session(config, machine or Machine("cpu", has_cxx=True), folder, sinks)
