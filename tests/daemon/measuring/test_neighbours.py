"""A neighbour beside a measured case: real processes, its frames cut to the window, and what happens if it fails."""

import io
import os
import signal
import time
from pathlib import Path

import msgspec
import pytest
from sessions_made import Stages, session
from worker_jobs import TINY, job, user_module

from benchd.daemon.config import LimitsConfig, Suite
from benchd.daemon.errors import UsageError
from benchd.daemon.measuring import neighbours, plan, user_model
from benchd.daemon.measuring.plan import Machine
from benchd.daemon.measuring.protocol import Message, Stage
from benchd.daemon.measuring.supervisor import Supervisor
from benchd.daemon.records import Neighbour, decode, encode
from benchd.daemon.reporting.scenario_note import scenario_note
from benchd.daemon.sampling.child import SamplerProcess
from benchd.daemon.worker import __main__ as worker_main
from benchd.daemon.worker import accompanying
from benchd.daemon.worker.child import StageClock

CPU = Machine("cpu", has_cxx=True)


def planned(**fields):
    given = {"models": ["square"], "variants": ["eager"], "options": {"size": ["16"]}, "preset": "quick"}
    limits = LimitsConfig(warm_up_cap_s=0.2, measure_cap_s=0.5, check_images=1)
    return plan.plan([Suite(**given | fields)], limits, CPU)


def names(stages):
    return [stage for _, stage in stages.seen]


def logs(pids):
    """Return the names of the logs of these workers, without their run."""
    return [Path(f"/proc/{pid}/fd/1").readlink().name.partition(".")[2] for pid in pids]


def test_a_case_is_measured_beside_another(tmp_path, monkeypatch):
    plans = planned(beside="square,eager,size=16:50Hz", threads=[1])
    assert plans[0].case.case_id == "square,eager,b1,size=16,threads=1,beside=square_eager_b1_size=16_50Hz"
    stages, real, before = Stages(), neighbours.accompanied, []
    monkeypatch.setattr(neighbours, "accompanied", lambda *given: before.extend(names(stages)) or real(*given))
    watched, watch = [], SamplerProcess.watch
    monkeypatch.setattr(SamplerProcess, "watch", lambda *given: watched.append(logs(given[1:])) or watch(*given))
    with session(tmp_path, [stages]) as opened:
        supervisor = Supervisor(opened, plans)
        supervisor.run()
    assert watched == [["0.log", "0.beside.log"]]
    assert before[0] == "import"
    assert "measure" not in before
    assert "measure" in names(stages)
    (record,) = supervisor.records
    assert record.status == "ok", record.reason
    neighbour = record.beside
    assert (neighbour.case_id, neighbour.rate_hz) == ("square,eager,b1,size=16", 50.0)
    assert neighbour.releases == pytest.approx(50 * record.processes[0].window.seconds, abs=1)
    assert neighbour.timing.runs <= neighbour.releases
    assert neighbour.misses >= neighbour.releases - neighbour.timing.runs
    assert record.processes[0].raw["beside_latency"].count >= neighbour.timing.runs
    assert record.x_of_floor is None
    assert "x_of_floor" in record.missing
    missed = f"{neighbour.misses} of {neighbour.releases} missed"
    assert f"beside square,eager,b1,size=16 at 50 Hz, {missed}" in scenario_note(record)
    assert decode(encode(record)) == record


def test_the_measured_process_builds_and_checks_before_the_neighbour_starts(tmp_path):
    """An engine that is built beside other work has the kernels of other times, and is used again."""
    pipe, accompanied = io.BytesIO(), job(tmp_path, beside=Neighbour("square,eager,b1", 30.0))
    worker_main._work(msgspec.structs.replace(accompanied, waits=True), StageClock(pipe, accompanied))
    messages = [msgspec.json.decode(line, type=Message) for line in pipe.getvalue().splitlines()]
    names = [message.name for message in messages if isinstance(message, Stage)]
    assert names.count("ready") == 1
    alone = names[: names.index("ready")]
    assert {"build", "export", "load", "check"} <= set(alone)
    assert not {"idle", "warm_up", "measure"} & set(alone)


def test_one_that_fails_alone_starts_no_neighbour(tmp_path, monkeypatch):
    monkeypatch.setattr(neighbours, "accompanied", lambda *given: pytest.fail("it has nothing to accompany"))
    own = user_model.module(user_module(tmp_path, build="raise ValueError('broke')"), [])
    suite, limits = Suite(variants=["eager"], beside="square,eager:30Hz", preset="quick"), LimitsConfig(check_images=1)
    with session(tmp_path) as opened:
        supervisor = Supervisor(opened, plan.plan([suite], limits, CPU, own))
        supervisor.run()
    (record,) = supervisor.records
    assert record.status == "failed"
    assert "broke" in record.reason


def test_a_neighbour_that_fails_fails_the_case(tmp_path):
    broken = job(tmp_path, module=user_module(tmp_path, build="raise ValueError('broke')"), limits=TINY)
    with session(tmp_path) as opened, opened.measuring():
        outcome = neighbours.accompanied(opened, broken, lambda pid: pytest.fail("nothing is measured then"))
    assert outcome.process.status == "failed"
    assert "its neighbour own.net.build,eager,b1,threads=1: " in outcome.process.reason
    assert "broke" in outcome.process.reason


@pytest.mark.parametrize(
    ("beside", "words"),
    [
        ("vim_tiny,eager", "expected a case and its rate, such as vim_tiny,custom:30Hz"),
        (":30Hz", "expected a case and its rate"),
        ("square,eager:0Hz", "expected a case and its rate"),
        ("square,eager:30fps", "expected a case and its rate"),
        ("snn_onepass:30Hz", "give a single case by adding the variant, as in snn_onepass,eager,b64 or"),
        ("squore,eager:30Hz", "did you mean 'square'"),
        ("square,eager,offline:30Hz", "leave out scenario, direction and streams"),
        ("square,eager,b1,streams=2:30Hz", "leave out scenario, direction and streams"),
    ],
)
def test_what_is_no_neighbour_is_refused(beside, words):
    with pytest.raises(UsageError, match=words):
        planned(beside=beside)


def test_frames_go_on_until_the_end_and_the_newest_is_used():
    class Slow:
        runs = 0

        def __call__(self, index):
            time.sleep(0.03)
            self.runs += 1
            if self.runs == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            return (1,)

    with accompanying.until_sigterm() as is_over:
        values = accompanying.accompany(Slow(), 100.0, is_over)
    assert len(values["released"]) == len(values["latency"]) == 5
    gaps = [after - before for before, after in zip(values["released"], values["released"][1:], strict=False)]
    assert all(gap % 10_000_000 == 0 and gap >= 20_000_000 for gap in gaps)
    assert min(values["latency"]) >= 30_000_000
