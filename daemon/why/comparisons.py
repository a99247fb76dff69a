"""The live comparisons of a search, each logged when it ends, so that the same command resumes after the last one."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import msgspec
from msgspec import Struct

from benchd.daemon.errors import BenchdError
from benchd.daemon.journal import Journal
from benchd.daemon.machine import identity
from benchd.daemon.measuring import paired
from benchd.daemon.measuring.paired import Decide, Request
from benchd.daemon.measuring.plan import PlannedCase
from benchd.daemon.measuring.session import Session
from benchd.daemon.shipping import race_log
from benchd.daemon.verdicts.layers import LayerVerdict

LOG = "why.jsonl"


class FinishedComparison(Struct, frozen=True, kw_only=True):
    """A finished comparison: each pair's ratio B / A (none, with the reason, if a side cannot run), and A's medians.

    `mean_over_median` is that of B's times, and `mark` says what disturbed the comparison.
    """

    key: str
    ratios: list[float]
    first_ms: list[float]
    mean_over_median: float = 1.0
    reason: str = ""
    layers: LayerVerdict | None = None
    mark: str = ""


class SearchInterrupted(BenchdError):
    """A signal ended the search; the same command resumes it."""


@dataclass
class Comparing:
    """The comparisons of a search in a session: how many are `done` or running, and what disturbed any of them."""

    session: Session
    err: TextIO
    done: int = 0
    mark: str = ""

    def pairs(self, what: str, request: Request, decide: Decide, facts: object = ()) -> FinishedComparison:
        """Return a comparison, from the log if it contains one with the same cases, files, machine and `facts`.

        Raises SearchInterrupted after a signal.
        """
        line = self._line(what, request, decide, facts)
        self.mark = self.mark or line.mark
        return line

    def _line(self, description: str, request: Request, decide: Decide, facts: object) -> FinishedComparison:
        self.done += 1
        self.err.write(f"comparison {self.done}, {description}\n")
        planned = self.planned(request)
        key = self._key(planned, request, facts)
        path = self.session.output / LOG
        stored = next((line for line in _lines(path) if line.key == key), None)
        if stored is not None:
            self.err.write(f"    measured before: {stored.reason or f'{len(stored.ratios)} pairs'}\n")
            return stored
        comparison, code = paired.compare(request, planned, self.session, self.err, decide)
        if code == 130:
            raise SearchInterrupted("interrupted; the same command resumes after the last comparison that ended")
        line = FinishedComparison(
            key=key,
            ratios=[] if code else comparison.ratios,
            first_ms=comparison.first_ms,
            mean_over_median=comparison.mean_over_median or 1.0,
            reason=comparison.verdict.reason if code else "",
            layers=comparison.layers,
            mark=comparison.mark,
        )
        with closing(Journal(path)) as written:
            written.append(msgspec.json.encode(line))
        return line

    def planned(self, request: Request) -> Sequence[PlannedCase]:
        """Return both sides; raise UsageError for an invalid request, NotAvailable for a case that cannot run here."""
        return paired.planned_sides(request, self.session.config.limits, self.session.machine)

    def _key(self, planned: Sequence[PlannedCase], request: Request, facts: object) -> str:
        environment, device_id = self.session.machine.environment(), identity.device_id(self.session.config.device.id)
        shared = race_log.digest(planned, environment, device_id)
        return hashlib.sha256(msgspec.json.encode((shared, list(request.variables), facts))).hexdigest()


def _lines(path: Path) -> Iterator[FinishedComparison]:
    decoder = msgspec.json.Decoder(FinishedComparison)
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(msgspec.MsgspecError):  # truncated by a crash: measured again
            yield decoder.decode(line)
