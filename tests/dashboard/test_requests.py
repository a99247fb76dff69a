"""What a page says about a suite that it has asked for, and when it may ask again."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from broker import running_broker
from drawn import blank
from links import Watcher
from waiting import WAIT_S

from benchd.daemon.delivery.broker import parse_url
from benchd.daemon.delivery.messages import Health, Info, SuiteInfo
from benchd.daemon.delivery.topics import Topics
from benchd.dashboard.commands import EXPIRY_S, Answer, SuiteRequest, progress, run_suite
from benchd.dashboard.queries import Device, Mark
from benchd.dashboard.views import device as view

SUITE = SuiteInfo(name="nightly", cases=["a", "b"])
ACCEPTED = Answer(accepted=True)


def at(age_s, answer, *, state="online", ended=(), **health):
    device = Device("d", state, 0.0, Info(), Health(**health), None, None)
    marks = [Mark(0.0, "case ok", case_id) for case_id in ended]
    return progress(SuiteRequest(100.0, answer), SUITE, device, marks, 100.0 + age_s)


def test_a_suite_never_asked_for_may_be_only_while_its_device_is_there():
    for state, is_open in (("online", True), ("silent", False), ("unknown", False)):
        device = Device("d", state, 0.0, Info(), Health(), None, None)
        assert progress(None, SUITE, device, [], 0.0).is_open is is_open


@pytest.mark.parametrize(
    ("found", "words", "is_open"),
    [
        (at(1, None), "asked", False),
        (at(11, Answer(accepted=False, by="nobody")), "asked", False),
        (at(EXPIRY_S, Answer(accepted=False, by="nobody")), "expired: no answer within 60 s", True),
        (at(1, Answer(accepted=False, reason="no such suite")), "refused: no such suite", True),
        (at(1, Answer(accepted=False, reason="gone", by="broker")), "not asked: gone", True),
        (at(1, ACCEPTED), "queued", False),
        (at(1, ACCEPTED, waiting_for="a cool board"), "queued: a cool board", False),
        (at(1, ACCEPTED, case_id="c"), "queued", False),
        (at(1, ACCEPTED, case_id="b", ended=["a"]), "running", False),
        (at(1, ACCEPTED, ended=["c"]), "queued", False),
        (at(1, ACCEPTED, ended=["a"], waiting_for="busy", cases_left=1), "queued: busy", False),
        (at(1, ACCEPTED, ended=["a"], cases_left=1), "queued", False),
        (at(1, ACCEPTED, ended=["a", "b"], case_id="c", cases_left=1), "finished", True),
        (at(1, ACCEPTED, ended=["a"]), "finished", True),
        (at(EXPIRY_S + 1, ACCEPTED, cases_left=2), "queued", False),
        (at(EXPIRY_S + 1, ACCEPTED), "ended", True),
        (at(1, ACCEPTED, state="silent"), "queued; the device is silent", False),
    ],
)
def test_a_request_is_told_and_not_repeated_while_it_is_open(found, words, is_open):
    assert found == (words, is_open)


def test_two_viewers_ask_for_a_suite_once(monkeypatch):
    suites, requests = [], {}
    monkeypatch.setattr(view, "run_suite", lambda broker, device_id, suite: suites.append(suite) or ACCEPTED)

    async def ask_twice():
        device = Device("d", "online", 0.0, Info(suites=[SUITE]), Health(), None, None)
        with blank():
            viewers = [view._Suites(None, device, requests) for _ in range(2)]
            for viewer in viewers:
                viewer.show(device, [])
            for viewer in viewers:
                await viewer._run(SUITE)

    asyncio.run(ask_twice())
    assert suites == ["nightly"]


def test_what_a_device_answers_is_shown_plain_and_as_its_own(tmp_path):
    answer = {"accepted": False, "reason": "no\u202e\x1b[2J", "by": "nobody"}
    with running_broker(tmp_path) as broker, closing(Watcher(broker, "d1")) as device, ThreadPoolExecutor(1) as page:
        future = page.submit(run_suite, parse_url(broker.url), "d1", "nightly", WAIT_S)
        command = json.loads(device.until(lambda topic, _: topic == Topics("d1").command("run")).payload)
        device.say(Topics("d1").response(f"{command['client']}/{command['id']}"), json.dumps(answer))
        assert future.result() == Answer(accepted=False, reason="no\ufffd\ufffd[2J", by="device")
