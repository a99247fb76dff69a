"""Which cases have become slower than their pinned runs: a verdict on each result, and what follows from it.

The first SLOWER is doubted: what slows a machine down for an hour would slow a repetition down too. The first result at
least half a day later decides; the service measures the case by then. If that is SLOWER too, it is a regression until a
verdict differs. Within a boot the monotonic clock counts, because a wall clock that is set may pass half a day in
minutes. The caller stores the standings in the same commit as the result that changed them.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from benchd.daemon.delivery.messages import Judgement
from benchd.daemon.errors import BenchdError, UsageError
from benchd.daemon.records import Record
from benchd.daemon.verdicts import alarms, baseline
from benchd.daemon.verdicts.alarms import Budget
from benchd.daemon.verdicts.compare import Comparison
from benchd.daemon.verdicts.when import HALF_A_DAY_S, measured_s, unix_s

REASON_CHARACTERS = 500  # keeps latest/<case> small


class Standing(Struct, frozen=True, kw_only=True):
    """The state of a case: the run that was SLOWER once and when, a regression, the fingerprint no pinned run has."""

    doubted: str | None = None
    doubted_wall: str | None = None
    doubted_boot: str | None = None
    doubted_mono_ns: int | None = None
    slower: Judgement | None = None
    stale: str | None = None


Standings = Mapping[str, Standing]
"""By case; cases in their default state are left out."""


class Notice(NamedTuple):
    """An event to publish."""

    event: str
    detail: str
    judgement: Judgement | None = None


class Update(NamedTuple):
    """The consequences of one result, or of a new plan."""

    standings: Standings
    judgement: Judgement | None = None
    notices: Sequence[Notice] = ()


class Regressions:
    """Compares results with the records in `runs`, files or folders; without any, with the stored baseline.

    Raises UsageError for a missing run.
    """

    def __init__(self, runs: Sequence[str], standings: Standings, budget: Budget) -> None:
        absent = next((run for run in runs if not Path(run).exists()), None)
        if absent:
            raise UsageError(f"baseline.runs: {absent}: no such file or folder")
        self.standings = standings
        self._runs, self._budget = runs, budget

    def after(self, record: Record) -> Update:
        """Return the consequences of a result; none for a failed one or if the baseline cannot be read.

        The runs are read anew each time, so that they use no memory in between.
        """
        if record.status != "ok":
            return Update(self.standings)
        case_id = record.case_id
        try:
            pinned = baseline.of_case(self._runs, case_id)
            judgement = judge(record, pinned, self._budget)
        except BenchdError as error:
            reason = str(error)[:REASON_CHARACTERS]
            return Update(self.standings, Judgement(case_id=case_id, verdict="inconclusive", reason=reason))
        before = self.standings.get(case_id, Standing())
        after = follow(before, record, pinned, judgement)
        notices = list(_notices(case_id, before, after, judgement))
        known = {name: one for name, one in {**self.standings, case_id: after}.items() if one != Standing()}
        return Update(known, judgement, notices)

    def of_plan(self, case_ids: Collection[str]) -> Update:
        """Return the consequences of a new plan: a case that has left it gets no more verdicts."""
        kept = {case_id: one for case_id, one in self.standings.items() if case_id in case_ids}
        gone = [case_id for case_id, one in self.standings.items() if one.slower and case_id not in kept]
        notices = [Notice("regression_cleared", f"{case_id}: it has left the plan") for case_id in gone]
        return Update(kept, notices=notices)

    def problem(self) -> str | None:
        """Return what is wrong, None while no case is slower."""
        slower = [(case_id, one.slower) for case_id, one in self.standings.items() if one.slower]
        if not slower:
            return None
        case_id, judgement = slower[0]
        more = f" and {len(slower) - 1} more" if slower[1:] else ""
        return f"slower than the baseline: {case_id} {judgement.effect or 0.0:+.1%}{more}"


def judge(record: Record, pinned: Sequence[Record], budget: Budget) -> Judgement | None:
    """Return the verdict on a result against the pinned runs of its case; None without any.

    Runs of another environment are ignored unless there are no others. A difference within the budget's bound is
    inconclusive.
    """
    if not pinned:
        return None
    pinned = baseline.alike(pinned, [record])
    (found,) = baseline.against(pinned, [record])
    (before_ms, now_ms), interval = found.medians_ms, found.verdict.interval
    doubt = _within_bound(found, pinned, budget)
    return Judgement(
        case_id=record.case_id,
        verdict="inconclusive" if doubt else found.verdict.answer,
        reason=(doubt or found.verdict.reason)[:REASON_CHARACTERS] or None,
        median_ms=now_ms,
        baseline_ms=before_ms,
        effect=found.verdict.effect,
        effect_low=interval.low if interval else None,
        effect_high=interval.high if interval else None,
        run_ids=[record.run_id],
        baseline_run_ids=[one.run_id for one in pinned],
    )


def _within_bound(found: Comparison, pinned: Sequence[Record], budget: Budget) -> str | None:
    """Return why a result that differs from the pinned runs may not count as different; else None."""
    effect = found.verdict.effect
    if found.verdict.answer not in ("slower", "faster") or effect is None:
        return None
    bound = alarms.least_change(budget, pinned, len(found.second_ms))
    if bound is None:
        return f"{effect:+.1%}, but {alarms.too_few(pinned)}"
    if abs(math.log1p(effect)) > bound:
        return None
    return (
        f"{effect:+.1%} is within the {math.expm1(bound):.1%} that {len(alarms.apart(pinned))} pinned runs half a day "
        f"apart leave open at {budget.false_alarms_per_month:g} false alarms a month; more of them narrow it"
    )


def follow(before: Standing, record: Record, pinned: Sequence[Record], judgement: Judgement | None) -> Standing:
    """Return the state of a case after a result."""
    is_stale = bool(pinned) and not any(baseline.is_alike(one, record) for one in pinned)
    stale = record.environment.fingerprint if is_stale else None
    age_s = _age_s(before, record)
    if age_s is not None and age_s < HALF_A_DAY_S:
        return msgspec.structs.replace(before, stale=stale)
    if judgement is None or judgement.verdict != "slower":
        return Standing(stale=stale)
    if age_s is None and before.slower is None:
        return Standing(
            doubted=record.run_id,
            doubted_wall=record.t_wall,
            doubted_boot=record.boot_id,
            doubted_mono_ns=record.t_mono_ns,
            stale=stale,
        )
    runs = [before.doubted] if before.doubted else []
    return Standing(slower=msgspec.structs.replace(judgement, run_ids=[*runs, record.run_id]), stale=stale)


def _age_s(standing: Standing, record: Record) -> float | None:
    """Return the age of a case's doubt at a result; None without a doubt, and if no clock can tell its age."""
    if standing.doubted_mono_ns is not None and standing.doubted_boot == record.boot_id:
        return (record.t_mono_ns - standing.doubted_mono_ns) / 1e9
    now_s = unix_s(record.t_wall) or 0.0
    doubted_s = measured_s(standing.doubted_wall or "", now_s)
    return None if doubted_s is None else now_s - doubted_s


