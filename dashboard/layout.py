"""What all pages share: the frame, the style, and how a number is written.

What a device says is shown as text, of bounded length, and never as HTML.
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from urllib.parse import quote

from nicegui import ui
from sqlalchemy.exc import DBAPIError

from benchd.dashboard.text import short

REFRESH_S = 0.5
UNREACHABLE = "The database does not answer: "

CSS = """
:root { color-scheme: light dark; --line: #d0d4da; --soft: #5b6470; --panel: #ffffff; --good: #1b7a35;
        --warn: #9a5b00; --bad: #b3261e; --link: #0b57d0; }
body { background: #f4f5f7; color: #1a1c20; }
body.body--dark { --line: #3a3f47; --soft: #a4acb8; --panel: #1d2025; --good: #6fd08c; --warn: #f2b04a; --bad: #ff8a80;
                  --link: #8ab4f8; background: #121417; color: #e6e8eb; }
.bar { background: var(--panel) !important; color: inherit !important; border-bottom: 1px solid var(--line);
       padding: .5rem 1rem; gap: .25rem 1.25rem; flex-wrap: wrap; align-items: baseline; }
.bar a, .link { color: var(--link); text-decoration: none; }
.bar a:focus-visible, .link:focus-visible, .card:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
.brand { font-weight: 700; }
.page { width: 100%; max-width: 100rem; margin: 0 auto; padding: .5rem; gap: 1rem; overflow-wrap: anywhere; }
.grid, .wide { display: grid; width: 100%; gap: .75rem; }
.grid { grid-template-columns: repeat(auto-fill, minmax(min(17rem, 100%), 1fr)); }
.wide { grid-template-columns: repeat(auto-fit, minmax(min(28rem, 100%), 1fr)); }
.card { background: var(--panel); border: 1px solid var(--line); border-radius: .5rem; padding: .75rem; gap: .25rem;
        color: inherit; text-decoration: none; overflow-wrap: anywhere; min-width: 0; }
.card.stale, .card.offline, .card.unknown { border-style: dashed; }
.stale .figure, .offline .figure { opacity: .5; }
.verdict { font-size: 1.1rem; font-weight: 600; }
.faster { color: var(--good); } .slower { color: var(--bad); } .inconclusive { color: var(--warn); }
.soft { color: var(--soft); }
.state-online { color: var(--good); } .state-stale { color: var(--warn); } .state-offline { color: var(--bad); }
.warn { color: var(--warn); } .bad { color: var(--bad); }
.page .q-field, .page .nicegui-row { max-width: 100%; }
.figure { font-variant-numeric: tabular-nums; }
.notice { border-left: 4px solid var(--warn); background: var(--panel); padding: .5rem .75rem; width: 100%; }
h1 { font-size: 1.4rem; line-height: 1.3; margin: 0; font-weight: 600; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; line-height: 1.3; margin: 0; font-weight: 600; }
dl.facts { display: grid; grid-template-columns: fit-content(9rem) minmax(0, 1fr); width: 100%; gap: .15rem .75rem;
           margin: 0; }
dl.facts dt { color: var(--soft); overflow-wrap: anywhere; } dl.facts dd { margin: 0; overflow-wrap: anywhere; }
.q-table__container { background: var(--panel) !important; width: 100%; }
.q-table td { font-variant-numeric: tabular-nums; max-width: 22rem; overflow: hidden; text-overflow: ellipsis; }
"""


@contextmanager
def frame(title: str) -> Iterator[None]:
    """Lay out a page: the header with its links, then the content under one heading."""
    ui.add_css(CSS)
    ui.dark_mode(None)  # as the system has it
    ui.colors(primary="#0b57d0")  # its white text is readable, the default's is not
    ui.page_title(f"{title} - benchd")
    with ui.header().classes("bar row").props("role=banner"):
        ui.link("benchd", "/").classes("brand")
        for name, target in (("Fleet", "/"), ("Results", "/results"), ("Trade-off", "/trade-off")):
            ui.link(name, target)
    with ui.column().classes("page").props("role=main"):
        heading(title, 1)
        trouble = notice("")
        trouble.set_visibility(False)
        try:
            yield
        except DBAPIError as error:
            trouble.set_text(f"{UNREACHABLE}{short(error.orig)}. See that it runs; then load this page again.")
            trouble.set_visibility(True)


async def follow(refresh: Callable[[], Awaitable[None]], period_s: float = REFRESH_S) -> None:
    """Call `refresh` now and every `period_s`; while the database does not answer the page stays and says so."""
    trouble = notice("")
    trouble.move(target_index=1)  # below the heading

    async def turn() -> None:
        try:
            await refresh()
        except DBAPIError as error:
            trouble.set_text(f"{UNREACHABLE}{short(error.orig)}. It is asked again and again.")
            trouble.set_visibility(True)
        else:
            trouble.set_visibility(False)

    await turn()
    ui.timer(period_s, turn)


def heading(text: str, level: int = 2) -> None:
    """Show a heading that a screen reader finds as one."""
    with ui.element(f"h{level}"):
        ui.label(text)


def notice(text: str) -> ui.label:
    """Show what is missing and what to do about it."""
    return ui.label(text).classes("notice").props("role=status")


def facts(pairs: dict[str, object]) -> None:
    """Show names and values, those without a value left out."""
    with ui.element("dl").classes("facts"):
        for name, value in pairs.items():
            if value not in (None, "", [], {}):
                with ui.element("dt"):
                    ui.label(name)
                with ui.element("dd"):
                    ui.label(short(value))


def record_path(key: str) -> str:
    """Return where the raw record is shown."""
    return f"/record/{quote(key, safe='')}"


def history_path(device_id: str, case_id: str) -> str:
    """Return where a case on a device is shown over time."""
    return f"/history/{quote(device_id)}/{quote(case_id)}"
