"""The records of the demo's simulated boards: what they say agrees, and the pages draw the story from them."""

import io
import random
import time
from contextlib import closing
from itertools import islice

import pytest
from asyncapi import Document
from messages_made import add, result
from waiting import wait_for

from benchd.dashboard.answers import Answers
from benchd.dashboard.changes import Changes
from benchd.dashboard.demo import start
from benchd.dashboard.demo.boards import BOARDS, CASES, SIMULATED, UPDATE_TICK, SimulatedBoard, measured, past
from benchd.dashboard.store import Store

TICKS = 61


def made(device):
    """Return every record that a device makes before and in the first minute of a demo, the oldest first."""
    chance = random.Random(1)
    live = (record for tick in range(TICKS) for record in measured(device, tick, chance))
    return [*past(device, time.time(), chance), *live]


@pytest.fixture(scope="module")
def stories():
    return [(device, made(device)) for device in BOARDS]


def test_every_record_says_that_it_is_simulated(stories):
    for _, records in stories:
        assert {record.case_id for record in records} == {case.case_id for case in CASES}
        for record in records:
            assert SIMULATED in record.device_id
            assert SIMULATED in record.flags
            assert SIMULATED in record.energy.scope
            assert SIMULATED in record.environment.gpu


def test_the_updated_board_gets_its_verdict_and_the_others_theirs(stories, tmp_path):
    with closing(Store(f"sqlite:///{tmp_path}/d.db")) as store:
        add(store, *(result(record, time.time()) for _, records in stories for record in records))
        answers, left = Answers(store, Changes(store)), 1
        while left:
            choices, left = answers.update()
    changes = {
        device.name: {choice.change.verdict.answer if choice.change else None for choice in choices[device.device_id]}
        for device in BOARDS
    }
    assert changes.pop("Orin AGX 2") == {"slower"}
    assert changes.pop("Orin AGX 1") == changes.pop("Orin Nano 1") == {"same"}
    assert set().union(*changes.values()) == {None}
    failed = {
        device.name: [name for board_choice in choices[device.device_id] for name in board_choice.failed]
        for device in BOARDS
    }
    assert {name: variants for name, variants in failed.items() if variants} == {"Orin Nano 2": ["tensorrt-fp16"]}
    assert 0 < UPDATE_TICK < TICKS


def test_boards_say_what_the_documented_topics_allow():
    messages = [message for device in BOARDS for message in published(SimulatedBoard(device))]
    described = Document()
    kinds = {described.validate(message.topic, message.body) for message in messages}
    assert kinds == {"status", "info", "health", "telemetry", "result", "event"}


def published(board):
    """Return some of the past, and the first minute."""
    return [*islice(board.past(), 20), *(message for tick in range(TICKS) for message in board.tick(tick))]


def test_a_machine_that_cannot_measure_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/absent")
    err = io.StringIO()
    with closing(start._ThisMachine(tmp_path, err)) as machine:
        wait_for(lambda: [*machine.messages()] or err.getvalue())
    assert err.getvalue().startswith("benchd demo: this machine is not measured: error: ")


def test_a_machine_that_is_being_measured_is_waited_for_and_that_is_said_once(tmp_path, monkeypatch):
    waits = "import signal, sys; '--wait' in sys.argv and print('waiting: for another', flush=True); signal.pause()"
    monkeypatch.setattr(start, "BENCH_ONCE", waits)
    err = io.StringIO()
    with closing(start._ThisMachine(tmp_path, err)) as machine:
        wait_for(lambda: [*machine.messages()] or err.getvalue())
        assert [*machine.messages()] == []
    assert err.getvalue() == "benchd demo: waiting: for another\n"
