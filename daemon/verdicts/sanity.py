"""Tests whether a record is consistent: answers with the check, times with the clock, energy with power; pure."""

from collections.abc import Iterator, Sequence
from typing import Literal

from msgspec import Struct

from benchd.daemon.records import ProcessResult, Record

BUSY_SHARE = 0.5  # smallest share of the window that timed runs must fill; the loop itself takes the rest
ENERGY_SHARE = 0.25  # tolerated difference between energy and mean power times time, beyond the error bar

Judgement = Literal["right", "wrong", "not tested"]


class SanityResult(Struct, frozen=True):
    """A test of a case: what was tested, the judgement, and the figures or the reason."""

    case_id: str
    subject: str
    judgement: Judgement
    detail: str


def examine(records: Sequence[Record]) -> list[SanityResult]:
    """Return the test results of all records, case by case."""
    return [SanityResult(record.case_id, *problem) for record in records for problem in _of(record)]


def _of(record: Record) -> Iterator[tuple[str, Judgement, str]]:
    """Yield each test of a record, the judgement, and the reason."""
    if record.status != "ok":
        is_untested = record.status in ("unsupported", "aborted")
        yield "run", "not tested" if is_untested else "wrong", record.reason or record.status
        return
    yield "agreement", *_agreement(record)
    yield "clocks", *_clocks(record)
    yield "energy", *_energy(record)


def _agreement(record: Record) -> tuple[Judgement, str]:
    check = record.check
    if check is None or check.verdict == "void":
        return "not tested", "its check is void" if check else "its answers were not checked"
    detail = f"{check.verdict}, off by {check.error_share:.2g} of the largest answer"
    return "wrong" if check.verdict == "failed" else "right", detail


def _clocks(record: Record) -> tuple[Judgement, str]:
    """Return whether the times of the successive runs add up to the window."""
    shares = [share for process in record.processes if (share := _filled(process)) is not None]
    if not shares:
        return "not tested", "no run was timed"
    fits = all(BUSY_SHARE <= share <= 1.001 for share in shares)
    figures = ", ".join(f"{share:.1%}" for share in shares)
    return "right" if fits else "wrong", f"timed runs take up {figures} of the window"


def _filled(process: ProcessResult) -> float | None:
    if process.timing is None or process.window is None:
        return None
    return process.timing.runs * process.timing.mean_ms / 1e3 / process.measured_s


def _energy(record: Record) -> tuple[Judgement, str]:
    """Return whether the joules equal the same source's mean watts times the seconds."""
    for process in record.processes:
        energy, window = process.energy, process.window
        if energy is None or window is None:
            continue
        powers = [summary for name, summary in process.telemetry.items() if name.partition("@")[0] == "power_w"]
        watts = [summary.mean for summary in powers if summary.source == energy.source]
        if not watts:
            return "not tested", f"{energy.source} has an energy counter but reports no power"
        share = energy.energy_j / (max(watts) * window.seconds)
        fits = abs(share - 1.0) <= ENERGY_SHARE + energy.energy_err_j / energy.energy_j
        return "right" if fits else "wrong", f"{energy.energy_j:.3g} J are {share:.0%} of power times time"
    return "not tested", record.missing.get("energy", "no energy was measured")
