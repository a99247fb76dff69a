"""A case that becomes slower than its baseline: records through the service's sink, heard behind a real mosquitto."""

import json
import time
from contextlib import contextmanager
from datetime import datetime, timedelta

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
from benchd.daemon.verdicts.alarms import Budget

DEVICE, HOUR_NS = "d-regressions", 3600 * 10**9
CASE = Case(model="square", options={"size": 16})
OTHER = Case(model="square", options={"size": 32})
SUITE = Suite(name="nightly", models=["square"], variants=["eager"], options={"size": [16, 32]})
PLAN = {case.case_id: 720.0 for case in (CASE, OTHER)}
AD_HOC = Suite(models=["square"], variants=["eager"], options={"size": [16]})


@pytest.fixture(autouse=True)
def _state(tmp_path, monkeypatch):
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))


def wall(hours):
    """Return the label of a time so many hours after the first pinned run."""
    return f"{(datetime(2026, 1, 1) + timedelta(hours=hours)).isoformat()}Z"


def measured(run_id, median_ms, *, case=CASE, processes=5, **fields):
    """Return a Record of processes around `median_ms`, 0.1 % apart."""
    times_ms = [median_ms * (1 + 0.001 * number) for number in range(processes)]
    results = [ProcessResult(status="ok", timing=timing(time_ms)) for time_ms in times_ms]
    given = {"device_id": DEVICE, "processes": results, "timing": timing(median_ms), "check": PASSED}
    return made(run_id=run_id, case=case, **given | fields)


def pin(path, *, runs=5, hours_apart=12, fingerprint="f"):
    """Write runs of both cases, 0.2 % apart."""
    environment = msgspec.structs.replace(ENVIRONMENT, fingerprint=fingerprint, kernel=f"6.1-{fingerprint}")
    runs = [
        measured(
            f"b{number}",
            1.0 + 0.002 * (number % 2),
            case=case,
            suite_id=f"b{number}",
            environment=environment,
            t_wall=wall(number * hours_apart),
        )
        for number in range(runs)
        for case in (CASE, OTHER)
    ]
    path.write_bytes(b"".join(encode(run) + b"\n" for run in runs))
    return str(path)


class Service:
    """The service's sink between what it measured and the broker, with what it has kept of the time before."""

    def __init__(self, folder, runs, outbox, link):
        kept = msgspec.json.decode(outbox.kept(STANDINGS) or b"{}", type=dict[str, Standing])
        self.agenda = Agenda(Config(suite=[SUITE]), Machine("cpu", True), State())
        self.regressions = Regressions(runs, kept, Budget(0.05, PLAN))
        self.hours, self.ahead = 1000.0, 0.0
        self.sink = Publisher(
            outbox,
            Reserve(folder / "reserve", 2**20),
            Topics(DEVICE),
            "boot",
            self.agenda,
            self.regressions,
            folder / "activity.json",
            [],
        )
        self.sink.link = link
        self.sink.plan(self.agenda.cases["nightly"])

    def take(self, run_id, median_ms, *, hours=12, clock_set=0, suite=SUITE, **fields):
        """Take the result of the first case of a new pass, so many hours later; return what is to be measured again.

        The wall clock was set by `clock_set` hours meanwhile.
        """
        self.hours, self.ahead = self.hours + hours, self.ahead + clock_set
        times = {"t_wall": wall(self.hours + self.ahead), "t_mono_ns": round(self.hours * HOUR_NS)}
        self.agenda.state = begin(State(), suite, self.agenda.cases["nightly"])
        suite_id = self.agenda.state.passes[0].suite_id
        record = measured(run_id, median_ms, suite_id=suite_id, **times | fields)
        self.sink.publish(record, encode(record))
        return self.agenda.state.again_s


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
        assert one.take("r1", 3.0) == {CASE.case_id: pytest.approx(time.time() + 12 * 3600, abs=60)}
        assert (verdict(one)["verdict"], verdict(one)["baseline_ms"]) == ("slower", pytest.approx(1.002, rel=0.002))
        assert one.regressions.problem() is None
        assert one.take("r1-at-once", 3.0, hours=11.9) == {CASE.case_id: pytest.approx(time.time() + 360, abs=60)}
        assert one.regressions.problem() is None, "what slows the machine down for an hour became a regression"
        one.take("r2", 3.0, hours=0.1)
        told = heard("regression")
        assert told["event"] == "regression"
        assert told["detail"].startswith("square,eager,b1,size=16: slower, 3.006 ms against 1.003 ms, +")
        judgement = told["judgement"]
        assert (judgement["case_id"], judgement["verdict"]) == (CASE.case_id, "slower")
        assert (judgement["median_ms"], judgement["baseline_ms"]) == (
            pytest.approx(3.006),
            pytest.approx(1.003, rel=1e-3),
        )
        assert judgement["effect_low"] < judgement["effect"] < judgement["effect_high"]
        assert judgement["effect"] == pytest.approx(2.0, rel=0.01)
        assert (judgement["run_ids"], judgement["baseline_run_ids"]) == (
            ["r1", "r2"],
            [f"b{number}" for number in range(5)],
        )
        assert one.regressions.problem() == "slower than the baseline: square,eager,b1,size=16 +199.8%"
    with linked(mosquitto, DEVICE, tmp_path / "outbox.db") as (link, _), service(tmp_path, runs, link) as one:
        assert one.regressions.problem() == "slower than the baseline: square,eager,b1,size=16 +199.8%"
        assert one.take("r3", 3.0) == {}, "a regression that is known is measured again"
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
        assert one.take("r2", 1.0) == {}
        assert one.take("r3", 3.0).keys() == {CASE.case_id}, "the doubt of long ago counted"
    assert events(tmp_path / "outbox.db") == []


