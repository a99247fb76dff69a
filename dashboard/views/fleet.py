"""The fleet: one card per device, with its state, the age of its last message, its activity and its backlog."""

import time
from asyncio import to_thread
from urllib.parse import quote

from nicegui import ui

from benchd.dashboard import queries
from benchd.dashboard.answers import Answers
from benchd.dashboard.layout import PATIENCE_S, follow, frame, notice
from benchd.dashboard.limits import READ, SHOWN
from benchd.dashboard.queries import Device
from benchd.dashboard.store import Store
from benchd.dashboard.text import SIGNS, age, count, doing, figure, more, short

EMPTY = "No device is known yet. On a device run bench-once --mqtt URL, or the service (benchd run) with this broker."


def add(store: Store, answers: Answers) -> None:
    """Serve the view at /fleet."""

    @ui.page("/fleet", response_timeout=PATIENCE_S)
    async def fleet(page: int = 1) -> None:
        page = min(max(page, 1), READ)
        offset = SHOWN * (page - 1)
        with frame("Fleet"):
            problems, empty = notice(""), notice(EMPTY)
            grid, rest = ui.element("div").classes("grid"), ui.link("", f"/fleet?page={page + 1}").classes("link")
            cards: dict[str, _Card] = {}

            async def refresh() -> None:
                devices, total, wrong = await to_thread(_read, store, offset)
                rest.set_text(more(total - offset - SHOWN))
                problems.set_text(" ".join(wrong))
                problems.set_visibility(bool(wrong))
                empty.set_visibility(not devices and not wrong)
                for device in devices:
                    if device.device_id not in cards:
                        with grid:
                            cards[device.device_id] = _Card(device.device_id)
                    cards[device.device_id].show(device)

            await follow(refresh)


def _read(store: Store, offset: int) -> tuple[list[Device], int, list[str]]:
    now_s = time.time()
    devices = queries.fleet(store, now_s, offset=offset, limit=SHOWN)
    return devices, queries.devices(store), queries.problems(store, now_s)


class _Card:
    """One device; only changes are sent to the browser."""

    def __init__(self, device_id: str) -> None:
        self._card = ui.link(target=f"/device/{quote(device_id)}").classes("card column").mark(f"card-{device_id}")
        with self._card:
            self._name = ui.label().style("font-weight: 600")
            self._place = ui.label().classes("soft")
            with ui.row().style("gap: .75rem"):
                self._state, self._age = ui.label(), ui.label().classes("soft")
            self._doing = ui.label()
            self._power = ui.label().classes("figure")
            self._waiting = ui.label().classes("soft figure")
            self._problem = ui.label().classes("bad")

    def show(self, device: Device) -> None:
        """Update the card."""
        health = device.health
        self._card.classes(replace=f"card column {device.state}")
        self._name.set_text(short(device.info.name or device.device_id))
        self._place.set_text(short(", ".join(filter(None, [device.info.site, *device.info.tags]))))
        self._state.set_text(SIGNS[device.state])
        self._state.classes(replace=f"state-{device.state}")
        self._age.set_text(f"last data {age(device.age_s)}")
        self._doing.set_text(doing(device))
        self._power.set_text("" if device.power_w is None else figure(device.power_w, "W"))
        self._waiting.set_text(f"backlog {count(health.outbox_pending + health.outbox_unstored, 'result')}")
        throttled = "clocks are throttled" if device.throttled else ""
        self._problem.set_text(short(". ".join(filter(None, [health.problem, throttled]))))
