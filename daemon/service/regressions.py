"""Which cases have become slower than the runs they are pinned to: a verdict on each result, and what follows from it.

SLOWER is doubted until the case, measured once more, is SLOWER again; then it is a regression, until a verdict says
otherwise. The caller keeps the standings in the commit of the result that changed them.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from benchd.daemon.delivery.messages import Judgement
from benchd.daemon.errors import BenchdError, UsageError
from benchd.daemon.records import Record
from benchd.daemon.verdicts import baseline, noise_floor

REASON_CHARACTERS = 500  # latest/<case> is to stay small


class Standing(Struct, frozen=True, kw_only=True):
    """What is known of a case: the run that was SLOWER once, a regression, the fingerprint that no pinned run has."""

    doubted: str | None = None
    slower: Judgement | None = None
    stale: str | None = None


Standings = Mapping[str, Standing]
"""By case; one that nothing is known of is left out."""


class Told(NamedTuple):
    """An event to publish."""

    event: str
    detail: str
    judgement: Judgement | None = None


class Followed(NamedTuple):
    """What one result leads to; `again` asks for one more measurement of its case."""

    standings: Standings
    judgement: Judgement | None = None
    told: Sequence[Told] = ()
    again: bool = False


class Regressions:
    """Holds results against the records in `runs`, files or folders; without any, against the stored baseline.

    Raises UsageError for a run that is not there.
    """

    def __init__(self, runs: Sequence[str], standings: Standings) -> None:
        absent = next((run for run in runs if not Path(run).exists()), None)
        if absent:
            raise UsageError(f"baseline.runs: {absent}: no such file or folder")
        self.standings = standings
        self._runs = runs

    def after(self, record: Record) -> Followed:
        """Return what a result leads to; one that did not end well, or a baseline that cannot be read, to nothing new.

        The runs are read anew each time, so that they take no memory in between.
        """
        if record.status != "ok":
            return Followed(self.standings)
        case_id = record.case_id
        try:
            pinned = baseline.of_case(self._runs, case_id)
            judgement = judge(record, pinned)
        except BenchdError as error:
            reason = str(error)[:REASON_CHARACTERS]
            return Followed(self.standings, Judgement(case_id=case_id, verdict="inconclusive", reason=reason))
        before = self.standings.get(case_id, Standing())
        after = follow(before, record, pinned, judgement)
        told = list(_told(case_id, before, after, judgement))
        known = {name: one for name, one in {**self.standings, case_id: after}.items() if one != Standing()}
        return Followed(known, judgement, told, again=after.doubted is not None)

    def of_plan(self, case_ids: Collection[str]) -> Followed:
        """Return what a new plan leads to: a case that has left it gets no verdict any more."""
        kept = {case_id: one for case_id, one in self.standings.items() if case_id in case_ids}
        gone = [case_id for case_id, one in self.standings.items() if one.slower and case_id not in kept]
        told = [Told("regression_cleared", f"{case_id}: it has left the plan") for case_id in gone]
        return Followed(kept, told=told)

    def problem(self) -> str | None:
        """Return what is wrong, None while no case is slower."""
        slower = [(case_id, one.slower) for case_id, one in self.standings.items() if one.slower]
        if not slower:
            return None
        case_id, judgement = slower[0]
        more = f" and {len(slower) - 1} more" if slower[1:] else ""
        return f"slower than the baseline: {case_id} {judgement.effect or 0.0:+.1%}{more}"


def judge(record: Record, pinned: Sequence[Record]) -> Judgement | None:
    """Return what is said of a result against the pinned runs of its case; None where there is none.

    Runs of another environment are left aside, unless there is no other.
    """
    if not pinned:
        return None
    pinned = baseline.alike(pinned, [record])
    min_effect = noise_floor.min_effect(record.device_id, record.environment.device)
    (found,) = baseline.against(pinned, [record], min_effect)
    (before_ms, now_ms), interval = found.medians_ms, found.verdict.interval
    return Judgement(
        case_id=record.case_id,
        verdict=found.verdict.answer,
        reason=found.verdict.reason[:REASON_CHARACTERS] or None,
        median_ms=now_ms,
        baseline_ms=before_ms,
        effect=found.verdict.effect,
        effect_low=interval.low if interval else None,
        effect_high=interval.high if interval else None,
        run_ids=[record.run_id],
        baseline_run_ids=[one.run_id for one in pinned],
    )


def follow(before: Standing, record: Record, pinned: Sequence[Record], judgement: Judgement | None) -> Standing:
    """Return how a case stands after a result."""
    is_stale = bool(pinned) and not any(_is_alike(one, record) for one in pinned)
    stale = record.environment.fingerprint if is_stale else None
    if judgement is None or judgement.verdict != "slower":
        return Standing(stale=stale)
    if before.doubted is None and before.slower is None:
        return Standing(doubted=record.run_id, stale=stale)
    runs = [before.doubted] if before.doubted else []
    return Standing(slower=msgspec.structs.replace(judgement, run_ids=[*runs, record.run_id]), stale=stale)


def _is_alike(one: Record, other: Record) -> bool:
    return one.environment.fingerprint == other.environment.fingerprint


def _told(case_id: str, before: Standing, after: Standing, judgement: Judgement | None) -> Iterator[Told]:
    said = _said(judgement) if judgement else "no run of it is pinned any more"
    if after.slower and not before.slower:
        yield Told("regression", f"{case_id}: {said}", after.slower)
    if before.slower and not after.slower:
        yield Told("regression_cleared", f"{case_id}: {said}", judgement)
    if after.stale and after.stale != before.stale:
        yield Told("baseline_stale", f"{case_id}: {said}", judgement)


def _said(judgement: Judgement) -> str:
    """Return a judgement as a line for people."""
    if judgement.median_ms is None or judgement.baseline_ms is None or judgement.effect is None:
        return f"{judgement.verdict}, {judgement.reason}"
    return (
        f"{judgement.verdict}, {judgement.median_ms:.4g} ms against {judgement.baseline_ms:.4g} ms, "
        f"{judgement.effect:+.1%} ({judgement.effect_low:+.1%} to {judgement.effect_high:+.1%})"
    )