def test_a_wall_clock_that_is_set_brings_no_regression_forward(tmp_path, link):
    with service(tmp_path, [pin(tmp_path / "pinned.jsonl")], link) as one:
        one.take("r1", 3.0)
        again_s = one.take("r2", 3.0, hours=0.1, clock_set=13)
        assert one.regressions.problem() is None
        assert again_s == {CASE.case_id: pytest.approx(time.time() + 11.9 * 3600, abs=60)}, "it is not asked again"
        assert one.take("r3", 3.0, hours=11.9, clock_set=-13) == {}
        assert one.regressions.standings[CASE.case_id].slower.run_ids == ["r1", "r3"]


@pytest.mark.parametrize(
    ("doubted", "now", "is_apart"),
    [
        (wall(2000), wall(2012), True),
        (wall(2000), wall(2011), False),
        ("1970-01-01T00:00:10Z", wall(2012), False),
        (wall(2012), "1970-01-01T00:00:10Z", False),
        (wall(2012), wall(2000), False),
    ],
)
def test_across_a_boot_a_doubt_counts_by_wall_clocks_that_can_be_right(tmp_path, link, doubted, now, is_apart):
    with service(tmp_path, [pin(tmp_path / "pinned.jsonl")], link) as one:
        one.take("r1", 3.0, t_wall=doubted)
        again_s = one.take("r2", 3.0, t_wall=now, boot_id="b2", t_mono_ns=HOUR_NS)
        assert (one.regressions.problem() is not None, again_s == {}) == (is_apart, is_apart)
        one.take("r3", 3.0, t_wall=wall(2024), boot_id="b2", t_mono_ns=13 * HOUR_NS)
        assert one.regressions.problem(), "the doubt lasts for ever"


def test_another_environment_makes_the_baseline_stale_once_and_no_verdict(tmp_path, link):
    with service(tmp_path, [pin(tmp_path / "pinned.jsonl", fingerprint="old")], link) as one:
        assert one.take("r1", 3.0) == {}
        assert verdict(one)["verdict"] == "inconclusive"
        assert verdict(one)["verdict_reason"].startswith("another environment (kernel: 6.1-old and 6.1)")
        one.take("r2", 3.0)
        old = (tmp_path / "pinned.jsonl").read_bytes()
        pin(tmp_path / "pinned.jsonl")
        with (tmp_path / "pinned.jsonl").open("ab") as file:
            file.write(old.replace(b'"run_id":"b', b'"run_id":"old'))
        one.take("r3", 1.0)
        assert (verdict(one)["verdict"], verdict(one)["verdict_reason"]) == ("same", None)
    (stale,) = events(tmp_path / "outbox.db")
    assert (stale["event"], stale["judgement"]["verdict"]) == ("baseline_stale", "inconclusive")


