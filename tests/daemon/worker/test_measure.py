"""The timed loop and the steps it times: nothing lost, the right mode, the exact window, raw values on disk."""

import gc
import hashlib
import math
import time
from array import array
from collections import Counter

import msgspec
import pytest
import torch
from test_server import Slept
from torch import nn
from worker_jobs import TINY, as_loaded, changed, job, run_here, user_module

from benchd.daemon.measuring.protocol import Compare
from benchd.daemon.verdicts import timings
from benchd.daemon.verdicts.statistics import Interval, StopRule
from benchd.daemon.worker import measure, steps
from benchd.daemon.worker.scenarios import offline

RULE = StopRule(min_blocks=3, min_block_runs=2, min_block_s=0.001, cap_s=0.05, half_width=None)


class Scripted:
    """A step whose durations are given, in two parts; the clock it moves is its own."""

    parts = ("total", "forward")
    runs = 1

    def __init__(self, durations_ns):
        self.durations_ns = durations_ns
        self.indices = []
        self.collecting = []

    def __call__(self, index):
        self.indices.append(index)
        self.collecting.append(gc.isenabled())
        duration = self.durations_ns[index % len(self.durations_ns)]
        return duration, duration // 2


def test_every_run_is_kept_in_order_and_nothing_is_collected_meanwhile():
    step = Scripted([500_000, 700_000])
    before = time.monotonic_ns()
    measured = measure.measure(step, RULE)
    count = len(step.indices)
    assert step.indices == list(range(count))
    assert list(measured.values_ns["total"]) == [500_000, 700_000] * (count // 2) + [500_000] * (count % 2)
    assert list(measured.values_ns["forward"]) == [value // 2 for value in measured.values_ns["total"]]
    assert not any(step.collecting)
    assert gc.isenabled()
    assert before <= measured.window.start_ns < measured.window.end_ns <= time.monotonic_ns()
    assert measured.summary.runs == count
    assert measured.summary.stop_reason == "cap"


class Slow(Scripted):
    def __call__(self, index):
        time.sleep(0.002)
        return super().__call__(index)


def test_the_load_goes_on_around_the_window_and_is_not_in_it():
    step, before = Slow([2_000_000]), time.monotonic_ns()
    measured = measure.measure(step, RULE, hold_s=0.1)
    assert measured.window.start_ns - before >= 1e8
    assert time.monotonic_ns() - measured.window.end_ns >= 1e8
    assert len(step.indices) > measured.summary.runs


def test_the_window_is_from_the_start_of_the_first_block_to_the_end_of_the_last():
    """Without the last look of the rule, which sorts all values while nothing runs."""
    measured = measure.measure(Slow([2_000_000]), RULE)
    assert len(measured.bounds_ns) == measured.summary.count + 1
    assert measured.bounds_ns == sorted(measured.bounds_ns)
    assert (measured.bounds_ns[0], measured.ended_ns[-1]) == (measured.window.start_ns, measured.window.end_ns)
    assert measured.bounds_ns[-1] == measured.ended_ns[-1]


def test_a_value_that_stands_for_many_runs_counts_for_as_much_time():
    chunk = Scripted([100_000])
    chunk.runs = 10
    measured = measure.measure(chunk, RULE)
    assert measured.summary.runs_per_block == 2  # two chunks of ten runs of 0.1 ms are longer than a block's 1 ms


def test_a_block_whose_threads_share_a_cpu_after_a_pause_does_not_move_the_centre():
    step = Slow([2_000_000] * 4 + [4_000_000])
    rule = StopRule(min_blocks=51, min_block_runs=1, min_block_s=0.001, cap_s=0.1, half_width=None)
    alone = measure.measure(step, rule).summary
    assert alone.median_ns == pytest.approx(2_400_000, rel=0.05)
    in_turns = measure.measure(step, rule, wait_for_turn=lambda: None).summary
    assert (in_turns.median_ns, in_turns.interval_ns) == (2_000_000, Interval(2_000_000, 2_000_000))


def test_a_stall_in_a_block_of_two_runs_does_not_move_the_centre():
    """A block ends with the run that stalls, so that beside a busy program a third of them would have two runs."""
    step = Slow([2_000_000, 18_000_000, 2_000_000])
    rule = StopRule(min_blocks=51, min_block_runs=1, min_block_s=0.006, cap_s=0.1, half_width=None)
    summary = measure.measure(step, rule, wait_for_turn=lambda: None).summary
    assert summary.runs_per_block % 2 == 1
    assert summary.median_ns == 2_000_000


def test_percentiles_appear_with_enough_runs_only():
    def timing(count):
        return timings.timing(array("q", range(1, count + 1)), None, count / 2)

    assert (timing(63).p90_ms, timing(661).p99_ms) == (None, None)
    assert timing(64).p90_ms == pytest.approx(58e-6, rel=0.02)
    assert timing(662).p99_ms == pytest.approx(655e-6, rel=0.01)
    assert timing(662).p99_ms <= timing(662).p99_upper_ms <= timing(662).max_ms
    assert timing(10).low_ms is None
    assert timing(6635).p999_ms is None
    assert timing(6636).p999_ms == pytest.approx(6629e-6, rel=0.01)


def test_dropped_requests_are_later_than_every_answer():
    """Of 1000 requests 60 are dropped: p90 is that of all, p95 is beyond the answers."""
    timing = timings.request_timing([*range(1, 941), *[math.inf] * 60])
    assert timing.p90_ms == pytest.approx(900e-6, rel=0.01)
    assert (timing.p95_ms, timing.p99_ms, timing.p99_upper_ms) == (None, None, None)
    assert (timing.runs, timing.max_ms) == (940, 940e-6)
    assert (timing.median_ms, timing.low_ms, timing.high_ms) == (500.5e-6, None, None)
    assert timings.request_timing(range(1, 941)) == timings.part_timing(range(1, 941))


def test_the_median_and_its_interval_count_the_requests_dropped_among_the_others():
    """Of each ten requests four are dropped, so that the median is between the fifth and the sixth answer."""
    timing = timings.request_timing([1.0, math.inf, 2.0, math.inf, 3.0, math.inf, 4.0, math.inf, 5.0, 6.0] * 100)
    assert (timing.median_ms, timing.low_ms, timing.high_ms) == (5.5e-6, 5.5e-6, 5.5e-6)
    assert timings.request_timing([1.0, 2.0, *[math.inf] * 2]).low_ms is None


def test_raw_times_are_little_endian_int64_with_their_hash(tmp_path):
    files = measure.write_raw({"total": array("q", [1, 2**40])}, tmp_path, "run.0")
    body = (tmp_path / files["total"].path).read_bytes()
    assert body == (1).to_bytes(8, "little") + (2**40).to_bytes(8, "little")
    assert (files["total"].sha256, files["total"].count) == (hashlib.sha256(body).hexdigest(), 2)


@pytest.fixture
def slept(monkeypatch):
    """A time that passes only while a step sleeps."""
    monkeypatch.setattr(measure, "time", slept := Slept())
    return slept


def test_warm_up_settles_on_a_steady_step_and_gives_up_on_a_drifting_one(slept):
    def sleeping(growth):
        def step(index):
            slept.sleep(0.001)
            return (1_000_000 * (1 + growth * index),)

        return step

    steady = measure.warm_up(sleeping(0.0), cap_s=60.0)
    assert steady.steady
    assert abs(steady.slope_share) < 0.005
    drifting = measure.warm_up(sleeping(0.01), cap_s=5.0)
    assert not drifting.steady
    assert drifting.seconds >= 5.0


def test_warm_up_ends_with_the_run_in_which_its_cap_passes(slept):
    def step(index):
        slept.sleep(2.0)
        return (2_000_000_000,)

    assert [measure.warm_up(step, cap_s).runs for cap_s in (3.0, 1.0, 0.0)] == [2, 1, 0]


class Seen(nn.Module):
    """Keeps which inputs it saw, and in which mode."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.seen, self.modes = [], []

    def forward(self, images):
        self.seen.append(images[:, 0].tolist())
        self.modes.append((torch.is_inference_mode_enabled(), self.training))
        return self.fc(images)


def test_batches_are_whole_and_rotate():
    module = Seen()
    images = torch.arange(7.0)[:, None].expand(7, 4)
    pool = steps.batches(images, 2, as_loaded(module))
    step = steps.SingleInference(as_loaded(module), pool)
    for index in range(4):
        (nanoseconds,) = step(index)
        assert nanoseconds > 0
    assert module.seen == [[0, 1], [2, 3], [4, 5], [0, 1]]


@pytest.mark.parametrize("one_input", [False, True])
def test_the_runs_of_a_comparison_read_many_batches_or_one_as_asked(one_input, tmp_path):
    sums_file = tmp_path / "seen"
    module = user_module(
        tmp_path, forward=f"with open('{sums_file}', 'a') as out: print(images.sum().item(), file=out)"
    )
    outcome = run_here(changed(job(tmp_path, module=module), recipe=Compare(repeats=False, one_input=one_input)))
    assert outcome.process.status == "ok", outcome.process.reason
    batches = Counter(sums_file.read_text().splitlines()[-outcome.process.timing.runs :])
    assert (max(batches.values()) > 0.8 * batches.total()) == one_input  # an audit reads others behind them


def test_the_runs_of_a_comparison_read_floats_drawn_as_asked(tmp_path):
    seen = tmp_path / "seen"
    module = user_module(tmp_path, forward=f"with open('{seen}', 'a') as out: print(images.min().item(), file=out)")
    found = run_here(changed(job(tmp_path, module=module), recipe=Compare(repeats=False, span=(2.0, 3.0))))
    assert found.process.status == "ok", found.process.reason
    assert all(2 <= float(line) < 3 for line in seen.read_text().splitlines()[-found.process.timing.runs :])


def test_offline_does_a_chunk_and_returns_the_mean_of_one():
    module = Seen()
    step = offline.Chunk(as_loaded(module), [torch.zeros(2, 4), torch.ones(2, 4)], runs=3)
    start = time.monotonic_ns()
    (first,) = step(0)
    assert 0 < 3 * first <= time.monotonic_ns() - start
    step(1)
    assert [call[0] for call in module.seen] == [0, 1, 0, 1, 0, 1]
    assert not step.waits()  # on a CPU that is known


def test_the_throughput_of_offline_is_that_of_the_timed_chunks(tmp_path):
    """Before every second chunk one inference is not timed: of chunks of two it would be a fifth of all."""
    module = user_module(tmp_path, forward="time.sleep(0.06)")
    rule = msgspec.structs.replace(TINY.rule, cap_s=1.5)
    limits = msgspec.structs.replace(TINY, rule=rule)
    process = run_here(job(tmp_path, module=module, limits=limits, scenario="offline", batch_size=3)).process
    assert process.timing.runs >= 5
    assert process.throughput_per_s == pytest.approx(3e3 / process.timing.mean_ms, rel=1e-6)


def test_training_leaves_fresh_gradients_and_its_parts_make_the_whole():
    module = Seen()
    step = steps.Training(module, torch.device("cpu"), [torch.ones(2, 4)], seed=0)
    total, forward, backward = step(0)
    assert total == forward + backward
    once = module.fc.weight.grad.clone()
    module.fc.weight.grad.fill_(1e6)
    step(0)
    assert module.fc.weight.grad.abs().max() < 10
    assert once.abs().sum() > 0
    assert module.modes[0] == (False, True)


def test_a_model_without_parameters_trains_its_input():
    step = steps.Training(nn.Tanh(), torch.device("cpu"), [torch.ones(2, 3, 3)], seed=0)
    total, forward, backward = step(0)
    assert min(total, forward, backward) > 0
