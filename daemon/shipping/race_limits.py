"""The user's limits for shipping, each applied to a figure from one process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from msgspec import Struct

from benchd.daemon.records import Record
from benchd.daemon.shipping import racing
from benchd.daemon.shipping.manifest import ShipLimits
from benchd.daemon.verdicts import figures


class Miss(Struct, frozen=True):
    """A limit that a candidate misses, and the share by which its mean exceeds it (None if it was not measured)."""

    words: str
    share: float | None


@dataclass(frozen=True)
class RaceLimit:
    """One limit: the quantity, its maximum and unit, and the function that returns it from one process's record."""

    what: str
    unit: str
    most: float
    figure: Callable[[Record], float | None]

    def miss(self, records: Sequence[Record], bounds: int) -> Miss | None:
        """Return how these processes, one per record, are shown to miss the limit, else None; `bounds` share the error.

        Processes without the figure, for example after a lost sensor, are left out.
        """
        values = self._values(records)
        if not values:
            return Miss(f"{self.what} was not measured", None)
        return self._miss(values, "is above") if racing.exceeds(values, self.most, bounds) else None

    def doubt(self, records: Sequence[Record]) -> Miss | None:
        """Return why the next process may miss the limit; None if most have the figure and none will miss it."""
        values = self._values(records)
        if 2 * len(values) <= len(records):
            return Miss(f"{self.what} was measured in {len(values)} of {len(records)} processes", None)
        is_met = racing.exceeds(values, self.most, 1) is False
        how = f"({self.spread(records)}) may or may not stay within"
        return None if is_met else self._miss(values, how)

    def stated(self, record: Record) -> str:
        """Return the figure of a record with several processes, and whether it is within the limit."""
        value, most = self.figure(record), f"the limit of {self.most:.4g} {self.unit}"
        if not value:
            return f"{self.what}: not measured, so {most} is not checked"
        how = "above" if value > self.most else "within"
        return f"{self.what}: {self._percentile([record])}{value:.4g} {self.unit}, {how} {most}"

    def needed(self, records: Sequence[Record], bounds: int) -> int | None:
        """Return the total number of rounds needed to judge this limit, or None if more similar ones would not help."""
        values = self._values(records)
        return racing.rounds_to_judge(values, self.most, bounds) if values else None

    def spread(self, records: Sequence[Record]) -> str:
        """Return the smallest and the largest figure of these processes, and how many exceed the limit."""
        values = self._values(records)
        if not values:
            return "not measured"
        above = sum(value > self.most for value in values)
        is_single = len(values) == 1
        between = f"{min(values):.4g}" if is_single else f"{min(values):.4g} to {max(values):.4g}"
        processes = "1 process" if is_single else f"{len(values)} processes"
        named = f"{self._percentile(records)}{between} {self.unit} in {processes}"
        return f"{named}, {above or 'none'} above {self.most:.4g} {self.unit}"

    def _percentile(self, records: Sequence[Record]) -> str:
        """Return which percentile a latency is; nothing if a process was too short to have one."""
        have = all(record.timing is None or record.timing.p99_ms for record in records)
        return "p99 " if self.figure is _latency_ms and have else ""

    def _values(self, records: Sequence[Record]) -> list[float]:
        values = [self.figure(record) for record in records]
        return [value for value in values if value is not None and value > 0.0]

    def _miss(self, values: Sequence[float], how: str) -> Miss:
        mean = geometric_mean(values)
        words = f"{self.what} {mean:.4g} {self.unit} {how} {self.most:.4g} {self.unit}"
        return Miss(words, mean / self.most - 1.0)


def limits(asked: ShipLimits) -> list[RaceLimit]:
    """Return the limits that were set."""
    given: list[tuple[str, str, float | None, Callable[[Record], float | None]]] = [
        ("latency", "ms", asked.max_latency_ms, _latency_ms),
        ("energy", "mJ per inference", asked.max_energy_j and 1e3 * asked.max_energy_j, _energy_mj),
        ("memory", "MiB", asked.max_memory_bytes and asked.max_memory_bytes / 2**20, figures.memory_mib),
        ("power", "W", asked.max_power_w, figures.largest_power_w),
        ("time", "ms per inference", asked.rate_hz and 1e3 / asked.rate_hz, _period_ms),
    ]
    return [RaceLimit(name, unit, most, figure) for name, unit, most, figure in given if most]


def _latency_ms(record: Record) -> float | None:
    """Return the upper bound, or the median of a process too short to have one; the race bounds their spread."""
    return figures.latency_ms(record) or (record.timing.median_ms if record.timing else None)


def _energy_mj(record: Record) -> float | None:
    most_j = figures.largest_energy_j(record)
    return None if most_j is None else 1e3 * most_j


def _period_ms(record: Record) -> float | None:
    return record.timing.median_ms / record.case.batch_size if record.timing else None
