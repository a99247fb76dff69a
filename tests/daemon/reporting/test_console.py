"""What a person reads: the table's cells, its notes, hostile text as text, and the progress lines."""

import io
import math
from dataclasses import replace
from typing import get_args

import msgspec
import pytest
import records_made
from records_made import ENVIRONMENT, accuracy, blocks, made, timing

from benchd.daemon.config import LimitsConfig, Suite
from benchd.daemon.measuring import plan
from benchd.daemon.measuring.plan import Machine
from benchd.daemon.measuring.protocol import StageName
from benchd.daemon.records import (
    ArtifactFacts,
    BlocksResult,
    Case,
    Check,
    Inputs,
    Interference,
    Memory,
    ProcessResult,
    Summary,
    Variant,
    encode,
)
from benchd.daemon.reporting import console
from benchd.daemon.reporting.console import Screen, SlowStages, print_baseline, print_plan
from benchd.daemon.verdicts.alarms import Budget
from benchd.daemon.verdicts.recommend import Requirements

PLAN_ON = Machine("cpu", True)
PLAN = plan.plan([Suite(models=["square"], variants=["eager"], preset="quick")], LimitsConfig(), PLAN_ON)

ENERGY = msgspec.structs.replace(
    records_made.ENERGY, energy_j=10.0, energy_err_j=0.2, gross_per_inference_j=0.0315, source="fake"
)


def shown(*records, as_json=False, width=console.PLAIN_WIDTH):
    """Return what a pass over these records prints to standard output and to standard error."""
    out, err = io.StringIO(), io.StringIO()
    screen = Screen(out, err, as_json)
    screen._out.width = width
    screen.begin(PLAN)
    screen.stage(PLAN[0], 0, "warm_up")
    for record in records:
        screen.publish(record, encode(record))
    screen.end()
    return out.getvalue(), err.getvalue()


def check(**fields):
    given = {"passed": True, "rule": "outputs", "images": 8, "max_abs_error": 1e-6, "error_share": 3e-7}
    return Check(**given | {"tolerance": 1e-4, "argmax_disagreements": 0} | fields)


def test_what_is_slow_before_the_first_time_is_said_once(monkeypatch):
    monkeypatch.setattr(console, "SAY_S", 0.0)
    err = io.StringIO()
    stages = SlowStages(err)
    of_file = plan.plan([Suite(models=["square"], variants=["onnxruntime"])], LimitsConfig(), Machine("cpu", True))[0]
    for process in (0, 1):
        for planned in (PLAN[0], of_file):
            for stage in ("import", "build", "export", "check", "warm_up", "measure"):
                stages.stage(planned, process, stage)
        stages.stage(of_file, process, "check", "image 4 of 64")
    of_onnxruntime = ("export", "check", "check, image 4 of 64")
    lines = ["eager b1: check", *(f"onnxruntime b1: {what}" for what in of_onnxruntime)]
    assert err.getvalue().splitlines() == [f"square {line}" for line in lines]


def test_without_a_terminal_the_progress_of_a_stage_is_no_line_each(monkeypatch):
    err = io.StringIO()
    stages = SlowStages(err)
    stages.stage(PLAN[0], 0, "check")
    monkeypatch.setattr(console, "SAY_S", math.inf)
    stages.stage(PLAN[0], 0, "check", "image 4 of 64")
    assert err.getvalue() == "square eager b1: check\n"


def test_what_disturbed_and_what_the_audits_found_stand_below_the_table():
    clean, all_of_it = (BlocksResult(median_ms=ms, low_ms=None, high_ms=None, blocks=2) for ms in (4.5, 5.0))
    interference = Interference(reasons=[["steal"], [], []], clean=clean, as_experienced=all_of_it, all_flagged=False)
    process = ProcessResult(status="ok", timing=timing(), interference=interference)
    out, _ = shown(made(processes=[process], flags=["probes_moved", "repeated_input_faster"]))
    assert "1 of 3 blocks of runs disturbed by CPU taken by other virtual machines: 4.5 ms excluding them, 5 ms" in out
    assert "audit: vim_tiny,eager,b1 is faster on inputs that it has seen before" in out
    assert "x of floor: the probed peak rates changed by more than 3 % during this run" in out
    narrow, _ = shown(made(flags=["probes_moved"]), width=100)
    assert "x of floor" not in narrow  # the column is not shown either
    plain, _ = shown(made())
    assert not any(word in plain for word in ("blocks disturbed", "audit:", "rates changed"))


