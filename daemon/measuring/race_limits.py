"""The limits that a user sets for what ships, each as a figure of one process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from msgspec import Struct

from benchd.daemon.measuring.plan import Planned
from benchd.daemon.measuring.protocol import Outcome
from benchd.daemon.records import ProcessResult
from benchd.daemon.verdicts import racing


class Asked(Struct, frozen=True, kw_only=True):
    """The limits of `benchd ship`; None is no limit. `min_effect` is the smallest difference that counts."""

    max_latency_ms: float | None = None
    max_energy_j: float | None = None
    max_memory_bytes: float | None = None
    max_power_w: float | None = None
    rate_hz: float | None = None
    min_agreement: float | None = None
    max_accuracy_drop: float | None = None
    min_effect: float = 0.01


class Miss(Struct, frozen=True):
    """A limit that a candidate certainly misses, by which share its mean is above it; None if it was not measured."""

    words: str
    share: float | None


@dataclass(frozen=True)
class Limit:
    """One limit: what it is of, its value and unit, and the figure of a process and its case."""

    what: str
    unit: str
    most: float
    figure: Callable[[ProcessResult, Planned], float | None]

    def values(self, outcomes: Sequence[Outcome], planned: Planned) -> list[float] | None:
        """Return the figure of each process; None if one lacks it."""
        found = [self.figure(outcome.process, planned) for outcome in outcomes]
        present = [value for value in found if value is not None and value > 0.0]
        return present if present and len(present) == len(found) else None

    def miss(self, values: Sequence[float] | None, bounds: int) -> Miss | None:
        """Return how these processes miss the limit, None unless that is certain; `bounds` share the error."""
        if values is None:
            return Miss(f"{self.what} was not measured", None)
        if not racing.exceeds(values, self.most, bounds):
            return None
        mean = geometric_mean(values)
        words = f"{self.what} {mean:.4g} {self.unit} is above {self.most:.4g} {self.unit}"
        return Miss(words, mean / self.most - 1.0)

    def is_met(self, values: Sequence[float] | None) -> bool:
        """Return whether the next process will certainly meet the limit too."""
        return values is not None and racing.exceeds(values, self.most, 1) is False


def limits(asked: Asked, device: str) -> list[Limit]:
    """Return the limits that were set."""

    def memory_mib(process: ProcessResult, planned: Planned) -> float | None:
        peak = process.memory
        size = peak and (peak.rss_peak_bytes if device == "cpu" else peak.device_peak_bytes)
        return size / 2**20 if size else None

    given: list[tuple[str, str, float | None, Callable[[ProcessResult, Planned], float | None]]] = [
        ("latency", "ms", asked.max_latency_ms, _latency_ms),
        ("energy", "mJ per inference", asked.max_energy_j and 1e3 * asked.max_energy_j, _energy_mj),
        ("memory", "MiB", asked.max_memory_bytes and asked.max_memory_bytes / 2**20, memory_mib),
        ("power", "W", asked.max_power_w, _power_w),
        ("time", "ms per inference", asked.rate_hz and 1e3 / asked.rate_hz, _period_ms),
    ]
    return [Limit(what, unit, most, figure) for what, unit, most, figure in given if most]


def _latency_ms(process: ProcessResult, planned: Planned) -> float | None:
    """Return p99 if enough runs back it, else the upper end of the median's interval."""
    timing = process.timing
    return (timing.p99_ms or timing.high_ms or timing.median_ms) if timing else None


def _energy_mj(process: ProcessResult, planned: Planned) -> float | None:
    """Return the energy of one inference at the upper end of its error bar."""
    energy = process.energy
    if energy is None or energy.energy_j <= 0.0:
        return None
    return 1e3 * energy.gross_per_inference_j * (1.0 + energy.energy_err_j / energy.energy_j)


def _power_w(process: ProcessResult, planned: Planned) -> float | None:
    """Return the mean power of the rail that draws the most, or else the counted energy over its window."""
    rails = [summary.mean for name, summary in process.telemetry.items() if name.partition("@")[0] == "power_w"]
    if process.energy is None or process.window is None:
        return max(rails, default=None)
    return max(rails, default=process.energy.energy_j / process.window.seconds)


def _period_ms(process: ProcessResult, planned: Planned) -> float | None:
    return process.timing.median_ms / planned.case.batch_size if process.timing else None
