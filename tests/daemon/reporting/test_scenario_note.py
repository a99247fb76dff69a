"""The line that says of a scenario what one median does not."""

import pytest
from records_made import made, timing

from benchd.daemon.records import Case, Deadlines, ProcessResult, Stages, TimeSlice
from benchd.daemon.reporting.scenario_note import scenario_note

STAGES = Stages(spawn_s=0.1, import_s=2.0, build_s=0.5, load_s=0.2, first_run_s=0.3, second_run_s=0.01)
COURSE = [
    TimeSlice(
        start_s=0, end_s=30, median_ms=4.0, telemetry={"gpu_clock_hz": 6e8, "power_w@VDD_IN": 7.0, "x_temp_c": 40}
    ),
    TimeSlice(start_s=570, end_s=600, median_ms=5.0, telemetry={"gpu_clock_hz": 5e8, "power_w@VDD_IN": 6.0}),
]


@pytest.mark.parametrize(
    ("scenario", "fields", "words"),
    [
        (
            "periodic",
            {"deadlines": [Deadlines(30, 600, 3, 2.5), Deadlines(10, 200, 0, 0.0)]},
            "30 Hz 3 of 600 missed (at most 2.5 ms late), 10 Hz 0 of 200 missed (at most 0 ms late)",
        ),
        (
            "wake_up",
            {"parts": {"gap_0_ms": timing(4.0), "gap_1000_ms": timing(5.0), "gap_10_ms": timing(4.5)}},
            "4 ms after 0 ms idle, 4.5 ms after 10 ms idle, 5 ms after 1000 ms idle",
        ),
        (
            "cold_start",
            {"processes": [ProcessResult(status="ok", timing=timing(), stages=STAGES), ProcessResult(status="failed")]},
            "spawn 0.1 s, import 2 s, build 0.5 s, load 0.2 s, first run 0.3 s, second run 0.01 s",
        ),
        (
            "sustained",
            {"processes": [ProcessResult(status="ok", timing=timing(), timeline=COURSE)]},
            "4 ms at start, 5 ms at 600 s, gpu_clock_hz 6e+08 to 5e+08, power_w@VDD_IN 7 to 6",
        ),
    ],
)
def test_each_scenario_tells_its_figures(scenario, fields, words):
    record = made(case=Case(model="vim_tiny", scenario=scenario), **fields)
    assert scenario_note(record) == f"{scenario}: vim_tiny,eager,b1,{scenario}: {words}"


def test_a_plain_scenario_has_nothing_to_add():
    assert scenario_note(made()) is None
