"""The suites as cases and what is measured next, from configurations and states."""

import msgspec
import pytest
import records_made

from benchd.daemon.config import Config, Suite
from benchd.daemon.errors import UsageError
from benchd.daemon.measuring.plan import Machine
from benchd.daemon.records import Case
from benchd.daemon.service import agenda, schedule
from benchd.daemon.service.agenda import Agenda
from benchd.daemon.service.facts import Facts
from benchd.daemon.service.schedule import Schedule, begin

MACHINE = Machine("cpu", True)
SUITE = Suite(name="s", every="1h", models=["square"], variants=["eager"], options={"size": [16, 32]})
NOW_S, HOUR_S = 1_790_000_000.0, 3600.0
CASES = ["square,eager,b1,size=16", "square,eager,b1,size=32"]


def made(*suites, state=None):
    return Agenda(Config(suite=list(suites)), MACHINE, Facts(schedule=state or Schedule()))


def nothing(entry):
    return None


def test_cases_are_those_of_the_plan_and_the_digest_follows_them():
    first = made(SUITE)
    assert first.cases == {"s": CASES}
    assert first.digest == made(SUITE).digest != made(msgspec.structs.replace(SUITE, batch_sizes=[2])).digest


def test_two_suites_that_give_one_case_other_images_are_refused():
    suites = (Suite(name="a", models=["square"]), Suite(name="b", models=["square"], data="imagefolder:x"))
    with pytest.raises(UsageError, match="the suites a and b measure square,eager,b1 with different inputs,"):
        made(*suites)


def test_two_suites_that_give_one_case_other_calibration_are_refused_if_it_reads_any():
    def pair(variant):
        first = Suite(name="a", models=["square"], variants=[variant])
        return first, msgspec.structs.replace(first, name="b", calibration="imagefolder:x")

    with pytest.raises(
        UsageError, match=r"square,onnxruntime-int8,b1 with different .* or calibration: use the same in both"
    ):
        made(*pair("onnxruntime-int8"))
    for variant in ("onnxruntime", "custom-int8"):
        assert made(*pair(variant)).cases == {name: [f"square,{variant},b1"] for name in "ab"}


def test_a_suite_that_is_due_is_begun_and_measured_case_by_case():
    service_agenda = made(SUITE)
    service_agenda.look(1000.0, 20.0, "d")
    assert service_agenda.next_due("d") == ("s", 4600.0)
    assert service_agenda.next(nothing) is None
    assert service_agenda.look(4600.0, 3620.0, "d")
    entry, (planned, *_) = service_agenda.next(nothing)
    assert (planned.case.case_id, entry.left) == (CASES[0], CASES)
    service_agenda.skip(entry.suite_id, CASES[0])
    assert service_agenda.next(nothing)[1][0].case.case_id == CASES[1]


BOOTS = {"never set": 0.0, "of last week": NOW_S - 7 * 24 * HOUR_S, "right": None}


def booted(state, wall_s, true_s, hours, *, is_set=True):
    """Return the state after so many hours of a boot whose clock begins at `wall_s` and may be set after a minute."""
    service_agenda = made(msgspec.structs.replace(SUITE, every="7d"), state=state)
    ahead_s = true_s if wall_s is None else wall_s
    for up_s in range(10, int(hours * HOUR_S), 60):
        if is_set and up_s > 60:
            ahead_s = true_s
        service_agenda.look(ahead_s + up_s, up_s, "d")
    return service_agenda._facts.schedule


@pytest.mark.parametrize("clock", BOOTS.values(), ids=BOOTS)
def test_a_board_that_is_on_for_an_hour_a_day_starts_its_weekly_run(clock):
    """Whatever its clock says until the network sets it."""
    state, begun = booted(Schedule(), None, NOW_S, 1.0), []
    for day in range(1, 22):
        state = booted(state, clock, NOW_S + day * 24 * HOUR_S, 1.0)
        begun += [day] * len(state.passes)
        state = msgspec.structs.replace(state, passes=[])
    assert begun == [7, 14, 21]


def test_a_board_whose_clock_is_never_set_counts_the_time_that_it_was_up():
    state, begun = Schedule(), 0
    for day in range(22):
        state = booted(state, 0.0, NOW_S + day * 24 * HOUR_S, 24 + 12 * (day % 2), is_set=False)
        begun += len(state.passes)
        state = msgspec.structs.replace(state, passes=[])
    assert begun == 22 * 30 // (7 * 24)


def test_a_daily_start_missed_while_the_board_was_off_is_made_up_once():
    state = made(msgspec.structs.replace(SUITE, every=None, at="02:30"))
    state.look(NOW_S, 10.0, "d")
    for clock in BOOTS.values():
        service_agenda = made(msgspec.structs.replace(SUITE, every=None, at="02:30"), state=state._facts.schedule)
        service_agenda.look(NOW_S + 48 * HOUR_S if clock is None else clock + 10.0, 10.0, "d")
        service_agenda.look(NOW_S + 48 * HOUR_S + 60.0, 70.0, "d")
        service_agenda.look(NOW_S + 48 * HOUR_S + 120.0, 130.0, "d")
        assert [entry.left for entry in service_agenda.runs] == [CASES]


def test_a_clock_that_was_a_year_ahead_is_believed_no_longer_than_a_day_after_the_next_boot():
    state = booted(Schedule(), None, NOW_S + 365 * 24 * HOUR_S, 1.0)
    state = booted(state, NOW_S, NOW_S, 24 * 7 + 1, is_set=False)
    assert [entry.left for entry in state.passes] == [CASES]
    assert state.clock_s == pytest.approx(NOW_S + 24 * 7 * HOUR_S, abs=2 * HOUR_S)


