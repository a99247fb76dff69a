"""What Home says: the choice of `benchd recommend` on every board, and the worst that is wrong with each."""

import msgspec
import pytest
from messages_made import add, message
from records_made import ENVIRONMENT, PASSED, WRONG, made, timing
from sqlalchemy.exc import OperationalError

from benchd.daemon.records import PROFILED, Case, ProcessResult, Variant
from benchd.daemon.verdicts.recommend import Requirements, decide, line
from benchd.dashboard.answers import Answers
from benchd.dashboard.changes import Changes
from benchd.dashboard.conditions import TROUBLES, boards, counts, matches
from benchd.dashboard.matrix import matrix
from benchd.dashboard.runs import RECORDS_BYTES, BoardCache
from benchd.dashboard.views import home

NOW_S = 1_000_000_000.0
SPREAD = (-0.002, -0.001, 0.0, 0.001, 0.002)


def measured(store, run, variant, median_ms, *, device="d1", at_s=NOW_S, **fields):
    processes = [ProcessResult(status="ok", timing=timing(median_ms * (1 + share))) for share in SPREAD]
    given = {"case": Case(model="m", variant=Variant.parse(variant)), "check": PASSED, "processes": processes}
    given |= {"timing": timing(median_ms), "run_id": f"{run}-{variant}", "suite_id": run, "device_id": device}
    record = made(**given | {"t_mono_ns": int(at_s)} | fields)
    say(store, device, f"result/{record.run_id}", record, at_s)
    return record


def say(store, device, kind, body, at_s=NOW_S):
    add(store, message(device, kind, body, at_s))


def of_setup(name):
    return {"environment": msgspec.structs.replace(ENVIRONMENT, fingerprint=name, l4t=name)}


def test_home_ships_what_recommend_ships_and_names_what_fails(store):
    answers = Answers(store, Changes(store))
    records = [measured(store, "s1", "eager", 9.0), measured(store, "s1", "custom", 5.0, flags=["throttled"])]
    records.append(measured(store, "s1", "fp16", 2.0, check=WRONG))
    by_device, left = answers.update()
    (choice,) = by_device["d1"]
    (decision,) = decide(records, Requirements())
    assert (choice.outcome, choice.variant, choice.failed, left) == ("ships", "custom", ("eager-fp16",), 0)
    assert (choice.words, choice.agreed) == (line(decision), "8 of 8 images agree")
    assert choice.doubt == "clocks throttled"


def test_a_newer_record_changes_the_choice_and_a_profile_or_a_late_one_does_not(store):
    answers = Answers(store, Changes(store))
    measured(store, "s1", "eager", 9.0)
    measured(store, "s1", "custom", 5.0)
    assert answers.update()[0]["d1"][0].variant == "custom"
    measured(store, "s2", "custom", 1.0, at_s=NOW_S - 9)
    measured(store, "s3", "eager", 0.5, flags=[PROFILED], at_s=NOW_S + 1)
    assert answers.update()[0]["d1"][0].result.median_ms == 5.0
    measured(store, "s4", "custom", 12.0, at_s=NOW_S + 2)
    assert answers.update()[0]["d1"][0].variant == "eager"


def test_each_power_mode_is_decided_from_its_own_newest_records(store):
    answers = Answers(store, Changes(store))
    times_ms = {"15W": {"eager": 9.0, "custom": 5.0, "fp16": 7.0}, "MAXN": {"eager": 6.0, "custom": 3.0}}
    for number, (mode, by_variant) in enumerate(times_ms.items()):
        environment = msgspec.structs.replace(ENVIRONMENT, fingerprint=mode, power_mode=mode)
        fields = {"environment": environment, "at_s": NOW_S + number}
        records = [measured(store, mode, variant, median_ms, **fields) for variant, median_ms in by_variant.items()]
        (decision,) = decide(records, Requirements())
        words = {choice.kind.power_mode: choice.words for choice in answers.update()[0]["d1"]}
        assert words[mode] == line(decision)
        assert words["15W"].startswith("m b1: ship: custom")
    assert len(answers.newest()[0]) == 5


