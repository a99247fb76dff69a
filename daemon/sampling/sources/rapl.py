"""The energy of CPU packages from the RAPL counters in /sys/class/powercap, for Intel and AMD (both as intel-rapl).

Only root can read them (CVE-2020-8694). A counter wraps after a minute to several hours: a decrease is corrected as one
wrap if the zone reports its range and the elapsed time permits only one; otherwise it is an error.
"""

import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchd.daemon.machine.sysfs import KernelFile, number, text
from benchd.daemon.records import Sample
from benchd.daemon.sampling.sources.protocol import PowerSource

PERIOD_S = 1e-3  # the processors' update period
MAX_ZONE_W = 1000.0  # more than any zone uses: a larger step is not a wrap
MIRROR_TRIES = 5  # the counter may be updated between two readings
ALL_PACKAGES = "packages"
# excludes intel-rapl-mmio:N, which is a second view of the same package
_ZONE = re.compile(r"intel-rapl:\d+(:\d+)?")
_UDEV_RULE = 'SUBSYSTEM=="powercap", RUN+="/bin/chgrp benchd /sys%p/energy_uj", RUN+="/bin/chmod g+r /sys%p/energy_uj"'


class Rapl:
    """Yields `energy_counter_j` since the first reading, for each zone at each change, and the sum of several packages.

    Rails are the kernel's names: `package-0`, `package-0-core`, `psys`. After an implausible step, the zone restarts
    from 0, so that windows across it do not yield an energy.
    """

    name = "rapl"

    def __init__(self, root: Path = Path("/")) -> None:
        self._powercap = root / "sys/class/powercap"
        self._zones: list[_Zone] = []
        self._packages_j: float | None = None

    def unavailable(self) -> str | None:
        """Return None if every package, or failing that another zone, can be read; else the reason and the remedy."""
        folders = [path for path in sorted(self._powercap.glob("intel-rapl:*")) if _ZONE.fullmatch(path.name)]
        if not folders:
            return (
                f"{self._powercap} has no intel-rapl zone: a virtual machine, not x86, or intel_rapl_msr is not loaded"
            )
        refusals = {zone: _refusal(zone) for zone in map(_Zone, folders)}
        self._zones = _counted_once(zone for zone, refusal in refusals.items() if refusal is None)
        # a sum that lacks a package would still look like the machine's total
        needed = (refusal for zone, refusal in refusals.items() if zone.is_package or not self._zones)
        return next(filter(None, needed), None)

    def power_sources(self) -> list[PowerSource]:
        """Return the sum of the packages, the platform, then the parts, which are not included in any sum."""
        packages = {zone.rail: zone.name for zone in self._zones if zone.is_package}
        total_rail = next(iter(packages)) if len(packages) == 1 else ALL_PACKAGES
        sources = [self._source(total_rail, f"CPU {' and '.join(packages.values())}", total=True)] if packages else []
        # after the packages, because some boards do not measure it
        sources += [self._source(zone.rail, "platform psys", total=True) for zone in self._zones if zone.is_platform]
        rest = [zone for zone in self._zones if not zone.is_platform and zone.rail != total_rail]
        return sources + [self._source(zone.rail, f"CPU {zone.rail}", total=False) for zone in rest]

    def _source(self, rail: str, scope: str, *, total: bool) -> PowerSource:
        return PowerSource(
            source=self.name, rail=rail, metric="energy_counter_j", scope=scope, total=total, period_s=PERIOD_S
        )

    def sample(self) -> Iterator[Sample]:
        """Yield the changed counters; then raise OSError listing the zones that failed."""
        failures: dict[_Zone, Exception] = {}
        for zone in self._zones:
            try:
                changed = zone.read()
            except (OSError, ValueError) as error:
                failures[zone] = error
                continue
            if changed:
                yield Sample(zone.t_ns, "energy_counter_j", zone.energy_j, self.name, zone.rail)
        if not any(zone.is_package for zone in failures):
            yield from self._sum()
        if failures:
            raise OSError("; ".join(f"{zone.rail}: {error}" for zone, error in failures.items()))

    def _sum(self) -> Iterator[Sample]:
        packages = [zone for zone in self._zones if zone.is_package]
        energy_j = sum(zone.energy_j for zone in packages)
        if len(packages) > 1 and energy_j != self._packages_j:
            self._packages_j = energy_j
            yield Sample(packages[-1].t_ns, "energy_counter_j", energy_j, self.name, ALL_PACKAGES)


