"""When a page may ask for a suite, and what it says about the answer."""

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
from benchd.dashboard.commands import run_suite
from benchd.dashboard.queries import Device
from benchd.dashboard.views import device as view

SUITES = [SuiteInfo(name="nightly", cases=["a", "b"])]


def device_in(state):
    return Device("d", state, 0.0, Info(suites=SUITES), Health(), None, None, None)


@pytest.mark.parametrize(("state", "words"), [("online", ""), ("silent", "the device is silent")])
def test_a_suite_can_be_asked_for_only_while_its_device_is_there(state, words):
    with blank():
        viewer = view._Suites(None, device_in(state), {})
        viewer.show(device_in(state))
        ((_, button, label),) = viewer._rows
    assert (button.enabled, label.text) == (not words, words)


def test_two_viewers_ask_for_a_suite_once(monkeypatch):
    suites, answers = [], {}
    monkeypatch.setattr(view, "run_suite", lambda broker, device_id, suite: suites.append(suite) or "accepted")

    async def ask_twice():
        with blank():
            viewers = [view._Suites(None, device_in("online"), answers) for _ in range(2)]
            for viewer in viewers:
                viewer.show(device_in("online"))
            await asyncio.gather(*(viewer._run("nightly") for viewer in viewers))

    asyncio.run(ask_twice())
    assert (suites, answers) == (["nightly"], {("d", "nightly"): "accepted"})


def test_what_a_device_answers_is_shown_plain_and_as_its_own(tmp_path):
    answer = {"accepted": False, "reason": "no\u202e\x1b[2J"}
    with running_broker(tmp_path) as broker, closing(Watcher(broker, "d1")) as device, ThreadPoolExecutor(1) as page:
        future = page.submit(run_suite, parse_url(broker.url), "d1", "nightly", WAIT_S)
        command = json.loads(device.until(lambda topic, _: topic == Topics("d1").command("run")).payload)
        device.say(Topics("d1").response(f"{command['client']}/{command['id']}"), json.dumps(answer))
        assert future.result() == "refused: no\ufffd\ufffd[2J"
