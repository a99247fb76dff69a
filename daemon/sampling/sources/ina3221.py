"""The power of a Jetson's rails from its INA3221 monitors: a few sysfs files, without privileges or child processes.

A rail is identified by its label, because hwmon device and channel numbers differ between boards and between boots.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from benchd.daemon.machine.sysfs import KernelFile, i2c_chips, number, text
from benchd.daemon.records import Sample
from benchd.daemon.sampling.sources.protocol import PowerSource

MODULE_INPUT = "VDD_IN"
# AGX Orin has no input rail. Its VDDQ_VDD2_1V8AO is fed from VIN_SYS_5V0 and would be counted twice.
MODULE_RAILS = ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0")

MAX_MILLIVOLTS = 26_000
FULL_SCALE_UV = 163_800
OFFSET_UV = 120  # three steps, because a rail without load may read slightly below zero
SMALLEST_SHUNT_UOHM = 2000  # the smallest shunt on any Orin board, used if the driver does not report one
RESET_PERIOD_S = 3 * (1.1e-3 + 1.1e-3)  # period after a reset, with shunt and bus voltages of three channels


CHANNELS = range(1, 4)


class Ina3221:
    """Yields `power_w` per rail label and, on a board without VDD_IN, the sum of the module's rails.

    The sum has no rail label and is yielded only if all its parts were read at the same tick.
    """

    name = "ina3221"

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._rails: dict[str, _Rail] = {}

    def unavailable(self) -> str | None:
        """Return why the module's power cannot be read, else None; failures of other rails do not matter."""
        read = set()
        try:
            self._rails = _rails(self._root)
            if not self._rails:
                devices = self._root / "sys/bus/i2c/devices"
                return f"no INA3221 with labelled rails in {devices}: not a Jetson Orin, or its driver is not loaded"
            for sample in self.sample():
                read.add(sample.rail)
        except (OSError, ValueError) as error:
            wanted = {source.rail for source in self.power_sources() if source.total} or self._rails.keys()
            return None if wanted and wanted <= read else str(error)
        return None

    def power_sources(self) -> list[PowerSource]:
        """Return the module's total power, if the board has rails for it, and then the other rails."""
        if MODULE_INPUT in self._rails:
            totals = [self._source(MODULE_INPUT, f"module input {MODULE_INPUT}", [MODULE_INPUT], total=True)]
        elif self._has_sum():
            scope = f"sum of module rails {' + '.join(MODULE_RAILS)}"
            totals = [self._source("", scope, MODULE_RAILS, total=True)]
        else:
            totals = []
        parts = [label for label in self._rails if label != MODULE_INPUT]
        return totals + [self._source(label, f"rail {label}", [label], total=False) for label in parts]

    def _source(self, rail: str, scope: str, labels: Sequence[str], *, total: bool) -> PowerSource:
        return PowerSource(
            source=self.name,
            rail=rail,
            metric="power_w",
            scope=scope,
            total=total,
            period_s=max(self._rails[label].period_s for label in labels),
            averaging_s=max(self._rails[label].averaging_s for label in labels),
        )

    def _has_sum(self) -> bool:
        return MODULE_INPUT not in self._rails and self._rails.keys() >= set(MODULE_RAILS)

    def sample(self) -> Iterator[Sample]:
        """Yield the current power of each rail; finally raise OSError listing the rails that failed."""
        read: dict[str, Sample] = {}
        failures = []
        for label, rail in self._rails.items():
            try:
                t_ns, watts = rail.read()
            except (OSError, ValueError) as error:
                failures.append(f"rail {label}: {error}")
                continue
            read[label] = Sample(t_ns, "power_w", watts, self.name, label)
            yield read[label]
        if self._has_sum() and read.keys() >= set(MODULE_RAILS):
            parts = [read[label] for label in MODULE_RAILS]
            t_ns = sum(part.t_ns for part in parts) // len(parts)
            yield Sample(t_ns, "power_w", sum(part.value for part in parts), self.name)
        if failures:
            with suppress(ValueError):  # the failure is reported below
                self._find_again()
            raise OSError("; ".join(failures))

    def _find_again(self) -> None:
        """Find the current paths of the same rails; a rail that no longer exists continues to fail."""
        rails = _rails(self._root)
        self._rails = {label: rails.get(label, rail) for label, rail in self._rails.items()}


class _Rail:
    """One channel, with the update period and averaging time of its chip in seconds."""

    def __init__(self, label: str, folder: Path, channel: int) -> None:
        self.period_s, self.averaging_s = _timing(folder)
        self._name = label
        self._label = KernelFile(folder / f"in{channel}_label")
        self._voltage = KernelFile(folder / f"in{channel}_input")  # mV
        self._current = KernelFile(folder / f"curr{channel}_input")  # mA
        self._shunt_uohm = number(folder / f"shunt{channel}_resistor") or SMALLEST_SHUNT_UOHM

    def read(self) -> tuple[int, float]:
        """Return the time at the middle of the reading, and the power in W.

        Raises OSError or ValueError if the channel cannot be read, has a different label or is out of range.
        """
        # After the driver is rebound, the same path may belong to a different rail.
        label = self._label.read().decode(errors="replace").strip()
        if label != self._name:
            raise ValueError(f"its channel is now labelled {label!r}")
        before_ns = time.monotonic_ns()
        millivolts, milliamps = int(self._voltage.read()), int(self._current.read())
        t_ns = (before_ns + time.monotonic_ns()) // 2
        if not 0 < millivolts <= MAX_MILLIVOLTS or not self._in_range(milliamps):
            raise ValueError(f"{millivolts} mV and {milliamps} mA are out of range")
        return t_ns, millivolts * milliamps / 1e6

    def _in_range(self, milliamps: int) -> bool:
        return -OFFSET_UV <= milliamps * self._shunt_uohm / 1e3 < FULL_SCALE_UV


def _rails(root: Path) -> dict[str, _Rail]:
    """Return the rails of all chips by label; raise ValueError if a label is unreadable or repeated."""
    rails: dict[str, _Rail] = {}
    for folder in (folder for chip in i2c_chips(root, "ina3221") for folder in chip.glob("hwmon/hwmon*")):
        for channel in CHANNELS:
            file = folder / f"in{channel}_label"
            if not file.exists():
                continue
            label = text(file)
            if label is None:
                raise ValueError(f"{file} cannot be read")
            if label in rails:
                raise ValueError(f"two rails are labelled {label}")
            if "NC" not in label:  # not connected
                rails[label] = _Rail(label, folder, channel)
    return rails


def _timing(folder: Path) -> tuple[float, float]:
    """Return a chip's update period and averaging time in seconds; the averaging time is 0 for a single conversion."""
    interval_ms, samples = number(folder / "update_interval"), number(folder / "samples")
    period_s = interval_ms / 1e3 if interval_ms else RESET_PERIOD_S
    # The average is updated at each conversion, and Jetson's drivers report the interval of a single conversion.
    return period_s, period_s * samples if samples and samples > 1 else 0.0
