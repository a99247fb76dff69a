"""The line that says of a scenario what one median does not."""

import msgspec
import pytest
from records_made import made, requests, timing

from benchd.daemon.records import (
    Case,
    Deadlines,
    Load,
    Neighbour,
    NeighbourResult,
    ProcessResult,
    Stages,
    TimeSlice,
)
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


REQUESTS = requests(asked=700, late=6, dropped=4, noticed_ms=0.25, busy_share=0.4)
COUNTS = "700 asked = 690 in time + 6 late + 4 dropped, p50 5 p90 6 ms, busy 40 %, woken after 0.25 ms"


@pytest.mark.parametrize(
    ("load", "met", "words"),
    [
        (Load(rate_hz=30.0), None, "30 requests per second"),
        (Load(rate_hz=30.0, deadline_ms=33.0), True, "30 requests per second meet 33 ms at p99"),
        (Load(rate_hz=30.0, deadline_ms=33.0), False, "30 requests per second miss 33 ms at p99"),
        (Load(rate_hz=30.0, deadline_ms=33.0), None, "30 requests per second are too few to judge 33 ms at p99"),
        (Load(deadline_ms=33.0, percentile=90.0), True, "at most 30 requests per second meet 33 ms at p90"),
        (Load(deadline_ms=33.0), False, "no rate found, 30 requests per second miss 33 ms at p99"),
    ],
)
def test_a_server_tells_its_rate_and_what_became_of_each_request(load, met, words):
    record = made(
        case=Case(model="vim_tiny", scenario="server", load=load),
        requests=msgspec.structs.replace(REQUESTS, met=met),
        timing=timing(5.0, p90_ms=6.0),
    )
    assert scenario_note(record).endswith(f": {words}: {COUNTS}")


@pytest.mark.parametrize(
    ("dropped", "words"),
    [(60, "p50 5 p90 6 ms, p99 dropped, busy"), (350, "p50 p90 p99 dropped, busy"), (5, "p50 5 p90 6 ms, busy")],
)
def test_a_percentile_of_a_server_that_is_a_dropped_request_says_so(dropped, words):
    """The streams' times are of answered requests, which a dropped one is not among."""
    record = made(
        case=Case(model="vim_tiny", scenario="server", load=Load(rate_hz=30.0), streams=2),
        requests=msgspec.structs.replace(REQUESTS, answered=694 - dropped, dropped=dropped),
        timing=timing(5.0, p90_ms=6.0 if dropped < 70 else None),
        parts={"stream_1": timing(4.0)},
    )
    assert f"{dropped} dropped, {words}" in scenario_note(record)
    assert "stream 1" not in scenario_note(record)


def test_each_stream_and_the_neighbour_tell_their_percentiles():
    record = made(
        case=Case(model="vim_tiny", streams=2, beside=Neighbour("square,eager,b1", 30.0)),
        parts={"stream_1": timing(4.0, p90_ms=5.0), "stream_2": timing(6.0), "compute": timing(1.0)},
        beside=NeighbourResult(case_id="square,eager,b1", rate_hz=30.0, releases=90, misses=1, timing=timing(7.0)),
    )
    assert scenario_note(record).endswith(
        ": stream 1 p50 4 p90 5 ms, stream 2 p50 6 ms; beside square,eager,b1 at 30 Hz, 1 of 90 missed, p50 7 ms"
    )


def test_a_pipeline_tells_the_share_of_each_stage():
    parts = {"decode": timing(6.0), "model": timing(4.0), "copy": timing(0.0)}
    record = made(case=Case(model="vim_tiny", scenario="pipeline"), timing=timing(10.0), parts=parts)
    assert scenario_note(record).endswith(": decode 6 ms (60 %), copy 0 ms (0 %), model 4 ms (40 %)")


def test_figures_that_other_programs_disturbed_say_so():
    case = Case(model="vim_tiny", scenario="wake_up")
    record = made(case=case, parts={"gap_0_ms": timing(4.0)}, flags=["busy_machine", "two_levels"])
    assert scenario_note(record).endswith(": 4 ms after 0 ms idle (busy machine)")
