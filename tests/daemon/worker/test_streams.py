"""Several streams of one model at the same time, as a worker runs them."""

import pytest
import torch
from worker_jobs import LONGER, TINY, job, run_here, user_module

from benchd.daemon.records import Variant
from benchd.daemon.worker import backends


@pytest.mark.parametrize("variant", ["eager", "onnxruntime"])
def test_each_stream_is_timed_and_they_overlap(tmp_path, variant):
    module = user_module(tmp_path, forward="time.sleep(0.002)") if variant == "eager" else None
    a_job = job(tmp_path, limits=LONGER, module=module, streams=3, variant=Variant.parse(variant), batch_size=2)
    outcome = run_here(a_job)
    process = outcome.process
    assert process.status == "ok", process.reason
    assert outcome.check.passed
    assert outcome.check.audited > 0
    assert list(process.raw) == ["total", "stream_1", "stream_2", "stream_3"]
    runs = [process.parts[f"stream_{number}"].runs for number in (1, 2, 3)]
    assert process.timing.runs == process.raw["total"].count == sum(runs)
    held = process.throughput_per_s * process.window.seconds / 2
    at_ends = held - sum(runs)  # two streams have a run on each end of the window; a short one may end just there
    assert (1e-3 if variant == "eager" else -1e-6) < at_ends < 4
    assert process.blocks.stop_reason == "cap"
    spent_s = sum(process.parts[f"stream_{number}"].mean_ms * runs[number - 1] for number in (1, 2, 3)) / 1e3
    assert spent_s > 1.5 * process.window.seconds  # at the same time


def test_a_wrong_answer_of_one_stream_fails_the_check(tmp_path):
    wrong = "import threading\n        off = threading.current_thread() is not threading.main_thread()"
    a_job = job(
        tmp_path, limits=LONGER, module=user_module(tmp_path, forward=f"{wrong}; images = images + off"), streams=2
    )
    outcome = run_here(a_job)
    assert outcome.check.verdict == "failed"
    assert "output_changed" in outcome.flags


def test_every_stream_is_loaded_as_the_first_one(tmp_path, monkeypatch):
    """In inference mode a copied model has parameters without versions, and Vim derives its weights in each replay."""
    modes, load = [], backends.load

    def noted(*arguments):
        modes.append(torch.is_inference_mode_enabled())
        return load(*arguments)

    monkeypatch.setattr(backends, "load", noted)
    outcome = run_here(job(tmp_path, limits=TINY, streams=2, variant=Variant("onnxruntime")))
    assert outcome.process.status == "ok", outcome.process.reason
    assert modes == [False, False]
