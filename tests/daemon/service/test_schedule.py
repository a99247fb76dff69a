"""Which pass is due: missed times, steps of the clock, delays and limits, by times given to pure functions."""

import msgspec
import pytest

from benchd.daemon.config import Suite
from benchd.daemon.service import schedule
from benchd.daemon.service.schedule import Schedule

HOUR_S, YEAR_S = 3600.0, 365 * 86400.0
NOW_S = 1_790_000_000.0
HOURLY = Suite(name="hourly", every="1h")
CASES = {"hourly": ["a", "b"], "by-hand": ["c"]}


def at(now_s, state=None, suites=(HOURLY,)):
    """Return the state after a look at the clock."""
    state = schedule.serve(state or Schedule(), suites, now_s)
    return schedule.begin_due(state, suites, CASES, now_s, "device")


def names(state):
    return [entry.suite.name for entry in state.passes]


def test_a_suite_without_a_trigger_never_begins_by_itself():
    by_hand = Suite(name="by-hand")
    assert at(NOW_S, suites=[by_hand]).served_s == {}
    assert schedule.due_s(by_hand, Schedule(), "device") is None


def test_missed_times_become_one_pass():
    state = at(NOW_S + 100.5 * HOUR_S, at(NOW_S))
    assert names(state) == ["hourly"]
    (entry,) = state.passes
    state = schedule.drop(state, entry.suite_id)
    assert names(at(NOW_S + 101 * HOUR_S, state)) == []
    assert names(at(NOW_S + 101.5 * HOUR_S, state)) == ["hourly"]


def test_a_suite_that_is_still_under_way_is_not_begun_twice():
    state = at(NOW_S + HOUR_S, at(NOW_S))
    assert names(at(NOW_S + 3 * HOUR_S, state)) == ["hourly"]


def test_a_step_back_by_ntp_does_not_run_a_suite_again():
    daily = Suite(name="hourly", cron="0 * * * *")
    state = at(NOW_S, suites=[daily])
    due_s = schedule.due_s(daily, state, "device")
    state = msgspec.structs.replace(at(due_s + 0.5, state, [daily]), passes=[])
    assert names(at(due_s - 0.5, state, [daily])) == []
    assert names(at(due_s, state, [daily])) == []


def test_devices_begin_apart_but_each_always_at_its_own_time():
    spread = Suite(name="hourly", at="02:30", random_delay_s=1800.0)
    delays = [schedule.delay_s(spread, f"device-{number}") for number in range(200)]
    assert all(0 <= delay < 1800 for delay in delays)
    assert len({delay // 300 for delay in delays}) == 6
    assert delays[0] == schedule.delay_s(spread, "device-0")
    state = at(NOW_S, suites=[spread])
    first_s = schedule.due_s(spread, state, "device")
    state = msgspec.structs.replace(at(first_s, state, [spread]), passes=[])
    assert schedule.due_s(spread, state, "device") == pytest.approx(first_s + 86400, abs=1e-3)


def test_no_case_begins_once_the_time_limit_is_spent():
    limited = Suite(name="hourly", every="1h", time_limit_s=100.0)
    state = schedule.begin(Schedule(), limited, ["a", "b", "c"])
    suite_id = state.passes[0].suite_id
    state = schedule.finish(state, suite_id, "a", 60.0)
    assert state.passes[0].left == ["b", "c"]
    assert schedule.finish(state, suite_id, "b", 60.0).passes == []


def test_a_case_is_measured_again_at_its_time_in_a_run_that_keeps_no_schedule_waiting():
    state = msgspec.structs.replace(at(NOW_S), again_s={"b": NOW_S + 1.5 * HOUR_S})
    state = at(NOW_S + HOUR_S, state)
    state = at(NOW_S + 1.6 * HOUR_S, msgspec.structs.replace(state, passes=[]))
    assert [(entry.left, entry.again, entry.by_command) for entry in state.passes] == [(["b"], True, False)]
    assert state.again_s == {}
    assert [entry.left for entry in at(NOW_S + 2.1 * HOUR_S, state).passes] == [["b"], ["a", "b"]]


def test_a_case_that_a_run_of_a_suite_has_yet_to_measure_or_that_has_left_needs_no_run_of_its_own():
    state = msgspec.structs.replace(at(NOW_S), again_s={"b": NOW_S + HOUR_S, "gone": NOW_S})
    state = at(NOW_S + HOUR_S, state)
    assert [entry.left for entry in state.passes] == [["a", "b"]]
    assert state.again_s == {"b": NOW_S + HOUR_S}, "only its result serves it"
    assert at(NOW_S + HOUR_S, state) == state, "a second run begins"


def test_a_run_that_is_cancelled_or_whose_results_do_not_count_takes_no_second_measurement_along():
    due = Schedule(again_s={"b": NOW_S})
    state = at(NOW_S, schedule.begin(due, Suite(), ["b"], by_command=True))
    assert [(entry.left, entry.again) for entry in state.passes] == [(["b"], False), (["b"], True)]
    state = at(NOW_S, schedule.begin(due, HOURLY, ["a", "b"]))
    state = at(NOW_S, schedule.drop(state, state.passes[0].suite_id))
    assert [(entry.left, entry.again) for entry in state.passes] == [(["b"], True)]


def test_a_second_measurement_more_than_a_day_ahead_was_planned_by_a_wrong_clock():
    assert at(NOW_S, Schedule(again_s={"a": NOW_S + 12 * HOUR_S, "b": NOW_S + YEAR_S})).again_s == {
        "a": NOW_S + 12 * HOUR_S
    }


@pytest.mark.parametrize(
    ("triggers", "results"),
    [
        ({"every": "1h"}, 730.5),
        ({"at": "02:30"}, 30.4375),
        ({"cron": "0,5 2 * * *"}, 2 * 30.4375),
        ({"cron": "* * * * *"}, 60 * 730.5),
        ({"cron": "0 0 1 1 *"}, 30.4375 / 7),
        ({"every": "4d"}, 30.4375 / 4),
        ({"every": "5d"}, 30.4375 / 5),
        ({"every": "30d"}, 30.4375 / 7),
        ({"cron": "0 3 * * 1,3,5"}, 3 * 30.4375 / 7),
        ({"cron": "0 3 */6 * *"}, 67 / 12),
        ({"cron": "0 * * * 6,0"}, 48 * 30.4375 / 7),
        ({}, 30.4375),
    ],
)
def test_results_per_month_follow_the_triggers(triggers, results):
    suites, cases = [Suite(name="s", **triggers), Suite(name="t", every="1d")], {"s": ["a"], "t": ["a", "b"]}
    expected = {"a": pytest.approx(results + 30.4375, rel=0.02), "b": 30.4375}
    assert schedule.results_per_month(suites, cases, NOW_S) == expected


def test_a_suite_that_has_left_the_configuration_is_forgotten_but_its_pass_ends_as_it_began():
    state = at(NOW_S + HOUR_S, at(NOW_S))
    state = at(NOW_S + HOUR_S, state, suites=[])
    assert state.served_s == {}
    assert names(state) == ["hourly"]


def test_a_pass_by_command_stands_beside_the_scheduled_one():
    state = schedule.begin(Schedule(), HOURLY, ["a"], by_command=True)
    state = schedule.serve(state, [HOURLY], NOW_S)
    assert names(at(NOW_S + HOUR_S, state)) == ["hourly", "hourly"]
