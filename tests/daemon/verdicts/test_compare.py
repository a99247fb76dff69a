"""Records against records: what may be compared, what is said, and the exit code."""

import msgspec
import pytest
from records_made import ENVIRONMENT, PASSED, WRONG, made, timing

from benchd.daemon.records import Case, ModelFacts, ProcessResult, Summary, UserFile, UserModule, Variant
from benchd.daemon.verdicts.compare import VISIBLE, command, compare, comparison, exit_code
from benchd.daemon.verdicts.effects import Verdict

FAST = [5.0, 5.01, 4.99, 5.02, 4.98]
SLOW = [value * 1.15 for value in FAST]
VOID = msgspec.structs.replace(WRONG, void=True)
TURNED = msgspec.structs.replace(PASSED, argmax_disagreements=1)
MODEL = ModelFacts(options={}, input_shape=[3, 4, 4], parameters=1, weights="w", weights_sha256="0", data="random")


def run(times_ms=FAST, run_id="r1", **fields):
    """Return the record of one run with a process for each of these medians."""
    processes = [ProcessResult(status="ok", timing=timing(value)) for value in times_ms]
    given = {"run_id": run_id, "suite_id": run_id, "processes": processes, "check": PASSED}
    return made(**given | fields)


def several(times_ms, **fields):
    """Return the records of three runs, 0.01 % apart."""
    return [run([value * (1 + step / 1e4) for value in times_ms], f"r{step}", **fields) for step in range(3)]


def other(found):
    """Return these records as others of the second side."""
    return [msgspec.structs.replace(record, run_id=f"{record.run_id} B") for record in found]


def only(first, second, **options):
    (comparison,) = compare(first, other(second), 0.005, **options)
    return comparison


def test_each_side_is_the_processes_of_all_its_runs():
    comparison = only([run(FAST[:3], "r1"), run(FAST[3:], "r2"), run(FAST, "r3")], [run(SLOW)])
    assert comparison.verdict.answer == "slower"
    assert comparison.verdict.effect == pytest.approx(0.15, abs=1e-4)
    assert comparison.first_ms == FAST * 2
    assert exit_code([comparison], ["slower"]) == 3


ANSWERED = msgspec.structs.replace(PASSED, outputs=["scores 10"], projections=[1.0, -2.0], inputs_sha256="i")


@pytest.mark.parametrize(
    ("projections", "fields", "failed"),
    [
        ([1.0, -2.0], {}, False),
        ([1.0, -2.0 + 1e-6], {}, False),
        ([1.0, -2.01], {}, True),
        ([1.0, -2.01], {"rule": "codes"}, False),  # a spike that rounding moves changes thousands after it
        ([1.5, -3.0], {"rule": "codes"}, True),
        ([1.5, -3.0], {"images": 16}, True),  # of which the first are the same
        ([1.5, -3.0], {"inputs_sha256": "of others"}, False),
        ([1.5, -3.0], {"weights_sha256": "1"}, False),
        ([1.5, -3.0], {"options": {"time_steps": 4}}, False),
        ([1.5], {}, False),
        ([], {}, False),
    ],
)
def test_other_answers_of_the_same_weights_fail_the_check(projections, fields, failed):
    of_model = {name: value for name, value in fields.items() if name in ModelFacts.__struct_fields__}
    model = msgspec.structs.replace(MODEL, **of_model)
    fields = {name: value for name, value in fields.items() if name not in of_model}
    check = msgspec.structs.replace(ANSWERED, projections=projections, **fields)
    base = run(SLOW, model=MODEL, check=ANSWERED)
    result = only([base], [run(FAST, model=model, check=check)])
    assert result.check_failed is failed
    expected = ("inconclusive", "B is not the same network as A: its exact answers differ")
    assert ((result.verdict.answer, result.verdict.reason) == expected) is failed
    assert [note for note in result.notes if "exact answers" in note] == [*result.notes[:1]] * failed
    assert exit_code([result], ["check"]) == (5 if failed else 0)


