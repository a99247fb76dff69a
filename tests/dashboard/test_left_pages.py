"""Pages whose client leaves, or never connects as curl: NiceGUI deletes them, and no traceback tells of that.

And pages whose reader has gone on to another search before the first one was answered, or whose search failed.
And pages left open while a device sends nothing more.
"""

import asyncio
import json
import re
import sys
import threading
import time
from contextlib import asynccontextmanager, closing, contextmanager

import pytest
from records_made import made
from waiting import WAIT_S

pytest.importorskip("nicegui", reason="needs nicegui, of the extra dashboard")

from drawn import blank
from nicegui import ui
from nicegui.testing import user_simulation
from sqlalchemy.exc import OperationalError

from benchd.daemon.delivery.connection import Arrived
from benchd.daemon.records import Case, encode
from benchd.dashboard import layout, queries
from benchd.dashboard.messages import rows
from benchd.dashboard.store import Store
from benchd.dashboard.views import fleet, results
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


@pytest.mark.parametrize(("error", "is_silent"), [(RuntimeError("The parent slot"), True), (KeyError("x"), False)])
def test_of_a_client_that_has_left_only_what_is_wrong_with_benchd_is_said(caplog, error, is_silent):
    async def leave():
        with blank() as client:
            layout.notice("")
            client.delete()
            assert layout._has_left(client, error) is is_silent

    asyncio.run(leave())


@pytest.fixture(autouse=True)
def _modules_stay():
    before = dict(sys.modules)
    yield
    sys.modules.update(before)  # NiceGUI's simulation ends by removing those of the pages, for later tests too


@pytest.fixture
def store(tmp_path):
    now_s = time.time()
    with closing(Store(f"sqlite:///{tmp_path}/d.db")) as found:
        for name in ("slow", "fast"):
            record = made(device_id=name, run_id="r1", case=Case(model=name))
            samples = json.dumps({"samples": [[0, "power_w", 5.0, "fake"]]}).encode()
            for leaf, body in (("result/r1", encode(record)), ("telemetry", samples)):
                found.add(rows(Arrived(f"benchd/v1/{name}/{leaf}", body, now_s)))
        yield found


@contextmanager
def held(monkeypatch, name, is_slow):
    """Hold up the queries that `is_slow`, from when the first of them is asked until the end of the block."""
    asked, free, query = threading.Event(), threading.Event(), getattr(queries, name)

    def wait(store, *given):
        if is_slow(*given):
            asked.set()
            assert free.wait(WAIT_S)
        return query(store, *given)

    monkeypatch.setattr(queries, name, wait)
    try:
        yield asked
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
        (field,) = (one for one in user.find(kind=ui.input).elements if one.props["label"] == "search")
        field.value = text
    return asyncio.all_tasks() - before


def test_a_slow_search_does_not_replace_the_answer_of_a_later_one(store, monkeypatch):
    async def read():
        async with simulated() as user:
            results.add(store)
            await user.open("/results")
            await user.should_not_see("Reading.", retries=600)
            with held(monkeypatch, "results", lambda which, *_: which.text == "s") as asked:
                slow = search(user, "s")
                await asyncio.to_thread(asked.wait, WAIT_S)
                await asyncio.wait(search(user, "fast"))
            await asyncio.wait(slow)
            (table,) = user.find(kind=ui.table).elements
            return [row["model"] for row in table.rows]

    assert asyncio.run(read()) == ["fast"]


def test_a_search_that_the_database_did_not_answer_is_asked_again(store, monkeypatch):
    failures, refreshes = [OperationalError("SELECT", {}, Exception("gone"))], []
    query, newest = queries.results, queries.newest

    def fail_once(store, which, *given):
        if which.text == "fast" and failures:
            raise failures.pop()
        return query(store, which, *given)

    async def read():
        async with simulated() as user:
            results.add(store)
            await user.open("/results")
            await user.should_not_see("Reading.", retries=600)
            monkeypatch.setattr(queries, "results", fail_once)
            await asyncio.wait(search(user, "fast"))
            monkeypatch.setattr(queries, "newest", lambda store: refreshes.append(1) or newest(store))
            while len(refreshes) < 3:  # two of them have ended
                await asyncio.sleep(results.REFRESH_S / 10)
            (table,) = user.find(kind=ui.table).elements
            return [row["model"] for row in table.rows]

    assert (asyncio.run(read()), failures) == (["fast"], [])


def test_what_a_device_sent_last_leaves_its_charts_once(monkeypatch):
    sent = []
    monkeypatch.setattr(LiveCharts, "run_method", lambda _, name, said: sent.append(said["points"][0]))

    async def look():
        with blank():
            live = LiveCharts(300.0)
            series = {"power_w": [(1000.0, 5.0)], "gpu_throttle_reasons": [(1000.0, 4.0)]}
            sends = ((series, 1001.0), ({}, 1002.0), ({}, 1301.0), ({}, 1302.0))
            return [live.extend(now, [], now_s) for now, now_s in sends]

    assert asyncio.run(look()) == [True, True, False, False]
    assert sent == [{"power_w": [[1_000_000, 5.0]]}, {}]


def test_what_a_device_sent_last_leaves_its_sparklines_once(monkeypatch):
    sent = []
    monkeypatch.setattr(fleet._Sparks, "run_method", lambda _, name, *given: sent.append((name, *given)))

    async def look():
        with blank():
            entry = fleet._Entry("d1", is_card=True)
            last = [queries.Spark(1000, 5.0, None)]
            for sparks, at_s in ((last, 1001.0), ([], 1000.0 + fleet.SPARK_S), ([], 1301.0), ([], 1302.0)):
                entry.draw(sparks, at_s)

    asyncio.run(look())
    assert sent == [("add", [[1000, 5.0, None]]), ("clear",)]