def test_a_pass_that_waits_lets_the_next_one_by_and_is_named_where_all_wait():
    service_agenda = made(SUITE)
    service_agenda._facts.schedule = begin(service_agenda._facts.schedule, SUITE, CASES)
    by_command = service_agenda.begin(Suite(models=["square"], variants=["eager"]))
    entry, _ = service_agenda.next(lambda entry: None if entry.by_command else "too warm")
    assert entry.suite_id == by_command.suite_id
    assert service_agenda.next(lambda entry: "too warm") == "s: too warm"


def test_a_case_that_is_gone_is_skipped_with_a_word():
    state = begin(begin(Schedule(), SUITE, ["gone", CASES[0]]), Suite(models=["no-such-model"]), ["x"])
    service_agenda = made(SUITE, state=state)
    assert service_agenda.next(lambda entry: "warm") == "s: gone skipped: no longer a case of this suite"
    assert [entry.left for entry in service_agenda.runs] == [[CASES[0]]]


@pytest.mark.parametrize(
    ("suite", "words"),
    [
        (Suite(models=["no-such-model"]), "unknown model"),
        (Suite(models=["square"], preset="x"), "unknown preset"),
        (Suite(models=["square"], batch_sizes=list(range(1, 600)), variants=["eager"]), "599 cases; at most 500"),
        (
            Suite(models=["snn_onepass"], options={name: [0.5] * 9000 for name in ("decay", "p_scale", "threshold")}),
            "the lists multiply to 729000000000 cases; at most 1000 are allowed",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(suite, words):
    with pytest.raises(UsageError, match=words):
        made().begin(suite)


def test_too_many_passes_are_refused_and_cancelled_by_id_or_altogether():
    service_agenda = made()
    ids = [service_agenda.begin(SUITE).suite_id for _ in range(agenda.MAX_PASSES)]
    with pytest.raises(UsageError, match="20 runs are already waiting"):
        service_agenda.begin(SUITE)
    assert service_agenda.cancel(ids[3]) == [ids[3]]
    assert service_agenda.cancel("unknown") == []
    assert len(service_agenda.cancel(None)) == agenda.MAX_PASSES - 1
    assert service_agenda.runs == []


def test_only_a_result_of_a_suite_says_whether_its_case_is_measured_once_more():
    again_s = {CASES[0]: NOW_S, CASES[1]: NOW_S}

    def after(suite, at_s):
        service_agenda = made(SUITE, state=begin(Schedule(again_s=again_s), suite, CASES))
        case = Case(model="square", options={"size": 16})
        service_agenda.finish(records_made.made(case=case, suite_id=service_agenda.runs[0].suite_id), 1.0, at_s)
        return service_agenda._facts.schedule.again_s

    listed = msgspec.structs.replace(SUITE, name="", every=None)
    assert after(listed, None) == after(listed, NOW_S + HOUR_S) == again_s
    assert after(SUITE, None) == {CASES[1]: NOW_S}
    assert after(SUITE, NOW_S + HOUR_S) == again_s | {CASES[0]: NOW_S + HOUR_S}


@pytest.mark.parametrize(
    ("suite", "text"), [(SUITE, "every 1h"), (Suite(), None), (Suite(name="n", at="2:30"), "at 2:30")]
)
def test_when_a_suite_begins_is_said_as_the_configuration_says_it(suite, text):
    assert agenda.when(suite) == text


def test_a_run_by_command_has_a_time_limit_and_comes_after_what_is_due():
    service_agenda = made(SUITE)
    service_agenda.look(1000.0, 20.0, "d")
    by_command = service_agenda.begin(msgspec.structs.replace(SUITE, name="", every=None))
    assert by_command.suite.time_limit_s == agenda.COMMANDED_S
    assert service_agenda.begin(msgspec.structs.replace(SUITE, time_limit_s=60.0)).suite.time_limit_s == 60.0
    assert service_agenda.next(nothing)[0] == by_command
    service_agenda.look(4600.0, 3620.0, "d")
    entry, _ = service_agenda.next(nothing)
    assert not entry.by_command
    service_agenda._facts.schedule = schedule.drop(service_agenda._facts.schedule, entry.suite_id)
    assert service_agenda.next(nothing)[0] == by_command
    service_agenda._facts.schedule = schedule.finish(
        service_agenda._facts.schedule, by_command.suite_id, CASES[0], agenda.COMMANDED_S
    )
    assert not service_agenda.is_under_way(by_command.suite_id)


def test_a_batch_that_memory_cannot_hold_is_refused_by_command():
    large = Suite(models=["vim_tiny"], variants=["eager"], batch_sizes=[1, 2**20])
    with pytest.raises(UsageError, match=r"batch size 1048576: at most [0-9]+ images of vim_tiny fit in memory"):
        made(SUITE).begin(large)
    with pytest.raises(UsageError, match="fit in memory"):
        made(SUITE).begin(msgspec.structs.replace(large, batch_sizes=[100], options={"image_size": [16, 16384]}))
    with pytest.raises(UsageError, match="fit in memory"):
        made(SUITE).begin(msgspec.structs.replace(large, models=[]))
    assert made(SUITE).begin(msgspec.structs.replace(large, batch_sizes=[1, 4])).left


@pytest.mark.parametrize(("model", "option", "value"), [("vim_tiny", "image_size", 100_000), ("square", "size", 2**40)])
def test_a_default_batch_that_memory_cannot_hold_is_refused_by_command(model, option, value):
    with pytest.raises(UsageError, match=rf"batch size 1: at most 0 images of {model} fit in memory"):
        made(SUITE).begin(Suite(models=[model], variants=["eager"], options={option: [value]}))
