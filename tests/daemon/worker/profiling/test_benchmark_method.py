import re

from profile_jobs import own_job

from benchd.daemon.worker.profiling import benchmark
from benchd.daemon.worker.profiling.work import open_work


def test_a_step_is_timed_without_a_profiler_as_often_as_asked_for(tmp_path):
    runs = 101  # of 10 ms each, more than the least time
    timings = benchmark.run(open_work(own_job(tmp_path, forward="time.sleep(0.01)", runs=runs)))
    assert (timings.step.runs, timings.forward.runs) == (runs, runs)
    assert 1e7 <= timings.step.min_ns <= timings.step.median_ns <= timings.step.max_ns
    assert 0 < timings.step.low_ns <= timings.step.median_ns <= timings.step.high_ns
    assert timings.throughput_per_s <= 2 / 0.01
    assert timings.backward is None
    assert timings.overhead is not None


def test_forward_and_backward_are_timed_apart(tmp_path):
    backward = "images = images.requires_grad_(); images.register_hook(lambda grad: time.sleep(0.004))"
    timings = benchmark.run(open_work(own_job(tmp_path, workload="train", forward=backward)))
    assert timings.forward.runs == timings.backward.runs >= 3
    assert timings.backward.median_ns >= 4e6
    assert timings.step.median_ns >= 4e6


def test_no_plain_step_follows_a_profiled_one(tmp_path, capsys):
    """On a GPU what the profiler leaves attached would slow it."""
    tells = "print(int(torch._C._autograd._profiler_enabled()), end='')"
    benchmark.run(open_work(own_job(tmp_path, forward=tells)))
    assert re.fullmatch("0+1+", capsys.readouterr().out)
