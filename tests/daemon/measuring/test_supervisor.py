"""What the supervisor decides by itself; whole passes run in tests/e2e."""

import pytest

from benchd.daemon.measuring.protocol import Outcome
from benchd.daemon.measuring.session import spare_cpu
from benchd.daemon.measuring.supervisor import _end_of_search
from benchd.daemon.records import ProcessResult


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


@pytest.mark.parametrize(
    ("status", "reason", "wanted"),
    [
        ("failed", "out of memory: no room", "unsupported"),
        ("failed", "ValueError: wrong", "failed"),
        ("timeout", "stage measure took longer than 9 s", "timeout"),
        ("ok", None, "ok"),
    ],
)
def test_a_batch_that_does_not_fit_ends_a_search_and_is_no_failure(status, reason, wanted):
    found = _end_of_search(Outcome(process=ProcessResult(status=status, reason=reason))).process
    assert (found.status, found.reason) == (wanted, reason)
