"""The parts that all pages share: the frame, the style and the number formats.

Text from devices is shown with limited length, and never as HTML.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from itertools import islice
from pathlib import Path
from urllib.parse import quote, urlencode
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from nicegui import Client, ui
from sqlalchemy.exc import DBAPIError
from starlette.requests import Request

from benchd.daemon.reporting.palette import LOOK
from benchd.dashboard.limits import SHOWN
from benchd.dashboard.text import age, clock, more, short

REFRESH_S = 2.0
# NiceGUI's time limit for building a page; with the default of 3 s, busy boards would get an error 500
PATIENCE_S = 30.0
SLOW_S = 5.0
SLOW = f"The database has not answered for {SLOW_S:.0f} s. This page waits for it."
UNREACHABLE = "The database does not answer: "

PAGES = {
    "Home": "/",
    "Fleet": "/fleet",
    "Changes": "/changes",
    "Results": "/results",
    "Shipped": "/shipped",
    "Trade-off": "/trade-off",
}

CSS = Path(__file__).with_suffix(".css")
ZONE = "Intl.DateTimeFormat().resolvedOptions().timeZone"
AWAY = Path(__file__).parent / "templates" / "away.html"


@contextmanager
def laid_out(title: str) -> Iterator[None]:
    """Lay out a page: the header with its links, then the content under a heading."""
    for style in (LOOK, CSS):
        ui.add_css(style)
    ui.add_body_html(AWAY.read_text())
    ui.dark_mode(None)  # follows the system
    ui.colors(primary="#0b57d0")  # readable with white text, unlike the default
    ui.page_title(f"{title} - benchd")
    with ui.header().classes("bar row").props("role=banner"):
        skip = ui.link("Skip to the content", "#").classes("skip")
        ui.link("benchd", "/").classes("brand")
        _links(ui.context.client.request)
    with ui.column().classes("page").props("tabindex=-1") as content:  # inside Quasar's main element
        skip.props["href"] = f"#{content.html_id}"
        heading(title, 1)
        ui.label().classes("notice server-away").props("role=alert")
        yield


def _links(request: Request) -> None:
    """Show the links to the pages, marking the current one, and a search for boards and cases."""
    with ui.element("nav").props("aria-label=pages"):
        for name, target in PAGES.items():
            link = ui.link(name, target)
            if target == request.url.path:
                link.props("aria-current=page")
    with ui.element("form").props("action=/search role=search"):
        field = ui.element("input").props("type=search name=q aria-label='board or case' placeholder='board or case'")
        field.props["defaultValue"] = request.query_params.get("q") or request.query_params.get("text") or ""


@asynccontextmanager
async def frame(title: str) -> AsyncIterator[None]:
    """Lay out a page and send it; content and errors are shown as soon as they are known.

    This ends for a client that has left, that never opens a connection, such as curl, or that runs no script.
    """
    client = ui.context.client
    with laid_out(title):
        trouble = notice("Reading.")
        await client.connected()
        if client.is_deleted:
            raise asyncio.CancelledError
        try:
            client.storage["zone"] = await client.run_javascript(ZONE, timeout=PATIENCE_S)
        except TimeoutError:
            raise asyncio.CancelledError from None
        slow = asyncio.get_running_loop().call_later(SLOW_S, trouble.set_text, SLOW)
        try:
            yield
        except Exception as error:
            if not _has_left(client, error):
                trouble.set_text(f"{_words(error)} Then reload this page.")
        else:
            trouble.set_visibility(False)
        finally:
            slow.cancel()


def _has_left(client: Client, error: Exception) -> bool:
    """Return whether an error only means, according to NiceGUI, that the client has left."""
    return client.is_deleted and isinstance(error, RuntimeError)


def _words(error: Exception) -> str:
    """Return what went wrong and what to do; an error from anything but the database is a bug, and is logged."""
    if isinstance(error, DBAPIError):
        return f"{UNREACHABLE}{short(error.orig)}. Check that it is running."
    logging.getLogger(__name__).error("a page failed", exc_info=error)
    return f"This page failed: {short(f'{type(error).__name__}: {error}')}. Please report it with the dashboard's log."


async def follow(refresh: Callable[[], Awaitable[None]], period_s: float = REFRESH_S) -> None:
    """Call `refresh` now and every `period_s`; while that fails, the page stays and shows the reason."""
    client, trouble = ui.context.client, notice("")
    trouble.move(target_index=1)  # below the heading

    async def turn() -> None:
        try:
            await refresh()
        except Exception as error:
            if not _has_left(client, error):
                trouble.set_text(f"{_words(error)} The page keeps retrying.")
                trouble.set_visibility(True)
        else:
            trouble.set_visibility(False)

    await turn()
    ui.timer(period_s, turn)


def heading(text: str, level: int = 2) -> ui.element:
    """Show a heading that screen readers recognise."""
    with ui.element(f"h{level}") as element:
        ui.label(text)
    return element


def notice(text: str) -> ui.label:
    """Show a notice that says what is missing and what to do about it."""
    return ui.label(text).classes("notice").props("role=status")


def facts(pairs: dict[str, object]) -> None:
    """Show names and values, leaving out empty ones."""
    with ui.element("dl").classes("facts"):
        known = {name: value for name, value in pairs.items() if value not in (None, "", [], {})}
        for name, value in islice(known.items(), SHOWN):
            with ui.element("dt"):
                ui.label(short(name))
            with ui.element("dd"):
                ui.label(short(value))
    ui.label(more(len(known) - SHOWN)).classes("soft")


class PagePart:
    """A part of a page that is rebuilt only if its content has changed."""

    def __init__(self, look: str) -> None:
        self.column, self._shown = ui.element("div").classes(look), ""

    def renew(self, *shown: object) -> bool:
        """Return whether the content is new; the part is then emptied."""
        now = repr(shown)
        is_new, self._shown = now != self._shown, now
        if is_new:
            self.column.clear()
        return is_new


@contextmanager
def stacked(*headings: str) -> Iterator[None]:
    """Show a table whose rows become blocks of lines on a narrow page."""
    with ui.element("div").classes("scroll"), ui.element("table").classes("stacked"):
        with ui.element("tr"):
            for words in headings:
                with ui.element("th").props("scope=col"):
                    ui.label(words)
        yield


def chip(words: str, target: str, look: str, *, is_chosen: bool) -> None:
    """Show a link to a subset of the page, marked if that is currently shown."""
    with ui.link(words, target).classes(f"chip {look}") as link:
        if is_chosen:
            link.props("aria-current=true")


def local(unix_s: float) -> str:
    """Return a time in the browser's zone, or in UTC if this machine does not know that zone."""
    try:
        return clock(unix_s, ZoneInfo(ui.context.client.storage.get("zone", "")))
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return clock(unix_s)


def since_when(unix_s: float) -> str:
    """Return a time since which something has been the case, and how long ago that is."""
    return f"since {local(unix_s)}, {age(time.time() - unix_s)}"


def record_path(key: str) -> str:
    """Return the path of the raw record."""
    return f"/record/{quote(key, safe='')}"


def result_path(key: str) -> str:
    """Return the path of a record's page."""
    return f"/result/{quote(key, safe='')}"


def changes_path(**chosen: object) -> str:
    """Return the path of the changes page with this selection."""
    return f"/changes{query(chosen)}"


def query(words: Mapping[str, object]) -> str:
    """Return the query of a URL with the words that have a value, or an empty string."""
    known = urlencode({name: value for name, value in words.items() if value})
    return f"?{known}" if known else ""


def history_path(device_id: str, case_id: str) -> str:
    """Return the path of a case's history on a device."""
    return f"/history/{quote(device_id)}/{quote(case_id)}"