def test_an_upgrade_of_benchd_makes_no_baseline_stale(tmp_path, link):
    now = msgspec.structs.replace(ENVIRONMENT, fingerprint="0f-02", kernel="6.1-0f-01", variables={})
    with service(tmp_path, [pin(tmp_path / "pinned.jsonl", fingerprint="0f-01")], link) as one:
        one.take("r1", 1.0, environment=now)
        assert verdict(one)["verdict"] == "same"
    assert events(tmp_path / "outbox.db") == []


def test_too_few_processes_are_undecided_with_the_line_to_type(tmp_path, link):
    with service(tmp_path, [pin(tmp_path / "pinned.jsonl")], link) as one:
        assert one.take("r1", 3.0, processes=2) == {}
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
        assert one.take("r1-failed", 3.0, status="failed").keys() == {CASE.case_id}, "the doubt is not decided"
        one.take("r2", 3.0)
        one.take("r3", 3.0, status="failed")
        assert one.regressions.problem()
        assert verdict(one)["verdict"] is None


def test_a_baseline_that_cannot_be_read_is_the_reason_and_no_end(tmp_path, link):
    pinned = tmp_path / "pinned.jsonl"
    with service(tmp_path, [pin(pinned)], link) as one:
        one.take("r0", 3.0)
        one.take("r0-again", 3.0)
        pinned.write_bytes(pinned.read_bytes()[:-9])
        one.take("r1", 3.0)
        assert verdict(one)["verdict"] == "inconclusive"
        assert "pinned.jsonl line 10: truncated" in verdict(one)["verdict_reason"]
        pinned.unlink()
        one.take("r2", 3.0)
        assert "pinned.jsonl: no such file" in verdict(one)["verdict_reason"]
        assert one.regressions.problem()
    with pytest.raises(UsageError, match=r"baseline.runs: .*pinned.jsonl: no such file or folder"):
        Regressions([str(pinned)], {}, Budget(0.05, PLAN))


def test_a_case_that_leaves_the_plan_takes_its_regression_along(tmp_path, link):
    with service(tmp_path, [pin(tmp_path / "pinned.jsonl")], link) as one:
        one.take("r1", 3.0)
        one.take("r2", 3.0)
        one.sink.plan([OTHER.case_id])
        assert one.regressions.problem() is None
    assert [event["event"] for event in events(tmp_path / "outbox.db")] == ["regression", "regression_cleared"]


def test_pinned_runs_of_one_day_raise_no_alarm_and_say_what_is_missing(tmp_path, link):
    """They show nothing of how the hours differ."""
    with service(tmp_path, [pin(tmp_path / "pinned.jsonl", runs=20, hours_apart=1)], link) as one:
        assert one.take("r1", 3.0) == {}
        assert verdict(one)["verdict"] == "inconclusive"
        assert verdict(one)["verdict_reason"] == (
            "+199.7%, but the baseline has 2 of 5 runs of it that are half a day apart: pin runs of several days with "
            "benchd baseline set RUN..."
        )


def test_a_difference_within_the_bound_of_few_pinned_runs_is_no_doubt(tmp_path, link):
    with service(tmp_path, [pin(tmp_path / "pinned.jsonl")], link) as one:
        assert one.take("r1", 1.007) == {}
        assert (verdict(one)["verdict"], verdict(one)["verdict_reason"]) == (
            "inconclusive",
            "+0.6% is within the 0.7% that 5 pinned runs half a day apart leave open at 0.05 false alarms a month; "
            "more of them narrow it",
        )
    with service(tmp_path, [pin(tmp_path / "pinned.jsonl", runs=30)], link) as one:
        assert one.take("r2", 1.007).keys() == {CASE.case_id}
        assert verdict(one)["verdict"] == "slower"
