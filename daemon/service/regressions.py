"""Finds cases that have become slower than their pinned runs: a verdict on each result, and its consequences.

A SLOWER verdict is unconfirmed at first: a cause that lasts for an hour, a day or a weekend also slows repetitions.
The next verdict that counts is from the first result at least a day later, and the service measures the case by then.
`alarms.SLOWER_DAYS` such verdicts in succession are a regression, until a verdict differs. Within a boot, the monotonic
clock is used, because setting the wall clock can skip a day. The caller stores the standings with the number of the
result that changed them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from benchd.daemon.delivery.messages import Judgement
from benchd.daemon.errors import BenchdError
from benchd.daemon.records import Record, unix_s
from benchd.daemon.service.facts import Standing
from benchd.daemon.service.state import State
from benchd.daemon.trigger import DAY_S
from benchd.daemon.verdicts import alarms, baseline
from benchd.daemon.verdicts.alarms import Budget
from benchd.daemon.verdicts.compare import Comparison
from benchd.daemon.verdicts.when import measured_s

REASON_CHARACTERS = 500  # limit for reasons, to keep latest/<case> small


def take_in(state: State, record: Record) -> Judgement | None:
    """Return the verdict on a result of the plan and publish its consequences; None if it failed or no run is pinned.

    The pinned runs are read again each time, so that they do not use memory in between.
    """
    if record.status != "ok":
        return None
    standings, case_id = state.facts.standings, record.case_id
    try:
        pinned = baseline.of_case(state.settings.baseline.runs, case_id)
        judgement = judge(record, pinned, state.budget)
    except BenchdError as error:
        return Judgement(case_id=case_id, verdict="inconclusive", reason=str(error)[:REASON_CHARACTERS])
    before = standings.pop(case_id, Standing())
    after = follow(before, record, pinned, judgement)
    if after != Standing():
        standings[case_id] = after
    for event, of in _events(before, after, judgement):
        state.event(event, f"{case_id}: {_words(judgement)}", of)
    return judgement


def forget_unplanned(state: State) -> None:
    """Drop the standings of cases that are no longer in the plan, because they do not get any more verdicts."""
    standings = state.facts.standings
    for case_id in [case_id for case_id in standings if case_id not in state.agenda.planned]:
        if standings.pop(case_id).slower:
            state.event("regression_cleared", f"{case_id}: no longer planned")


def problem(standings: Mapping[str, Standing]) -> str | None:
    """Return the problem to report, or None if no case is slower."""
    slower = [(case_id, standing.slower) for case_id, standing in standings.items() if standing.slower]
    if not slower:
        return None
    case_id, judgement = slower[0]
    more = f" and {len(slower) - 1} more" if slower[1:] else ""
    return f"slower than the baseline: {case_id} {judgement.effect or 0.0:+.1%}{more}"


def judge(record: Record, pinned: Sequence[Record], budget: Budget) -> Judgement | None:
    """Return the verdict on a result, compared with the pinned runs of its case, or None if there are none.

    Runs in a different environment are ignored unless there are no others. A difference within the budget's bound is
    inconclusive.
    """
    if not pinned:
        return None
    pinned = baseline.alike(pinned, [record])
    (comparison,) = baseline.against(pinned, [record])
    (before_ms, now_ms), interval = comparison.medians_ms, comparison.verdict.interval
    doubt = _within_bound(comparison, pinned, budget)
    return Judgement(
        case_id=record.case_id,
        verdict="inconclusive" if doubt else comparison.verdict.answer,
        reason=(doubt or comparison.verdict.reason)[:REASON_CHARACTERS] or None,
        median_ms=now_ms,
        baseline_ms=before_ms,
        effect=comparison.verdict.effect,
        effect_low=interval.low if interval else None,
        effect_high=interval.high if interval else None,
        run_ids=[record.run_id],
        baseline_run_ids=[run.run_id for run in pinned],
    )


def _within_bound(comparison: Comparison, pinned: Sequence[Record], budget: Budget) -> str | None:
    """Return why a result that differs from the pinned runs must not count as different, else None."""
    effect = comparison.verdict.effect
    if comparison.verdict.answer not in ("slower", "faster") or effect is None:
        return None
    bound = alarms.least_change(budget, pinned, len(comparison.second_ms))
    if bound is None:
        return f"{effect:+.1%}, but {alarms.too_few(pinned)}"
    if abs(math.log1p(effect)) > bound:
        return None
    if bound <= alarms.LEAST_CHANGE:
        return f"{effect:+.1%} is within the {math.expm1(bound):.1%} that boots and busy hours can explain"
    return (
        f"{effect:+.1%} is within the {math.expm1(bound):.1%} that {len(alarms.apart(pinned))} pinned runs half a day "
        f"apart cannot exclude at {budget.false_alarms_per_month:g} false alarms a month; pin more to narrow it"
    )


def follow(before: Standing, record: Record, pinned: Sequence[Record], judgement: Judgement | None) -> Standing:
    """Return the state of a case after a result."""
    is_stale = bool(pinned) and not any(baseline.is_alike(run, record) for run in pinned)
    stale = record.environment.fingerprint if is_stale else None
    age_s = _age_s(before, record)
    if age_s is not None and age_s < DAY_S:
        return msgspec.structs.replace(before, stale=stale)
    if judgement is None or judgement.verdict != "slower":
        return Standing(stale=stale)
    runs = [*([] if age_s is None else before.doubted), record.run_id]
    if before.slower or len(runs) == alarms.SLOWER_DAYS:
        return Standing(slower=msgspec.structs.replace(judgement, run_ids=runs), stale=stale)
    return Standing(
        doubted=runs,
        doubted_wall=record.t_wall,
        doubted_boot=record.boot_id,
        doubted_mono_ns=record.t_mono_ns,
        stale=stale,
    )


def _age_s(standing: Standing, record: Record) -> float | None:
    """Return how old a case's doubt is at a result; None without a doubt, or without a clock that can tell."""
    if standing.doubted_mono_ns is not None and standing.doubted_boot == record.boot_id:
        return (record.t_mono_ns - standing.doubted_mono_ns) / 1e9
    now_s = unix_s(record.t_wall) or 0.0
    doubted_s = measured_s(standing.doubted_wall or "", now_s)
    return None if doubted_s is None else now_s - doubted_s


def again_in_s(standing: Standing, record: Record) -> float | None:
    """Return how long after this result of the plan its case must be measured again; None if no SLOWER awaits that.

    If there is no verdict, because the result failed or the baseline is unreadable, wait another day.
    """
    if not standing.doubted:
        return None
    left_s = DAY_S - (_age_s(standing, record) or 0.0)
    return left_s if left_s > 0.0 else DAY_S


def _events(before: Standing, after: Standing, judgement: Judgement | None) -> Iterator[tuple[str, Judgement | None]]:
    """Yield the events of a change in standing, each with its judgement."""
    if after.slower and not before.slower:
        yield "regression", after.slower
    if before.slower and not after.slower:
        yield "regression_cleared", judgement
    if after.stale and after.stale != before.stale:
        yield "baseline_stale", judgement


def _words(judgement: Judgement | None) -> str:
    if judgement is None:
        return "it no longer has a pinned run"
    if judgement.median_ms is None or judgement.baseline_ms is None or judgement.effect is None:
        return f"{judgement.verdict}, {judgement.reason}"
    return (
        f"{judgement.verdict}, {judgement.median_ms:.4g} ms against {judgement.baseline_ms:.4g} ms, "
        f"{judgement.effect:+.1%} ({judgement.effect_low:+.1%} to {judgement.effect_high:+.1%})"
    )
