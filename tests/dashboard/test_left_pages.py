"""Pages whose client leaves, or never connects as curl: NiceGUI deletes them, and no traceback tells of that."""

import asyncio

import pytest

pytest.importorskip("nicegui", reason="needs nicegui, of the extra dashboard")

from nicegui import Client
from nicegui.page import page
from starlette.requests import Request

from benchd.dashboard import layout

REQUEST = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b""}


async def left(drawn):
    """Build a page whose client is deleted before it connects; `drawn` gets a word if anything is drawn after that."""

    async def build():
        with client:
            async with layout.frame("Home"):
                drawn.append("content")
                await layout.follow(lambda: asyncio.sleep(0))

    client = Client(page(""), request=Request(REQUEST))
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
        with Client(page(""), request=Request(REQUEST)) as client:
            layout.notice("")
            client.delete()
            assert layout._has_left(client, error) is is_silent

    asyncio.run(leave())
