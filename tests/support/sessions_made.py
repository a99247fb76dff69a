"""Sessions of a test's own, in a folder."""

from collections.abc import Sequence
from pathlib import Path

from benchd.daemon.config import Config, DeviceConfig, SamplingConfig
from benchd.daemon.measuring.plan import Machine
from benchd.daemon.measuring.session import Session, Sink


def session(
    folder: Path, sinks: Sequence[Sink] = (), *, source: str = "procfs", machine: Machine | None = None
) -> Session:
    config = Config(device=DeviceConfig(id="d"), sampling=SamplingConfig(sources=[source]))
    return Session(config, machine or Machine("cpu", has_cxx=True), folder, sinks)