def test_what_is_not_told_apart_is_inconclusive_and_what_has_no_check_does_not_ship(store):
    measured(store, "s1", "eager", 5.0)
    measured(store, "s1", "custom", 5.001)
    measured(store, "s1", "eager", 5.0, device="d2", check=None)
    for variant, median_ms in (("eager", 9.0), ("custom", 5.0)):
        alone = [ProcessResult(status="ok", timing=timing(median_ms))]
        measured(store, "s1", variant, median_ms, device="d3", processes=alone)
    by_device, _ = Answers(store, Changes(store)).update()
    assert [by_device[name][0].outcome for name in ("d1", "d2", "d3")] == ["inconclusive", "nothing", "fastest"]
    cell = matrix(by_device["d3"], ["d3"], by_kind=False).cells.popitem()[1]
    assert home.lines(cell)[0] == ("fastest, one process", "soft", "")


def test_of_records_that_are_too_large_together_the_newest_count_and_no_other_board_loses_one(store, caplog):
    for number in range(10):
        case, missing = Case(model=f"m{number}"), {"notes": "x" * (RECORDS_BYTES // 5)}
        measured(store, f"s{number}", "eager", 5.0, at_s=NOW_S + number, case=case, missing=missing)
    measured(store, "s1", "eager", 5.0, device="d2")
    records, _ = Answers(store, Changes(store)).newest()
    assert [record.case.model for record in records] == ["m9", "m8", "m7", "m6", "m"]
    assert "d1: left out 6 records" in caplog.text


def test_what_is_read_together_is_of_one_device_and_power_mode(store, caplog):
    """Fifty cases of seven processes on a GPU take nearly all of RECORDS_BYTES in each mode."""
    for mode in ("15W", "MAXN"):
        environment = msgspec.structs.replace(ENVIRONMENT, fingerprint=mode, power_mode=mode)
        for number in range(4):
            fields = {"case": Case(model=f"m{number}"), "missing": {"notes": "x" * (RECORDS_BYTES // 5)}}
            measured(store, f"{mode}{number}", "eager", 5.0, environment=environment, **fields)
    assert len(Answers(store, Changes(store)).newest()[0]) == 8
    assert "left out" not in caplog.text


def test_a_record_that_no_board_can_have_measured_costs_its_board_its_place_and_no_other(store):
    measured(store, "s1", "eager", 5.0, processes=[ProcessResult(status="ok")] * 1001)
    measured(store, "s1", "eager", 5.0, device="d2")
    assert Answers(store, Changes(store)).update()[0].keys() == {"d2"}


def test_a_board_with_times_that_no_machine_measures_costs_no_other_board(store):
    for device, time_ms in (("d1", 1e-160), ("d2", 5.0)):
        measured(store, "s1", "eager", time_ms, device=device, **of_setup("old"))
        measured(store, "s2", "eager", 1 / time_ms, device=device, at_s=NOW_S + 1, **of_setup("new"))
        measured(store, "s2", "fp16", time_ms, device=device, at_s=NOW_S + 1, **of_setup("new"))
    changes = Changes(store)
    by_device, left = Answers(store, changes).update()
    assert (sorted(by_device), left) == (["d1", "d2"], 0)
    assert [by_device[name][0].variant for name in ("d1", "d2")] == ["eager-fp16", "eager"]
    assert [change.verdict.answer for change in changes.update("setup")[0]] == ["slower", "faster"]


def test_a_board_that_cannot_be_read_is_left_out_and_logged_and_a_database_that_is_away_is_told(store, caplog):
    for device in ("d1", "d2", "d3"):
        measured(store, "s1", "eager", 5.0, device=device)
    failures = {"d2": ZeroDivisionError("a bug"), "d3": OperationalError("SELECT", {}, Exception("away"))}

    def read(board):
        if failure := failures.get(board.device_id):
            raise failure
        return board.device_id

    cache = BoardCache(store, read)
    with pytest.raises(OperationalError):
        cache.update()
    del failures["d3"]
    assert cache.update()[:2] == ({"d1": "d1", "d3": "d3"}, 0)
    assert "ZeroDivisionError: a bug" in caplog.text
    failures.clear()
    measured(store, "s2", "eager", 5.0, device="d2", at_s=NOW_S + 1)
    assert cache.update()[0].keys() == {"d1", "d2", "d3"}


def test_a_change_is_against_the_setup_before_with_its_interval_and_cause(store):
    for run in range(3):
        measured(store, f"a{run}", "eager", 5.0 + run / 1000, at_s=NOW_S + run, **of_setup("36.4.3"))
    for run in range(3):
        measured(store, f"b{run}", "eager", 5.5 + run / 1000, at_s=NOW_S + 9 + run, **of_setup("36.4.7"))
    answers = Answers(store, Changes(store))
    choices, _ = answers.update()
    (choice,) = choices["d1"]
    change = choice.change
    (board,) = boards(store, choices, NOW_S, answers.changes)
    assert board.detail == "1 of 1 case slower, 10.0 % since l4t 36.4.3 → 36.4.7"
    assert board.since_s == NOW_S + 9
    assert (change.verdict.answer, change.since) == ("slower", "l4t 36.4.3 → 36.4.7")
    assert change.verdict.interval.low < change.verdict.effect < change.verdict.interval.high
    assert change.verdict.effect == pytest.approx(0.1, rel=1e-2)
    cell = matrix([choice], ["d1"], by_kind=False).cells.popitem()[1]
    text, look, target = home.lines(cell)[-1]
    assert (text[:8], text[-6:], look, target) == (
        "▲ +10.0 ",
        "slower",
        "change bad",
        "/changes?q=d1+m%2Ceager%2Cb1",
    )


def test_boards_of_one_kind_are_counted_by_what_they_choose(store):
    for number in range(5):
        times_ms = (9.0, 5.0) if number else (5.0, 9.0)
        for variant, median_ms in zip(("eager", "custom"), times_ms, strict=True):
            measured(store, "s1", variant, median_ms + number / 10, device=f"d{number}")
    by_device, _ = Answers(store, Changes(store)).update()
    grid = matrix([choice for of_board in by_device.values() for choice in of_board], [], by_kind=True)
    (cell,) = grid.cells.values()
    assert (cell.lead.variant, cell.agreeing, cell.boards, cell.range_ms) == ("custom", 4, 5, (5.1, 5.4))
    assert cell.others == ("1 eager",)
    assert cell.device_ids == {f"d{number}" for number in range(5)}
    assert ("4 of 5 boards agree", "", "") in home.lines(cell)


def test_each_board_is_in_one_condition_the_worst_first(store):
    ages_s = {"fine": 0, "gone": 9999, "slow": 0, "hot": 0, "bad": 0, "ill": 0}
    for device, age_s in ages_s.items():
        say(store, device, "status", {"state": "online"}, NOW_S - age_s)
        say(store, device, "info", {"site": "hall 1", "tags": [f"tag-{device}"]}, NOW_S - age_s)
    say(store, "slow", "latest/c", {"case_id": "c", "verdict": "slower", "median_ms": 2.0, "baseline_ms": 1.0})
    for device in ("hot", "slow"):
        say(store, device, "telemetry", {"samples": [[0, "gpu_throttle_reasons", 4.0, "nvml"]]})
    measured(store, "s1", "eager", 5.0, device="bad")
    measured(store, "s1", "fp16", 5.0, device="bad", check=WRONG)
    say(store, "ill", "health", {"problem": "disk full"})
    fleet = boards(store, Answers(store, Changes(store)).update()[0], NOW_S)
    assert [(board.device.device_id, board.condition) for board in fleet] == [
        ("slow", "slower"),
        ("gone", "silent"),
        ("hot", "throttled"),
        ("bad", "failed check"),
        ("ill", "problem"),
        ("fine", "fine"),
    ]
    assert [board.detail for board in fleet[:4:3]] == ["c: 2 ms against 1 ms", "m b1: eager-fp16"]
    assert "no status" not in TROUBLES
    assert list(counts(fleet)) == ["fine", "slower", "silent", "throttled", "failed check", "problem"]
    assert [len([board for board in fleet if matches(board.device, text)]) for text in ("HALL", "tag-hot", "none")] == [
        6,
        1,
        0,
    ]
