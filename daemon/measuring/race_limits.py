"""The limits that a user sets for what ships, each as a figure of one process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from msgspec import Struct

from benchd.daemon.records import Record
from benchd.daemon.verdicts import figures, racing
from benchd.daemon.verdicts.manifest import Asked


class Miss(Struct, frozen=True):
    """A limit that a candidate certainly misses, by which share its mean is above it; None if it was not measured."""

    words: str
    share: float | None


@dataclass(frozen=True)
class Limit:
    """One limit: what it is of, its value and unit, and the figure of the record of one process."""

    what: str
    unit: str
    most: float
    figure: Callable[[Record], float | None]

    def values(self, records: Sequence[Record]) -> list[float] | None:
        """Return the figure of each process, each a record by itself; None if one lacks it."""
        found = [self.figure(record) for record in records]
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


def limits(asked: Asked) -> list[Limit]:
    """Return the limits that were set."""
    given: list[tuple[str, str, float | None, Callable[[Record], float | None]]] = [
        ("latency", "ms", asked.max_latency_ms, _latency_ms),
        ("energy", "mJ per inference", asked.max_energy_j and 1e3 * asked.max_energy_j, _energy_mj),
        ("memory", "MiB", asked.max_memory_bytes and asked.max_memory_bytes / 2**20, figures.memory_mib),
        ("power", "W", asked.max_power_w, figures.largest_power_w),
        ("time", "ms per inference", asked.rate_hz and 1e3 / asked.rate_hz, _period_ms),
    ]
    return [Limit(what, unit, most, figure) for what, unit, most, figure in given if most]


def _latency_ms(record: Record) -> float | None:
    """Return the upper figure, or of a process too short for one the median: the race bounds the processes' spread."""
    return figures.latency_ms(record) or (record.timing.median_ms if record.timing else None)


def _energy_mj(record: Record) -> float | None:
    most_j = figures.largest_energy_j(record)
    return None if most_j is None else 1e3 * most_j


def _period_ms(record: Record) -> float | None:
    return record.timing.median_ms / record.case.batch_size if record.timing else None
