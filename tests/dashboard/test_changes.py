"""Changes since an update or a date: what is compared with what, and what is said of the cause."""

import msgspec
import pytest
from messages_made import add, result
from records_made import ENVIRONMENT, PASSED, WRONG, made, timing

from benchd.daemon.records import PROFILED, Case, ModelFacts, ProcessResult
from benchd.dashboard.changes import UPDATES, Changes
from benchd.dashboard.limits import day_s
from benchd.dashboard.views.changes import sort

SPREAD = (-0.002, -0.001, 0.0, 0.001, 0.002)
DAY_S = 86400.0
FIRST_S = day_s("2026-03-01")
MODEL = ModelFacts(
    options={},
    input_shape=[3, 8, 8],
    parameters=1,
    weights="random",
    weights_sha256="w",
    read={"benchd": "old"},
    data="d",
)


def environment(name, **fields):
    return msgspec.structs.replace(ENVIRONMENT, fingerprint=f"{name}-sources", **fields)


def measured(store, run, day, median_ms, environment, *, device="d1", benchd="0.1", **fields):
    processes = [ProcessResult(status="ok", timing=timing(median_ms * (1 + share))) for share in SPREAD]
    at_s = FIRST_S + day * DAY_S
    given = {"case": Case(model="m"), "check": PASSED, "processes": processes, "timing": timing(median_ms)}
    given |= {"run_id": run, "suite_id": run, "device_id": device, "environment": environment, "tool_version": benchd}
    add(store, result(made(**given | {"t_wall": "1970-01-01T00:00:00Z"} | fields), at_s))


def runs(store, name, days, median_ms, environment, **fields):
    for day in days:
        measured(store, f"{name}{day}", day, median_ms + day / 1000, environment, **fields)


def changed(store, since):
    changes, left = Changes(store).update(since)
    assert left == 0
    return {(change.device_id, change.case_id): change for change in changes}


def test_an_update_s_change_has_an_interval_and_no_separable_cause(store):
    runs(store, "a", range(3), 10.0, environment("e1", l4t="36.4.3"))
    runs(store, "b", range(3, 6), 11.0, environment("e2", l4t="36.4.7"), benchd="0.2")
    (change,) = changed(store, "benchd").values()
    assert (change.verdict.answer, change.is_across, change.runs) == ("slower", True, (3, 3))
    assert change.verdict.effect == pytest.approx(0.1, rel=0.01)
    assert change.verdict.interval.low < change.verdict.effect < change.verdict.interval.high
    assert change.differences == ("benchd 0.1 → 0.2", "l4t 36.4.3 → 36.4.7")
    assert change.first_s == FIRST_S + 3 * DAY_S
    assert change.separating.startswith("undo the 2 differences one at a time, run bench-once --case m,eager,b1 ")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"projections": [1.7]}, "B is not the same network as A: its exact answers differ"),
        ({"passed": False}, "B: fails its numerical check"),
    ],
)
def test_since_a_date_neither_another_network_nor_wrong_answers_are_a_change(store, fields, reason):
    """Of one setup: an edit of the model changes no fingerprint."""
    answers = {"outputs": ["scores 10"], "inputs_sha256": "i", "projections": [1.0]}
    was, now = (msgspec.structs.replace(PASSED, **answers | changed) for changed in ({}, fields))
    runs(store, "a", range(3), 10.0, environment("e"), model=MODEL, check=was)
    runs(store, "b", range(3, 6), 8.0, environment("e"), model=MODEL, check=now)
    (change,) = changed(store, "2026-03-04").values()
    assert (change.is_across, change.verdict.answer, change.verdict.reason) == (False, "inconclusive", reason)


def test_each_kind_of_update_compares_with_the_last_setup_before_it(store):
    """Four setups in turn: of JetPack, of the driver, of benchd and of the kernel; the time grows with each."""
    facts = {"l4t": "1", "driver": "1", "kernel": "1"}
    steps = [("l4t", "2", "0.1"), ("driver", "2", "0.1"), ("driver", "2", "0.2"), ("kernel", "2", "0.2")]
    runs(store, "a", range(2), 10.0, environment("e0", device="cuda", **facts))
    for number, (name, value, benchd) in enumerate(steps, 1):
        facts |= {name: value}
        setup = environment(f"e{number}", device="cuda", **facts)
        runs(store, f"b{number}", range(2 * number, 2 * number + 2), 10.0 + number, setup, benchd=benchd)
    before_ms = {since: change.pair.medians_ms[0] for since in UPDATES for change in changed(store, since).values()}
    rounded_ms = {since: round(value) for since, value in before_ms.items()}
    assert rounded_ms == {"jetpack": 10, "driver": 11, "benchd": 12, "setup": 13, "fingerprint": 13}


