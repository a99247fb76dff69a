"""Compares two sets of records: the comparable cases, the verdict on each, and the resulting exit code; pure."""

import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from statistics import median

import msgspec
from msgspec import Struct

from benchd.daemon.records import ProcessResult, Record, UserFile
from benchd.daemon.verdicts import doubts, layers, sameness, timings, when
from benchd.daemon.verdicts.effects import FEWEST_PROCESSES, MIN_EFFECT, Days, Effect, Verdict, judge_plan, runs_effect
from benchd.daemon.verdicts.layers import LayerVerdict
from benchd.daemon.verdicts.recommend import unfit, void, wrong
from benchd.daemon.verdicts.results import process_medians_ms
from benchd.daemon.verdicts.statistics import centre

# valid names of environment variables, checked because a record may come from anyone
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
VISIBLE = "CUDA_VISIBLE_DEVICES"
ADVISED_PROCESSES = 5
"""The number of processes in the commands that reasons suggest."""

CLOCK_SHARE = 0.03
"""Clocks that differ by more than this share count as different."""

OTHER_ANSWERS = "B is not the same network as A: its exact answers differ"

ALL_SHARED = "all records of B are also in A"

FAIL_ON = {"check": 5, "slower": 3, "inconclusive": 4}
"""The conditions that can fail a run, with their exit codes; the first that applies wins."""

Runs = Sequence[Sequence[float]]
"""The process medians of each run of bench-once, in ms."""


class Comparison(Struct, frozen=True, kw_only=True):
    """The verdict on `second` compared with `first`.

    `medians_ms` are the centres of the sides (`centre_ms`). `ratios` are the second side's time divided by the first's
    in each pair of a live comparison, from which its verdict follows. `notes` are differences between the sides that do
    not prevent a comparison. `check_failed` is also set if the weights are equal but the answers differ. `broken_off`
    is set if a process failed or the measurement was interrupted or, for files, if B failed where A was measured.
    `doubt` says why the times are not those of the requested cases, and `mark` follows the verdict if other programs
    disturbed them. `layers` attributes the difference to layers, if the processes were profiled. `mean_over_median` is
    of B's runs, for comparison with tools that print means.
    """

    first: str
    second: str
    verdict: Verdict
    first_ms: list[float]
    second_ms: list[float]
    medians_ms: tuple[float | None, float | None]
    check_failed: bool
    ratios: list[float] = []
    check_void: bool = False
    broken_off: bool = False
    doubt: str = ""
    mark: str = ""
    layers: LayerVerdict | None = None
    mean_over_median: float | None = None
    notes: list[str] = []


class Pair(Struct, frozen=True):
    """The process medians of each run on the two sides of a case, with the effect, or why they cannot be compared."""

    first_ms: Runs
    second_ms: Runs
    effect: Effect | None
    reason: str = ""

    @property
    def medians_ms(self) -> tuple[float | None, float | None]:
        """Return the centre of each side, as in Comparison."""
        return centre_ms(self.first_ms), centre_ms(self.second_ms)


def centre_ms(runs: Runs) -> float | None:
    """Return the centre of the runs' centres, from which an effect is computed; None if there is no time."""
    times_ms = list(chain(*runs))
    if not times_ms or min(times_ms) <= 0.0:
        return median(times_ms) if times_ms else None
    return centre([centre(run) for run in runs])


def compare(
    first: Sequence[Record],
    second: Sequence[Record],
    min_effect: float,
) -> list[Comparison]:
    """Return one Comparison for each case on either side, with verdicts corrected for the number of cases.

    A case that cannot be compared is inconclusive, with the reason and, if there is one, the command to run. A case
    that is unsupported on both sides is left out. A record on both sides counts only for the first: it is not a second
    measurement, and would make the sides more similar.
    """
    in_first = {record.key for record in first}
    new = [record for record in second if record.key not in in_first]
    shared = Counter(record.case_id for record in second if record.key in in_first)
    tried = dict.fromkeys(record.case_id for record in (*first, *second) if record.status != "unsupported")
    arms = {case_id: (_of(first, case_id), _of(new, case_id)) for case_id in tried}
    pairs = {
        case_id: _refused(sides, ALL_SHARED) if shared[case_id] and not sides[1] else pair(*sides, doubtful=True)
        for case_id, sides in arms.items()
    }
    verdicts = judged(list(pairs.values()), min_effect)
    return [
        comparison(
            (case_id, case_id), verdict, (paired.first_ms, paired.second_ms), arms[case_id], shared=shared[case_id]
        )
        for (case_id, paired), verdict in zip(pairs.items(), verdicts, strict=True)
    ]


