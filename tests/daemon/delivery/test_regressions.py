"""A case that becomes slower than its baseline: records through the service's sink, heard behind a real mosquitto."""

import json
from contextlib import contextmanager

import msgspec
import pytest
from broker import HOST, free_port
from records_made import ENVIRONMENT, PASSED, made, timing
from test_link import Watcher, linked

from benchd.daemon.config import Config, Suite
from benchd.daemon.delivery.disk_reserve import Reserve
from benchd.daemon.delivery.outbox import Outbox
from benchd.daemon.delivery.topics import Topics
from benchd.daemon.errors import UsageError
from benchd.daemon.measuring.plan import Machine
from benchd.daemon.records import Case, ProcessResult, encode
from benchd.daemon.service.agenda import Agenda
from benchd.daemon.service.publisher import STANDINGS, Publisher
from benchd.daemon.service.regressions import Regressions, Standing
from benchd.daemon.service.schedule import State, begin
from benchd.daemon.verdicts import baseline

DEVICE = "d-regressions"
CASE = Case(model="square", options={"size": 16})
OTHER = Case(model="square", options={"size": 32})
SUITE = Suite(name="nightly", models=["square"], variants=["eager"], options={"size": [16, 32]})
AD_HOC = Suite(models=["square"], variants=["eager"], options={"size": [16]})


@pytest.fixture(autouse=True)
def _state(tmp_path, monkeypatch):
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))


def measured(run_id, median_ms, *, case=CASE, processes=5, **fields):
    """Return a Record of processes around `median_ms`, 0.1 % apart."""
    times_ms = [median_ms * (1 + 0.001 * number) for number in range(processes)]
    results = [ProcessResult(status="ok", timing=timing(time_ms)) for time_ms in times_ms]
    given = {"device_id": DEVICE, "processes": results, "timing": timing(median_ms), "check": PASSED}
    return made(run_id=run_id, case=case, **given | fields)


def pin(path, *, median_ms=1.0, fingerprint="f"):
    """Write three runs of both cases, five processes in all and more."""
    environment = msgspec.structs.replace(ENVIRONMENT, fingerprint=fingerprint, kernel=f"6.1-{fingerprint}")
    runs = [
        measured(
            f"b{number}",
            median_ms * (0.9999 + 0.0001 * number),
            case=case,
            suite_id=f"b{number}",
            environment=environment,
        )
        for number in range(3)
        for case in (CASE, OTHER)
    ]
    path.write_bytes(b"".join(encode(run) + b"\n" for run in runs))
    return str(path)


class Service:
    """The service's sink between what it measured and the broker, with what it has kept of the time before."""

    def __init__(self, folder, runs, outbox, link):
        kept = msgspec.json.decode(outbox.kept(STANDINGS) or b"{}", type=dict[str, Standing])
        self.agenda = Agenda(Config(suite=[SUITE]), Machine("cpu", True), State())
        self.regressions = Regressions(runs, kept)
        self.sink = Publisher(
            outbox,
            Reserve(folder / "reserve", 2**20),
            Topics(DEVICE),
            "boot",
            self.agenda,
            self.regressions,
            folder / "activity.json",
        )
        self.sink.link = link
        self.sink.plan(self.agenda.cases["nightly"])

    def take(self, run_id, median_ms, *, suite=SUITE, **fields):
        """Take the result of the first case of a new pass; return which cases are left in that pass."""
        self.agenda.state = begin(State(), suite, self.agenda.cases["nightly"])
        return self.take_again(run_id, median_ms, **fields)

    def take_again(self, run_id, median_ms, **fields):
        record = measured(run_id, median_ms, suite_id=self.agenda.state.passes[0].suite_id, **fields)
        self.sink.publish(record, encode(record))
        return [entry.left for entry in self.agenda.state.passes]


@contextmanager
def service(folder, runs, link=None):
    with Outbox(folder / "outbox.db") as outbox:
        yield Service(folder, runs, outbox, link)


def events(outbox_path):
    with Outbox(outbox_path) as outbox:
        rows = outbox.pending(100)
    return [json.loads(row.body) for row in rows if row.topic.endswith("/event")]


def verdict(one):
    """Return what `latest` of the first case says now."""
    return json.loads(one.sink.link._documents[Topics(DEVICE).latest(CASE.case_id)])


@pytest.fixture
def link(tmp_path):
    """A link whose broker is not there: what it is told stays with it."""
    with linked(f"mqtt://{HOST}:{free_port()}", DEVICE, tmp_path / "outbox.db") as (link, _):
        yield link


def test_a_slower_case_is_measured_again_announced_kept_and_cleared(mosquitto, tmp_path):
    runs = [pin(tmp_path / "pinned.jsonl")]
    watcher = Watcher(mosquitto, DEVICE)

    def heard(name):
        return json.loads(watcher.until(lambda topic, body: topic.endswith("/event") and name in str(body)).payload)

    with linked(mosquitto, DEVICE, tmp_path / "outbox.db") as (link, _), service(tmp_path, runs, link) as one:
        assert one.take("r1", 3.0) == [[OTHER.case_id, CASE.case_id]], "it is not measured again, last of its pass"
        assert (verdict(one)["verdict"], verdict(one)["baseline_ms"]) == ("slower", pytest.approx(1.002))
        assert one.regressions.problem() is None
        assert one.take_again("r2", 3.0) == [[OTHER.case_id]]
        told = heard("regression")
        assert told["event"] == "regression"
        assert told["detail"].startswith("square,eager,b1,size=16: slower, 3.006 ms against 1.002 ms, +")
        judgement = told["judgement"]
        assert (judgement["case_id"], judgement["verdict"]) == (CASE.case_id, "slower")
        assert (judgement["median_ms"], judgement["baseline_ms"]) == (pytest.approx(3.006), pytest.approx(1.002))
        assert judgement["effect_low"] < judgement["effect"] < judgement["effect_high"]
        assert judgement["effect"] == pytest.approx(2.0, rel=0.01)
        assert (judgement["run_ids"], judgement["baseline_run_ids"]) == (["r1", "r2"], ["b0", "b1", "b2"])
        assert one.regressions.problem() == "slower than the baseline: square,eager,b1,size=16 +200.0%"
    with linked(mosquitto, DEVICE, tmp_path / "outbox.db") as (link, _), service(tmp_path, runs, link) as one:
        assert one.regressions.problem() == "slower than the baseline: square,eager,b1,size=16 +200.0%"
        assert one.take("r3", 3.0) == [[OTHER.case_id]], "a regression that is known is measured again"
        one.take("r4", 1.0)
        cleared = heard("regression_cleared")
        assert (cleared["judgement"]["verdict"], cleared["judgement"]["run_ids"]) == ("same", ["r4"])
        assert one.regressions.problem() is None
        assert verdict(one)["verdict"] == "same"
    assert sum("/event" in message.topic for message in watcher.all) == 2
    watcher.close()


