import pytest

from benchd.daemon.verdicts.when import AHEAD_S, measured_s

ARRIVED_S = 1_767_225_600.0  # 2026-01-01


@pytest.mark.parametrize(
    ("t_wall", "at_s"),
    [
        ("2025-12-02T00:00:00.000Z", ARRIVED_S - 30 * 86400),
        ("2026-01-01T00:04:59Z", ARRIVED_S + AHEAD_S - 1),
        ("2026-01-01T01:00:00+01:00", ARRIVED_S),
        ("2026-01-01T00:06:00Z", None),
        ("1970-01-01T00:01:00.000Z", None),
        ("2025-12-02T00:00:00", None),
        ("yesterday", None),
        ("9" * 400, None),
        ("", None),
    ],
)
def test_only_a_clock_that_can_be_right_is_believed(t_wall, at_s):
    assert measured_s(t_wall, ARRIVED_S) == at_s
