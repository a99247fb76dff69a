"""Processes that import torch side by side and are measured one after the other: real workers in every test."""

import os
import signal
import sys
import threading
from contextlib import closing

import psutil
import pytest
from sessions_made import session
from waiting import wait_for
from worker_jobs import user_module

from benchd.daemon.config import LimitsConfig
from benchd.daemon.measuring import paired, plan
from benchd.daemon.measuring.plan import Machine
from benchd.daemon.measuring.session import Sink
from benchd.daemon.measuring.supervisor import Supervisor, Turn
from benchd.daemon.measuring.user_model import UserModule

CPU = Machine("cpu", has_cxx=True)
LIMITS = LimitsConfig(warm_up_cap_s=0.1, measure_cap_s=0.1, check_images=1)
ALONE = """
    import pathlib, psutil, subprocess
    known = pathlib.Path(__file__).with_name("started")
    before = [one for one in psutil.process_iter() if known.exists() and one.pid == int(known.read_text())]
    for _ in range(100):  # a process that is killed takes a moment to die
        alive = [one for one in before if one.is_running() and one.status() != "zombie"]
        time.sleep(0.1 if alive else 0)
    assert not alive, "the one before left a process beside this one"
    known.write_text(str(subprocess.Popen(["sleep", "600"]).pid))
"""


class Stages(Sink):
    """Keeps the stages of all processes in order."""

    def __init__(self):
        self.seen = []

    def stage(self, planned, process, stage, percent=None):
        self.seen.append((process, stage))


@pytest.fixture
def opened(tmp_path):
    stages = Stages()
    with session(tmp_path, [stages]) as one, one.measuring():
        yield one, stages


def entry(case="square,eager,b1,size=16", own=None):
    (planned,) = plan.plan([plan.suite_of(case, "quick")], LIMITS, CPU, own)
    return planned


def turns(planned, count=2, **fields):
    return [Turn(planned, f"turn.{number}", number, **fields) for number in range(count)]


def run(opened, planned, **fields):
    with closing(Supervisor(opened[0], [planned]).in_turn(turns(planned, **fields))) as running:
        return list(running)


def in_order(seen):
    """Return whether each process had ended before the next one did anything."""
    numbers = [number for number, _ in seen]
    return numbers == sorted(numbers) and len(set(numbers)) > 1


def test_both_import_torch_before_the_first_is_measured_and_measure_one_after_the_other(opened):
    first, second, third = run(opened, entry(), count=3)
    assert [one.process.status for one in (first, second, third)] == ["ok"] * 3
    assert opened[1].seen[:2] == [(0, "import"), (1, "import")]
    assert in_order(opened[1].seen[2:])
    assert first.process.window.end_ns < second.process.window.start_ns


def test_what_the_first_left_running_does_not_run_beside_the_second(opened, tmp_path):
    path = user_module(tmp_path, build=ALONE)
    own = UserModule.at(path, [])
    outcomes = run(opened, entry(f"{own.model},eager,b1", own))
    assert [(one.process.status, one.process.reason) for one in outcomes] == [("ok", None)] * 2


def test_a_cold_start_and_an_older_benchd_take_turns_whole(opened, tmp_path):
    older = tmp_path / "older"
    older.write_text(f'#!/bin/sh\ncase "$2" in *waits*) exit 1;; esac\nexec {sys.executable} "$@"\n')
    older.chmod(0o755)
    assert paired._may_wait(sys.executable)
    assert not paired._may_wait(str(older))
    run(opened, entry(), may_wait=False)
    assert in_order(opened[1].seen)
    opened[1].seen.clear()
    run(opened, entry("square,eager,b1,cold_start,size=16"))
    assert in_order(opened[1].seen)


def test_one_that_dies_as_it_waits_fails_alone(opened):
    supervisor = Supervisor(opened[0], [entry()])
    with closing(supervisor.in_turn(turns(entry()))) as running:
        assert next(running).process.status == "ok"
        (waiting,) = children()
        os.kill(waiting, signal.SIGKILL)
        outcome = next(running)
    assert outcome.process.status == "failed"
    assert "killed by SIGKILL" in outcome.process.reason


def test_who_stops_early_leaves_no_process_behind(opened):
    supervisor = Supervisor(opened[0], [entry()])
    with closing(supervisor.in_turn(turns(entry()))) as running:
        next(running)
        assert children()
    assert not children()


def test_an_interrupt_ends_both(opened, monkeypatch):
    begun = threading.Event()
    monkeypatch.setattr(opened[1], "stage", lambda *given: begun.set() if given[2] == "build" else None)
    pressed = threading.Thread(target=lambda: begun.wait() and os.kill(os.getpid(), signal.SIGINT))
    pressed.start()
    outcomes = run(opened, entry())
    pressed.join()
    assert [one.process.status for one in outcomes] == ["aborted", "aborted"]
    wait_for(lambda: not children())


def children():
    """Return the pids of this process's workers."""
    return [one.pid for one in psutil.Process().children() if "benchd.daemon.worker" in one.cmdline()]
