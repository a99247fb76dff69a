"""The service's sink: what is committed together, when the link is held, and what a full disk and a crash leave."""

import shutil
from itertools import count

import msgspec
import pytest
from links import unstarted
from records_made import made

from benchd.daemon.config import Config, LimitsConfig, Suite
from benchd.daemon.delivery.disk_reserve import Reserve
from benchd.daemon.delivery.outbox import JOURNALLED, Message, Outbox
from benchd.daemon.delivery.topics import Topics
from benchd.daemon.errors import Full, UsageError
from benchd.daemon.measuring.plan import Machine, plan
from benchd.daemon.measuring.recording import RunId
from benchd.daemon.service.agenda import Agenda
from benchd.daemon.service.publisher import RUNNING, Publisher, Running
from benchd.daemon.service.recovery import NO_RUN
from benchd.daemon.service.regressions import Regressions
from benchd.daemon.service.schedule import State, begin
from benchd.daemon.verdicts.alarms import Budget

TOPICS = Topics("bench-abc123")
SUITE = Suite(models=["square"], variants=["eager"])
(PLANNED,) = plan([SUITE], LimitsConfig(), Machine("cpu", True))


@pytest.fixture
def outbox(tmp_path):
    with Outbox(tmp_path / "outbox.db") as outbox:
        yield outbox


@pytest.fixture
def link(tmp_path):
    with unstarted(tmp_path / "outbox.db", TOPICS) as link:
        yield link


def unable(*given):
    raise UsageError("the outbox is locked")


def publisher(outbox, folder, link=None, owed=None):
    state = begin(State(), SUITE, ["vim_tiny,eager,b1", "square,eager,b1"])
    state = msgspec.structs.replace(state, passes=[msgspec.structs.replace(state.passes[0], suite_id="s1")])
    agenda = Agenda(Config(), Machine("cpu", True), state)
    reserve, regressions = Reserve(folder / "reserve", 2**20), Regressions([], {}, Budget(0.05, {}))
    sink = Publisher(
        outbox, reserve, TOPICS, "boot", agenda, regressions, folder / "activity.json", [] if owed is None else owed
    )
    sink.link = link
    return sink


def left(outbox):
    """Return the cases that the kept schedule still holds."""
    return [entry.left for entry in msgspec.json.decode(outbox.kept("schedule"), type=State).passes]


def test_the_link_is_held_from_the_warm_up_to_the_end_of_the_timed_runs(outbox, tmp_path, link):
    sink = publisher(outbox, tmp_path, link)
    held = {}
    for stage in ("import", "build", "load", "check", "warm_up", "measure", "probe"):
        sink.stage(PLANNED, 0, stage)
        held[stage] = (link.held.is_set(), sink.timed)
    assert [stage for stage, state in held.items() if state == (True, True)] == ["warm_up", "measure"]
    assert all(state in ((True, True), (False, False)) for state in held.values())
    for leave in (sink.end, lambda: sink.publish(made(), b"{}")):
        sink.stage(PLANNED, 0, "measure")
        leave()
        assert not link.held.is_set()


def test_a_record_and_the_schedule_are_one_commit_and_what_ran_is_forgotten_with_it(outbox, tmp_path, link):
    sink = publisher(outbox, tmp_path, link)
    sink.begin_case("s1", PLANNED, RunId.new(), 60.0)
    running = msgspec.json.decode(outbox.kept(RUNNING), type=Running)
    assert (running.suite_id, running.case, running.boot_id) == ("s1", PLANNED.case, "boot")
    assert msgspec.json.decode((tmp_path / "activity.json").read_bytes())["case_id"] == PLANNED.case.case_id
    sink.publish(made(), b"the body")
    sink.end()
    assert not (tmp_path / "activity.json").exists()
    assert outbox.kept(RUNNING) == b""
    assert left(outbox) == [["square,eager,b1"]]
    assert [(row.key, row.topic, row.body) for row in outbox.pending(9)] == [
        ("bench-abc123:r1", TOPICS.result("r1"), b"the body")
    ]


