"""`benchd watch --mqtt`: the fleet as a live table in the terminal, and the results as they arrive."""

import time
from contextlib import closing
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from benchd.daemon.delivery.broker import Broker, Ended
from benchd.daemon.errors import NotAvailable
from benchd.dashboard import queries
from benchd.dashboard.feed import Feed
from benchd.dashboard.limits import SHOWN
from benchd.dashboard.messages import rows
from benchd.dashboard.queries import Device, Filter
from benchd.dashboard.store import Store
from benchd.dashboard.text import SIGNS, age, energy, figure, median, more, short

REFRESH_S = 1.0
RESULTS = 10
PLAIN_WIDTH = 160  # columns if there is no terminal


def watch(broker: Broker, client_id: str, out: TextIO, seconds: float | None) -> None:
    """Show what arrives, for `seconds` or until interrupted; raise NotAvailable if the broker cannot be reached.

    It goes through a store in memory, so that the terminal shows the same as the pages.
    """
    width = None if out.isatty() else PLAIN_WIDTH
    console = Console(file=out, width=width, highlight=False)
    try:
        with closing(Store("sqlite://")) as store, closing(Feed(broker, client_id, 0)) as feed:
            _follow(store, feed, console, seconds)
    except Ended as error:
        raise NotAvailable(f"{error}") from None


def _follow(store: Store, feed: Feed, console: Console, seconds: float | None) -> None:
    end_s = time.monotonic() + seconds if seconds is not None else float("inf")
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        due_s = time.monotonic()
        while time.monotonic() < end_s:
            arrived = feed.batch(min(REFRESH_S, max(end_s - time.monotonic(), 0.0)))
            store.add(row for one in arrived for row in rows(one))
            feed.acknowledge(arrived)
            if time.monotonic() >= due_s:
                due_s = time.monotonic() + REFRESH_S
                live.update(_screen(store), refresh=True)
        live.update(_screen(store), refresh=True)


def _screen(store: Store) -> Group:
    now_s = time.time()
    store.tidy(now_s)
    newest = queries.results(store, Filter(), "arrived_s", True, 0, RESULTS).results
    fleet = _table("device", "state", "last data", "doing", "power", "backlog", "problem")
    fleet.caption = more(queries.devices(store) - SHOWN) or None
    for device in queries.fleet(store, now_s, limit=SHOWN):
        fleet.add_row(*map(_plain, _device(device)))
    last = _table("model", "variant", "batch", "device", "median [95 %]", "energy per inference", "check", "status")
    for result in newest:
        cells = [short(result.model), result.variant, str(result.batch_size), result.device_id]
        cells += [median(result), energy(result), result.checked or "-", result.status]
        last.add_row(*map(_plain, cells))
    return Group(fleet, last if newest else "no result since the start")


def _table(*headings: str) -> Table:
    table = Table()
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _device(device: Device) -> list[str]:
    health = device.health
    doing = health.case_id or health.waiting_for or health.activity
    backlog = str(health.outbox_pending + health.outbox_unstored)
    power = figure(device.power_w, "W")
    cells = [device.device_id, SIGNS[device.state], age(device.age_s), doing, power, backlog, health.problem or ""]
    return [short(cell) for cell in cells]


def _plain(text: str) -> str:
    """Return a device's text without terminal control characters."""
    return escape("".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text))
