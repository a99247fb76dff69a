"""From processes to a Record: statuses, intervals between processes, throughput, and reasons for what is missing."""

import pytest
from records_made import ENVIRONMENT, timing

from benchd.daemon import recording
from benchd.daemon.protocol import Outcome
from benchd.daemon.recording import Begun, Pass
from benchd.daemon.records import Case, Check, Memory, ProcessResult, Summary

SHARED = Pass("dev-1", "boot", "suite", "0.1.0", ENVIRONMENT)


def outcome(status="ok", *, reason=None, check=None, **process):
    return Outcome(process=ProcessResult(status=status, reason=reason, **process), check=check)


def record(*outcomes, case=None):
    return recording.record(case or Case(model="vim_tiny", batch_size=4), "quick", SHARED, Begun.now(7), outcomes)


def check(passed, share):
    return Check(
        passed=passed,
        rule="outputs",
        images=8,
        max_abs_error=share,
        error_share=share,
        tolerance=1e-4,
        argmax_disagreements=0,
    )


def test_one_process_keeps_its_own_interval():
    one = record(outcome(timing=timing(5.0)))
    assert one.timing == timing(5.0)
    assert one.timing.interval_basis == "within_process"
    assert one.throughput_per_s == pytest.approx(800.0)
    assert one.throughput_basis == "batch_over_median"


def test_several_processes_give_an_interval_between_them():
    three = record(*(outcome(timing=timing(median)) for median in (5.0, 5.1, 5.2)))
    assert three.timing.interval_basis == "between_processes"
    assert three.timing.median_ms == pytest.approx((5.0 * 5.1 * 5.2) ** (1 / 3))
    assert three.timing.low_ms < 5.0 < 5.2 < three.timing.high_ms
    assert three.timing.runs == 2100
    assert len(three.processes) == 3


def test_the_worst_process_s_percentile_stands_and_one_without_it_leaves_none():
    both = record(*(outcome(timing=timing(5.0, p99_ms=value, p90_ms=6.0)) for value in (7.0, 9.0)))
    assert both.timing.p99_ms == 9.0
    one_short = record(*(outcome(timing=timing(5.0, p99_ms=value, p90_ms=6.0)) for value in (7.0, None)))
    assert one_short.timing.p99_ms is None
    assert one_short.missing["timing.p99_ms"].startswith("needs 662 runs")
    assert "timing.p90_ms" not in one_short.missing


@pytest.mark.parametrize(
    ("statuses", "worst"),
    [(["ok", "failed"], "failed"), (["ok", "timeout"], "timeout"), (["ok", "aborted"], "aborted"), (["ok"], "ok")],
)
def test_the_worst_status_decides_and_brings_its_reason(statuses, worst):
    made = record(*(outcome(status, reason=f"because {status}") for status in statuses))
    assert (made.status, made.reason) == (worst, f"because {worst}")


def test_a_case_that_failed_has_no_timing_but_keeps_what_its_processes_measured():
    made = record(outcome(timing=timing(5.0)), outcome("failed", reason="gone"))
    assert made.timing is None
    assert made.throughput_per_s is None
    assert made.missing["timing"] == "gone"
    assert made.processes[0].timing == timing(5.0)


def test_the_failed_check_of_any_process_is_the_record_s():
    made = record(*(outcome(timing=timing(), check=found) for found in (check(True, 1e-6), check(False, 1e-2))))
    assert made.check == check(False, 1e-2)


def test_offline_reports_the_measured_throughput():
    case = Case(model="vim_tiny", batch_size=4, scenario="offline")
    made = record(outcome(timing=timing(5.0), throughput_per_s=777.0), case=case)
    assert (made.throughput_per_s, made.throughput_basis) == (777.0, "measured")


def test_telemetry_is_pooled_over_processes_and_clocks_are_told_apart():
    first = {"cpu_clock_hz": Summary(1e9, 2e9, 3e9, 10, "procfs"), "cpu_temp_c": Summary(40, 50, 60, 10, "thermal")}
    second = {"cpu_clock_hz": Summary(2e9, 4e9, 5e9, 30, "procfs")}
    made = record(*(outcome(timing=timing(), telemetry=telemetry) for telemetry in (first, second)))
    assert made.clocks == {"cpu_clock_hz": Summary(1e9, 3.5e9, 5e9, 40, "procfs")}
    assert list(made.temperature) == ["cpu_temp_c"]
    assert "clocks" not in made.missing
    assert record(outcome(timing=timing())).missing["clocks"] == "no_sensor"


@pytest.mark.parametrize(("percent", "flags"), [(55.0, []), (60.0, []), (70.0, ["busy_machine"])])
def test_a_machine_that_others_use_is_flagged(percent, flags):
    seen = {
        "cpu_utilization_percent": Summary(0, percent, 100, 9, "procfs"),  # of two CPUs
        "process_cpu_percent": Summary(0, 100, 100, 9, "procfs"),  # of one
    }
    assert record(outcome(timing=timing(), telemetry=seen)).flags == flags


def test_memory_is_the_largest_peak():
    peaks = [Memory(rss_peak_bytes=10), Memory(rss_peak_bytes=30, device_peak_bytes=5)]
    made = record(*(outcome(timing=timing(), memory=peak) for peak in peaks))
    assert made.memory == Memory(rss_peak_bytes=30, device_peak_bytes=5)


def test_what_was_not_measured_is_null_with_a_reason():
    made = record(outcome("unsupported", reason="no TensorRT"))
    for name in ("timing", "energy", "occupancy", "x_of_floor", "clocks", "temperature"):
        assert not getattr(made, name)
        assert made.missing[name]
    assert made.missing["energy"] == "no_sensor"


def test_parts_are_combined_by_name():
    parts = {"forward": timing(2.0), "backward": timing(3.0)}
    made = record(outcome(timing=timing(5.0), parts=parts), case=Case(model="vim_tiny", direction="training"))
    assert made.parts == parts