def pair(
    first: Sequence[Record], second: Sequence[Record], *, across_setups: bool = False, doubtful: bool = False
) -> Pair:
    """Return the two sides of a case for `judged`; `across_setups` lets environment and clocks differ between them.

    Records that `recommend` rejects, and differing answers, prevent the comparison unless `doubtful` is set:
    `comparison` then qualifies the verdict instead.
    """
    reason = _why_not(first, second, across_setups)
    if reason is None and not doubtful:
        reason = next(_reasons(unfit, first, second), OTHER_ANSWERS if _other_answers(first, second) else None)
    if reason is not None:
        return _refused((first, second), reason)
    return Pair(runs_ms(first), runs_ms(second), runs_effect(*runs_by_day(first, second)))


def _refused(sides: tuple[Sequence[Record], Sequence[Record]], reason: str) -> Pair:
    return Pair(runs_ms(sides[0]), runs_ms(sides[1]), None, reason)


def judged(pairs: Sequence[Pair], min_effect: float = MIN_EFFECT) -> list[Verdict]:
    """Return the verdict on each pair, corrected for the number of pairs."""
    verdicts = iter(judge_plan([pair.effect for pair in pairs if pair.effect], min_effect))
    return [
        _by_levels(next(verdicts), pair) if pair.effect else Verdict(answer="inconclusive", reason=pair.reason)
        for pair in pairs
    ]


def _by_levels(verdict: Verdict, sides: Pair) -> Verdict:
    """Return the verdict, inconclusive if either side jumps between two levels further apart than the difference."""
    if verdict.answer not in ("faster", "slower"):
        return verdict
    pairs = [timings.two_levels(list(chain(*runs))) for runs in (sides.first_ms, sides.second_ms)]
    jumps = [(slow.ms / fast.ms, fast.ms, slow.ms) for fast, slow in filter(None, pairs)]
    jump, fast_ms, slow_ms = max(jumps, default=(1.0, 0.0, 0.0))
    if abs(math.log1p(verdict.effect or 0.0)) >= math.log(jump):
        return verdict
    reason = (
        f"processes jump between {fast_ms:.4g} and {slow_ms:.4g} ms, and the difference may only be how often each "
        "occurs; benchd compare --live may settle it"
    )
    return msgspec.structs.replace(verdict, answer="inconclusive", reason=reason)


def runs_ms(records: Sequence[Record]) -> list[list[float]]:
    """Return the process medians of each bench-once run that has any."""
    by_run: dict[str, list[float]] = {}
    for record in records:
        by_run.setdefault(record.suite_id, []).extend(process_medians_ms([record]))
    return [times_ms for times_ms in by_run.values() if times_ms]


def runs_by_day(*sides: Sequence[Record]) -> list[Days]:
    """Return the process medians of each side's runs, by day."""
    day_of = when.days(list(chain(*sides)))
    by_day: list[dict[str, list[Record]]] = []
    for side in sides:
        by_day.append({})
        for record in side:
            by_day[-1].setdefault(day_of[record.key], []).append(record)
    return [{day: runs for day, records in side.items() if (runs := runs_ms(records))} for side in by_day]


def comparison(
    names: tuple[str, str],
    verdict: Verdict,
    runs: tuple[Runs, Runs],
    records: tuple[Sequence[Record], Sequence[Record]],
    ratios: Sequence[float] = (),
    shared: int = 0,
) -> Comparison:
    """Return the Comparison of two sides, without times that `recommend` rejects; a void check never wins.

    `shared` is the number of records that were dropped from the second side because they are also in the first.
    """
    others = _other_answers(*records)
    doubt = OTHER_ANSWERS if others else next(_doubts(records, verdict), None)
    if doubt:
        verdict = msgspec.structs.replace(verdict, answer="inconclusive", reason=doubt)
    left_out = [f"{shared} records of B are also in A and count only there"] if shared else []
    return Comparison(
        first=names[0],
        second=names[1],
        verdict=verdict,
        first_ms=list(chain(*runs[0])),
        second_ms=list(chain(*runs[1])),
        medians_ms=(centre_ms(runs[0]), centre_ms(runs[1])),
        check_failed=bool(others) or any(wrong(record) for record in records[1]),
        check_void=any(void(record) for record in records[1]),
        broken_off=_is_broken_off(*records),
        doubt=doubt or "",
        mark=doubts.mark(chain(*records)),
        ratios=list(ratios),
        mean_over_median=_mean_over_median(records[1]),
        layers=layers.judge(layers.rounds(_processes(records[0]), _processes(records[1]), ratios)),
        notes=others + _notes(*records) + left_out,
    )


