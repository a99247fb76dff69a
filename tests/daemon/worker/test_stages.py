import io
import time

from worker_jobs import job

from benchd.daemon.worker.stages import StageClock


def test_a_stage_that_comes_twice_has_both_its_times(tmp_path):
    stages = StageClock(io.BytesIO(), job(tmp_path))
    for name in ("idle", "measure", "idle"):
        stages.enter(name)
        time.sleep(0.02)
    stages.leave()
    assert stages.stages().idle_s >= 0.04
    assert stages.stages().measure_s >= 0.02
