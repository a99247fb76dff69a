"""Frames at a rate, idle gaps, cold starts and sustained runs: the loops alone, then as a worker runs them."""

import time
from array import array

import pytest
from worker_jobs import LONGER, job, measured, run, run_here

from benchd.daemon.records import Window
from benchd.daemon.worker.scenarios import periodic, sustained, wake_up


class Takes:
    """A step that takes at least so long, and notes when it began."""

    parts = ("total",)
    runs = 1

    def __init__(self, seconds=0.0):
        self.seconds, self.began = seconds, []

    def __call__(self, index):
        self.began.append(time.monotonic())
        time.sleep(self.seconds)
        return (round(1e9 * (time.monotonic() - self.began[-1])),)


def test_frames_are_never_run_before_their_release():
    values, deadlines = periodic.periodic(Takes(), 0.6)
    assert list(values) == ["30_hz", "10_hz", "60_hz"]
    assert [deadline.releases for deadline in deadlines] == [6, 2, 12]
    assert all(latency >= 0 for latencies in values.values() for latency in latencies)


def test_a_model_that_is_too_slow_misses_and_drops_frames():
    """At 60 Hz a run of 40 ms outlasts two periods: every frame that runs is late, and others are dropped."""
    values, deadlines = periodic.periodic(Takes(0.04), 0.6)
    fastest = deadlines[2]
    assert fastest.misses == fastest.releases == 12
    assert len(values["60_hz"]) < 12
    assert fastest.worst_lateness_ms >= 40 - 1000 / 60
    assert min(values["60_hz"]) >= 40e6


def test_wake_up_waits_before_each_run_and_goes_round_the_gaps():
    step = Takes()
    values = wake_up.wake_up(step, 0.01)
    assert list(values) == ["gap_1000_ms", "gap_100_ms", "gap_10_ms", "gap_0_ms"]
    assert [len(column) for column in values.values()] == [1] * 4
    assert step.began[1] - step.began[0] >= 0.1


def test_slices_are_the_medians_of_equal_parts_of_the_time():
    values = array("q", [1_000_000] * 100 + [2_000_000] * 50)
    parts = sustained.slices(values, Window(7, 7 + 200_000_000))
    assert [part.median_ms for part in parts] == [1.0] * 10 + [2.0] * 10
    assert (parts[0].start_s, parts[-1].end_s) == (0.0, pytest.approx(0.2))


def test_a_part_without_a_run_is_left_out():
    parts = sustained.slices(array("q", [150_000_000, 50_000_000]), Window(0, 200_000_000))
    assert [part.start_s for part in parts] == [0.0, pytest.approx(0.15)]


@pytest.fixture
def scenario(tmp_path):
    """Return a function that runs a scenario, by default in this process, and returns its outcome."""

    def ran(name, by=measured):
        outcome = by(job(tmp_path, limits=LONGER, scenario=name))
        assert outcome.check.passed, outcome.process.reason
        return outcome

    return ran


def test_periodic_as_a_worker_runs_it(scenario):
    process = scenario("periodic").process
    assert list(process.parts) == list(process.raw) == ["30_hz", "10_hz", "60_hz"]
    assert process.timing == process.parts["30_hz"]
    assert [deadline.rate_hz for deadline in process.deadlines] == [30, 10, 60]
    assert process.window.seconds >= 0.3
    assert process.throughput_per_s is None


def test_wake_up_as_a_worker_runs_it(scenario):
    process = scenario("wake_up").process
    assert process.timing == process.parts["gap_1000_ms"]
    assert process.window.seconds >= 1.11


def test_a_cold_start_counts_from_the_spawn_to_the_first_output(scenario):
    process = scenario("cold_start", run).process
    stages = process.stages
    reached = stages.spawn_s + stages.import_s + stages.build_s + stages.load_s + stages.first_run_s
    assert process.timing.median_ms >= 1e3 * reached
    assert process.timing.median_ms == pytest.approx(1e3 * process.window.seconds)
    assert (process.timing.runs, process.timing.low_ms, process.warm_up, process.raw) == (1, None, None, {})
    assert min(stages.second_run_s, stages.check_s) > 0


def test_sustained_keeps_the_course_of_the_run(scenario):
    process = scenario("sustained").process
    assert 2 <= len(process.timeline) <= sustained.SLICES
    assert process.timeline[0].start_s == 0.0
    assert process.timeline[-1].end_s <= process.window.seconds + 1e-9  # on a busy machine no run begins in the last
    assert process.blocks.stop_reason == "cap"


@pytest.mark.parametrize("case", [{}, {"streams": 2}, {"scenario": "periodic"}], ids=str)
def test_where_the_raw_times_cannot_be_written_the_rest_of_the_process_is_kept(case, tmp_path):
    (tmp_path / "raw").touch()
    process = run_here(job(tmp_path, **case)).process
    assert process.status == "failed"
    assert "raw" in process.reason
    assert process.window
    assert process.timing
    assert bool(process.blocks) == ("scenario" not in case)
