"""Temperatures from the kernel's thermal zones: works on most machines, without privileges."""

import time
from collections.abc import Iterator
from pathlib import Path

from benchd.daemon.machine.sysfs import KernelFile, text
from benchd.daemon.records import Sample

RANGE_C = (-55.0, 150.0)


class Thermal:
    """Yields `zone_temp_c` at most twice per second, with the zone's type as the rail.

    A zone whose unit is powered off has no temperature, which is not an error.
    """

    name = "thermal"
    min_interval_ns = 450_000_000

    def __init__(self, root: Path = Path("/")) -> None:
        self._folder = root / "sys/devices/virtual/thermal"
        self._zones: dict[str, KernelFile] = {}

    def unavailable(self) -> str | None:
        """Return None if any zone has a temperature; unreadable zones are skipped from then on."""
        self._zones = {}
        readable = 0
        for rail, file in _zones(self._folder).items():
            try:
                readable += _celsius(file) is not None
            except (OSError, ValueError):
                continue
            self._zones[rail] = file
        return None if readable else f"no thermal zone in {self._folder} reports a temperature"

    def sample(self) -> Iterator[Sample]:
        """Yield the current temperatures; finally raise OSError listing the zones that failed."""
        failures = []
        for rail, file in self._zones.items():
            try:
                celsius = _celsius(file)
            except (OSError, ValueError) as error:
                failures.append(f"zone {rail}: {error}")
                continue
            if celsius is not None:
                yield Sample(time.monotonic_ns(), "zone_temp_c", celsius, self.name, rail)
        if failures:
            raise OSError("; ".join(failures))


def _zones(folder: Path) -> dict[str, KernelFile]:
    """Return each zone's temperature file by zone type, with the zone number appended if the type repeats."""
    zones: dict[str, KernelFile] = {}
    for zone in sorted(folder.glob("thermal_zone*"), key=lambda path: (len(path.name), path.name)):
        kind = text(zone / "type") or "unnamed"
        rail = kind if kind not in zones else f"{kind}-{zone.name.removeprefix('thermal_zone')}"
        zones[rail] = KernelFile(zone / "temp")
    return zones


def _celsius(file: KernelFile) -> float | None:
    """Return the temperature in degC, None while the unit is off; raise OSError or ValueError if it is unreadable."""
    try:
        celsius = int(file.read()) / 1e3
    except BlockingIOError:  # Tegra's firmware returns this for an unpowered unit
        return None
    if not RANGE_C[0] <= celsius <= RANGE_C[1]:
        raise ValueError(f"{celsius:g} degC is out of range")
    return celsius