def test_one_side_is_of_one_model_and_the_other_may_be_another():
    other = msgspec.structs.replace(MODEL, weights_sha256="1")
    mixed = only([run(FAST, "r1", model=MODEL), run(FAST, "r2", model=other)], [run(SLOW, model=MODEL)])
    assert mixed.verdict.answer == "inconclusive"
    assert mixed.verdict.reason.startswith("A: different weights: w was replaced; ")
    assert only([run(FAST, model=MODEL)], [run(SLOW, model=other)]).verdict.answer == "slower"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"options": {"t": 2}}, "different options (t None and 2)"),
        ({"weights": "random, seed 0", "weights_sha256": "1"}, "different weights (w and random, seed 0)"),
        ({"parameters": 2}, "a different number of parameters (1 and 2)"),
    ],
)
def test_another_network_is_not_compared(changes, reason):
    verdict = only([run(SLOW, model=MODEL)], [run(model=msgspec.structs.replace(MODEL, **changes))]).verdict
    assert (verdict.answer, verdict.reason) == ("inconclusive", reason)


def test_it_is_noted_if_the_weights_or_the_batch_differ():
    trained = run(model=msgspec.structs.replace(MODEL, weights_sha256="1"))
    assert only([run(model=MODEL)], [trained]).notes == ["B has different weights from A"]
    assert only([run(model=MODEL)], [run(model=MODEL)]).notes == []
    larger = run(case=Case(model="vim_tiny", batch_size=4))
    live = comparison(("A", "B"), Verdict(answer="slower"), ([FAST], [SLOW]), ([run()], [larger]))
    assert live.notes == ["the batch size is 1 in A and 4 in B"]


@pytest.mark.parametrize(
    ("number", "fields"), [(1, {}), (3, {"t_wall": "2026-01-02T00:00:00Z"}), (3, {"boot_id": "2"})]
)
def test_runs_of_one_day_do_not_show_how_days_or_boots_differ(number, fields):
    """However many they are, and whatever they are apart on that day."""
    base = several(FAST)[:number]
    of_all = [only(base, several(times, **fields)[:number]).verdict for times in (FAST, [1.05 * x for x in FAST], SLOW)]
    assert [verdict.answer for verdict in of_all] == ["inconclusive", "inconclusive", "slower"]
    assert all(verdict.reason.startswith("runs from a single day: ") for verdict in of_all)


def test_days_are_compared_by_how_much_they_differ():
    days = [[*several(FAST, t_wall=f"2026-01-0{day}T00:00:00Z")] for day in range(1, 6)]
    named = [msgspec.structs.replace(record, suite_id=record.key + record.t_wall) for day in days for record in day]
    later = several([1.02 * x for x in FAST], t_wall="2026-01-09T00:00:00Z")
    verdict = only(
        [msgspec.structs.replace(day_record, run_id=day_record.suite_id) for day_record in named], later
    ).verdict
    assert (verdict.answer, verdict.reason) == ("slower", "")


def test_what_fails_its_check_cannot_win():
    comparison = only([run(SLOW)], [run(FAST, check=WRONG)])
    assert comparison.verdict.answer == "inconclusive"
    assert "fails its numerical check" in comparison.verdict.reason
    assert [exit_code([comparison], words) for words in (["check", "inconclusive"], ["inconclusive"], [])] == [5, 4, 0]


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ({"check": WRONG}, {"check": WRONG}, "A: fails its numerical check"),
        ({"check": WRONG}, {}, "A: fails its numerical check"),
        ({}, {"flags": ["repeated_input_faster"]}, "B: answers repeated inputs faster"),
        ({"flags": ["output_changed"]}, {}, "A: gave different answers while it was timed"),
        ({}, {"flags": ["provider_fallback"]}, "B: did not run as requested (provider_fallback)"),
        ({}, {"check": None}, "B: was not checked"),
        ({}, {"check": TURNED}, "B: agreement on 7 of 8 images is below 0.98"),
    ],
)
@pytest.mark.parametrize("times_ms", [FAST, SLOW])
def test_times_of_what_recommend_would_not_ship_do_not_compare(first, second, reason, times_ms):
    verdict = only([run(SLOW, **first)], [run(times_ms, run_id="r2", **second)]).verdict
    assert (verdict.answer, verdict.reason) == ("inconclusive", reason)


