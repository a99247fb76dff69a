"""Several streams of one model at the same time, as a worker runs them."""

import time
from contextlib import nullcontext, suppress
from threading import Barrier, BrokenBarrierError

import pytest
import torch
from worker_jobs import LONGER, job, measured, run_here, user_module

from benchd.daemon.records import Variant
from benchd.daemon.verdicts.statistics import StopRule, block_estimate
from benchd.daemon.worker.streams import Streams, back_to_back


@pytest.mark.parametrize("variant", ["eager", "onnxruntime"])
def test_each_stream_is_timed_and_they_overlap(tmp_path, variant):
    module = user_module(tmp_path, forward="time.sleep(0.002)") if variant == "eager" else None
    a_job = job(tmp_path, limits=LONGER, module=module, streams=3, variant=Variant.parse(variant), batch_size=2)
    outcome = measured(a_job)
    process = outcome.process
    assert outcome.check.passed
    assert outcome.check.audited > 0
    assert list(process.raw) == ["total", "stream_1", "stream_2", "stream_3"]
    runs = [process.parts[f"stream_{number}"].runs for number in (1, 2, 3)]
    assert process.timing.runs == process.raw["total"].count == sum(runs)
    expected_runs = process.throughput_per_s * process.window.seconds / 2
    # two streams have a run on each end of the window; a short one may end just there
    at_ends = expected_runs - sum(runs)
    assert (1e-3 if variant == "eager" else -1e-6) < at_ends < 4
    assert process.blocks.stop_reason == "cap"
    assert process.timing.median_ms == pytest.approx(block_estimate(process.blocks.medians_ms)[0])
    spent_s = sum(process.parts[f"stream_{number}"].mean_ms * runs[number - 1] for number in (1, 2, 3)) / 1e3
    assert spent_s > 1.1 * process.window.seconds  # at the same time


class Timed:
    """A step that takes a little longer than it says, in rounds with those of the other streams."""

    parts = ("total",)
    runs = 1

    def __init__(self, value_ns, rounds):
        self.value_ns, self.rounds = value_ns, rounds

    def __call__(self, index):
        with suppress(BrokenBarrierError):  # another stream has ended
            self.rounds.wait(2.0)
        time.sleep(self.value_ns / 1e9)
        return (self.value_ns,)


def test_the_blocks_are_of_the_runs_of_all_streams():
    rounds = Barrier(3)
    steps = [Timed(value_ns, rounds) for value_ns in (5_000_000, 6_000_000, 6_000_000)]
    rule = StopRule(min_blocks=3, min_block_runs=1, min_block_s=0.05, cap_s=0.3, half_width=None)
    with Streams(steps, torch.device("cpu"), nullcontext) as streams:
        summary = back_to_back(streams, rule, 0.0)[0].summary
    assert summary.block_medians_ns == [6e6] * summary.count
    assert summary.median_ns == 6e6


def test_a_wrong_answer_of_one_stream_fails_the_check(tmp_path):
    wrong = "import threading\n        off = threading.current_thread() is not threading.main_thread()"
    a_job = job(
        tmp_path, limits=LONGER, module=user_module(tmp_path, forward=f"{wrong}; images = images + off"), streams=2
    )
    outcome = run_here(a_job)
    assert outcome.check.verdict == "failed"
    assert "output_changed" in outcome.flags
