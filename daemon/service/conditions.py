"""Checks the conditions of a scheduled run: the machine's temperature, load, power mode and supply."""

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchd.daemon.config import Conditions
from benchd.daemon.errors import NotAvailable
from benchd.daemon.machine import gpu
from benchd.daemon.machine.environment import power_mode_of
from benchd.daemon.machine.sysfs import number, text
from benchd.daemon.sampling.sources.devfreq import Devfreq

GPU_QUIET_S = 30.0
GPU_UNSEEN_S = 10.0  # maximum time between checks; after a longer gap, such as a case, the GPU may have been busy


@dataclass(frozen=True)
class Readings:
    """The machine's current state, with None for values that cannot be read here."""

    temperature_c: float | None
    gpu_load_percent: float | None
    system_load: float | None
    power_mode: str | None
    on_mains: bool | None


def read(gpu_uuid: str | None, root: Path = Path("/")) -> Readings:
    """Return the hottest thermal zone, the GPU's load, the 1-minute load average, the power mode and the supply.

    `gpu_uuid` is the GPU to query with NVML; a Tegra reports its own in sysfs.
    """
    temperatures = [number(zone / "temp") for zone in (root / "sys/class/thermal").glob("thermal_zone*")]
    load = re.match(r"[\d.]+", text(root / "proc/loadavg") or "")
    return Readings(
        temperature_c=max((value / 1e3 for value in temperatures if value is not None), default=None),
        gpu_load_percent=_gpu_load_percent(gpu_uuid, root),
        system_load=float(load[0]) if load else None,
        power_mode=power_mode_of(root),
        on_mains=_on_mains(root),
    )


class Judge:
    """Decides what a run waits for; remembers the last check, and since when the GPU has been below each limit."""

    def __init__(self) -> None:
        self._quiet: dict[float, tuple[float, float]] = {}

    def unmet(self, wanted: Conditions, now: Readings, t_s: float) -> str | None:
        """Return the first condition not met at the monotonic time `t_s`, or None if all are met.

        A condition whose value cannot be read counts as unmet.
        """
        reasons = [
            _below("temperature", now.temperature_c, wanted.temperature_below_c, "C"),
            _below("system load", now.system_load, wanted.system_load_below, ""),
            self._gpu(wanted.gpu_load_below_percent, now.gpu_load_percent, t_s),
            _equal("power mode", now.power_mode, wanted.power_mode),
            _on_mains_wanted(now.on_mains) if wanted.on_mains else None,
        ]
        return next((reason for reason in reasons if reason), None)

    def _gpu(self, limit: float | None, value: float | None, t_s: float) -> str | None:
        """Return why the GPU is not quiet; its load must stay low, because a reading may fall between two frames."""
        if limit is None:
            return None
        busy = _below("GPU load", value, limit, "%")
        if busy:
            self._quiet.pop(limit, None)
            return busy
        since_s, seen_s = self._quiet.get(limit, (t_s, t_s))
        since_s = t_s if t_s - seen_s > GPU_UNSEEN_S else since_s
        self._quiet[limit] = since_s, t_s
        quiet_s = t_s - since_s
        return f"GPU quiet for {quiet_s:.0f} of {GPU_QUIET_S:g} s" if quiet_s < GPU_QUIET_S else None


def _below(name: str, value: float | None, limit: float | None, unit: str) -> str | None:
    if limit is None:
        return None
    if value is None:
        return f"{name} cannot be read here"
    return None if value < limit else f"{name} {value:.3g}{unit and ' ' + unit}, not below {limit:g}"


def _equal(name: str, value: str | None, wanted: str | None) -> str | None:
    if wanted is None or value == wanted:
        return None
    return f"{name} {value}, not {wanted}" if value else f"{name} cannot be read here"


def _on_mains_wanted(on_mains: bool | None) -> str | None:
    return None if on_mains else "on battery" if on_mains is False else "the power supply cannot be read here"


def _gpu_load_percent(gpu_uuid: str | None, root: Path) -> float | None:
    """Return the load from NVML, or from devfreq if NVML reports none, as on a Tegra."""
    if gpu_uuid:
        with suppress(NotAvailable):
            return gpu.utilization_percent(gpu_uuid)
    try:
        tegra = Devfreq(root)
        samples = [] if tegra.unavailable() else tegra.sample()
        return next((sample.value for sample in samples if sample.metric == "gpu_utilization_percent"), None)
    except (OSError, ValueError):
        return None


def _on_mains(root: Path) -> bool | None:
    """Return False if the machine's battery, not that of a mouse, is discharging; without a battery, it is on mains."""
    if not (root / "sys/class").is_dir():
        return None
    supplies = (root / "sys/class/power_supply").glob("*")
    own = [supply for supply in supplies if text(supply / "scope") != "Device"]
    return not any(text(supply / "status") == "Discharging" for supply in own)