def test_a_void_check_fails_nothing():
    comparison = only([run()], [run(check=VOID)])
    assert (comparison.check_failed, comparison.check_void) == (False, True)
    assert only([run(FAST, check=VOID)], [run(SLOW, check=VOID)]).verdict.answer == "slower"
    verdict = only([run(SLOW, check=VOID)], [run(FAST, check=VOID)]).verdict
    assert (verdict.answer, verdict.reason) == ("inconclusive", "faster, but its check is void")


def environment(**changes):
    return msgspec.structs.replace(ENVIRONMENT, fingerprint="other", **changes)


def clock(hz, name="cpu_clock_hz"):
    return {name: Summary(hz, hz, hz, 10, "procfs")}


def on_gpu(hz):
    clocks = clock(3e9) | clock(hz, "gpu_clock_hz")
    return run(environment=msgspec.structs.replace(ENVIRONMENT, device="cuda"), telemetry=clocks)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (
            [run()],
            [run(FAST[:2])],
            "B has 2 of the 3 processes that a verdict needs: run bench-once --case vim_tiny,eager,b1",
        ),
        ([run([])], [run()], "A ok: without a time"),
        ([run(status="failed", reason="no memory")], [run()], "A failed: no memory"),
        ([run([0.0, *FAST])], [run()], "A reports an impossible time of 0 ms"),
        (
            [run()],
            [run(device_id="orin-2")],
            "device bench-abc123 and orin-2; benchd compare --live vim_tiny,eager,b1 --python",
        ),
        ([run()], [run(environment=environment(power_mode="15W"))], "power_mode: unknown and 15W"),
        ([run()], [run(environment=environment(versions={"torch": "2.9"}))], "torch: unset and 2.9"),
        (several(FAST), [run(telemetry=clock(2e9))], ""),
        ([run(telemetry=clock(3e9))], [run(telemetry=clock(2.89e9))], "different clocks (cpu_clock_hz 3000 and 2890"),
        (several(FAST, telemetry=clock(3e9)), [run(telemetry=clock(2.93e9))], ""),
        ([on_gpu(1.98e9)], [on_gpu(1.2e9)], "different clocks (gpu_clock_hz 1980 and 1200 MHz)"),
        ([run(model=MODEL)], [run(model=msgspec.structs.replace(MODEL, data="cifar10"))], "different inputs"),
        ([run(FAST, "r1"), run(FAST, "r2", device_id="orin-2")], [run()], "device bench-abc123 and orin-2"),
        ([run()], [], "B has no record of it"),
        ([], [run()], "A has no record of it"),
    ],
)
def test_what_may_not_be_compared_is_inconclusive_with_the_reason(first, second, words):
    verdict = only(first, second).verdict
    assert words in verdict.reason
    assert (verdict.answer, verdict.effect is None) == (("inconclusive", True) if words else ("same", False))


def test_a_change_that_a_further_run_may_show_too_is_no_change():
    """Runs 1 % apart hold 2 % to be one of them, as their 15 processes, each as good as the next, would not."""
    runs = [run([value * scale for value in FAST], f"r{number}") for number, scale in enumerate((1, 1.01, 1.02))]
    verdict = only(runs, [run([value * 1.03 for value in FAST])]).verdict
    assert verdict.answer == "inconclusive"
    assert verdict.interval.low < -0.02
    assert verdict.interval.high > 0.06
    assert "about 25 runs per side would settle it" in verdict.reason
    assert only(runs, [run([value * 1.08 for value in FAST])]).verdict.answer == "slower"


def test_what_is_unsupported_on_both_sides_is_left_out_and_on_one_is_not():
    case = Case(model="vim_tiny", variant=Variant("tensorrt"))
    absent = made(case=case, status="unsupported", reason="no TensorRT", timing=None, processes=[])
    assert compare([absent], [absent], 0.005) == []
    assert only([absent], [run(case=case)]).verdict.reason == "A unsupported: no TensorRT"


