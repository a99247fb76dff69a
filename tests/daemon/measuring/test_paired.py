"""The plan of a live comparison; whole comparisons run in tests/e2e."""

import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from records_made import blocks, timing

from benchd.daemon.config import LimitsConfig
from benchd.daemon.measuring import paired
from benchd.daemon.measuring.paired import Request, Side
from benchd.daemon.measuring.plan import Machine, Planned
from benchd.daemon.measuring.protocol import Outcome
from benchd.daemon.measuring.supervisor import Supervisor
from benchd.daemon.records import ProcessResult
from benchd.daemon.verdicts import effects
from benchd.daemon.verdicts.effects import ALPHA, LOOK_ALPHA

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


@dataclass
class Measured:
    """A supervisor of which only machine and power sensors are asked."""

    device: str = "cpu"
    sources: tuple[str, ...] = ()
    plan: tuple[Planned, ...] = ()
    can_interleave = Supervisor.can_interleave

    @property
    def session(self):
        return self

    @property
    def machine(self):
        return Machine(self.device, has_cxx=True)

    def sampler(self, _):
        return self

    @property
    def samples(self):
        return SimpleNamespace(power=self.sources)


def sides(*cases, limits=None):
    made = paired.planned_sides(Request(list(cases), "quick", 0.01), limits or LimitsConfig(), CPU)
    return tuple(Side(entry, sys.executable, {}, False, entry.case.case_id, run=None) for entry in made)


def test_blocks_are_interleaved_on_a_cpu_without_joules():
    assert paired._can_interleave(sides("square,eager,b1"), Measured())
    assert not paired._can_interleave(sides("square,eager,b1"), Measured("cuda"))
    assert not paired._can_interleave(sides("square,eager,b1"), Measured(sources=("rapl",)))
    assert not paired._can_interleave(sides("square,eager,b1", "square,eager,b1,streams=2"), Measured())
    assert not paired._can_interleave(sides("square,eager,b1,periodic"), Measured())
    assert not paired._can_interleave(sides("square,eager,b1", limits=LimitsConfig(measure_cap_s=3.0)), Measured())


@pytest.mark.parametrize(
    ("cases", "limits", "seconds"),
    [
        (["square,eager,b1"], LimitsConfig(), 0.1),
        (["square,eager,b1", "square,compile,b1"], LimitsConfig(), 2.0),  # only one of them may still compile
        (["square,eager,b1"], LimitsConfig(warm_up_cap_s=5.0), 5.0),
        (["square,eager,b1"], LimitsConfig(warm_up_cap_s=0.2), 0.2),
    ],
)
def test_one_case_against_itself_warms_up_briefly(cases, limits, seconds):
    both = sides(*cases, limits=limits)
    paired._interleave(both)
    assert [side.planned.limits.warm_up_cap_s for side in both] == [seconds, seconds]
    assert all(side.is_interleaved for side in both)


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


@pytest.mark.parametrize(("pairs", "alpha"), [(None, LOOK_ALPHA), (7, ALPHA)])
def test_several_comparisons_share_the_error_of_one(pairs, alpha):
    ratios = [1.2, 1.21, 1.2, 1.19, 1.2, 1.21, 1.19]
    request = Request(["square,eager,b1"], "quick", 0.005, pairs=pairs, comparisons=4)
    assert paired._verdict(request, 0.005, ratios).confidence == 1 - alpha / 4
