"""Shows the fleet, devices in trouble first: one card per device, or one row per device if there are many."""

import time
from asyncio import to_thread
from collections.abc import Sequence
from urllib.parse import quote

from nicegui import app, ui
from starlette.responses import RedirectResponse

from benchd.dashboard import limits, queries
from benchd.dashboard.answers import Answers
from benchd.dashboard.conditions import CONDITIONS, SHAPES, BoardCondition, Condition, boards, counts, looks, matches
from benchd.dashboard.layout import PATIENCE_S, PagePart, chip, follow, frame, notice, query
from benchd.dashboard.limits import SHOWN
from benchd.dashboard.store import Store
from benchd.dashboard.text import SIGNS, age, count, doing, more, sensors, short, throttling

CARDS = 24  # more devices are shown as rows
EMPTY = "No device yet. Start benchd on one (bench-once --mqtt URL, or benchd run) with this broker."
NONE = "No device matches. Clear the search or choose a different state."


def add(store: Store, answers: Answers) -> None:
    """Serve the view at /fleet; `state` and `q` select devices by condition and text.

    Also serve the search on every page, at /search, which leads to the matching devices or else to the results.
    """

    @app.get("/search")
    def search(q: str = "") -> RedirectResponse:
        is_board = any(matches(device, q) for device in queries.fleet(store, time.time()))
        return RedirectResponse(f"/fleet{query({'q': q})}" if is_board else f"/results{query({'text': q})}")

    @ui.page("/fleet", response_timeout=PATIENCE_S)
    async def fleet(state: str = "", q: str = "", page: int = 1) -> None:
        page = limits.page(page)
        offset, chosen = SHOWN * (page - 1), condition_named(state)
        async with frame("Fleet"):
            problems, empty, strip = notice(""), notice(""), PagePart("strip")
            grid = ui.element("div")
            rest = ui.link("", f"/fleet{query({'q': q, 'state': state, 'page': page + 1})}").classes("link")
            entries: dict[str, _Entry] = {}
            order: list[str] = []

            async def refresh() -> None:
                boards, wrong = await to_thread(_read, store, answers)
                boards = [board for board in boards if matches(board.device, q)]
                wanted = [board for board in boards if chosen in (None, board.condition)]
                visible = wanted[offset : offset + SHOWN]
                if strip.renew(counts(boards)):
                    with strip.column:
                        strip_of(boards, "/fleet", chosen, q=q)
                rest.set_text(more(len(wanted) - offset - SHOWN))
                rest.set_visibility(bool(rest.text))
                problems.set_text(". ".join(wrong))
                problems.set_visibility(bool(wrong))
                empty.set_text(NONE if q or chosen else EMPTY)
                empty.set_visibility(not wanted and not wrong)
                if order != [board.device.device_id for board in visible]:
                    order[:] = [board.device.device_id for board in visible]
                    entries.clear()
                    grid.clear()
                    grid.classes(replace="rows" if len(visible) > CARDS else "grid")
                    with grid:
                        entries.update((device_id, _Entry(device_id)) for device_id in order)
                for board in visible:
                    entries[board.device.device_id].show(board)

            await follow(refresh)


def condition_named(name: str) -> Condition | None:
    """Return the condition with that name, or None."""
    return next((condition for condition in CONDITIONS if condition == name), None)


def strip_of(fleet: Sequence[BoardCondition], path: str, chosen: Condition | None, **asked: str) -> None:
    """Show how many boards are in each condition, each with a link to those boards on this page."""
    chip(count(len(fleet), "board"), f"{path}{query(asked)}", "all", is_chosen=chosen is None)
    for condition, number in counts(fleet).items():
        words, target = f"{SHAPES[condition]} {number} {condition}", f"{path}{query(asked | {'state': condition})}"
        chip(words, target, looks(condition), is_chosen=condition == chosen)


def _read(store: Store, answers: Answers) -> tuple[list[BoardCondition], list[str]]:
    now_s = time.time()
    choices, _ = answers.update()
    return boards(store, choices, now_s, answers.changes), queries.problems(store, now_s)


class _Entry:
    """A device, as a card or a row; only changes are sent to the browser."""

    def __init__(self, device_id: str) -> None:
        self._entry = ui.link(target=f"/device/{quote(device_id)}").mark(f"card-{device_id}")
        with self._entry:
            self._name = ui.label().classes("name")
            self._condition = ui.label()
            self._place = ui.label().classes("soft")
            self._doing = ui.label()
            self._sensors = ui.label().classes("figure")
            self._state = ui.label()
            self._service = ui.label().classes("soft")

    def show(self, board: BoardCondition) -> None:
        """Update the entry."""
        device = board.device
        info, health = device.info, device.health
        self._entry.classes(replace=f"card entry {device.state}")
        self._name.set_text(short(board.name))
        named = [device.device_id] if info.name and info.name != device.device_id else []
        self._place.set_text(short(", ".join(filter(None, [*named, info.site, *info.tags]))))
        self._condition.set_text(short(board.words))
        self._condition.classes(replace=looks(board.condition))
        self._state.set_text(
            "" if board.condition == "silent" else f"{SIGNS[device.state]}, last data {age(device.age_s)}"
        )
        self._state.classes(replace=f"state-{device.state}")
        self._doing.set_text(doing(device))
        self._sensors.set_text(sensors(device))
        backlog = f"backlog {count(health.pending, 'result')}"
        self._service.set_text(f"{throttling(device)}, {backlog}")
