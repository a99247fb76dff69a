"""The plan of a live comparison; whole comparisons run in tests/e2e."""

import pytest

from benchd.daemon.config import LimitsConfig
from benchd.daemon.measuring import paired
from benchd.daemon.measuring.paired import Request
from benchd.daemon.measuring.plan import Machine

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