def test_in_one_setup_a_date_separates_runs_and_across_it_the_setups_of_both_sides(store):
    setup = environment("e1")
    runs(store, "a", range(3), 10.0, setup)
    runs(store, "b", range(5, 8), 12.0, setup)
    (change,) = changed(store, "2026-03-04").values()
    assert (change.verdict.answer, change.is_across, change.differences, change.separating) == ("slower", False, (), "")
    measured(store, "c", 8, 14.0, environment("e2", l4t="1"))
    (change,) = changed(store, "2026-03-04").values()
    assert (change.is_across, round(change.pair.medians_ms[0]), round(change.pair.medians_ms[1])) == (True, 10, 14)
    assert changed(store, "2027-01-01") == changed(store, "2020-01-01") == {}


def test_what_may_not_be_compared_says_why_and_a_profile_is_no_run(store):
    runs(store, "a", range(3), 10.0, environment("e1"), check=WRONG)
    runs(store, "b", range(3, 5), 11.0, environment("e2"))
    measured(store, "profile", 9, 99.0, environment("e3"), flags=[PROFILED])
    (change,) = changed(store, "setup").values()
    assert (sort(change), change.verdict.reason) == ("not compared", "A: fails its numerical check")
    assert round(change.pair.medians_ms[1]) == 11


@pytest.mark.parametrize("since", ["setup", "2026-03-04"])
def test_a_profile_in_the_setup_before_does_not_make_it_the_newest_one(store, since):
    runs(store, "a", range(3), 10.0, environment("e1"))
    runs(store, "b", range(3, 6), 11.0, environment("e2"))
    measured(store, "profile", 9, 99.0, environment("e1"), flags=["busy_machine", PROFILED])
    (change,) = changed(store, since).values()
    assert [round(median_ms) for median_ms in change.pair.medians_ms] == [10, 11]


def test_a_case_that_ends_before_its_worker_reports_is_no_update(store):
    runs(store, "a", range(3), 10.0, environment("e1", l4t="1"))
    unknown = {"status": "aborted", "timing": None, "processes": [], "check": None}
    measured(store, "b", 3, 1.0, environment("e2", l4t="2", threads=None), **unknown)
    assert [changed(store, since) for since in (*UPDATES, "2026-03-04")] == [{}] * (len(UPDATES) + 1)
    measured(store, "c", 4, 11.0, environment("e3", l4t="3"))
    (change,) = changed(store, "setup").values()
    assert change.differences == ("l4t 1 → 3",)


def test_an_update_of_benchd_alone_is_separable_by_measuring_both_here(store):
    setup = environment("e1")
    runs(store, "a", range(3), 10.0, setup, model=MODEL)
    newer = msgspec.structs.replace(MODEL, read={"benchd": "new"})
    runs(store, "b", range(3, 6), 9.0, setup, benchd="0.2", model=newer, case=Case(model="m"))
    (change,) = changed(store, "setup").values()
    assert (change.verdict.answer, change.differences) == ("faster", ("benchd 0.1 → 0.2",))
    assert change.separating.startswith("benchd compare --live m,eager,b1")


def test_verdicts_are_corrected_for_all_changes_in_the_fleet(store):
    for number in range(10):
        for side, (days, median_ms) in enumerate(((range(3), 10.0), (range(3, 6), 10.0 if number else 10.3))):
            for day in days:
                noise = 0.08 * ((7 * number + 3 * day) % 5 - 2) / 2
                name, setup = f"{number}-{day}", environment(f"e{side}", l4t=str(side))
                measured(store, name, day, median_ms + noise, setup, device=f"d{number}")
    changes = Changes(store)
    for _ in range(50):
        results, left = changes.update("setup")
        if not left:
            break
    assert len(results) == 10
    alone = [change.pair.effect.interval(0.95) for change in results]
    assert all(
        change.verdict.interval.low <= own.low and change.verdict.interval.high >= own.high
        for change, own in zip(results, alone, strict=True)
    )
    assert not any(change.verdict.answer in ("slower", "faster") for change in results if change.device_id != "d0")
