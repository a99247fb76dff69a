"""What memory holds of each record of a report, and which records have to be there whole."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain

from msgspec import Struct

from benchd.daemon.records import Record, Variant
from benchd.daemon.verdicts.recommend import Place, impossible, in_time


class Brief(Struct, frozen=True, kw_only=True, gc=False):
    """A record's time and place, its points in charts, and the bytes of the spool that hold the rest.

    `process_ms` are the medians of the timed ones of its `processes`; `clock_hz` are the mean clock and the highest.
    """

    t_wall: str
    t_mono_ns: int
    boot_id: str
    place: Place
    machine: str
    comparable_part: str
    clock_hz: tuple[float, float] | None
    case_id: str
    variant: Variant
    weights_sha256: str | None
    is_inference: bool
    is_measured: bool
    impossible: str | None
    scope: str | None
    median_ms: float
    processes: int
    process_ms: tuple[float, ...]
    start: int
    size: int

    @property
    def device_id(self) -> str:
        """Return the device that was measured."""
        return self.place[0]


def is_measured(record: Record) -> bool:
    """Return whether charts show the record."""
    return record.status == "ok" and record.timing is not None and not impossible(record)


def decisive(briefs: Sequence[Brief]) -> list[Brief]:
    """Return those whose records give the same decisions, ratios and newest records, in the same order, as all do.

    `briefs` are in order of `t_wall`. A case needs its newest record and, for the order, its oldest one, among all, the
    inferences and the measured ones; the older weights that a decision names need theirs. `in_time` orders by the end
    of each boot, so a boot needs its last record.
    """
    inferences = [one for one in briefs if one.is_inference]
    kinds = (briefs, inferences, [one for one in briefs if one.is_measured])
    kept = list(chain.from_iterable(_ends(in_time(kind), lambda one: (one.place, one.case_id)) for kind in kinds))
    kept += _ends(inferences, lambda one: (one.place, one.case_id, one.weights_sha256))
    boots = {one.boot_id for one in kept}
    for kind in kinds:
        kept += {one.boot_id: one for one in kind if one.boot_id in boots}.values()
    starts = {one.start for one in kept}
    return [one for one in briefs if one.start in starts]


def _ends(ordered: Iterable[Brief], key: Callable[[Brief], Hashable]) -> list[Brief]:
    """Return the first and the last one of each key."""
    first: dict[Hashable, Brief] = {}
    last: dict[Hashable, Brief] = {}
    for one in ordered:
        of = key(one)
        first.setdefault(of, one)
        last[of] = one
    return [*first.values(), *last.values()]