def again_in_s(standing: Standing, record: Record) -> float | None:
    """Return how long after this result of its plan a doubted case is to be measured once more; None without a doubt.

    A result that could not decide, because it failed or the baseline cannot be read, is followed by another half a day.
    """
    if standing.doubted is None:
        return None
    left_s = HALF_A_DAY_S - (_age_s(standing, record) or 0.0)
    return left_s if left_s > 0.0 else HALF_A_DAY_S


def _notices(case_id: str, before: Standing, after: Standing, judgement: Judgement | None) -> Iterator[Notice]:
    said = _said(judgement) if judgement else "no run of it is pinned any more"
    if after.slower and not before.slower:
        yield Notice("regression", f"{case_id}: {said}", after.slower)
    if before.slower and not after.slower:
        yield Notice("regression_cleared", f"{case_id}: {said}", judgement)
    if after.stale and after.stale != before.stale:
        yield Notice("baseline_stale", f"{case_id}: {said}", judgement)


def _said(judgement: Judgement) -> str:
    if judgement.median_ms is None or judgement.baseline_ms is None or judgement.effect is None:
        return f"{judgement.verdict}, {judgement.reason}"
    return (
        f"{judgement.verdict}, {judgement.median_ms:.4g} ms against {judgement.baseline_ms:.4g} ms, "
        f"{judgement.effect:+.1%} ({judgement.effect_low:+.1%} to {judgement.effect_high:+.1%})"
    )
