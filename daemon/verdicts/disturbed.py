"""What disturbed the processes of a case as a whole, from the interference in their results."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchd.daemon.records import ProcessResult
from benchd.daemon.verdicts.statistics import centre


@dataclass(frozen=True)
class Disturbed:
    """How many of a case's blocks were disturbed and by what, and the median excluding and including them."""

    disturbed: int
    blocks: int
    reasons: list[str]
    clean_ms: float
    as_experienced_ms: float


def disturbed(processes: Sequence[ProcessResult]) -> Disturbed | None:
    """Return what disturbed the processes of a case, None if nothing did; a process with a time of 0 is left out."""
    interferences = [process.interference for process in processes if process.interference]
    comparable = [
        interference
        for interference in interferences
        if min(interference.clean.median_ms, interference.as_experienced.median_ms) > 0.0
    ]
    by_block = [reasons for interference in comparable for reasons in interference.reasons]
    if not any(by_block):
        return None
    return Disturbed(
        disturbed=sum(map(bool, by_block)),
        blocks=len(by_block),
        reasons=sorted({reason for reasons in by_block for reason in reasons}),
        clean_ms=centre([interference.clean.median_ms for interference in comparable]),
        as_experienced_ms=centre([interference.as_experienced.median_ms for interference in comparable]),
    )
