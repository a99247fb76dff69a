"""Judges whether a shipped folder keeps its promise, by comparing its time now with its time when shipped; pure.

Each time is from a single run, and runs of the same code differ by a few per cent, which a single run cannot show. The
verdict therefore adds `effects.RUNS_APART` to the spread of the processes (docs/measuring.md).
"""

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from benchd.daemon.records import Environment, ProcessResult, Record
from benchd.daemon.shipping import race_limits
from benchd.daemon.shipping.manifest import REBUILT, Manifest, ShipLimits
from benchd.daemon.verdicts import doubts, effects, figures, layers, recommend, sameness
from benchd.daemon.verdicts.effects import ALPHA, FEWEST_PROCESSES
from benchd.daemon.verdicts.layers import LayerVerdict
from benchd.daemon.verdicts.results import process_medians_ms
from benchd.daemon.verdicts.statistics import centre

Answer = Literal["kept", "slower", "faster", "inconclusive", "another_machine", "broken", "failed"]
EXIT_CODES: dict[Answer, int] = {
    "kept": 0,
    "faster": 0,
    "broken": 5,
    "slower": 3,
    "inconclusive": 4,
    "another_machine": 4,
    "failed": 1,
}
"""The exit codes, as for `compare`: without a verdict, there is no success."""

SLOWDOWN = 0.1
"""A promise is kept if a slowdown by this share is excluded at the one-sided error `ALPHA`."""

CLASS = ("machine", "board", "soc", "cpu_model", "cpu_count", "device", "gpu", "power_mode")
"""The properties that two machines must share for a promise made on one to hold on the other."""


class VerificationResult(Struct, frozen=True, kw_only=True):
    """The result of verifying a shipped folder; its verdict is `broken` if its answers differ from the golden ones.

    `change` is the time now divided by the promised time, minus 1, with its 95 % interval. `changed` lists the changes
    in the machine and its software since the folder was shipped, and `rebuilt` says why a TensorRT plan was rebuilt.
    `layers` says which layers changed, and `limits` what the figures of the limits that it was shipped under are now.
    """

    name: str
    case_id: str
    answer: Answer
    reason: str = ""
    promised_ms: float
    now_ms: float | None = None
    change: float | None = None
    change_low: float | None = None
    change_high: float | None = None
    promised_energy_j: float | None = None
    energy_j: float | None = None
    promised_memory_bytes: int | None = None
    memory_bytes: int | None = None
    processes: int = 0
    rebuilt: str = ""
    changed: list[str] = []
    t_wall: str
    fingerprint: str
    layers: LayerVerdict | None = None
    limits: list[str] = []


def judge(
    shipped: Manifest,
    record: Record,
    *,
    is_golden: bool,
    rebuilt: str = "",
    confirmed: Sequence[ProcessResult] = (),
    promise_flags: Sequence[str] = (),
) -> VerificationResult:
    """Return the verdict on the measured folder; `is_golden` is False if its answers differ from the golden ones.

    `confirmed` are the processes on which the promise is based, `promise_flags` what puts it in doubt, and `rebuilt`
    says why the plan was rebuilt.
    """
    now_ms, promised = process_medians_ms([record]), shipped.promised
    elsewhere = other_machine(shipped.environment, record.environment)
    checked = None if record.check is None else recommend.wrong(record)
    answer, reason, change = _answer(promised.processes_ms, now_ms)
    doubtful = f"the promise is doubtful: {doubts.words(promise_flags)}" if promise_flags else ""
    reason = "; ".join(filter(None, [reason, doubts.words(doubts.of(record)), doubtful]))
    if not is_golden or checked:
        answer, reason = "broken", record.reason or checked or ""
    elif record.status != "ok":
        answer, reason = "failed", f"{'' if record.status == 'failed' else f'{record.status}: '}{record.reason}"
    elif elsewhere:
        answer, reason = "another_machine", f"promised on {elsewhere}"
    divided = layers.judge(layers.rounds(confirmed, record.processes))
    if answer == "slower" and divided:
        reason = "; ".join(filter(None, [divided.sentence, reason]))
    return VerificationResult(
        name=shipped.name,
        case_id=shipped.case.case_id,
        answer=answer,
        reason=reason,
        promised_ms=promised.latency_ms,
        now_ms=centre(now_ms) if now_ms else None,
        change=change.share if change else None,
        change_low=change.interval(1.0 - ALPHA).low if change else None,
        change_high=change.interval(1.0 - ALPHA).high if change else None,
        promised_energy_j=promised.energy_per_inference_j,
        energy_j=record.energy.gross_per_inference_j if record.energy else None,
        promised_memory_bytes=promised.memory_bytes,
        memory_bytes=figures.memory_bytes(record),
        processes=len(now_ms),
        rebuilt=rebuilt or _refused_plan(record),
        changed=list(sameness.environment_differences(shipped.environment, record.environment)),
        t_wall=record.t_wall,
        fingerprint=record.environment.fingerprint,
        layers=divided,
        limits=[limit.stated(record) for limit in race_limits.limits(_limits(shipped))] if now_ms else [],
    )


