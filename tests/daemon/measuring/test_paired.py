"""The plan of a live comparison; whole comparisons run in tests/e2e."""

import sys

import pytest
from records_made import blocks, timing
from sessions_made import session

from benchd.daemon.config import LimitsConfig
from benchd.daemon.measuring import paired
from benchd.daemon.measuring.paired import Request, Side
from benchd.daemon.measuring.plan import Machine
from benchd.daemon.measuring.protocol import Outcome
from benchd.daemon.measuring.supervisor import Supervisor
from benchd.daemon.records import ProcessResult
from benchd.daemon.verdicts import effects

CPU = Machine("cpu", has_cxx=True)


@pytest.mark.parametrize(
    ("case", "preset", "limits", "seconds"),
    [
        ("square,eager,b1", "quick", LimitsConfig(), 1.25),
        ("square,eager,b1,offline", "quick", LimitsConfig(), 1.25),
        ("square,eager,b1,periodic", "quick", LimitsConfig(), 5.0),
        ("square,eager,b1", "quick", LimitsConfig(measure_cap_s=3.0), 3.0),
        ("square,eager,b1", "standard", LimitsConfig(), 60.0),
    ],
)
def test_processes_are_short_unless_the_user_chose_how_long_they_measure(case, preset, limits, seconds):
    sides = paired.planned_sides(Request([case], preset, 0.01), limits, CPU)
    assert [side.limits.rule.cap_s for side in sides] == [seconds, seconds]


def sides(*cases, limits=None):
    entries = paired.planned_sides(Request(list(cases), "quick", 0.01), limits or LimitsConfig(), CPU)
    return tuple(Side(entry, sys.executable, {}, False, entry.case.case_id, run=None) for entry in entries)


@pytest.mark.parametrize(
    ("cases", "device", "limits", "interleaved"),
    [
        (["square,eager,b1"], "cpu", LimitsConfig(), True),
        (["square,eager,b1"], "cuda", LimitsConfig(), False),
        (["square,eager,b1", "square,eager,b1,streams=2"], "cpu", LimitsConfig(), False),
        (["square,eager,b1,periodic"], "cpu", LimitsConfig(), False),
        (["square,eager,b1"], "cpu", LimitsConfig(measure_cap_s=3.0), False),
    ],
)
def test_blocks_are_interleaved_on_a_cpu_alone(tmp_path, cases, device, limits, interleaved):
    with session(tmp_path, machine=Machine(device, has_cxx=True)) as bench_session:
        assert paired._can_interleave(sides(*cases, limits=limits), Supervisor(bench_session, [])) is interleaved


@pytest.mark.parametrize(
    ("starts_ns", "ratio"),
    [([1, 2, 3, 4], 1.5), ([], 3.0)],
)
def test_a_pair_of_interleaved_processes_is_the_median_of_its_rounds(starts_ns, ratio):
    """One block of B was disturbed, and A needed one block less; its process median shows both."""
    both = sides("square,eager,b1")
    for side, medians_ms, median_ms in zip(both, ([2.0, 4.0, 8.0], [3.0, 60.0, 8.0, 1.0]), (4.0, 12.0), strict=True):
        result = ProcessResult(status="ok", timing=timing(median_ms), blocks=blocks(medians_ms, starts_ns=starts_ns))
        side.outcomes.append(Outcome(process=result))
    assert effects.ratio(*(side.outcomes[-1].process for side in both)) == pytest.approx(ratio)
