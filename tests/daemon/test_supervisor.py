"""What the supervisor decides by itself; whole passes run in tests/e2e."""

import pytest

from benchd.daemon.supervisor import spare_cpu


@pytest.mark.parametrize(
    ("cpus", "device", "threads", "spare"),
    [
        (range(2), "cuda", None, None),
        (range(6), "cuda", None, 5),
        (range(6), "cpu", None, None),
        (range(6), "cpu", 6, None),
        (range(6), "cpu", 4, 5),
        ({0, 2, 8, 9}, "cpu", 3, 9),
    ],
)
def test_the_sampler_gets_a_cpu_that_the_case_does_not_compute_on(cpus, device, threads, spare):
    assert spare_cpu(set(cpus), device, threads) == spare
