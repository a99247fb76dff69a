"""A measurement that begins once other processes leave the CPUs alone, beside a process that does not."""

import io
import os
import pty
import socket
import subprocess
import sys
import time

import pytest
from waiting import WAIT_S

from benchd.daemon.commands import arguments
from benchd.daemon.machine import quiet

SPIN = "import sys; print(flush=True)\nwhile True: pass"


@pytest.fixture
def neighbour():
    """A process that uses a CPU."""
    with subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        yield process
        process.kill()


def test_a_neighbour_is_seen_and_own_work_is_not(neighbour):
    use, deadline_s = quiet.ForeignUse(), time.monotonic() + WAIT_S
    while use.cpus() < quiet.FOREIGN_CPUS and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert use.cpus() >= quiet.FOREIGN_CPUS


def test_the_wait_says_that_the_machine_is_busy_and_ends_with_an_interrupt(neighbour):
    out = io.StringIO()
    quiet.wait_until_quiet(3600.0, out, lambda: "busy machine" in out.getvalue())
    first, second = out.getvalue().splitlines()
    assert first == "waiting until the CPUs have been quiet for 3600 s"
    assert second.startswith("busy machine: other processes use ")


@pytest.fixture
def wake():
    """A socket as that of a session's signals."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def begun(monkeypatch, wake, answers=None, cpus=1.5, quiet_s=0.0):
    """Return what a start with these answers says where others use so many CPUs."""
    out, used = io.StringIO(), iter([cpus])
    monkeypatch.setattr(quiet, "LOOK_S", 0.0)
    monkeypatch.setattr(quiet, "STEP_S", 0.01)
    monkeypatch.setattr(quiet, "ASKED_QUIET_S", 0.01)
    monkeypatch.setattr(quiet.ForeignUse, "cpus", lambda _: next(used, 0.0))
    quiet.settle(quiet.Start(None, quiet_s, out, answers), wake[0], lambda: False)
    return out.getvalue()


@pytest.fixture
def terminal():
    """A terminal: its leader's descriptor, and the stream of what is typed there."""
    leader, follower = pty.openpty()
    with os.fdopen(follower) as typed:
        yield leader, typed
    os.close(leader)


def test_where_nobody_answers_a_busy_machine_is_said_with_its_remedy(monkeypatch, wake):
    output = begun(monkeypatch, wake)
    assert (
        output == "BUSY MACHINE: other processes use 1.5 CPUs, so times may be far too long (--quiet-for 30s waits)\n"
    )
    assert "use 1 CPU, so" in begun(monkeypatch, wake, cpus=1.0)
    assert begun(monkeypatch, wake, cpus=0.1) == ""


@pytest.mark.parametrize(("given", "asks"), [(None, True), (True, False), (False, False)])
def test_nothing_is_asked_where_the_wait_was_given(monkeypatch, terminal, given, asks):
    monkeypatch.setattr(arguments.sys, "stdin", terminal[1])
    monkeypatch.setattr(arguments.sys, "stderr", terminal[1])
    assert bool(arguments.start(given).answers) is asks


@pytest.mark.parametrize(("typed", "last"), [("g\n", quiet.QUESTION), ("no\nwait\n", "waiting until")])
def test_a_person_is_asked_until_the_answer_is_one(monkeypatch, wake, terminal, typed, last):
    os.write(terminal[0], typed.encode())
    output = begun(monkeypatch, wake, terminal[1])
    assert output.count(quiet.QUESTION) == typed.count("\n")
    assert output.splitlines()[-1].startswith(last)


@pytest.mark.parametrize("typed", ["", "\x04"])
def test_without_an_answer_it_goes_on(monkeypatch, wake, terminal, typed):
    os.write(terminal[0], typed.encode())
    monkeypatch.setattr(quiet, "ANSWER_S", 0.2)
    assert begun(monkeypatch, wake, terminal[1]).endswith(f"{quiet.QUESTION}\nno answer: going on\n")


def test_a_person_who_stops_stops_it(monkeypatch, wake, terminal):
    os.write(terminal[0], b"s\n")
    with pytest.raises(KeyboardInterrupt):
        begun(monkeypatch, wake, terminal[1])


def test_a_signal_ends_the_question(monkeypatch, wake, terminal):
    wake[1].send(b"\x02")
    with pytest.raises(KeyboardInterrupt):
        begun(monkeypatch, wake, terminal[1])
