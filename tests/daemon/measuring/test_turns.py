"""Processes that import torch side by side and are measured one after the other, or block by block: real workers."""

import os
import random
import signal
from contextlib import closing
from dataclasses import replace
from itertools import pairwise

import msgspec
import psutil
import pytest
from forked import WORKER
from sessions_made import Stages, session
from worker_jobs import user_module

from benchd.daemon.config import LimitsConfig
from benchd.daemon.measuring import paired, plan, process, user_model
from benchd.daemon.measuring.paired import Request
from benchd.daemon.measuring.plan import Machine
from benchd.daemon.measuring.protocol import Compare
from benchd.daemon.measuring.supervisor import Supervisor, Turn, interleaved_rule

CPU = Machine("cpu", has_cxx=True)
LIMITS = LimitsConfig(warm_up_cap_s=0.1, measure_cap_s=0.1, check_images=1)


@pytest.fixture
def opened(tmp_path):
    stages = Stages()
    with session(tmp_path, [stages]) as bench_session, bench_session.measuring():
        yield bench_session, stages


def entry(case="square,eager,b1,size=16", own=None):
    (planned,) = plan.plan([plan.suite_of(case, "quick")], LIMITS, CPU, own)
    return planned


def turns(planned, count=2):
    return [Turn(planned, f"turn.{number}", number, Compare()) for number in range(count)]


def as_given(turn):
    return turn


def run(opened, planned, count=2):
    with closing(Supervisor(opened[0], [planned]).in_turn(turns(planned, count), as_given)) as running:
        return [outcome for _, outcome in sorted(running, key=lambda each: each[0].name)]


def in_order(seen):
    """Return whether each process had ended before the next one did anything."""
    numbers = [number for number, _ in seen]
    return numbers == sorted(numbers) and len(set(numbers)) > 1


def test_both_import_torch_before_the_first_is_measured_and_measure_one_after_the_other(opened):
    first, second, third = run(opened, entry(), count=3)
    assert [outcome.process.status for outcome in (first, second, third)] == ["ok"] * 3
    assert opened[1].seen[:2] == [(0, "import"), (1, "import")]
    assert in_order(opened[1].seen[2:])
    assert first.process.window.end_ns < second.process.window.start_ns


def test_a_cold_start_takes_its_turn_whole(opened):
    sides = [
        Turn(entry(), "turn.0", 0, Compare()),
        Turn(entry("square,eager,b1,cold_start,size=16"), "turn.1", 1, Compare()),
    ]
    with closing(Supervisor(opened[0], [entry()]).in_turn(sides, as_given)) as running:
        assert len([*running]) == 2
    assert in_order(opened[1].seen)


def test_one_that_dies_as_it_waits_fails_alone(opened):
    supervisor = Supervisor(opened[0], [entry()])
    with closing(supervisor.in_turn(turns(entry()), as_given)) as running:
        assert next(running)[1].process.status == "ok"
        (waiting,) = children()
        os.kill(waiting, signal.SIGKILL)
        _, outcome = next(running)
    assert outcome.process.status == "failed"
    assert "killed by SIGKILL" in outcome.process.reason


SPINNING = """
    import pathlib, threading
    made = pathlib.Path(__file__).with_name("spun")
    made.mkdir(exist_ok=True)
    file = (made / str(os.getpid())).open("wb", buffering=0)
    def spin():
        while True:
            file.write(b"%d\\n" % time.monotonic_ns())
            time.sleep(0.0005)
    threading.Thread(target=spin, daemon=True).start()
    (made / f"{os.getpid()}.read").write_text(repr(sys.stdin.read()))
"""
NOTING = """pathlib = __import__("pathlib")
        pathlib.Path(__file__).with_name(f"cpus.{os.getpid()}").write_text(repr(sorted(os.sched_getaffinity(0))))"""


def interleaved_entry(own=None, threads=None, cap_s=0.2):
    case = ("eager,b1" if own else "square,eager,b1,size=16") + (f",threads={threads}" if threads else "")
    request = Request([case], "quick", 0.01, modules=[own] if own else [])
    entry, _ = paired.planned_sides(request, LimitsConfig(warm_up_cap_s=0.1, check_images=1), CPU)
    return replace(entry, limits=msgspec.structs.replace(entry.limits, rule=interleaved_rule(cap_s)))


def windows(outcomes):
    """Return the window of each block with its process, in order of time."""
    blocks = [(window, place) for place, outcome in enumerate(outcomes) for window in outcome.process.blocks.windows]
    return sorted(blocks, key=lambda each: each[0].start_ns)


