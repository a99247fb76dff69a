"""GPU load and clock of a Jetson from devfreq and, if running as root, those of its memory from debugfs."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchd.daemon.machine.sysfs import GPU_CLOCKS, THOR_GPU, KernelFile, gpu_nodes, number
from benchd.daemon.records import Sample


class Devfreq:
    """Yields `gpu_utilization_percent` and `gpu_clock_hz` at most ten times per second.

    If the kernel exposes the memory controller, also yields `emc_clock_hz` and `emc_utilization_percent`.
    """

    name = "devfreq"
    min_interval_ns = 90_000_000

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._metrics: dict[str, Callable[[], float]] = {}

    def unavailable(self) -> str | None:
        """Return why the GPU's load or clock cannot be read, else None; memory values are optional."""
        nodes = gpu_nodes(self._root)
        if len(nodes) != 1:
            return f"{self._root / GPU_CLOCKS} has {len(nodes)} integrated GPU nodes, not one"
        self._metrics = _gpu(nodes[0]) | _emc(self._root / "sys/kernel")
        try:
            for metric in self._metrics:
                self._read(metric)
        except (OSError, ValueError) as error:
            return str(error)
        return None

    def sample(self) -> Iterator[Sample]:
        """Yield the current values; raise OSError or ValueError at the first that is no longer readable."""
        for metric in self._metrics:
            value = self._read(metric)
            yield Sample(time.monotonic_ns(), metric, value, self.name)

    def _read(self, metric: str) -> float:
        try:
            value = self._metrics[metric]()
        except (OSError, ValueError, ZeroDivisionError) as error:
            raise OSError(f"{metric}: {error}") from error
        if value < 0 or (metric.endswith("_percent") and value > 100):
            raise ValueError(f"{metric} of {value:g} is out of range")
        return value


def _gpu(node: Path) -> dict[str, Callable[[], float]]:
    clock = KernelFile(node / "cur_freq")
    metrics: dict[str, Callable[[], float]] = {"gpu_clock_hz": lambda: int(clock.read())}
    if node.name != THOR_GPU:  # Thor's kernel does not report a load
        load = KernelFile(node / "device/load")
        metrics["gpu_utilization_percent"] = lambda: int(load.read()) / 10  # the kernel reports permille
    return metrics


def _emc(kernel: Path) -> dict[str, Callable[[], float]]:
    """Return the memory controller's readable values: clock and utilization, only the clock, or none."""
    rate_path = kernel / "debug/bpmp/debug/clk/emc/rate"
    if number(rate_path) is None:
        return {}
    rate = KernelFile(rate_path)
    metrics: dict[str, Callable[[], float]] = {"emc_clock_hz": lambda: int(rate.read())}
    for path in (kernel / "debug/cactmon/mc_all", kernel / "actmon_avg_activity/mc_all"):
        if number(path) is not None:
            metrics["emc_utilization_percent"] = _emc_utilization(KernelFile(path), rate)
            break
    return metrics


def _emc_utilization(activity: KernelFile, rate: KernelFile) -> Callable[[], float]:
    # The monitor's average is in percent of a clock in kHz, and lags after the clock has been lowered.
    return lambda: min(int(activity.read()) / (int(rate.read()) / 1e3), 100.0)
