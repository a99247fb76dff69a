"""Pages whose client leaves, or never connects as curl: NiceGUI deletes them, and no traceback tells of that.

And pages left open while a device sends nothing more.
"""

import asyncio

import pytest
from drawn import blank
from nicegui import core

from benchd.dashboard import layout
from benchd.dashboard.views.live import LiveCharts


async def left(drawn):
    """Build a page whose client is deleted before it connects; `drawn` gets a word if anything is drawn after that."""

    async def build():
        with client:
            async with layout.frame("Home"):
                drawn.append("content")
                await layout.follow(lambda: asyncio.sleep(0))

    client = blank()
    task = asyncio.create_task(build())
    await asyncio.sleep(0)
    client.delete()
    await asyncio.wait([task])


def test_a_page_whose_client_has_left_ends_without_a_word(caplog):
    drawn = []
    asyncio.run(left(drawn))
    assert (drawn, caplog.messages) == ([], [])


def test_a_page_whose_browser_never_answers_ends_without_a_word(caplog, monkeypatch):
    monkeypatch.setattr(layout, "PATIENCE_S", 0.01)
    drawn = []

    async def build():
        monkeypatch.setattr(core, "loop", asyncio.get_running_loop())
        with (client := blank()):
            client.connected = lambda: asyncio.sleep(0)  # it connects, and then answers no script
            async with layout.frame("Home"):
                drawn.append("content")

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(build())
    assert (drawn, caplog.messages) == ([], [])


def test_what_a_device_sent_last_leaves_its_charts_once(monkeypatch):
    sent = []
    monkeypatch.setattr(LiveCharts, "run_method", lambda _, name, update: sent.append(update["points"][0]))

    async def look():
        with blank():
            live = LiveCharts(300.0)
            series = {"power_w": [(1000.0, 5.0)], "gpu_throttle_reasons": [(1000.0, 4.0)]}
            sends = ((series, 1001.0), ({}, 1002.0), ({}, 1301.0), ({}, 1302.0))
            return [live.extend(now, [], now_s) for now, now_s in sends]

    assert asyncio.run(look()) == [True, True, False, False]
    assert sent == [{"power_w": [[1_000_000, 5.0]]}, {}]