def test_blocks_of_a_pair_alternate_in_an_order_drawn_anew_and_a_sink_hears_of_each_stage_once(opened):
    outcomes = run(opened, interleaved_entry(cap_s=paired.INTERLEAVED.cap_s))
    assert [outcome.process.status for outcome in outcomes] == ["ok", "ok"]
    blocks = windows(outcomes)
    assert all(early.end_ns < late.start_ns for (early, _), (late, _) in pairwise(blocks))
    common = min(len(outcome.process.blocks.medians_ms) for outcome in outcomes)
    rounds = [tuple(place for _, place in blocks[2 * number : 2 * number + 2]) for number in range(common - 1)]
    assert {*rounds} == {(0, 1), (1, 0)} or len(rounds) < 20  # both within 20 but for one pair in a million
    for outcome in outcomes:
        assert outcome.process.measured_s == pytest.approx(
            sum(window.seconds for window in outcome.process.blocks.windows)
        )
        assert outcome.process.throughput_per_s == pytest.approx(
            outcome.process.timing.runs / outcome.process.measured_s
        )
        assert "warm_up_not_steady" not in outcome.flags
    # however often turns change, a sink hears of each stage once
    assert opened[1].seen.count((0, "measure")) == opened[1].seen.count((1, "measure")) == 1
    assert "ready" not in {stage for _, stage in opened[1].seen}


def test_a_process_that_waits_is_suspended_with_its_threads_and_reads_nothing_of_ours(opened, tmp_path):
    own = user_model.module(user_module(tmp_path, build=SPINNING), [])
    outcomes = run(opened, interleaved_entry(own))
    assert [(outcome.process.status, outcome.process.reason) for outcome in outcomes] == [("ok", None)] * 2
    spun = [path for path in (tmp_path / "spun").iterdir() if path.suffix != ".read"]
    stamps = [[int(line) for line in path.read_text().split()] for path in spun]
    for place, outcome in enumerate(outcomes):
        inside = [
            [any(w.start_ns <= t <= w.end_ns for w in outcome.process.blocks.windows) for t in each] for each in stamps
        ]
        assert sorted(map(any, inside)) == [False, True], place
    assert [path.read_text() for path in (tmp_path / "spun").glob("*.read")] == ["''"] * 2


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU is all that a pair can have")
def test_a_pair_shares_the_cpus_it_needs_and_each_pair_draws(opened, tmp_path):
    own = user_model.module(user_module(tmp_path, forward=NOTING), [])
    used = []
    for seed in (0, 1):  # whose first draws are two CPUs, whatever the number of them
        random.seed(seed)
        outcomes = run(opened, interleaved_entry(own, threads=1))
        first, second = (outcome.process.cpus for outcome in outcomes)
        assert len(first) == 1
        assert first == second
        assert {path.read_text() for path in tmp_path.glob("cpus.*")} == {repr(first)}
        [path.unlink() for path in tmp_path.glob("cpus.*")]
        used.append(tuple(first))
    assert len({*used}) == 2
    assert all(not outcome.process.cpus for outcome in run(opened, interleaved_entry(own)))


def test_a_side_that_fails_ends_the_pair(opened, tmp_path):
    broken = user_model.module(user_module(tmp_path, build="raise ValueError('broken')"), [])
    supervisor = Supervisor(opened[0], [interleaved_entry()])
    pair = [
        Turn(interleaved_entry(), "turn.0", 0, Compare()),
        Turn(interleaved_entry(broken), "turn.1", 0, Compare()),
    ]
    with closing(supervisor.in_turn(pair, as_given)) as running:
        turn, outcome = next(running)
    assert (turn.name, outcome.process.status) == ("turn.1", "failed")
    assert not children()


STUBBORN = """
    import ctypes, threading
    libc = ctypes.CDLL(None)
    threading.Thread(target=lambda: libc.vfork() or libc.pause(), daemon=True).start()
    time.sleep(0.2)
"""


def test_what_cannot_be_suspended_is_ended_and_named(opened, tmp_path, monkeypatch):
    """A thread behind vfork stops only after its child has run a program, and the child is stopped as well."""
    monkeypatch.setattr(process, "SUSPEND_S", 0.3)
    own = user_model.module(user_module(tmp_path, build=STUBBORN), [])
    supervisor = Supervisor(opened[0], [interleaved_entry(own)])
    pair = [Turn(interleaved_entry(own), f"turn.{number}", 0, Compare()) for number in range(2)]
    with closing(supervisor.in_turn(pair, as_given)) as running:
        _, outcome = next(running)
    assert outcome.process.status == "failed"
    assert "could not be suspended" in outcome.process.reason
    assert not children()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_one_that_dies_between_blocks_fails_and_the_other_is_measured(opened, monkeypatch, number):
    begun = []

    def kill(planned, process, stage, done=""):
        if stage == "measure" and process == 1 and not begun:
            begun.extend(children())
            os.kill(begun[1], number)

    monkeypatch.setattr(opened[1], "stage", kill)
    first, second = run(opened, interleaved_entry())
    assert (first.process.status, second.process.status) == ("ok", "failed")
    assert f"killed by {number.name}" in second.process.reason
    assert not children()


def test_an_interrupt_between_blocks_ends_both(opened, monkeypatch):
    act = lambda *given: given[2] == "measure" and os.kill(os.getpid(), signal.SIGINT)  # noqa: E731
    monkeypatch.setattr(opened[1], "stage", act)
    assert [outcome.process.status for outcome in run(opened, interleaved_entry())] == ["aborted"] * 2
    assert not children()


def children():
    """Return the pids of this process's workers."""
    alike = [child.pid for child in psutil.Process().children() if WORKER in child.cmdline()]
    return [pid for pid in alike if os.getsid(pid) == pid]
