"""The sensors, with one file per source. To add one, add a file with a class like `Procfs` and a line in `SAMPLERS`.

A sampler is constructed with the path of its root (or script) and raises UsageError if that is invalid; absent hardware
is not an error: `unavailable` reports it. `sample` may raise an exception: samples yielded before that are kept, the
record lists the failure, and the next tick tries again.
"""

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

from benchd.daemon.errors import UsageError, unknown
from benchd.daemon.machine.sysfs import THOR_GPU, gpu_nodes, i2c_chips
from benchd.daemon.records import Sample
from benchd.daemon.sampling.sources.protocol import PowerSource
from benchd.exporters.tegra import is_tegra

SAMPLERS = {
    "procfs": "benchd.daemon.sampling.sources.procfs:Procfs",
    "ina3221": "benchd.daemon.sampling.sources.ina3221:Ina3221",
    "ina238": "benchd.daemon.sampling.sources.ina238:Ina238",
    "nvml": "benchd.daemon.sampling.sources.nvml:Nvml",
    "rapl": "benchd.daemon.sampling.sources.rapl:Rapl",
    "devfreq": "benchd.daemon.sampling.sources.devfreq:Devfreq",
    "thermal": "benchd.daemon.sampling.sources.thermal:Thermal",
    "throttle": "benchd.daemon.sampling.sources.throttle:Throttle",
    "gpm": "benchd.daemon.sampling.sources.nvml:Gpm",
    "jtop": "benchd.daemon.sampling.sources.jtop:Jtop",
    "fake": "benchd.daemon.sampling.sources.fake:Fake",
}


class Sampler(Protocol):
    """A source of samples, each stamped as close to its reading as possible.

    A sampler may set `min_interval_ns`, below which it is not read again, however short the period.
    """

    @property
    def name(self) -> str:
        """Return the sampler's name in SAMPLERS, which is the `source` of its samples."""
        ...

    def unavailable(self) -> str | None:
        """Return None after one successful reading of every value that the sampler offers, else the reason."""
        ...

    def sample(self) -> Iterator[Sample]:
        """Yield one sample per current value."""
        ...


@runtime_checkable
class Watcher(Protocol):
    """A sampler that also follows processes."""

    def watch(self, *pids: int) -> None:
        """Follow these processes from now on, instead of any others."""
        ...


@runtime_checkable
class PowerMeter(Protocol):
    """A sampler that also yields power or energy."""

    def power_sources(self) -> list[PowerSource]:
        """Describe the power and energy metrics, most complete first; valid once `unavailable` has returned None."""
        ...


def check(sources: Sequence[str]) -> list[str]:
    """Return the sampler names in `sources`; raise UsageError for an unknown, repeated or unusable one."""
    names = [source.partition("=")[0] for source in sources]
    for source, name in zip(sources, names, strict=True):
        if name not in SAMPLERS:
            raise unknown("sampler", name, SAMPLERS)
        if names.count(name) > 1:
            raise UsageError(f"sampler {name!r} is listed twice")
        if "," in source:
            raise UsageError(f"sampler {source!r}: a path must not contain a comma")
    return names


def load(source: str) -> Sampler:
    """Return the sampler for `name` or `name=PATH`; raise UsageError if it is invalid."""
    check([source])
    name, has_path, path = source.partition("=")
    module, _, kind = SAMPLERS[name].partition(":")
    sampler = getattr(importlib.import_module(module), kind)
    return cast("Sampler", sampler(Path(path)) if has_path else sampler())


def present(device: str, gpu_uuid: str | None = None, root: Path = Path("/")) -> list[str]:
    """Return the samplers that have hardware on this machine, with the best power source for `device` first.

    `device` is cpu or cuda, and `gpu_uuid` is the GPU for NVML to open. A board's own files precede NVML and jtop,
    which offer some of the same values, because jtop's GPU load may stay at 0.
    """
    nvml = f"nvml={gpu_uuid}" if gpu_uuid else "nvml"
    zones = any((root / "sys/devices/virtual/thermal").glob("thermal_zone*"))
    monitors = {name: bool(i2c_chips(root, name)) for name in ("ina238", "ina3221")}
    if is_tegra(root):
        samplers = monitors | {
            "procfs": True,
            "devfreq": True,
            "throttle": True,
            "thermal": zones,
            nvml: device == "cuda" and any(node.name == THOR_GPU for node in gpu_nodes(root)),
            "jtop": (root / "run/jtop.sock").exists(),
        }
    else:
        rapl = any((root / "sys/class/powercap").glob("*rapl:*"))
        samplers = {nvml: device == "cuda", **monitors, "rapl": rapl, "procfs": True, "thermal": zones}
    return [name for name, is_there in samplers.items() if is_there]