def test_a_row_holds_what_was_measured():
    record = made(
        case=Case(model="snn_onepass", variant=Variant(precision="fp16"), batch_size=64, options={"time_steps": 4}),
        timing=timing(12.3456, low_ms=12.1, high_ms=12.5, p99_ms=14.0),
        throughput_per_s=5184.0,
        memory=Memory(rss_peak_bytes=300 * 2**20),
        check=check(),
        energy=ENERGY,
        telemetry={"power_w@VDD_IN": Summary(5, 6.5, 7, 50, "fake")},
    )
    table, _ = shown(record)
    for cell in ("snn_onepass time_steps=4", "eager-fp16", "64", "12.35 [12.1, 12.5]", "14", "5184"):
        assert cell in table
    for cell in ("31.5 ±2 %", "6.5", "300", "ok 3.0e-07", "cpu: cpu, 2 threads"):
        assert cell in table


def test_a_clock_below_the_device_s_range_is_named_with_both():
    slow = msgspec.structs.replace(ENVIRONMENT, device="cpu", cpu_max_hz=3e9)
    clocks = {"cpu_clock_hz": Summary(1e9, 1.2e9, 2e9, 9, "procfs")}
    table, _ = shown(made(flags=["clock_below_range"], environment=slow, telemetry=clocks))
    assert "the CPU ran at 1200 of 3000 MHz throughout" in " ".join(table.split())


def test_what_was_not_measured_is_a_dash_with_its_note():
    table, _ = shown(made())
    assert "energy: no power sensor was read" in table
    assert "energy" not in table.partition("└")[0]
    beside, _ = shown(made(), made(case=Case(model="square"), energy=ENERGY))
    assert " - " in beside


@pytest.mark.parametrize(("half_width", "noted"), [(None, False), (0.01, True)])
def test_an_interval_that_stays_wide_is_noted_if_a_width_was_requested(half_width, noted):
    of_two = blocks([4.0, 4.1], bounds_ns=[0, 10, 20], half_width=half_width)
    process = ProcessResult(status="ok", timing=timing(4.0), blocks=of_two)
    table, _ = shown(made(preset="standard", limits={"half_width": half_width}, processes=[process]))
    assert ("interval: 1 of 1 stayed wider than the preset asks for" in table) is noted


def test_a_model_whose_run_was_interrupted_gets_no_recommendation():
    case = Case(model="square", variant=Variant(precision="amp"))
    ended = made(case=case, status="aborted", reason="interrupted by a signal", timing=None)
    out, _ = shown(made(case=Case(model="square")), ended, made())
    assert "\nsquare b1: interrupted: no variant is recommended before all have run\n" in out
    assert "not amp" not in out
    assert [line for line in out.splitlines() if line.startswith("vim_tiny b1: ")]


def test_checks_and_kernels_are_named():
    spiking = check(rule="codes", passed=False, flipped_share=2e-3)
    custom = made(case=Case(model="vim_tiny", variant=Variant(kernels="custom")), kernels_ran="c", check=spiking)
    table, _ = shown(custom)
    assert "custom (c)" in table
    assert "FAILED 3.0e-07, 2e-03 flipped" in table
    table, _ = shown(made(check=check(passed=False, void=True, note="rounding alone moves the output")))
    assert "void 3.0e-07" in table
    assert "check: vim_tiny: rounding alone moves the output" in table
    table, _ = shown(made(check=check(images=64, argmax_disagreements=53)))
    assert "ok 3.0e-07, 11 of 64 images agree" in table


def test_accuracy_has_a_column_where_any_record_has_it_and_the_drop_a_note():
    lossy = made(case=Case(model="vim_tiny", variant=Variant(precision="bf16")), accuracy=accuracy(gained=1, lost=3))
    table, _ = shown(made(accuracy=accuracy()), lossy, made(status="failed", timing=None, reason="no memory"))
    assert "top-1 %" in table
    assert table.count("50.0 [40.4, 59.6]") == 2
    assert "top-1: over 100 of the 100 images of imagefolder:images" in table
    drop = "drop against plain fp32 2.00 [-2.81, 7.60] %: it alone gets 1 of the images right, fp32 alone 3"
    assert f"top-1: vim_tiny,bf16,b1: {drop}" in table
    assert "top-1" not in shown(made())[0]


