"""Detects what limits a Jetson's clocks: cooling devices, a lowered GPU clock limit, and over-current events.

All values are from sysfs, without privileges: cur_state of the thermal framework's cooling devices, max_freq of the
GPU's devfreq node, and oc*_event_cnt of the SoC's over-current monitor. The masks use NVML's bits, so readers need only
one format.
"""

import time
from collections.abc import Iterator
from pathlib import Path

from benchd.daemon.machine.sysfs import KernelFile, gpu_nodes, text
from benchd.daemon.records import Sample

THERMAL, BRAKE = 0x20, 0x80  # NVML's bits: software thermal slowdown, power brake
LOWERING = ("cpufreq", "devfreq", "throttle")  # part of a cooling device's type; all others are fans and alerts


class Throttle:
    """Yields `gpu_throttle_reasons` and `cpu_throttle_reasons` at most ten times per second.

    The masks use NVML's bits: 0x20 means that a cooling device lowers a clock or that the GPU's clock limit is below
    its highest value since the start, and 0x80 that the supply drew too much current since the last reading.
    """

    name = "throttle"
    min_interval_ns = 90_000_000

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._cooling: dict[str, KernelFile] = {}
        self._limits: list[KernelFile] = []
        self._events: list[KernelFile] = []
        self._highest_hz = self._counted = 0

    def unavailable(self) -> str | None:
        """Return None if the cooling devices that lower clocks can be read, else the reason."""
        folder = self._root / "sys/class/thermal"
        self._cooling = {
            f"{text(device / 'type')} {device.name}": KernelFile(device / "cur_state")
            for device in sorted(folder.glob("cooling_device*"))
            if any(word in (text(device / "type") or "") for word in LOWERING)
        }
        if not self._cooling:
            return f"no cooling device in {folder} limits a clock"
        self._limits = [KernelFile(node / "max_freq") for node in gpu_nodes(self._root)]
        self._events = [KernelFile(path) for path in (self._root / "sys/class/hwmon").glob("hwmon*/oc*_event_cnt")]
        try:
            self._counted = self._count()
            self._masks()
        except (OSError, ValueError) as error:
            return str(error)
        return None

    def sample(self) -> Iterator[Sample]:
        """Yield both masks; raise OSError or ValueError if a file is unreadable."""
        for metric, mask in self._masks().items():
            yield Sample(time.monotonic_ns(), metric, float(mask), self.name)

    def _masks(self) -> dict[str, int]:
        levels = {kind: int(file.read()) for kind, file in self._cooling.items()}
        cpu = any(level for kind, level in levels.items() if "cpu" in kind)
        gpu = any(level for kind, level in levels.items() if "cpu" not in kind)
        limits = [int(file.read()) for file in self._limits]
        self._highest_hz = max([self._highest_hz, *limits])
        gpu = gpu or any(limit < self._highest_hz for limit in limits)
        before, self._counted = self._counted, self._count()
        brake = BRAKE if self._counted > before else 0
        return {"gpu_throttle_reasons": THERMAL * gpu | brake, "cpu_throttle_reasons": THERMAL * cpu | brake}

    def _count(self) -> int:
        return sum(int(file.read()) for file in self._events)