def _processes(records: Sequence[Record]) -> list[ProcessResult]:
    return [process for record in records for process in record.processes]


def _mean_over_median(records: Sequence[Record]) -> float | None:
    timed = [process.timing for process in _processes(records) if process.timing]
    return median(timing.mean_ms / timing.median_ms for timing in timed) if timed else None


def _is_broken_off(first: Sequence[Record], second: Sequence[Record]) -> bool:
    """Return whether B failed where A was measured; a case that failed on both sides says nothing about B."""
    has_failed = bool(second) and second[-1].status in ("failed", "timeout", "aborted")
    return has_failed and bool(process_medians_ms(first)) and not process_medians_ms(second)


def _other_answers(first: Sequence[Record], second: Sequence[Record]) -> list[str]:
    """Return how B's exact answers differ from A's, given equal weights and inputs."""
    pairs = [(a, b) for a in _measured(first)[-1:] for b in _measured(second)[-1:]]
    differences = [sameness.model_differs(a, b) for a, b in pairs if not sameness.other_model(a, b)]
    return [f"B has the same weights as A, but {why}" for why in differences if why]


def _doubts(records: tuple[Sequence[Record], Sequence[Record]], verdict: Verdict) -> Iterator[str]:
    """Yield why the times of these records are not comparable, or why B cannot win."""
    yield from _reasons(unfit, *records)
    if verdict.answer == "faster" and any(void(record) for record in _measured(records[1])):
        yield "faster, but its check is void"


def _reasons(why: Callable[[Record], str | None], *sides: Sequence[Record]) -> Iterator[str]:
    """Yield the reasons that apply to the successful records, each with its side."""
    for side, records in zip("AB", sides, strict=True):
        yield from (f"{side}: {reason}" for record in _measured(records) if (reason := why(record)))


def exit_code(comparisons: Sequence[Comparison], fail_on: Sequence[str]) -> int:
    """Return the exit code of the first condition of `FAIL_ON` that applies and is in `fail_on`, otherwise 0."""
    failures = {word for comparison in comparisons for word in fails(comparison, fail_on)}
    return next((code for word, code in FAIL_ON.items() if word in failures), 0)


def fails(comparison: Comparison, fail_on: Sequence[str]) -> list[str]:
    """Return the conditions in `fail_on` that apply to a comparison."""
    holds = {comparison.verdict.answer, *(["check"] if comparison.check_failed else [])}
    return [word for word in fail_on if word in holds]


def _of(records: Sequence[Record], case_id: str) -> list[Record]:
    return [record for record in records if record.case_id == case_id]


def _measured(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.status == "ok"]


def _why_not(first: Sequence[Record], second: Sequence[Record], across_setups: bool) -> str | None:
    """Return why the two sides of a case cannot be compared, else None."""
    for side, records in (("A", first), ("B", second)):
        times_ms = process_medians_ms(records)
        if not times_ms:
            return f"{side} {_absence(records)}"
        if min(times_ms) <= 0.0:
            return f"{side} reports an impossible time of {min(times_ms):g} ms"
    difference = next(_differences(_measured([*first, *second]), across_setups), None)
    if difference:
        return f"{difference}; {both_here(_measured(second)[-1])}"
    return _other_network(first, second) or _mixed(first, second) or _too_few(first, second)


def _other_network(first: Sequence[Record], second: Sequence[Record]) -> str | None:
    """Return why B is a different network from A, else None; further trained weights do not make it one."""
    a, b = _measured(first)[-1].model, _measured(second)[-1].model
    return sameness.other_network(a, b) if a and b else None


def _notes(first: Sequence[Record], second: Sequence[Record]) -> list[str]:
    """Return the differences between A and B that do not prevent a comparison."""
    pairs = [(a, b) for a in _measured(first)[-1:] for b in _measured(second)[-1:]]
    sizes = [(a.case.batch_size, b.case.batch_size) for a, b in pairs]
    notes = [f"the batch size is {a} in A and {b} in B" for a, b in sizes if a != b]
    for side, records in zip("AB", (first, second), strict=True):
        flags = sorted({flag for record in _measured(records) for flag in doubts.of(record)})
        notes += [f"{side} is doubtful: {doubts.words(flags)}"] if flags else []
    presets = [(a.preset, b.preset) for a, b in pairs if a.preset and b.preset]
    notes += [f"A was measured with the preset {a} and B with {b}" for a, b in presets if a != b]
    models = [(a.model, b.model) for a, b in pairs if a.model and b.model and a.case_id == b.case_id]
    return notes + ["B has different weights from A" for a, b in models if a.weights_sha256 != b.weights_sha256]