def test_a_repetition_that_is_not_slower_ends_the_doubt(tmp_path, link):
    with service(tmp_path, [pin(tmp_path / "pinned.jsonl")], link) as one:
        one.take("r1", 3.0)
        assert one.take_again("r2", 1.0) == [[OTHER.case_id]]
        assert one.take("r3", 3.0) == [[OTHER.case_id, CASE.case_id]], "the doubt of long ago counted"
    assert events(tmp_path / "outbox.db") == []


def test_another_environment_makes_the_baseline_stale_once_and_no_verdict(tmp_path, link):
    with service(tmp_path, [pin(tmp_path / "pinned.jsonl", fingerprint="old")], link) as one:
        assert one.take("r1", 3.0) == [[OTHER.case_id]]
        assert verdict(one)["verdict"] == "inconclusive"
        assert verdict(one)["verdict_reason"].startswith("another environment (kernel 6.1-old and 6.1)")
        one.take("r2", 3.0)
        old = (tmp_path / "pinned.jsonl").read_bytes()
        pin(tmp_path / "pinned.jsonl")
        with (tmp_path / "pinned.jsonl").open("ab") as file:
            file.write(old.replace(b'"run_id":"b', b'"run_id":"old'))
        one.take("r3", 1.0)
        assert (verdict(one)["verdict"], verdict(one)["verdict_reason"]) == ("same", None)
    (stale,) = events(tmp_path / "outbox.db")
    assert (stale["event"], stale["judgement"]["verdict"]) == ("baseline_stale", "inconclusive")


def test_too_few_processes_are_undecided_with_the_line_to_type(tmp_path, link):
    with service(tmp_path, [pin(tmp_path / "pinned.jsonl")], link) as one:
        assert one.take("r1", 3.0, processes=2) == [[OTHER.case_id]]
        assert verdict(one)["verdict"] == "inconclusive"
        assert verdict(one)["verdict_reason"].startswith("B has 2 of 3 processes: run bench-once --models square ")


def test_what_nobody_pinned_or_planned_has_no_verdict(tmp_path, link):
    with service(tmp_path, [], link) as one:
        one.take("r1", 3.0)
        assert verdict(one)["verdict"] is None
        baseline.path().parent.mkdir(parents=True)
        pin(baseline.path())
        one.take("r2", 3.0, suite=AD_HOC)
        assert verdict(one)["verdict"] is None, "a pass that a command put together"
        one.take("r3", 3.0)
        assert verdict(one)["verdict"] == "slower", "what is stored from now on was not looked at"
        one.take("r4", 3.0)
        baseline.clear()
        one.take("r5", 3.0)
        assert verdict(one)["verdict"] is None
    regression, cleared = events(tmp_path / "outbox.db")
    assert (regression["event"], cleared["event"], cleared["judgement"]) == ("regression", "regression_cleared", None)


def test_a_result_that_did_not_end_well_changes_nothing(tmp_path, link):
    with service(tmp_path, [pin(tmp_path / "pinned.jsonl")], link) as one:
        one.take("r1", 3.0)
        one.take_again("r2", 3.0)
        one.take("r3", 3.0, status="failed")
        assert one.regressions.problem()
        assert verdict(one)["verdict"] is None


def test_a_baseline_that_cannot_be_read_is_the_reason_and_no_end(tmp_path, link):
    pinned = tmp_path / "pinned.jsonl"
    with service(tmp_path, [pin(pinned)], link) as one:
        one.take("r0", 3.0)
        one.take_again("r0-again", 3.0)
        pinned.write_bytes(pinned.read_bytes()[:-9])
        one.take("r1", 3.0)
        assert verdict(one)["verdict"] == "inconclusive"
        assert "pinned.jsonl line 6: truncated" in verdict(one)["verdict_reason"]
        pinned.unlink()
        one.take("r2", 3.0)
        assert "pinned.jsonl: No such file" in verdict(one)["verdict_reason"]
        assert one.regressions.problem()
    with pytest.raises(UsageError, match=r"baseline.runs: .*pinned.jsonl: no such file or folder"):
        Regressions([str(pinned)], {})


def test_a_case_that_leaves_the_plan_takes_its_regression_along(tmp_path, link):
    with service(tmp_path, [pin(tmp_path / "pinned.jsonl")], link) as one:
        one.take("r1", 3.0)
        one.take_again("r2", 3.0)
        one.sink.plan([OTHER.case_id])
        assert one.regressions.problem() is None
    assert [event["event"] for event in events(tmp_path / "outbox.db")] == ["regression", "regression_cleared"]
