"""Pages whose client leaves, or never connects as curl: NiceGUI deletes them, and no traceback tells of that.

And pages whose reader has gone on to another search before the first one was answered.
And pages left open while a device sends nothing more.
"""

import asyncio
import re
import sys
import threading
import time
from contextlib import asynccontextmanager, closing, contextmanager

import pytest
from drawn import blank
from messages_made import add, message, result
from nicegui import ui
from nicegui.testing import user_simulation
from records_made import made
from waiting import WAIT_S

from benchd.daemon.records import Case
from benchd.dashboard import layout, queries
from benchd.dashboard.store import Store
from benchd.dashboard.views import results
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


@pytest.fixture(autouse=True)
def _modules_stay():
    before = dict(sys.modules)
    yield
    sys.modules.update(before)  # NiceGUI's simulation ends by removing those of the pages, for later tests too


@pytest.fixture
def store(tmp_path):
    now_s = time.time()
    with closing(Store(f"sqlite:///{tmp_path}/d.db")) as database:
        for name in ("slow", "fast"):
            add(database, result(made(device_id=name, case=Case(model=name)), now_s))
            add(database, message(name, "telemetry", {"samples": [[0, "power_w", 5.0, "fake"]]}, now_s))
        yield database


@contextmanager
def held(monkeypatch, name, is_slow):
    """Hold up the queries that `is_slow`, from when the first of them is asked until the end of the block."""
    started, free, query = threading.Event(), threading.Event(), getattr(queries, name)

    def wait(store, *given):
        if is_slow(*given):
            started.set()
            assert free.wait(WAIT_S)
        return query(store, *given)

    monkeypatch.setattr(queries, name, wait)
    try:
        yield started
    finally:
        free.set()


@asynccontextmanager
async def simulated():
    """Yield a user whose browser is in UTC."""
    async with user_simulation() as user:
        user.javascript_rules[re.compile(re.escape(layout.ZONE))] = lambda _: "UTC"
        yield user


def search(user, text):
    """Search for a text and return the tasks that this begins."""
    before = asyncio.all_tasks()
    with user:
        (field,) = (element for element in user.find(kind=ui.input).elements if element.props["label"] == "search")
        field.value = text
    return asyncio.all_tasks() - before


def test_a_slow_search_does_not_replace_the_answer_of_a_later_one(store, monkeypatch):
    async def read():
        async with simulated() as user:
            results.add(store)
            await user.open("/results")
            await user.should_not_see("Reading.", retries=600)
            with held(monkeypatch, "results", lambda which, *_: which.text == "s") as started:
                slow = search(user, "s")
                await asyncio.to_thread(started.wait, WAIT_S)
                await asyncio.wait(search(user, "fast"))
            await asyncio.wait(slow)
            (table,) = user.find(kind=ui.table).elements
            return [row["model"] for row in table.rows]

    assert asyncio.run(read()) == ["fast"]


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
