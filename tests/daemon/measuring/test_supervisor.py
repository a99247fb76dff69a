"""What the supervisor decides by itself; whole passes run in tests/e2e."""

import pytest
from sessions_made import session

from benchd.daemon.measuring.plan import PRESETS, PlannedCase
from benchd.daemon.measuring.process import KILLED
from benchd.daemon.measuring.protocol import Compare, Outcome, unmeasured
from benchd.daemon.measuring.session import spare_cpu
from benchd.daemon.measuring.supervisor import Supervisor, Turn, _end_of_search
from benchd.daemon.records import Case, ProcessResult


@pytest.mark.parametrize(
    ("cpus", "device", "threads", "spare"),
    [
        (range(2), "cuda", 2, None),
        (range(6), "cuda", 6, 5),
        (range(6), "cpu", 6, None),
        (range(6), "cpu", 4, 5),
        ({0, 2, 8, 9}, "cpu", 3, 9),
    ],
)
def test_the_sampler_gets_a_cpu_that_the_case_does_not_compute_on(cpus, device, threads, spare):
    assert spare_cpu(set(cpus), device, threads) == spare


def test_only_before_the_first_cold_start_another_fills_the_caches(tmp_path, monkeypatch):
    planned, names = PlannedCase(Case(model="square", scenario="cold_start"), "quick", PRESETS["quick"], True, None), []
    monkeypatch.setattr(Supervisor, "_process", lambda _, turn: names.append(turn.name) or unmeasured("ok", None))
    for number in range(2):
        Supervisor(session(tmp_path), [planned]).process(Turn(planned, f"r1.{number}", number, Compare()))
    assert names == ["r1.ready", "r1.0", "r1.1"]


@pytest.mark.parametrize(
    ("status", "reason", "batch_size", "wanted"),
    [
        ("failed", "out of memory: no room", 1, "unsupported"),
        ("failed", "out of memory: no room", 8, "unsupported"),
        ("failed", f"{KILLED} in stage check", 1, "failed"),  # no smaller batch ran
        ("failed", f"{KILLED} in stage check", 8, "unsupported"),
        ("failed", "the worker was killed by SIGSEGV in stage check", 8, "failed"),
        ("failed", "ValueError: wrong", 8, "failed"),
        ("timeout", "stage measure took longer than 9 s", 8, "timeout"),
        ("ok", None, 8, "ok"),
    ],
)
def test_a_batch_that_does_not_fit_ends_a_search_and_is_no_failure(status, reason, batch_size, wanted):
    process = _end_of_search(Outcome(process=ProcessResult(status=status, reason=reason)), batch_size).process
    assert (process.status, process.reason) == (wanted, reason)
