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
    told = [process.interference for process in processes if process.interference]
    found = [one for one in told if min(one.clean.median_ms, one.as_experienced.median_ms) > 0.0]
    by_block = [reasons for one in found for reasons in one.reasons]
    if not any(by_block):
        return None
    return Disturbed(
        disturbed=sum(map(bool, by_block)),
        blocks=len(by_block),
        reasons=sorted({reason for reasons in by_block for reason in reasons}),
        clean_ms=centre([one.clean.median_ms for one in found]),
        as_experienced_ms=centre([one.as_experienced.median_ms for one in found]),
    )
