"""The conditions of a run are told as they are: threads, CPUs and the wall clock."""

import os
import time

from fake_clock import FakeClock
from records_made import written

from benchd.daemon.verdicts import when

NET = """
import torch
from torch import nn
torch.set_num_threads(1)

class Net(nn.Linear):
    input_shape = (8,)

    def forward(self, images):
        {forward}
        return super().forward(images)

def build():
    torch.manual_seed(0)
    return Net(8, 8)
"""


def with_threads(once, tmp_path, count, forward="pass"):
    (tmp_path / "net.py").write_text(NET.format(forward=forward))
    done = once("--module", "net.py:build", "--variants", "eager", "--threads", str(count))
    assert done.returncode == 0, done.stderr
    return written(tmp_path)[-1], done.stdout


def test_the_threads_asked_for_run_whatever_the_module_sets(once, tmp_path):
    record, _ = with_threads(once, tmp_path, 2)
    assert record.environment.threads == 2
    assert "other_threads" not in record.flags


def test_threads_that_the_module_sets_in_each_run_are_told(once, tmp_path):
    record, output = with_threads(once, tmp_path, 2, "torch.set_num_threads(1)")
    assert record.environment.threads == 1
    assert "other_threads" in record.flags
    assert "threads: own.net.build,eager,b1,threads=2: 1 ran, not 2: the model sets its own" in output


def test_threads_that_share_a_cpu_are_told(once, tmp_path):
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})
    try:
        record, output = with_threads(once, tmp_path, 2)
    finally:
        os.sched_setaffinity(0, mine)
    assert (record.environment.threads, record.environment.cpu_count) == (2, 1)
    assert "shared_cpus" in record.flags
    assert "threads: own.net.build: 2 threads on the 1 CPU it may use" in output


def test_a_clock_that_was_never_set_is_told(once_apart, tmp_path):
    clock = FakeClock(tmp_path)
    clock.set(60.0 - time.time())
    done = once_apart("--models", "square", "--option", "size=16", "--variants", "eager", **clock.environment)
    assert done.returncode == 0, done.stderr
    (record,) = written(tmp_path)
    assert when.is_unset(record.t_wall)
    assert "clock_not_set" in record.flags
    assert "clock: never set (1970-01-01T" in done.stdout
