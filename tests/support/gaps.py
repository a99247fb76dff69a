"""Measurements of energy that are made again: a sampler that stood still, as on a busy machine, may give none."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from benchd.daemon.records import Record

REASONS = ("gaps: ", "too_few_updates: ", "not_covered: ", "no_samples: ")
ATTEMPTS = 10  # a machine that stalls one does not stall each

T = TypeVar("T")


def is_for_gaps(reason: str) -> bool:
    return reason.startswith(REASONS)


def without_gaps(measure: Callable[[], T], reasons: Callable[[T], Iterable[str]]) -> T:
    """Return what `measure()` gives as soon as gaps are no reason for a missing energy, and at last all the same."""
    for _ in range(ATTEMPTS):
        measurement = measure()
        if not any(map(is_for_gaps, reasons(measurement))):
            break
    return measurement


def without_energy(records: Sequence[Record]) -> list[str]:
    """Return why records have no energy."""
    return [record.missing["energy"] for record in records if record.energy is None]
