"""What the pages say of shipped folders: beside what would ship now, and on their own page."""

import time
from datetime import datetime, timezone

import pytest
from messages_made import add, message

from benchd.daemon.delivery.messages import DeployedFolder
from benchd.dashboard.answers import Answers, Choice, Kind
from benchd.dashboard.changes import Changes
from benchd.dashboard.matrix import Cell
from benchd.dashboard.messages import Result
from benchd.dashboard.queries import OnBoard
from benchd.dashboard.views import home, shipped

SLOWER = "\N{BLACK UP-POINTING TRIANGLE} broken, slower"
KIND = Kind("chip", "", "cpu")


def cell(boards=1, device="d1"):
    values = dict.fromkeys(Result._fields) | {"case_id": "m,onnxruntime,b1"}
    lead = Choice("m b1", device, KIND, "ships", "onnxruntime", Result(**values), "", "", (), None)
    return Cell(lead, boards, frozenset([device, *(f"d{number}" for number in range(2, boards + 1))]), None, (), (), 0)


def on(device, verdict="kept", case_id="m,eager,b1", **fields):
    return OnBoard(device, DeployedFolder(name="net", case_id=case_id, verdict=verdict, **fields), 100.0)


def promises(boards, *stale):
    return [(board.device_id, board.found, board.device_id in stale) for board in boards]


@pytest.mark.parametrize(
    ("boards", "deployed", "line"),
    [
        (1, [on("d1")], ("deployed: eager, \N{CHECK MARK} kept", "soft", "/shipped")),
        (
            1,
            [on("d1", "slower")],
            ("deployed: eager, \N{BLACK UP-POINTING TRIANGLE} broken, slower", "bad", "/shipped"),
        ),
        (1, [on("d2"), on("d1", case_id="m,eager,b4"), on("d1", case_id="o,eager,b1")], None),
        (3, [on("d1"), on("d2", "broken")], ("deployed on 2 boards: eager, 1 broken", "bad", "/shipped")),
        (3, [on("d3"), on("d4"), on("d5", "broken")], ("deployed: eager, \N{CHECK MARK} kept", "soft", "/shipped")),
    ],
)
def test_what_is_deployed_stands_beside_what_would_ship(boards, deployed, line):
    assert home.beside(cell(boards), promises(deployed)) == line


@pytest.mark.parametrize(
    ("deployed", "line"),
    [
        ([on("d1")], ("deployed: eager, \N{CHECK MARK} kept, stale", "warn", "/shipped")),
        ([on("d1"), on("d2")], ("deployed on 2 boards: eager, 0 broken, 1 stale", "warn", "/shipped")),
        ([on("d1"), on("d2", "broken")], ("deployed on 2 boards: eager, 1 broken, 1 stale", "bad", "/shipped")),
    ],
)
def test_that_a_promise_is_stale_stands_there_too(deployed, line):
    assert home.beside(cell(3), promises(deployed, "d1")) == line


def test_home_knows_which_promises_are_stale(store):
    now_s = time.time()
    for device, age_s in (("d1", 0.0), ("d2", shipped.STALE_S + 1.0)):
        body = {"verdict": "kept", "t_wall": datetime.fromtimestamp(now_s - age_s, timezone.utc).isoformat()}
        add(store, message(device, "shipped/net", body, now_s))
    deployed = home._read(store, Answers(store, Changes(store)), None).deployed
    assert [(device_id, is_stale) for device_id, _, is_stale in deployed] == [("d1", False), ("d2", True)]


def test_by_how_much_is_told_with_its_interval():
    assert shipped.change(on("d1", change=0.301, change_low=0.28, change_high=0.32).found) == "+30.1 [+28.0, +32.0] %"
    assert shipped.change(on("d1").found) == "-"