ON_GPU_HOST = msgspec.structs.replace(ENVIRONMENT, gpu="H200")


def test_the_command_repeats_variables_and_cpus():
    variables = {VISIBLE: "", "OMP_PROC_BIND": "close", "OMP_PLACES": "{0:2}"}
    bound = environment(variables=variables, affinity="0-1", system={"online_cpus": "0-7"})
    assert command(run(environment=bound)) == (
        "CUDA_VISIBLE_DEVICES='' OMP_PROC_BIND=close OMP_PLACES='{0:2}' taskset -c 0-1 "
        "bench-once --case vim_tiny,eager,b1"
    )
    assert command(run(environment=environment(affinity="0-1"))).startswith("bench-once")


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"case": Case(model="square", threads=2), "environment": ON_GPU_HOST},
            "benchd compare --live square,eager,b1,threads=2 --python A/bin/python --python B/bin/python --device cpu",
        ),
        (
            {"case": Case(model="own.net.build", batch_size=4), "own": UserModule("net.py:build")},
            "benchd compare --live own.net.build,eager,b4 --module A/net.py:build --module B/net.py:build",
        ),
        (
            {"case": Case(model="own.net.v2", variant=Variant("onnxruntime")), "own": UserFile("net.v2.onnx")},
            "bench-once --case own.net.v2,onnxruntime,b1 --processes 5 for both",
        ),
    ],
)
def test_what_was_measured_elsewhere_can_be_measured_here(fields, line):
    reason = only([run(**fields, telemetry=clock(3e9))], [run(**fields, telemetry=clock(2e9))]).verdict.reason
    assert f"different clocks (cpu_clock_hz 3000 and 2000 MHz); {line}" in reason


def test_a_record_of_both_sides_counts_for_the_first_one_alone():
    """An output folder to which a run was added still holds those before it."""
    before = [run(FAST, f"r{number}") for number in range(4)]
    (comparison,) = compare(before, [*before, run(SLOW, "new")], 0.005)
    assert (comparison.verdict.answer, comparison.second_ms) == ("slower", SLOW)
    assert comparison.notes == ["4 records of B are also in A and count only there"]
    (nothing_new,) = compare(before, before, 0.005)
    assert (nothing_new.verdict.answer, nothing_new.verdict.reason) == (
        "inconclusive",
        "all records of B are also in A",
    )


def test_a_difference_smaller_than_a_jump_between_levels_is_none():
    """Five processes of two levels fall on a lattice, where runs agree exactly by chance."""
    mixed, rarer = [10.0, 10.0, 10.0, 13.0, 13.0], [10.0, 10.0, 10.0, 10.0, 13.0]
    result = only([run(mixed, f"r{number}") for number in range(3)], [run(rarer, "new")])
    assert result.verdict.answer == "inconclusive"
    assert "jump between 10 and 13 ms" in result.verdict.reason
    twice = [value / 2 for value in rarer]
    assert only([run(mixed, f"r{number}") for number in range(3)], [run(twice, "new")]).verdict.answer == "faster"
    centre = (10.0**3 * 13.0**2) ** 0.2
    assert result.medians_ms[0] == pytest.approx(centre)


def test_flags_and_presets_of_either_side_are_noted():
    busy = run(flags=["busy_machine", "mqtt", "simulated"], preset="thorough")
    flagged = "B is doubtful: busy machine, simulated"
    assert only([run(preset="thorough")], [busy]).notes == [flagged]
    presets = "A was measured with the preset quick and B with thorough"
    assert only([run(preset="quick")], [busy]).notes == [flagged, presets]


def test_a_record_of_a_stranger_runs_nothing():
    hostile = environment(
        variables={"X=1 rm -rf /;": "y", "OMP_PLACES": "a b"}, affinity="0; rm -rf /", system={"online_cpus": "0-7"}
    )
    assert command(run(environment=hostile)).startswith("OMP_PLACES='a b' taskset -c '0; rm -rf /' bench-once ")