class _Zone:
    """One counter, corrected for wraps: `energy_j` since the first reading, at `t_ns`."""

    def __init__(self, folder: Path) -> None:
        name = text(folder / "name") or folder.name
        is_part = folder.name.count(":") > 1
        parent = text(folder.with_name(folder.name.rpartition(":")[0]) / "name")
        self.rail = f"{parent}-{name}" if is_part else name
        self.is_package = not is_part and name.startswith("package-")
        self.is_platform = not is_part and name == "psys"
        self.mirrors: list[str] = []
        self.path = folder / "energy_uj"
        self.energy_j = 0.0
        self.t_ns = 0
        self._file = KernelFile(self.path)
        self._range_uj = number(folder / "max_energy_range_uj")
        self._energy_uj: int | None = None

    @property
    def name(self) -> str:
        """Return the zone's rail, and any rails that mirror its counter."""
        return f"{self.rail} (repeated as {', '.join(self.mirrors)})" if self.mirrors else self.rail

    def is_mirrored_by(self, other: "_Zone") -> bool:
        """Return whether `other` shows the same counter, so that its reading is between two readings of this zone."""
        for _ in range(MIRROR_TRIES):
            before, between, after = self.counter_uj(), other.counter_uj(), self.counter_uj()
            if 0 < before <= between <= after:
                return True
        return False

    def counter_uj(self) -> int:
        """Return the raw counter; raise OSError or ValueError if it cannot be read."""
        return int(self._file.read(32))

    def read(self) -> bool:
        """Read the counter and return whether the value is new (the first one is).

        Raises OSError or ValueError if the file cannot be read or the step from the last value is implausible.
        """
        energy_uj, t_ns = self.counter_uj(), time.monotonic_ns()
        before_uj, self._energy_uj = self._energy_uj, energy_uj
        before_ns, self.t_ns = self.t_ns, t_ns
        if before_uj is None or energy_uj == before_uj:
            return before_uj is None
        try:
            self.energy_j += self._step_uj(energy_uj - before_uj, (t_ns - before_ns) / 1e9) / 1e6
        except ValueError:
            self.energy_j = 0.0
            raise
        return True

    def _step_uj(self, step_uj: int, elapsed_s: float) -> int:
        """Return the step corrected for a wrap; raise ValueError if it may be a reset or more than one wrap."""
        most_uj = (elapsed_s + PERIOD_S) * MAX_ZONE_W * 1e6
        if self._range_uj and most_uj >= self._range_uj:
            raise ValueError(f"not read for {elapsed_s:.3g} s, in which it may have wrapped more than once")
        if step_uj < 0 and not self._range_uj:
            raise ValueError(f"went back by {-step_uj} uJ, and without max_energy_range_uj a wrap cannot be detected")
        forward_uj = step_uj % self._range_uj if self._range_uj else step_uj
        if forward_uj > most_uj:
            raise ValueError(f"changed by {step_uj} uJ in {elapsed_s:.3g} s, which neither a load nor a wrap explains")
        return forward_uj


def _counted_once(zones: Iterable[_Zone]) -> list[_Zone]:
    """Return the zones, except packages that mirror another's counter, as on kernels that list one per die."""
    kept: list[_Zone] = []
    for zone in zones:
        packages = (package for package in kept if package.is_package and zone.is_package)
        first = next((package for package in packages if package.is_mirrored_by(zone)), None)
        if first:
            first.mirrors.append(zone.rail)
        else:
            kept.append(zone)
    return kept


def _refusal(zone: _Zone) -> str | None:
    """Return why the zone cannot be read and what to do, or None if it can be read."""
    try:
        zone.counter_uj()
    except PermissionError:
        return f"only root can read {zone.path}; let a group read it with this udev rule, then reboot: {_UDEV_RULE}"
    except (OSError, ValueError) as error:
        return f"{zone.path}: {error}"
    return None
