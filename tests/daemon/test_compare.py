"""Records against records: what may be compared, what is said, and the exit code."""

import msgspec
import pytest
from records_made import ENVIRONMENT, made, timing

from benchd.daemon.compare import compare, exit_code
from benchd.daemon.records import Case, Check, ModelFacts, ProcessResult, Summary, Variant

FAST = [5.0, 5.01, 4.99, 5.02, 4.98]
SLOW = [value * 1.05 for value in FAST]
WRONG = Check(
    passed=False, rule="outputs", images=8, max_abs_error=1, error_share=1, tolerance=0, argmax_disagreements=8
)
MODEL = ModelFacts(options={}, input_shape=[3, 4, 4], parameters=1, weights="w", weights_sha256="0", data="random")


def run(times_ms=FAST, run_id="r1", **fields):
    """Return the record of one run with a process for each of these medians."""
    processes = [ProcessResult(status="ok", timing=timing(value)) for value in times_ms]
    return made(run_id=run_id, suite_id=fields.pop("suite_id", run_id), processes=processes, **fields)


def only(first, second, **options):
    (comparison,) = compare(first, second, 0.005, **options)
    return comparison


def test_each_side_is_the_processes_of_all_its_runs():
    comparison = only([run(FAST[:3], "r1"), run(FAST[3:], "r2")], [run(SLOW)])
    assert comparison.verdict.answer == "slower"
    assert comparison.verdict.effect == pytest.approx(0.05)
    assert comparison.first_ms == FAST
    assert exit_code([comparison], ["slower"]) == 3


def test_the_other_way_round_is_faster_and_exits_0():
    comparison = only([run(SLOW)], [run(FAST)])
    assert comparison.verdict.answer == "faster"
    assert exit_code([comparison], ["slower", "check", "inconclusive"]) == 0


def test_the_same_times_are_the_same():
    assert only([run()], [run(run_id="r2")]).verdict.answer == "same"


def test_what_fails_its_check_cannot_win():
    comparison = only([run(SLOW)], [run(FAST, check=WRONG)])
    assert comparison.verdict.answer == "inconclusive"
    assert "fails its numerical check" in comparison.verdict.reason
    assert [exit_code([comparison], words) for words in (["check", "inconclusive"], ["inconclusive"], [])] == [5, 4, 0]


def environment(**changes):
    return msgspec.structs.replace(ENVIRONMENT, fingerprint="other", **changes)


def clock(hz):
    return {"cpu_clock_hz": Summary(hz, hz, hz, 10, "procfs")}


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ([run()], [run(FAST[:4])], "B has 4 of 5 processes: bench-once --models vim_tiny --variants eager"),
        ([run([])], [run()], "A ok: None"),
        ([run(status="failed", reason="no memory")], [run()], "A failed: no memory"),
        ([run([0.0, *FAST])], [run()], "A holds a time of 0 ms"),
        ([run()], [run(device_id="orin-2")], "device bench-abc123 and orin-2; benchd compare --live"),
        ([run()], [run(environment=environment(power_mode="15W"))], "power_mode None and 15W"),
        ([run()], [run(environment=environment(versions={"torch": "2.9"}))], "torch None and 2.9"),
        ([run()], [run(clocks=clock(2e9))], ""),
        ([run(clocks=clock(3e9))], [run(clocks=clock(2e9))], "other clocks (cpu_clock_hz 3000 and 2000 MHz)"),
        ([run(model=MODEL)], [run(model=msgspec.structs.replace(MODEL, data="cifar10"))], "other inputs"),
        ([run(FAST, "r1"), run(FAST, "r2", device_id="orin-2")], [run()], "device bench-abc123 and orin-2"),
        ([run()], [], "B has no record of it"),
        ([], [run()], "A has no record of it"),
    ],
)
def test_what_may_not_be_compared_is_inconclusive_with_the_reason(first, second, words):
    verdict = only(first, second).verdict
    assert words in verdict.reason
    assert (verdict.answer, verdict.effect) == ("inconclusive", None) if words else ("same", 0.0)


def test_a_baseline_of_too_few_runs_is_no_baseline():
    runs = [run(FAST, f"r{number}") for number in range(3)]
    assert only(runs, [run()], fewest_runs=3).verdict.answer == "same"
    assert only(runs[:2], [run()], fewest_runs=3).verdict.reason == "the baseline has 2 of 3 runs of it"


def test_what_is_unsupported_on_both_sides_is_left_out_and_on_one_is_not():
    case = Case(model="vim_tiny", variant=Variant("tensorrt"))
    absent = made(case=case, status="unsupported", reason="no TensorRT", timing=None, processes=[])
    assert compare([absent], [absent], 0.005) == []
    assert only([absent], [run(case=case)]).verdict.reason == "A unsupported: no TensorRT"


def test_the_line_to_type_names_all_of_the_case():
    case = Case(model="square", batch_size=4, options={"t": 2}, direction="training", scenario="offline", seed=3)
    reason = only([run(case=case)], [run([5.0], case=case)]).verdict.reason
    wanted = (
        "--models square --variants eager --batch-sizes 4 --option t=2 --direction training --scenario offline --seed 3"
    )
    assert reason == f"B has 1 of 5 processes: bench-once {wanted} --processes 5"


def test_many_cases_are_corrected_for_their_number():
    """One case that is just significant alone is not, among thirty."""
    nudged = [value * 1.0145 for value in FAST]
    cases = [Case(model="vim_tiny", batch_size=size) for size in range(1, 31)]
    first = [run(case=case) for case in cases]
    second = [run(nudged if case.batch_size == 7 else FAST, case=case) for case in cases]
    assert only(first[6:7], second[6:7]).verdict.answer == "slower"
    spread = [5.0, 5.06, 4.94, 5.1, 4.9]
    first[6], second[6] = run(spread, case=cases[6]), run([value * 1.03 for value in spread], case=cases[6])
    assert only(first[6:7], second[6:7]).verdict.answer == "slower"
    answers = [comparison.verdict.answer for comparison in compare(first, second, 0.005)]
    assert answers.count("same") == 29
    assert answers[6] == "inconclusive"
