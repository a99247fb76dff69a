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
from benchd.daemon.service.schedule import State, begin

MACHINE = Machine("cpu", True)
SUITE = Suite(name="s", every="1h", models=["square"], variants=["eager"], options={"size": [16, 32]})
NOW_S, HOUR_S = 1_790_000_000.0, 3600.0
CASES = ["square,eager,b1,size=16", "square,eager,b1,size=32"]


def made(*suites, state=None):
    return Agenda(Config(suite=list(suites)), MACHINE, state or State())


def nothing(entry):
    return None


def test_cases_are_those_of_the_plan_and_the_digest_follows_them():
    first = made(SUITE)
    assert first.cases == {"s": CASES}
    assert first.digest == made(SUITE).digest != made(msgspec.structs.replace(SUITE, batch_sizes=[2])).digest


def test_two_suites_that_give_one_case_other_images_are_refused():
    suites = (Suite(name="a", models=["square"]), Suite(name="b", models=["square"], data="imagefolder:x"))
    with pytest.raises(UsageError, match="the suites a and b measure square,eager,b1 with other inputs,"):
        made(*suites)


def test_two_suites_that_give_one_case_other_calibration_are_refused_if_it_reads_any():
    def pair(variant):
        first = Suite(name="a", models=["square"], variants=[variant])
        return first, msgspec.structs.replace(first, name="b", calibration="imagefolder:x")

    with pytest.raises(UsageError, match=r"square,onnxruntime-int8,b1 with other .* or calibration: give both"):
        made(*pair("onnxruntime-int8"))
    for variant in ("onnxruntime", "custom-int8"):
        assert made(*pair(variant)).cases == {name: [f"square,{variant},b1"] for name in "ab"}


def test_a_suite_that_is_due_is_begun_and_measured_case_by_case():
    one = made(SUITE)
    one.look(1000.0, 20.0, "d")
    assert one.next_due("d") == ("s", 4600.0)
    assert one.next(nothing) is None
    assert one.look(4600.0, 3620.0, "d")
    entry, (planned, *_) = one.next(nothing)
    assert (planned.case.case_id, entry.left) == (CASES[0], CASES)
    one.skip(entry.suite_id, CASES[0])
    assert one.next(nothing)[1][0].case.case_id == CASES[1]


def test_a_clock_that_is_set_right_after_a_boot_begins_nothing_that_was_not_due():
    """A board without a clock of its own, booted six hours after its daily suite."""
    one = made(msgspec.structs.replace(SUITE, every="1d"), state=State(served_s={"s": NOW_S}))
    one.look(100.0, 10.0, "d")
    one.look(NOW_S + 6 * HOUR_S, 15.0, "d")
    assert (one.state.passes, one.next_due("d")) == ([], ("s", NOW_S + 30 * HOUR_S))
    one.look(NOW_S + 30 * HOUR_S, 15.0 + 24 * HOUR_S, "d")
    assert [entry.left for entry in one.state.passes] == [CASES]


def test_a_clock_that_is_set_by_hours_still_makes_up_for_what_was_missed():
    """A board that begins with the time at which it went off."""
    one = made(msgspec.structs.replace(SUITE, every="1d"), state=State(served_s={"s": NOW_S - 20 * HOUR_S}))
    one.look(NOW_S, 10.0, "d")
    one.look(NOW_S + 6 * HOUR_S, 15.0, "d")
    assert [entry.left for entry in one.state.passes] == [CASES]


def test_a_pass_that_waits_lets_the_next_one_by_and_is_named_where_all_wait():
    one = made(SUITE)
    one.state = begin(one.state, SUITE, CASES)
    by_command = one.begin(Suite(models=["square"], variants=["eager"]))
    entry, _ = one.next(lambda entry: None if entry.by_command else "too warm")
    assert entry.suite_id == by_command.suite_id
    assert one.next(lambda entry: "too warm") == "s: too warm"


def test_a_case_that_is_gone_is_skipped_with_a_word():
    state = begin(begin(State(), SUITE, ["gone", CASES[0]]), Suite(models=["no-such-model"]), ["x"])
    one = made(SUITE, state=state)
    assert one.next(lambda entry: "warm") == "s: gone skipped: no longer a case of this suite"
    assert [entry.left for entry in one.state.passes] == [[CASES[0]]]


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
    one = made()
    ids = [one.begin(SUITE).suite_id for _ in range(agenda.MAX_PASSES)]
    with pytest.raises(UsageError, match="20 runs are already waiting"):
        one.begin(SUITE)
    assert one.cancel(ids[3]) == [ids[3]]
    assert one.cancel("unknown") == []
    assert len(one.cancel(None)) == agenda.MAX_PASSES - 1
    assert one.state.passes == []


def test_only_a_result_of_a_suite_says_whether_its_case_is_measured_once_more():
    again_s = {CASES[0]: NOW_S, CASES[1]: NOW_S}

    def after(suite, at_s):
        one = made(SUITE, state=begin(State(again_s=again_s), suite, CASES))
        case = Case(model="square", options={"size": 16})
        return one.after(records_made.made(case=case, suite_id=one.state.passes[0].suite_id), 1.0, at_s).again_s

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
    one = made(SUITE)
    one.look(1000.0, 20.0, "d")
    asked = one.begin(msgspec.structs.replace(SUITE, name="", every=None))
    assert asked.suite.time_limit_s == agenda.COMMANDED_S
    assert one.begin(msgspec.structs.replace(SUITE, time_limit_s=60.0)).suite.time_limit_s == 60.0
    assert one.next(nothing)[0] == asked
    one.look(4600.0, 3620.0, "d")
    entry, _ = one.next(nothing)
    assert not entry.by_command
    one.state = schedule.drop(one.state, entry.suite_id)
    assert one.next(nothing)[0] == asked
    one.state = schedule.finish(one.state, asked.suite_id, CASES[0], agenda.COMMANDED_S)
    assert not one.is_under_way(asked.suite_id)


def test_a_batch_that_memory_cannot_hold_is_refused_by_command():
    large = Suite(models=["vim_tiny"], variants=["eager"], batch_sizes=[1, 2**20])
    with pytest.raises(UsageError, match=r"batch size 1048576: at most [0-9]+ images of vim_tiny fit this memory"):
        made(SUITE).begin(large)
    with pytest.raises(UsageError, match="fit this memory"):
        made(SUITE).begin(msgspec.structs.replace(large, batch_sizes=[100], options={"image_size": [16, 16384]}))
    with pytest.raises(UsageError, match="fit this memory"):
        made(SUITE).begin(msgspec.structs.replace(large, models=[]))
    assert made(SUITE).begin(msgspec.structs.replace(large, batch_sizes=[1, 4])).left


@pytest.mark.parametrize(("model", "option", "value"), [("vim_tiny", "image_size", 100_000), ("square", "size", 2**40)])
def test_a_default_batch_that_memory_cannot_hold_is_refused_by_command(model, option, value):
    with pytest.raises(UsageError, match=rf"batch size 1: at most 0 images of {model} fit this memory"):
        made(SUITE).begin(Suite(models=[model], variants=["eager"], options={option: [value]}))
