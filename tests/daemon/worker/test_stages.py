import io
import time

import msgspec
from worker_jobs import job

from benchd.daemon.measuring.protocol import Stage
from benchd.daemon.worker.child import StageClock


def test_a_stage_that_comes_twice_has_both_its_times(tmp_path):
    stages = StageClock(io.BytesIO(), job(tmp_path))
    for name in ("idle", "measure", "idle"):
        stages.enter(name)
        time.sleep(0.02)
    stages.leave()
    assert stages.stages().idle_s >= 0.04
    assert stages.stages().measure_s >= 0.02


def test_a_stage_that_goes_on_says_how_far_it_is(tmp_path):
    pipe = io.BytesIO()
    stages = StageClock(pipe, job(tmp_path))
    stages.enter("accuracy")
    stages.go_on("image 2 of 5")
    lines = [msgspec.json.decode(line, type=Stage) for line in pipe.getvalue().splitlines()]
    assert lines == [Stage("accuracy"), Stage("accuracy", "image 2 of 5")]
