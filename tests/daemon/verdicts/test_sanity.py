"""A record that contradicts itself is found: by its check, by its window, and by its energy."""

import msgspec
import pytest
from records_made import PASSED, WRONG, made, timing

from benchd.daemon.records import Energy, ProcessResult, Summary, Window
from benchd.daemon.verdicts.sanity import examine


def found(record, subject):
    (finding,) = [entry for entry in examine([record]) if entry.subject == subject]
    return finding.judgement


def process(window_s, energy_j=None, watts=None):
    """A process of 100 runs of 10 ms: a second of runs."""
    energy = energy_j and Energy(
        energy_j=energy_j,
        energy_err_j=0.1,
        gross_per_inference_j=energy_j / 100,
        scope="s",
        source="nvml",
        metric="energy_counter_j",
        sensor_period_s=0.1,
        updates=10,
        gap_share=0.0,
        flags=[],
    )
    telemetry = {"power_w": Summary(watts, watts, watts, 20, "nvml")} if watts else {}
    window = Window(0, round(window_s * 1e9))
    return ProcessResult(
        status="ok", timing=timing(10.0, runs=100, mean_ms=10.0), window=window, energy=energy, telemetry=telemetry
    )


@pytest.mark.parametrize(
    ("check", "detail"),
    [
        (msgspec.structs.replace(PASSED, error_share=1e-5), "passed, off by 1e-05 of the largest answer"),
        (WRONG, "failed, off by 1 of the largest answer"),
        (msgspec.structs.replace(WRONG, void=True), "its check is void"),
        (None, "its answers were not checked"),
    ],
)
def test_the_agreement_says_what_its_figure_is_a_share_of(check, detail):
    (finding,) = [entry for entry in examine([made(check=check)]) if entry.subject == "agreement"]
    assert finding.detail == detail


@pytest.mark.parametrize(("window_s", "judgement"), [(1.0, "right"), (1.2, "right"), (0.9, "wrong"), (3.0, "wrong")])
def test_the_runs_fill_the_window(window_s, judgement):
    assert found(msgspec.structs.replace(made(), processes=[process(window_s)]), "clocks") == judgement


@pytest.mark.parametrize(
    ("energy_j", "watts", "judgement"),
    [
        (50.0, 50.0, "right"),
        (58.0, 50.0, "right"),
        (5.0, 50.0, "wrong"),
        (50.0, None, "not tested"),
        (None, 5.0, "not tested"),
    ],
)
def test_the_energy_is_power_times_time(energy_j, watts, judgement):
    record = msgspec.structs.replace(made(), processes=[process(1.0, energy_j, watts)])
    assert found(record, "energy") == judgement


def test_a_case_that_cannot_run_is_not_tested_and_one_that_failed_is_wrong():
    failed = msgspec.structs.replace(made(), status="failed", reason="it broke")
    assert found(failed, "run") == "wrong"
    for status in ("unsupported", "aborted"):
        assert found(msgspec.structs.replace(failed, status=status), "run") == "not tested"
