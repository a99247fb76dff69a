"""What becomes of a record: what is in the log and in the facts, when the link is held, and what a full disk leaves."""

import msgspec
import pytest
from links import unstarted
from records_made import made
from services import CPU, state_in

from benchd.daemon import records
from benchd.daemon.config import Config, DeviceConfig, LimitsConfig, Suite
from benchd.daemon.delivery.topics import Topics
from benchd.daemon.errors import Full
from benchd.daemon.measuring.plan import plan
from benchd.daemon.measuring.supervisor import MeasuredCase
from benchd.daemon.records import Case
from benchd.daemon.service import cases, results
from benchd.daemon.service.facts import STATE, FactsFile
from benchd.daemon.service.schedule import Schedule, begin

TOPICS = Topics("bench-abc123")
SUITE = Suite(models=["square"], variants=["eager"])
(PLANNED,) = plan([SUITE], LimitsConfig(), CPU)
LEFT = ["vim_tiny,eager,b1", "square,eager,b1"]


@pytest.fixture
def state(tmp_path):
    with unstarted(tmp_path, TOPICS) as (link, _), service(tmp_path, link) as state:
        yield state


def service(folder, link=None):
    return state_in(folder, Config(device=DeviceConfig(id=TOPICS.device_id)), link)


def begin_run(state):
    schedule = begin(Schedule(), SUITE, LEFT)
    run = msgspec.structs.replace(schedule.passes[0], suite_id="s1")
    state.facts.schedule = msgspec.structs.replace(schedule, passes=[run])
    return run


def stored(state):
    return FactsFile(state.folder / STATE).now


def left(state):
    """Return the cases that the stored schedule still holds."""
    return [entry.left for entry in stored(state).schedule.passes]


def publish(state, record):
    results.ResultSink(state).publish(record, records.encode(record))


def bodies(state):
    return [records.decode(entry.body).run_id for entry in state.records.entries()]


def test_the_link_is_held_from_the_warm_up_to_the_end_of_the_timed_runs(state):
    sink, by_stage = results.ResultSink(state), {}
    for stage in ("import", "build", "load", "check", "warm_up", "measure", "probe"):
        sink.stage(PLANNED, 0, stage)
        by_stage[stage] = (state.link.is_held, state.is_timed)
    assert [stage for stage, now in by_stage.items() if now == (True, True)] == ["warm_up", "measure"]
    assert all(now in ((True, True), (False, False)) for now in by_stage.values())
    for leave in (lambda: cases._end(state), lambda: publish(state, made())):
        sink.stage(PLANNED, 0, "measure")
        leave()
        assert not state.link.is_held


def test_a_record_is_in_the_log_before_the_facts_know_it_and_what_ran_what_ran_is_forgotten_with_it(state):
    cases._begin(state, begin_run(state), MeasuredCase(PLANNED))
    running = stored(state).running
    assert (running.suite_id, running.case, running.boot_id) == ("s1", PLANNED.case, state.boot_id)
    publish(state, made())
    cases._end(state)
    assert (stored(state).running, stored(state).applied_seq) == (None, 1)
    assert left(state) == [LEFT[1:]]
    assert bodies(state) == [made().run_id]


def test_only_cases_of_the_plan_have_a_latest(state):
    publish(state, made())
    assert state.link._documents == {}
    state.agenda.planned = {made().case_id}
    publish(state, made())
    ((topic, body),) = state.link._documents.items()
    assert topic == TOPICS.latest(made().case_id)
    assert msgspec.json.decode(body)["median_ms"] == made().timing.median_ms


def test_an_interrupted_case_stays_in_its_run(state):
    begin_run(state)
    publish(state, made(status="aborted", timing=None, processes=[]))
    assert left(state) == [LEFT]


def test_a_result_that_a_full_disk_rejects_is_kept_and_appended_before_the_next(small_disk):
    with service(small_disk) as state:
        begin_run(state)
        state.save()
        with pytest.raises(Full):
            publish(state, made(reason="y" * 2**23))
        assert state.agenda.runs[0].left == LEFT
        state.owed[0] = (made(), records.encode(made()))  # in the place of room on the disk
        publish(state, made(run_id="r2", case=Case(model="square")))
        assert bodies(state) == [made().run_id, "r2"]
        assert (state.owed, stored(state).applied_seq) == ([], 2)
