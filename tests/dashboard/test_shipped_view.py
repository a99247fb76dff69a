"""What the pages say of shipped folders: beside what would ship now, and on their own page."""

import pytest

pytest.importorskip("nicegui", reason="needs nicegui, of the extra dashboard")

from benchd.dashboard.answers import Choice, Kind
from benchd.dashboard.matrix import Cell
from benchd.dashboard.messages import Deployed, Result
from benchd.dashboard.queries import OnBoard
from benchd.dashboard.views import home, shipped

SLOWER = "\N{BLACK UP-POINTING TRIANGLE} broken, slower"
KIND = Kind("chip", "", "cpu")


def cell(boards=1, device="d1"):
    values = dict.fromkeys(Result._fields) | {"case_id": "m,onnxruntime,b1"}
    lead = Choice("m b1", device, KIND, "ships", "onnxruntime", Result(**values), "", "", (), None)
    return Cell(lead, boards, frozenset([device, *(f"d{number}" for number in range(2, boards + 1))]), None, (), (), 0)


def on(device, verdict="kept", case_id="m,eager,b1", **fields):
    return OnBoard(device, Deployed(name="net", case_id=case_id, verdict=verdict, **fields), 100.0)


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
    assert home.beside(cell(boards), deployed) == line


def test_a_promise_that_was_verified_long_ago_is_stale():
    assert not shipped.is_stale(on("d1"), 100.0 + shipped.STALE_S)
    assert shipped.is_stale(on("d1"), 101.0 + shipped.STALE_S)


def test_by_how_much_is_told_with_its_interval():
    assert shipped.change(on("d1", change=0.301, change_low=0.28, change_high=0.32).found) == "+30.1 [+28.0, +32.0] %"
    assert shipped.change(on("d1").found) == "-"
