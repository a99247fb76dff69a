"""A case that becomes slower than its baseline: records through the service's sink, heard behind a real mosquitto."""

import json
import time
from contextlib import contextmanager
from datetime import datetime, timedelta

import msgspec
import pytest
from links import Watcher, linked, unstarted
from records_made import ENVIRONMENT, PASSED, made, timing
from services import state_in

from benchd.daemon.config import BaselineConfig, Config, DeviceConfig, Suite
from benchd.daemon.delivery.topics import Topics
from benchd.daemon.records import Case, ProcessResult, encode
from benchd.daemon.service import regressions, results
from benchd.daemon.service.schedule import Schedule, begin
from benchd.daemon.verdicts import baseline

DEVICE, HOUR_NS = "d-regressions", 3600 * 10**9
CASE = Case(model="square", options={"size": 16})
OTHER = Case(model="square", options={"size": 32})
SUITE = Suite(name="nightly", every="1h", models=["square"], variants=["eager"], options={"size": [16, 32]})
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


def pin(path, *, runs=5, hours_apart=12, fingerprint="f", apart=0.002):
    """Write runs of both cases, 0.2 % apart."""
    environment = msgspec.structs.replace(ENVIRONMENT, fingerprint=fingerprint, kernel=f"6.1-{fingerprint}")
    runs = [
        measured(
            f"b{number}",
            1.0 + apart * (number % 2),
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
    """What becomes of results, with what is known of the time before."""

    def __init__(self, state):
        self.state, self.hours, self.ahead = state, 1000.0, 0.0

    def take(self, run_id, median_ms, *, hours=24, clock_set=0, suite=SUITE, **fields):
        """Take the result of the first case of a new pass, so many hours later; return what is to be measured again.

        The wall clock was set by `clock_set` hours meanwhile.
        """
        self.hours, self.ahead = self.hours + hours, self.ahead + clock_set
        times = {"t_wall": wall(self.hours + self.ahead), "t_mono_ns": round(self.hours * HOUR_NS)}
        schedule = begin(Schedule(), suite, self.state.agenda.cases["nightly"])
        self.state.facts.schedule, suite_id = schedule, schedule.passes[0].suite_id
        record = measured(run_id, median_ms, suite_id=suite_id, **times | fields)
        results.ResultSink(self.state).publish(record, encode(record))
        return self.state.facts.schedule.again_s

    def problem(self):
        return regressions.problem(self.state.facts.standings)


@contextmanager
def service(folder, runs, link):
    settings = Config(device=DeviceConfig(id=DEVICE), suite=[SUITE], baseline=BaselineConfig(runs=runs))
    with state_in(folder, settings, link) as state:
        yield Service(state)


def events(link):
    return [json.loads(entry.body) for entry in link.delivery.outgoing["events"].log.entries()]


def verdict(one):
    """Return what `latest` of the first case says now."""
    return json.loads(one.state.link._documents[Topics(DEVICE).latest(CASE.case_id)])


@pytest.fixture
def link(tmp_path):
    """A link that has not started: what it is told stays with it."""
    with unstarted(tmp_path, Topics(DEVICE)) as (link, _):
        yield link


def test_a_slower_case_is_measured_again_announced_kept_and_cleared(mosquitto, tmp_path):
    runs = [pin(tmp_path / "pinned.jsonl")]
    watcher = Watcher(mosquitto, DEVICE)

    def heard(name):
        return json.loads(watcher.until(lambda topic, body: topic.endswith("/event") and name in str(body)).payload)

    with linked(mosquitto, DEVICE, tmp_path) as (link, _), service(tmp_path, runs, link) as daemon:
        assert daemon.take("r1", 3.0) == {CASE.case_id: pytest.approx(time.time() + 24 * 3600, abs=60)}
        assert (verdict(daemon)["verdict"], verdict(daemon)["baseline_ms"]) == (
            "slower",
            pytest.approx(1.002, rel=0.002),
        )
        assert daemon.problem() is None
        assert daemon.take("r1-at-once", 3.0, hours=23.9) == {CASE.case_id: pytest.approx(time.time() + 360, abs=60)}
        daemon.take("r2", 3.0, hours=0.1)
        assert daemon.problem() is None, "what slows the machine down for a week end became a regression"
        daemon.take("r3", 3.0)
        event = heard("regression")
        assert event["event"] == "regression"
        assert event["detail"].startswith("square,eager,b1,size=16: slower, 3.006 ms against 1.003 ms, +")
        judgement = event["judgement"]
        assert (judgement["case_id"], judgement["verdict"]) == (CASE.case_id, "slower")
        assert (judgement["median_ms"], judgement["baseline_ms"]) == (
            pytest.approx(3.006),
            pytest.approx(1.003, rel=1e-3),
        )
        assert judgement["effect_low"] < judgement["effect"] < judgement["effect_high"]
        assert judgement["effect"] == pytest.approx(2.0, rel=0.01)
        assert (judgement["run_ids"], judgement["baseline_run_ids"]) == (
            ["r1", "r2", "r3"],
            [f"b{number}" for number in range(5)],
        )
        assert daemon.problem() == "slower than the baseline: square,eager,b1,size=16 +199.8%"
    with linked(mosquitto, DEVICE, tmp_path) as (link, _), service(tmp_path, runs, link) as daemon:
        assert daemon.problem() == "slower than the baseline: square,eager,b1,size=16 +199.8%"
        assert daemon.take("r4", 3.0) == {}, "a regression that is known is measured again"
        daemon.take("r5", 1.0)
        cleared = heard("regression_cleared")
        assert (cleared["judgement"]["verdict"], cleared["judgement"]["run_ids"]) == ("same", ["r5"])
        assert daemon.problem() is None
        assert verdict(daemon)["verdict"] == "same"
    assert sum("/event" in message.topic for message in watcher.all) == 2
    watcher.close()


def test_a_repetition_that_is_not_slower_ends_the_doubt(tmp_path, link):
    with service(tmp_path, [pin(tmp_path / "pinned.jsonl")], link) as daemon:
        daemon.take("r1", 3.0)
        daemon.take("r2", 3.0)
        assert daemon.take("r3", 1.0) == {}
        daemon.take("r4", 3.0)
        assert daemon.take("r5", 3.0).keys() == {CASE.case_id}, "the doubt of long ago counted"
    assert events(link) == []


def test_setting_the_wall_clock_does_not_hasten_a_regression(tmp_path, link):
    with service(tmp_path, [pin(tmp_path / "pinned.jsonl")], link) as daemon:
        daemon.take("r0", 3.0)
        daemon.take("r1", 3.0)
        again_s = daemon.take("r2", 3.0, hours=0.1, clock_set=25)
        assert daemon.problem() is None
        assert again_s == {CASE.case_id: pytest.approx(time.time() + 23.9 * 3600, abs=60)}, "it is not asked again"
        assert daemon.take("r3", 3.0, hours=23.9, clock_set=-25) == {}
        assert daemon.state.facts.standings[CASE.case_id].slower.run_ids == ["r0", "r1", "r3"]


@pytest.mark.parametrize(
    ("doubted", "now", "is_apart"),
    [
        (wall(2000), wall(2024), True),
        (wall(2000), wall(2023), False),
        ("1970-01-01T00:00:10Z", wall(2024), False),
        (wall(2024), "1970-01-01T00:00:10Z", False),
        (wall(2024), wall(2000), False),
    ],
)
def test_across_a_boot_a_doubt_counts_by_wall_clocks_that_can_be_right(tmp_path, link, doubted, now, is_apart):
    with service(tmp_path, [pin(tmp_path / "pinned.jsonl")], link) as daemon:
        daemon.take("r0", 3.0, t_wall=wall(1900))
        daemon.take("r1", 3.0, t_wall=doubted)
        again_s = daemon.take("r2", 3.0, t_wall=now, boot_id="b2", t_mono_ns=HOUR_NS)
        assert (daemon.problem() is not None, again_s == {}) == (is_apart, is_apart)
        for day in range(1, 4):
            daemon.take(
                f"r{2 + day}", 3.0, t_wall=wall(2024 + 24 * day), boot_id="b2", t_mono_ns=(1 + 24 * day) * HOUR_NS
            )
        assert daemon.problem(), "the doubt lasts for ever"


def test_another_environment_makes_the_baseline_stale_once_and_no_verdict(tmp_path, link):
    with service(tmp_path, [pin(tmp_path / "pinned.jsonl", fingerprint="old")], link) as daemon:
        assert daemon.take("r1", 3.0) == {}
        assert verdict(daemon)["verdict"] == "inconclusive"
        assert verdict(daemon)["verdict_reason"].startswith("a different environment (kernel: 6.1-old and 6.1)")
        daemon.take("r2", 3.0)
        old = (tmp_path / "pinned.jsonl").read_bytes()
        pin(tmp_path / "pinned.jsonl")
        with (tmp_path / "pinned.jsonl").open("ab") as file:
            file.write(old.replace(b'"run_id":"b', b'"run_id":"old'))
        daemon.take("r3", 1.0)
        assert (verdict(daemon)["verdict"], verdict(daemon)["verdict_reason"]) == ("same", None)
    (stale,) = events(link)
    assert (stale["event"], stale["judgement"]["verdict"]) == ("baseline_stale", "inconclusive")


def test_an_upgrade_of_benchd_makes_no_baseline_stale(tmp_path, link):
    now = msgspec.structs.replace(ENVIRONMENT, fingerprint="0f-02", kernel="6.1-0f-01", variables={})
    with service(tmp_path, [pin(tmp_path / "pinned.jsonl", fingerprint="0f-01")], link) as daemon:
        daemon.take("r1", 1.0, environment=now)
        assert verdict(daemon)["verdict"] == "same"
    assert events(link) == []


def test_too_few_processes_are_undecided_with_the_line_to_type(tmp_path, link):
    with service(tmp_path, [pin(tmp_path / "pinned.jsonl")], link) as daemon:
        assert daemon.take("r1", 3.0, processes=2) == {}
        assert verdict(daemon)["verdict"] == "inconclusive"
        assert verdict(daemon)["verdict_reason"].startswith(
            "B has 2 of the 3 processes that a verdict needs: run bench-once --case square,"
        )


def test_what_nobody_pinned_or_planned_has_no_verdict(tmp_path, link):
    with service(tmp_path, [], link) as daemon:
        daemon.take("r1", 3.0)
        assert verdict(daemon)["verdict"] is None
        baseline.path().parent.mkdir(parents=True)
        pin(baseline.path())
        daemon.take("r2", 3.0, suite=AD_HOC)
        assert verdict(daemon)["verdict"] is None, "a pass that a command put together"
        daemon.take("r3", 3.0)
        assert verdict(daemon)["verdict"] == "slower", "what is stored from now on was not looked at"
        daemon.take("r4", 3.0)
        daemon.take("r5", 3.0)
        baseline.clear()
        daemon.take("r6", 3.0)
        assert verdict(daemon)["verdict"] is None
    regression, cleared = events(link)
    assert (regression["event"], cleared["event"], cleared["judgement"]) == ("regression", "regression_cleared", None)


def test_a_result_that_did_not_end_well_changes_nothing(tmp_path, link):
    with service(tmp_path, [pin(tmp_path / "pinned.jsonl")], link) as daemon:
        daemon.take("r1", 3.0)
        assert daemon.take("r1-failed", 3.0, status="failed").keys() == {CASE.case_id}, "the doubt is not decided"
        daemon.take("r2", 3.0)
        daemon.take("r3", 3.0)
        daemon.take("r4", 3.0, status="failed")
        assert daemon.problem()
        assert verdict(daemon)["verdict"] is None


def test_a_baseline_that_cannot_be_read_is_the_reason_and_no_end(tmp_path, link):
    pinned = tmp_path / "pinned.jsonl"
    with service(tmp_path, [pin(pinned)], link) as daemon:
        for number in range(3):
            daemon.take(f"r0-{number}", 3.0)
        pinned.write_bytes(pinned.read_bytes()[:-9])
        daemon.take("r1", 3.0)
        assert verdict(daemon)["verdict"] == "inconclusive"
        assert "pinned.jsonl line 10: truncated" in verdict(daemon)["verdict_reason"]
        pinned.unlink()
        daemon.take("r2", 3.0)
        assert "pinned.jsonl: no such file" in verdict(daemon)["verdict_reason"]
        assert daemon.problem()


def test_a_case_that_leaves_the_plan_takes_its_regression_along(tmp_path, link):
    with service(tmp_path, [pin(tmp_path / "pinned.jsonl")], link) as daemon:
        for number in range(3):
            daemon.take(f"r{number}", 3.0)
        daemon.state.agenda.planned = {OTHER.case_id}
        regressions.forget_unplanned(daemon.state)
        assert daemon.problem() is None
    assert [event["event"] for event in events(link)] == ["regression", "regression_cleared"]


def test_pinned_runs_of_one_day_raise_no_alarm_and_say_what_is_missing(tmp_path, link):
    """They show nothing of how the hours differ."""
    with service(tmp_path, [pin(tmp_path / "pinned.jsonl", runs=20, hours_apart=1)], link) as daemon:
        assert daemon.take("r1", 3.0) == {}
        assert verdict(daemon)["verdict"] == "inconclusive"
        assert verdict(daemon)["verdict_reason"] == (
            "+199.7%, but the baseline has 2 of the 5 runs, half a day apart, that an alarm needs: pin runs from "
            "several days with benchd baseline set RUN..."
        )


def test_a_difference_within_the_bound_of_few_pinned_runs_is_no_doubt(tmp_path, link):
    with service(tmp_path, [pin(tmp_path / "pinned.jsonl", apart=0.05)], link) as daemon:
        assert daemon.take("r1", 1.14) == {}
        assert (verdict(daemon)["verdict"], verdict(daemon)["verdict_reason"]) == (
            "inconclusive",
            "+11.8% is within the 12.4% that 5 pinned runs half a day apart cannot exclude at 0.05 false alarms a "
            "month; pin more to narrow it",
        )
    with service(tmp_path, [pin(tmp_path / "pinned.jsonl", runs=30, apart=0.05)], link) as daemon:
        assert daemon.take("r2", 1.14).keys() == {CASE.case_id}
        assert verdict(daemon)["verdict"] == "slower"


def test_a_small_difference_counts_of_no_pinned_runs_however_alike_they_are(tmp_path, link):
    """They may all be of one boot, and the next one is some per cent slower."""
    with service(tmp_path, [pin(tmp_path / "pinned.jsonl", runs=30)], link) as daemon:
        assert daemon.take("r1", 1.08) == {}
        reason = "+7.9% is within the 8.3% that boots and busy hours can explain"
        assert (verdict(daemon)["verdict"], verdict(daemon)["verdict_reason"]) == ("inconclusive", reason)
        assert daemon.take("r2", 1.1).keys() == {CASE.case_id}
