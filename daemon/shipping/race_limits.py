"""The limits that a user sets for what ships, each as a figure of one process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from msgspec import Struct

from benchd.daemon.records import Record
from benchd.daemon.shipping import racing
from benchd.daemon.shipping.manifest import Asked
from benchd.daemon.verdicts import figures


class Miss(Struct, frozen=True):
    """A limit that a candidate misses, by which share its mean is above it; None if it was not measured."""

    words: str
    share: float | None


@dataclass(frozen=True)
class RaceLimit:
    """One limit: what it is of, its value and unit, and the figure of the record of one process."""

    what: str
    unit: str
    most: float
    figure: Callable[[Record], float | None]

    def miss(self, records: Sequence[Record], bounds: int) -> Miss | None:
        """Return how these processes, each a record, miss the limit, None unless certainly; `bounds` share the error.

        A process without the figure, as after a lost sensor, is left out.
        """
        values = self._values(records)
        if not values:
            return Miss(f"{self.what} was not measured", None)
        return self._miss(values, "is above") if racing.exceeds(values, self.most, bounds) else None

    def doubt(self, records: Sequence[Record]) -> Miss | None:
        """Return why the next process may miss the limit, None if it will certainly meet it; most have the figure."""
        values = self._values(records)
        if 2 * len(values) <= len(records):
            return Miss(f"{self.what} was measured in {len(values)} of {len(records)} processes", None)
        is_met = racing.exceeds(values, self.most, 1) is False
        how = f"({self.spread(records)}) may or may not stay within"
        return None if is_met else self._miss(values, how)

    def needed(self, records: Sequence[Record], bounds: int) -> int | None:
        """Return after how many rounds in all this limit would be judged, None if more of the same do not decide."""
        values = self._values(records)
        return racing.rounds_to_judge(values, self.most, bounds) if values else None

    def spread(self, records: Sequence[Record]) -> str:
        """Return the least and the greatest figure of these processes, and how many miss the limit."""
        values = self._values(records)
        if not values:
            return "not measured"
        above = sum(value > self.most for value in values)
        between = f"{min(values):.4g}" if len(values) == 1 else f"{min(values):.4g} to {max(values):.4g}"
        return f"{between} {self.unit}, {above} of {len(values)} above {self.most:.4g}"

    def _values(self, records: Sequence[Record]) -> list[float]:
        values = [self.figure(record) for record in records]
        return [value for value in values if value is not None and value > 0.0]

    def _miss(self, values: Sequence[float], how: str) -> Miss:
        mean = geometric_mean(values)
        words = f"{self.what} {mean:.4g} {self.unit} {how} {self.most:.4g} {self.unit}"
        return Miss(words, mean / self.most - 1.0)


def limits(asked: Asked) -> list[RaceLimit]:
    """Return the limits that were set."""
    given: list[tuple[str, str, float | None, Callable[[Record], float | None]]] = [
        ("latency", "ms", asked.max_latency_ms, _latency_ms),
        ("energy", "mJ per inference", asked.max_energy_j and 1e3 * asked.max_energy_j, _energy_mj),
        ("memory", "MiB", asked.max_memory_bytes and asked.max_memory_bytes / 2**20, figures.memory_mib),
        ("power", "W", asked.max_power_w, figures.largest_power_w),
        ("time", "ms per inference", asked.rate_hz and 1e3 / asked.rate_hz, _period_ms),
    ]
    return [RaceLimit(what, unit, most, figure) for what, unit, most, figure in given if most]


def _latency_ms(record: Record) -> float | None:
    """Return the upper figure, or of a process too short for one the median: the race bounds the processes' spread."""
    return figures.latency_ms(record) or (record.timing.median_ms if record.timing else None)


def _energy_mj(record: Record) -> float | None:
    most_j = figures.largest_energy_j(record)
    return None if most_j is None else 1e3 * most_j


def _period_ms(record: Record) -> float | None:
    return record.timing.median_ms / record.case.batch_size if record.timing else None