def _limits(shipped: Manifest) -> ShipLimits:
    given = {name: value for name, value in shipped.asked.items() if value is not None}
    return msgspec.convert(given, ShipLimits)


def _refused_plan(record: Record) -> str:
    """Return why TensorRT refused to load the plan, or an empty string if it did not."""
    notes = record.runtime.notes if record.runtime else []
    return next((note.removeprefix(REBUILT) for note in notes if note.startswith(REBUILT)), "")


def _answer(promised_ms: Sequence[float], now_ms: Sequence[float]) -> tuple[Answer, str, effects.Effect | None]:
    """Return the verdict based on the times alone, its reason and the effect."""
    if min(len(promised_ms), len(now_ms)) < FEWEST_PROCESSES:
        return "inconclusive", f"fewer than {FEWEST_PROCESSES} processes", None
    change = effects.runs_effect({"shipped": [promised_ms]}, {"now": [now_ms]})
    interval = change.interval(1.0 - ALPHA)
    if interval.low > 0.0:
        return "slower", "", change
    if interval.high < 0.0:
        return "faster", "", change
    if change.interval(1.0 - 2.0 * ALPHA).high < SLOWDOWN:
        return "kept", "", change
    return "inconclusive", f"it may be {100 * SLOWDOWN:g} % slower or more: verify again, or ship again", change


def other_machine(promised: Environment, now: Environment) -> str | None:
    """Return how this machine's class differs from that of the promise, or None if it does not."""
    values = ((getattr(promised, name), getattr(now, name), name) for name in CLASS)
    different = [f"{name} {was}, not {current}" for was, current, name in values if was != current]
    return "; ".join(different) or None


def explained(verified: VerificationResult) -> list[str]:
    """Return lines that say in plain words what the verdict and its interval mean."""
    meaning = {
        "kept": f"it is less than {100 * SLOWDOWN:g} % slower, with 95 % confidence on this side alone",
        "slower": "it is slower by more than runs of the same code differ",
        "faster": "it is faster by more than runs of the same code differ",
    }.get(verified.answer)
    interval = "[...]: where the true change lies with 95 % confidence; runs of the same code differ by a few per cent"
    lines = [*verified.limits, *[f"{verified.answer}: {meaning}"] * bool(meaning)]
    return lines + [interval] * (verified.change_low is not None)


def line(verified: VerificationResult) -> str:
    """Return the verdict in one line."""
    words = verified.answer.replace("_", " ")
    if verified.now_ms is None:
        return f"{verified.case_id}: {words}: {verified.reason}"
    change = ""
    if verified.change is not None and verified.change_low is not None and verified.change_high is not None:
        change = f", {verified.change:+.1%} [{verified.change_low:+.1%}, {verified.change_high:+.1%}]"
    why = f" ({verified.reason})" if verified.reason else ""
    times = f"{verified.now_ms:.4g} ms, promised {verified.promised_ms:.4g} ms{change}"
    return f"{verified.case_id}: {words}: {times}{why}"
