"""Shows what is deployed on a fleet's boards: promise kept, broken or stale, by how much and since when."""

import time
from asyncio import to_thread
from collections.abc import Sequence
from urllib.parse import quote

from nicegui import ui

from benchd.daemon.delivery.messages import DeployedFolder
from benchd.dashboard import queries
from benchd.dashboard.layout import PATIENCE_S, PagePart, follow, frame, heading, notice, stacked
from benchd.dashboard.limits import SHOWN
from benchd.dashboard.queries import OnBoard
from benchd.dashboard.store import Store
from benchd.dashboard.text import age, figure, more, percent, short

AGES_S = 60.0  # unchanged content is redrawn this often, because its age grows
STALE_S = 7 * 86_400.0
"""A promise that was verified longer ago than this is no longer known to be kept."""

NONE = "Nothing is deployed. Add a folder written by benchd ship to the configuration of benchd run: [[shipped]] path."


def add(store: Store) -> None:
    """Serve the view at /shipped."""

    @ui.page("/shipped", response_timeout=PATIENCE_S)
    async def shipped() -> None:
        async with frame("What is deployed"):
            empty, place = notice(NONE), PagePart("")

            async def refresh() -> None:
                on_boards = await to_thread(queries.deployed, store)
                empty.set_visibility(not on_boards)
                if place.renew(on_boards, time.time() // AGES_S):
                    with place.column:
                        _folders(on_boards)

            await follow(refresh)


def _folders(on_boards: Sequence[OnBoard]) -> None:
    """Show one table per folder, boards with a broken promise first."""
    now_s = time.time()
    names = list(dict.fromkeys(on_board.found.name for on_board in on_boards))
    for name in names[:SHOWN]:
        boards = sorted(
            (on_board for on_board in on_boards if on_board.found.name == name),
            key=lambda on_board: _calm(on_board, now_s),
        )
        heading(short(name))
        _table(boards[:SHOWN], now_s)
        ui.label(more(len(boards) - SHOWN)).classes("soft")
    ui.label(more(len(names) - SHOWN)).classes("soft")


def _calm(on_board: OnBoard, now_s: float) -> tuple[bool, bool]:
    return not on_board.found.is_broken, not is_stale(on_board, now_s)


def is_stale(one: OnBoard, now_s: float) -> bool:
    """Return whether the last verification is too old to be reliable."""
    return now_s - one.verified_s > STALE_S


def _table(boards: Sequence[OnBoard], now_s: float) -> None:
    with stacked("board", "promise", "now and promised", "case", "since", "verified", "ahead of it"):
        for on_board in boards:
            deployed = on_board.found
            with ui.element("tr"):
                with ui.element("td"):
                    ui.link(short(on_board.device_id), f"/device/{quote(on_board.device_id)}").classes("link")
                with ui.element("td"):
                    ui.label(word(deployed, is_stale=is_stale(on_board, now_s))).classes(
                        "bad" if deployed.is_broken else ""
                    )
                    ui.label(short(deployed.reason or "")).classes("soft")
                times = f"{figure(deployed.now_ms)}, {figure(deployed.promised_ms, 'ms')} promised"
                for words in (
                    f"{times}: {change(deployed)}",
                    short(deployed.case_id),
                    f"since {short(deployed.since[:16])}",
                    f"verified {age(now_s - on_board.verified_s)}",
                    f"ahead: {short(deployed.better)}" if deployed.better else "",
                ):
                    with ui.element("td"):
                        ui.label(words)


def word(deployed: DeployedFolder, *, is_stale: bool) -> str:
    """Return a word for whether the promise is kept, and for a stale verdict."""
    signs = {"kept": "✓ kept", "faster": "✓ kept, faster", "slower": "▲ broken, slower", "broken": "✕ broken"}
    return short(signs.get(deployed.verdict, deployed.verdict.replace("_", " "))) + (", stale" if is_stale else "")


def change(deployed: DeployedFolder) -> str:
    """Return the change relative to the promise with its interval."""
    if deployed.change is None or deployed.change_low is None or deployed.change_high is None:
        return "-"
    return f"{percent(deployed.change)} [{percent(deployed.change_low)}, {percent(deployed.change_high)}] %"