def test_a_drop_beyond_the_limit_of_the_screen_is_named_below_its_line():
    out = io.StringIO()
    screen = Screen(out, io.StringIO(), as_json=False, requirements=Requirements(max_accuracy_drop=0.01))
    screen.begin(PLAN)
    record = made(accuracy=accuracy(lost=30), check=check())
    screen.publish(record, encode(record))
    screen.end()
    assert "not eager: accuracy drop 30.00" in out.getvalue()


def test_what_is_left_counts_down_at_the_pace_of_the_processes_that_ended_or_is_said_to_be_late():
    two = plan.plan([Suite(models=["square"], variants=["eager", "amp"], processes=2)], LimitsConfig(), PLAN_ON)
    screen = Screen(io.StringIO(), io.StringIO(), as_json=False)
    screen.begin(two)
    screen.stage(two[0], 0, "import")
    planned_s = sum(entry.seconds for entry in two)
    screen._began_s -= 3.0
    assert screen._ahead() == f"[1/2] about {console.duration(planned_s - 3.0)} left: "
    screen._began_s -= 8 * planned_s / 4  # a process that takes eight times as long
    assert screen._ahead() == "[1/2] longer than planned: "
    screen.stage(two[1], 0, "import")
    left_s = 3 * (8 * planned_s / 4 + 3.0)
    assert screen._ahead() == f"[1/2] about {console.duration(left_s)} left, longer than planned: "


def test_a_timed_stage_says_how_long_the_clock_stands_still():
    cold = plan.plan([Suite(models=["square"], variants=["eager"], scenarios=["cold_start"])], LimitsConfig(), PLAN_ON)
    assert console._silence(cold[0], "load") == ", about 5 s without a sign until its first answer"
    assert [console._silence(*quiet) for quiet in ((cold[0], "check"), (PLAN[0], "measure"))] == ["", ""]
    timed = [stage for stage in get_args(StageName) if not console._ticks(PLAN[0].case, stage)]
    assert timed == ["measure"]


def test_the_plan_says_what_runs_what_cannot_and_how_long():
    out = io.StringIO()
    print_plan(out, PLAN, {"not today": ["tensorrt", "tensorrt-fp16"]})
    assert "square,eager,b1" in out.getvalue()
    assert "1 case, about 12 s" in out.getvalue()
    assert "cannot run here: not today: tensorrt, tensorrt-fp16" in out.getvalue()
    assert "accuracy" not in out.getvalue()
    print_plan(out, [replace(PLAN[0], inputs=Inputs(accuracy="full"))], {})
    assert "plus accuracy, whose time depends on the number of images" in out.getvalue()


@pytest.mark.parametrize(
    ("reused", "said"), [(True, "1 of 1 existed already"), (False, "exporting the rest took 14.5 s")]
)
def test_the_files_of_a_variant_say_whether_they_were_there_before(reused, said):
    file = ArtifactFacts(
        key="k", format="onnx", bytes=1, sha256="s", made_at="t", made_on="m", versions={}, reused=reused, seconds=14.5
    )
    table, _ = shown(made(artifacts=[file]))
    assert f"exported files: {'' if reused else '0 of 1 existed already; '}{said}" in table


def test_each_run_of_a_baseline_counts_alike_in_the_median_that_is_shown():
    runs = ((10.0, 3), (10.0, 3), (11.0, 15))
    processes = [[ProcessResult(status="ok", timing=timing(median_ms))] * count for median_ms, count in runs]
    baseline = [made(run_id=f"r{n}", suite_id=f"r{n}", processes=of_run) for n, of_run in enumerate(processes)]
    assert "10.32" in printed(baseline)


def printed(baseline):
    out = io.StringIO()
    print_baseline(out, baseline, "stored in kept", Budget(1, {}))
    return out.getvalue()


def test_a_doubt_about_the_times_of_a_baseline_stands_beside_them():
    process = ProcessResult(status="ok", timing=timing(4.5))
    drifting, busy = (printed([made(processes=[process], flags=[flag])]) for flag in ("correlated_blocks", "steal"))
    assert "4.5 drifts" in drifting
    assert "drifts: the time drifts, so the interval may be too narrow" in drifting
    assert busy.startswith("BUSY MACHINE: other processes slowed vim_tiny")
    assert "4.5 busy" in busy
    assert "drifts" not in busy
