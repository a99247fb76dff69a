"""A measurement that begins once other processes leave the CPUs alone, beside a process that does not."""

import io
import subprocess
import sys
import time

import pytest
from waiting import WAIT_S

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


def test_the_wait_begins_anew_with_each_busy_second(monkeypatch):
    out, used = io.StringIO(), iter([0.0, 2.0, 0.0, 0.0])
    monkeypatch.setattr(quiet, "STEP_S", 0.6)
    monkeypatch.setattr(quiet.ForeignUse, "cpus", lambda _: next(used, 0.0))
    begun_s = time.monotonic()
    quiet.wait_until_quiet(1.0, out, lambda: False)
    assert time.monotonic() - begun_s >= 2.2  # two steps, of which the second was busy, then a whole second
    assert out.getvalue().endswith("busy machine: other processes use 2 CPUs\n")
