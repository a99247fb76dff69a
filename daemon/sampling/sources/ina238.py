"""The input power of a Jetson Thor's module from its INA238 monitor: one sysfs file, without privileges."""

import time
from collections.abc import Iterator
from pathlib import Path

from benchd.daemon.machine.sysfs import KernelFile, i2c_chips, number
from benchd.daemon.records import Sample
from benchd.daemon.sampling.sources.protocol import PowerSource

RAIL = "VIN"
# The kernel driver averages 16 samples of three conversions of 1052 us each.
PERIOD_S = 16 * 3 * 1052e-6


class Ina238:
    """Yields `power_w` for the rail VIN, the module's input."""

    name = "ina238"

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def unavailable(self) -> str | None:
        """Return why the power cannot be read, else None."""
        try:
            self._find()
            for _ in self.sample():
                pass
        except (OSError, ValueError) as error:
            return str(error)
        return None

    def _find(self) -> None:
        """Find the monitor's file, whose hwmon number varies between boots; raise OSError unless exactly one exists."""
        files = [file for chip in i2c_chips(self._root, "ina238") for file in chip.glob("hwmon/hwmon*/power1_input")]
        if len(files) != 1:
            raise OSError(f"found {len(files)} INA238 in {self._root / 'sys/bus/i2c/devices'}, not one")
        interval_ms = number(files[0].with_name("update_interval"))
        self._period_s = interval_ms / 1e3 if interval_ms else PERIOD_S
        self._microwatts = KernelFile(files[0])

    def power_sources(self) -> list[PowerSource]:
        """Return the module's input as the only power source."""
        return [
            PowerSource(
                source=self.name,
                rail=RAIL,
                metric="power_w",
                scope=f"module input {RAIL}",
                total=True,
                period_s=self._period_s,
                averaging_s=self._period_s,
            )
        ]

    def sample(self) -> Iterator[Sample]:
        """Yield the current power; if it cannot be read, look for its file again and raise OSError or ValueError."""
        before_ns = time.monotonic_ns()
        try:
            watts = int(self._microwatts.read()) / 1e6
        except OSError:
            self._find()
            raise
        yield Sample((before_ns + time.monotonic_ns()) // 2, "power_w", watts, self.name, RAIL)
