"""What all pages share: the frame, the style, and the format of numbers.

Text from a device is shown as text of bounded length, never as HTML.
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from urllib.parse import quote, urlencode

from nicegui import ui
from sqlalchemy.exc import DBAPIError

from benchd.daemon.reporting.palette import LOOK
from benchd.dashboard.limits import SHOWN
from benchd.dashboard.text import more, short

REFRESH_S = 0.5
PATIENCE_S = 30.0  # of NiceGUI with a page that is being built; it would answer 500 after 3 s on a busy board
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


@contextmanager
def frame(title: str) -> Iterator[None]:
    """Lay out a page: the header with its links, then the content under one heading."""
    for style in (LOOK, CSS):
        ui.add_css(style)
    ui.dark_mode(None)  # follows the system
    ui.colors(primary="#0b57d0")  # readable with white text, unlike the default
    ui.page_title(f"{title} - benchd")
    with ui.header().classes("bar row").props("role=banner"):
        ui.link("benchd", "/").classes("brand")
        for name, target in PAGES.items():
            ui.link(name, target)
    with ui.column().classes("page"):  # within Quasar's main
        heading(title, 1)
        trouble = notice("")
        trouble.set_visibility(False)
        try:
            yield
        except DBAPIError as error:
            trouble.set_text(f"{UNREACHABLE}{short(error.orig)}. Check that it is running, then reload this page.")
            trouble.set_visibility(True)


async def follow(refresh: Callable[[], Awaitable[None]], period_s: float = REFRESH_S) -> None:
    """Call `refresh` now and every `period_s`; while the database does not answer, the page stays and reports that."""
    trouble = notice("")
    trouble.move(target_index=1)  # below the heading

    async def turn() -> None:
        try:
            await refresh()
        except DBAPIError as error:
            trouble.set_text(f"{UNREACHABLE}{short(error.orig)}. The page keeps retrying.")
            trouble.set_visibility(True)
        else:
            trouble.set_visibility(False)

    await turn()
    ui.timer(period_s, turn)


def heading(text: str, level: int = 2) -> ui.element:
    """Show a heading that screen readers recognise."""
    with ui.element(f"h{level}") as found:
        ui.label(text)
    return found


def notice(text: str) -> ui.label:
    """Show what is missing and what to do about it."""
    return ui.label(text).classes("notice").props("role=status")


def facts(pairs: dict[str, object]) -> None:
    """Show names and values, except those without a value."""
    with ui.element("dl").classes("facts"):
        known = {name: value for name, value in pairs.items() if value not in (None, "", [], {})}
        for name, value in islice(known.items(), SHOWN):
            with ui.element("dt"):
                ui.label(short(name))
            with ui.element("dd"):
                ui.label(short(value))
    ui.label(more(len(known) - SHOWN)).classes("soft")


class Part:
    """A part of a page that is built again only if what it shows has changed."""

    def __init__(self, look: str) -> None:
        self.column, self._shown = ui.element("div").classes(look), ""

    def renew(self, *shown: object) -> bool:
        """Return whether this is new; the part is then empty."""
        now = repr(shown)
        is_new, self._shown = now != self._shown, now
        if is_new:
            self.column.clear()
        return is_new


def chip(words: str, target: str, look: str, *, is_chosen: bool) -> None:
    """Show a link to a part of what is shown, marked if it is what is shown now."""
    with ui.link(words, target).classes(f"chip {look}") as link:
        if is_chosen:
            link.props("aria-current=true")


def record_path(key: str) -> str:
    """Return the path of the raw record."""
    return f"/record/{quote(key, safe='')}"


def changes_path(**chosen: object) -> str:
    """Return the path of the changes, with what is chosen there."""
    words = urlencode({name: value for name, value in chosen.items() if value})
    return f"/changes?{words}" if words else "/changes"


def history_path(device_id: str, case_id: str) -> str:
    """Return the path of a case's history on a device."""
    return f"/history/{quote(device_id)}/{quote(case_id)}"