def _mixed(*sides: Sequence[Record]) -> str | None:
    """Return why the records on one side are of different models, else None; A and B may differ from each other."""
    differences = [sameness.model_difference(_measured(side)) for side in sides]
    return next((f"{side}: {words}" for side, words in zip("AB", differences, strict=True) if words), None)


def _absence(records: Sequence[Record]) -> str:
    if not records:
        return "has no record of it"
    last = records[-1]
    return f"{last.status}: {last.reason or 'without a time'}"


def _too_few(first: Sequence[Record], second: Sequence[Record]) -> str | None:
    for side, records in (("A", first), ("B", second)):
        count = len(process_medians_ms(records))
        if count < FEWEST_PROCESSES:
            again = command(_measured(records)[-1], ADVISED_PROCESSES)
            return f"{side} has {count} of the {FEWEST_PROCESSES} processes that a verdict needs: run {again}"
    return None


def _differences(measured: Sequence[Record], across_setups: bool) -> Iterator[str]:
    """Yield the differences between the records that prevent a comparison."""
    reference = measured[0]
    for other in measured[1:]:
        if other.device_id != reference.device_id:
            yield f"device {reference.device_id} and {other.device_id}"
        changed = None if across_setups else sameness.environment_difference(reference.environment, other.environment)
        if changed:
            yield changed
        if _inputs(other) != _inputs(reference):
            yield f"different inputs ({_inputs(reference)} and {_inputs(other)})"
        clock_difference = None if across_setups else clocks(reference, other)
        if clock_difference:
            name, before, after = clock_difference
            yield f"different clocks ({name} {before / 1e6:.0f} and {after / 1e6:.0f} MHz)"


def _inputs(record: Record) -> tuple[list[list[int]], str] | None:
    if record.model is None:
        return None
    return [record.model.input_shape, *(spec.shape for spec in record.model.inputs[1:])], record.model.data


def clocks(record: Record, other: Record) -> tuple[str, float, float] | None:
    """Return the name and both means in Hz of the device's measured clock if they differ, else None."""
    name = "cpu_clock_hz" if record.environment.device == "cpu" else "gpu_clock_hz"
    if name not in record.telemetry or name not in other.telemetry:
        return None
    before, after = record.telemetry[name].mean, other.telemetry[name].mean
    return (name, before, after) if abs(after - before) > CLOCK_SHARE * before else None


def command(record: Record, processes: int | None = None, records: str = "") -> str:
    """Return the shell command that measures a record again: its case, variables, CPUs and device.

    `processes` replaces the number of processes; `records` is the location of the record, by default the output folder.
    """
    words = ["bench-once", "--case", record.case_id, *(["--records", records] if records else []), *_device(record)]
    words += ["--processes", str(processes)] if processes else []
    return " ".join([*_prefix(record), shlex.join(words)])


def _prefix(record: Record) -> Iterator[str]:
    """Yield the variables, except CUDA_VISIBLE_DEVICES on a GPU (see `_device`), and any restriction of the CPUs."""
    environment = record.environment
    for name, value in (environment.variables or {}).items():
        if _NAME.fullmatch(name) and (name != VISIBLE or environment.device == "cpu"):
            yield f"{name}={shlex.quote(value)}"
    if environment.affinity and environment.affinity != environment.system.get("online_cpus", environment.affinity):
        yield f"taskset -c {shlex.quote(environment.affinity)}"


def _device(record: Record) -> list[str]:
    """Return the arguments that keep a CPU case off an existing GPU, or a GPU case on the GPU on which it ran."""
    environment = record.environment
    if environment.device == "cpu":
        return ["--device", "cpu"] if environment.gpu else []
    return ["--device", uuid] if (uuid := (environment.variables or {}).get(VISIBLE)) else []


def both_here(record: Record) -> str:
    """Return the command that measures both sides of a case here: two installations, or two of the user's modules."""
    if isinstance(record.own, UserFile):
        return f"{command(record, ADVISED_PROCESSES)} for both on this machine"
    words = ["benchd", "compare", "--live", record.case_id]
    if record.own:
        words += [word for side in "AB" for word in ("--module", f"{side}/{record.own.path}")]
        words += [word for spec in record.own.inputs for word in ("--input", str(spec))]
    else:
        words += ["--python", "A/bin/python", "--python", "B/bin/python"]
    return f"{shlex.join([*words, *_device(record)])} measures both on this machine"
