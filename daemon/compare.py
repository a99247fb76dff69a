"""Records against records: which cases may be compared, what is said of each, and the exit code that follows; pure."""

import shlex
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Struct

from benchd.daemon.records import Case, Environment, Record
from benchd.daemon.results import process_medians_ms
from benchd.daemon.statistics import FEWEST_PROCESSES, Verdict, judge_plan, median, welch_effect
from benchd.models.catalog import MODELS

CLOCK_SHARE = 0.03
"""Clocks further apart than this are other clocks."""

FAIL_ON = {"check": 5, "slower": 3, "inconclusive": 4}
"""What may fail a run, and its exit code, the first that holds."""


class Comparison(Struct, frozen=True, kw_only=True):
    """What is said of `second` against `first`. The medians are those of the process medians of each side."""

    first: str
    second: str
    verdict: Verdict
    first_ms: list[float]
    second_ms: list[float]
    check_failed: bool

    @property
    def medians_ms(self) -> tuple[float | None, float | None]:
        """Return the median of each side's process medians; None for a side without any."""
        return (_median(self.first_ms), _median(self.second_ms))


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def compare(
    first: Sequence[Record], second: Sequence[Record], min_effect: float, fewest_runs: int = 1
) -> list[Comparison]:
    """Return one Comparison for each case of either side, corrected for their number.

    A case that may not be compared is inconclusive with the reason and, where there is one, the line to type. One that
    is unsupported on both sides is left out. `fewest_runs` is how many runs of a case the first side needs.
    """
    arms = {case_id: (_of(first, case_id), _of(second, case_id)) for case_id in _case_ids(first, second)}
    refused = {case_id: _why_not(*sides, fewest_runs) for case_id, sides in arms.items()}
    judged = [case_id for case_id, reason in refused.items() if reason is None]
    effects = [welch_effect(*map(process_medians_ms, arms[case_id])) for case_id in judged]
    verdicts = dict(zip(judged, judge_plan(effects, min_effect), strict=True))
    return [
        comparison(
            (case_id, case_id),
            verdicts.get(case_id) or Verdict(answer="inconclusive", reason=refused[case_id] or ""),
            (process_medians_ms(sides[0]), process_medians_ms(sides[1])),
            any(record.check and not record.check.passed for record in sides[1]),
        )
        for case_id, sides in arms.items()
    ]


def comparison(
    names: tuple[str, str], verdict: Verdict, times_ms: tuple[Sequence[float], Sequence[float]], check_failed: bool
) -> Comparison:
    """Return the Comparison of two sides; the second one cannot win where it fails its numerical check."""
    if check_failed and verdict.answer == "faster":
        reason = "faster, but it fails its numerical check"
        verdict = msgspec.structs.replace(verdict, answer="inconclusive", reason=reason)
    return Comparison(
        first=names[0],
        second=names[1],
        verdict=verdict,
        first_ms=list(times_ms[0]),
        second_ms=list(times_ms[1]),
        check_failed=check_failed,
    )


def exit_code(comparisons: Sequence[Comparison], fail_on: Sequence[str]) -> int:
    """Return the exit code of the first of `FAIL_ON` that holds and is to fail, else 0."""
    holds = {one.verdict.answer for one in comparisons} | {"check" for one in comparisons if one.check_failed}
    return next((code for word, code in FAIL_ON.items() if word in holds and word in fail_on), 0)


def _case_ids(first: Sequence[Record], second: Sequence[Record]) -> list[str]:
    """Return the cases that either side could run, in the order of their first record."""
    tried = [record for record in (*first, *second) if record.status != "unsupported"]
    return list(dict.fromkeys(record.case_id for record in tried))


def _of(found: Sequence[Record], case_id: str) -> list[Record]:
    return [record for record in found if record.case_id == case_id]


def _why_not(first: Sequence[Record], second: Sequence[Record], fewest_runs: int) -> str | None:
    """Return why these records of a case may not be compared, else None."""
    for side, found in (("A", first), ("B", second)):
        times_ms = process_medians_ms(found)
        if not times_ms:
            return f"{side} {_absence(found)}"
        if min(times_ms) <= 0.0:
            return f"{side} holds a time of {min(times_ms):g} ms"
    difference = next(_differences([record for record in (*first, *second) if record.status == "ok"]), None)
    if difference:
        return f"{difference}; benchd compare --live measures both here and now"
    return _too_few(first, second, fewest_runs)


def _absence(found: Sequence[Record]) -> str:
    return f"{found[-1].status}: {found[-1].reason}" if found else "has no record of it"


def _too_few(first: Sequence[Record], second: Sequence[Record], fewest_runs: int) -> str | None:
    for side, found in (("A", first), ("B", second)):
        count = len(process_medians_ms(found))
        if count < FEWEST_PROCESSES:
            return f"{side} has {count} of {FEWEST_PROCESSES} processes: {command(found[-1].case)}"
    runs = len({record.suite_id for record in first if record.status == "ok"})
    return f"the baseline has {runs} of {fewest_runs} runs of it" if runs < fewest_runs else None


def _differences(measured: Sequence[Record]) -> Iterator[str]:
    """Yield what the records do not share though comparable ones must."""
    one = measured[0]
    for other in measured[1:]:
        if other.device_id != one.device_id:
            yield f"device {one.device_id} and {other.device_id}"
        if other.environment.fingerprint != one.environment.fingerprint:
            yield f"another environment ({_changed(one.environment, other.environment)})"
        if _inputs(other) != _inputs(one):
            yield f"other inputs ({_inputs(one)} and {_inputs(other)})"
        yield from _clocks(one, other)


def _changed(one: Environment, other: Environment) -> str:
    """Return the names and values of what differs, the fingerprint itself aside."""
    before, after = (_flat(msgspec.structs.asdict(environment)) for environment in (one, other))
    names = [name for name in before | after if before.get(name) != after.get(name) and name != "fingerprint"]
    return ", ".join(f"{name} {before.get(name)} and {after.get(name)}" for name in names) or "fingerprint"


def _flat(facts: dict[str, object]) -> dict[str, object]:
    versions = facts.pop("versions")
    return facts | (versions if isinstance(versions, dict) else {})


def _inputs(record: Record) -> tuple[list[int], str] | None:
    return (record.model.input_shape, record.model.data) if record.model else None


def _clocks(one: Record, other: Record) -> Iterator[str]:
    """Yield the measured clocks of the device that are not those of the other record."""
    name = "cpu_clock_hz" if one.environment.device == "cpu" else "gpu_clock_hz"
    if name in one.clocks and name in other.clocks:
        before, after = one.clocks[name].mean, other.clocks[name].mean
        if abs(after - before) > CLOCK_SHARE * before:
            yield f"other clocks ({name} {before / 1e6:.0f} and {after / 1e6:.0f} MHz)"


def command(case: Case) -> str:
    """Return the line that measures a case with as many processes as a comparison needs."""
    own = case.model not in MODELS
    words = ["bench-once", *(["--module", "FILE.py:FUNCTION"] if own else ["--models", case.model])]
    words += ["--variants", case.variant.name, "--batch-sizes", str(case.batch_size)]
    for name, value in sorted(case.options.items()):
        words += ["--option", f"{name}={value}"]
    words += ["--direction", case.direction] if case.direction != "inference" else []
    words += ["--scenario", case.scenario] if case.scenario != "single_stream" else []
    words += ["--seed", str(case.seed)] if case.seed else []
    words += ["--threads", str(case.threads)] if case.threads else []
    return shlex.join([*words, "--processes", str(FEWEST_PROCESSES)])