def test_only_cases_of_the_plan_have_a_latest(outbox, tmp_path, link):
    sink = publisher(outbox, tmp_path, link)
    record = made()
    sink.publish(record, b"{}")
    assert link.take_document() is None
    sink.planned_cases = {record.case_id}
    sink.publish(record, b"{}")
    topic, body = link.take_document()
    assert topic == TOPICS.latest(record.case_id)
    assert msgspec.json.decode(body)["median_ms"] == record.timing.median_ms


def test_without_a_broker_the_schedule_alone_is_kept(outbox, tmp_path):
    sink = publisher(outbox, tmp_path)
    sink.publish(made(), b"{}")
    sink.event("started", "x")
    assert outbox.counts() == (0, 0, 0)
    assert left(outbox) == [["square,eager,b1"]]


def test_an_interrupted_case_stays_in_its_pass(outbox, tmp_path, link):
    publisher(outbox, tmp_path, link).publish(made(status="aborted", timing=None, processes=[]), b"{}")
    assert left(outbox) == [["vim_tiny,eager,b1", "square,eager,b1"]]


def test_on_a_full_disk_a_result_goes_where_the_reserve_was(small_disk, link):
    with Outbox(small_disk / "outbox.db") as outbox:
        sink = publisher(outbox, small_disk, link)
        assert sink._reserve.hold() is None
        (small_disk / "filler").write_bytes(b"x" * (4 * 2**20 - 2**20 - 300_000))
        sink.publish(made(), b"y" * 400_000)
        assert not (small_disk / "reserve").exists()
        assert [len(row.body) for row in outbox.pending(9)] == [400_000]
        with pytest.raises(Full):
            sink.publish(made(run_id="r2", case_id="square,eager,b1"), b"y" * 2_000_000)
        assert left(outbox) == [["square,eager,b1"]], "a result that could not be kept took its case along"
        assert sink._agenda.state.passes[0].left == ["square,eager,b1"]


def use_up_the_log(outbox):
    for number in count():
        outbox.keep({"fact": b"%d" % number})


def test_what_the_outbox_could_not_take_is_delivered_after_a_reload_and_after_a_restart(outbox, tmp_path, link):
    owed, (lost, adopted, next_) = [], (made(run_id=name) for name in ("lost", "adopted", "next"))
    before = publisher(outbox, tmp_path, link, owed)
    refuse = pytest.MonkeyPatch()
    refuse.setattr(outbox, "add_all", unable)
    with pytest.raises(UsageError):
        before.publish(lost, b"lost")
    reloaded = publisher(outbox, tmp_path, link, owed)
    with pytest.raises(UsageError):
        reloaded.adopt([Message(adopted.key, "topic", 1, b"adopted")], adopted.run_id)
    refuse.undo()
    reloaded.publish(next_, b"next")
    assert [row.body for row in outbox.pending(9)] == [b"lost", b"adopted", b"next"]


def test_a_journal_that_could_not_be_read_into_a_new_outbox_is_read_by_the_next_start(outbox, tmp_path, link):
    publisher(outbox, tmp_path, link).publish(made(), b"the body")
    assert outbox.kept(JOURNALLED) == b""
    publisher(outbox, tmp_path, link).adopt([], NO_RUN)
    publisher(outbox, tmp_path, link).publish(made(run_id="r2"), b"another")
    assert outbox.kept(JOURNALLED) == b"r2"


def test_on_a_full_disk_a_case_that_begins_is_kept_where_the_reserve_was(small_disk, link):
    with Outbox(small_disk / "outbox.db") as outbox:
        sink = publisher(outbox, small_disk, link)
        assert sink._reserve.hold() is None
        (small_disk / "filler").write_bytes(b"x" * shutil.disk_usage(small_disk).free)
        with pytest.raises(Full):
            use_up_the_log(outbox)
        sink.begin_case("s1", PLANNED, RunId.new(), 60.0)
        assert msgspec.json.decode(outbox.kept(RUNNING), type=Running).case == PLANNED.case
        assert not (small_disk / "reserve").exists()
