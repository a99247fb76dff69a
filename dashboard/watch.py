"""`benchd watch --mqtt`: shows the fleet as a live table in the terminal, trouble first, above the newest results."""

import time
from collections.abc import Iterable
from contextlib import closing
from typing import NamedTuple, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from benchd.daemon.delivery.broker import Broker, ConnectionEnded
from benchd.daemon.delivery.connection import IncomingMessage
from benchd.daemon.errors import NotAvailable
from benchd.daemon.reporting.console import console_on
from benchd.daemon.reporting.tables import ALARM, cut, figures, light
from benchd.dashboard import queries
from benchd.dashboard.feed import Feed
from benchd.dashboard.messages import Result, rows
from benchd.dashboard.queries import Device, Filter
from benchd.dashboard.store import Store
from benchd.dashboard.text import SIGNS, age, energy, figure, median

REFRESH_S = 1.0
RESULTS = 10
TELEMETRY_S = 60.0  # stored for far longer than it is shown
TABLES = ("device", "document", "result", "telemetry")  # the only tables that are needed here
MORE, ALL = 80, 120  # minimum terminal widths for more columns, and for all
AROUND = 5  # number of lines that show neither devices nor results


class StoreContent(NamedTuple):
    """The store's content at one moment."""

    devices: list[Device]
    results: list[Result]


def watch(broker: Broker, client_id: str, out: TextIO, seconds: float | None) -> None:
    """Show arriving messages for `seconds` or until interrupted; raise NotAvailable if the broker cannot be reached.

    The messages go to a store in memory, so that the terminal shows the same as the pages.
    """
    console = console_on(out)
    try:
        with closing(Store("sqlite://")) as store, closing(Feed(broker, client_id)) as feed:
            _follow(store, feed, console, seconds)
    except ConnectionEnded as error:
        raise NotAvailable(f"{error}") from None


def _follow(store: Store, feed: Feed, console: Console, seconds: float | None) -> None:
    end_s = time.monotonic() + seconds if seconds is not None else float("inf")
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while (now_s := time.monotonic()) < end_s:
            due_s = min(now_s + REFRESH_S, end_s)
            while (wait_s := due_s - time.monotonic()) > 0:
                arrived = feed.batch(wait_s)
                keep(store, arrived)
                feed.acknowledge(arrived)
            live.update(screen(look(store), console), refresh=True)


def keep(store: Store, arrived: Iterable[IncomingMessage]) -> None:
    """Store the messages that are shown."""
    store.add(row for message in arrived for row in rows(message) if row.table in TABLES)


def look(store: Store) -> StoreContent:
    """Return the data to show, and delete the rest, because this may run for weeks."""
    now_s = time.time()
    store.forget(now_s - TELEMETRY_S, RESULTS)
    newest = queries.results(store, Filter(), "measured_s", True, 0, RESULTS).results
    return StoreContent(queries.fleet(store, now_s), newest)


def screen(seen: StoreContent, console: Console) -> Group:
    """Return the devices that fit, those in trouble first, and the newest results in the remaining lines.

    Devices leave room for at least half of the results; without a terminal, all devices are shown.
    """
    room = max(3, console.height - AROUND - RESULTS // 2) if console.is_terminal else len(seen.devices)
    width = console.width
    ordered = sorted(seen.devices, key=lambda device: (not trouble(device), device.state == "online", device.device_id))
    parts: list[RenderableType] = [_fleet(ordered[:room], width)]
    if (hidden := len(ordered) - room) > 0:
        parts.append(Text(f"and {hidden} more", "bold"))
    left = console.height - AROUND - min(room, len(ordered)) if console.is_terminal else RESULTS
    newest = seen.results[: max(left, 1)]
    return Group(*parts, _results(newest, width) if newest else "no result since the start")


def trouble(device: Device) -> str:
    """Return the known problem of a device, or an empty string."""
    problems = [device.health.problem or "", "THROTTLED" if device.throttled else ""]
    problems += [] if device.state == "online" else [device.state]
    return "; ".join(filter(None, problems))


def _fleet(devices: list[Device], width: int) -> Table:
    more, everything = width >= MORE, width >= ALL
    left = width - 24 - 13 * more - 15 * everything  # width left for text, after figures and column separators
    names, troubles = ([_plain(text(device)) for device in devices] for text in (lambda one: one.device_id, trouble))
    name_width = min(max(map(len, names), default=0), left // (3 if everything else 2))
    trouble_width = min(max(map(len, troubles), default=0), (left - name_width) // (2 if everything else 1))
    table = light("device", "state", *figures("power"), *(figures("last data") if more else []))
    for heading in ["backlog", "doing"] * everything + ["trouble"]:
        table.add_column(heading, no_wrap=True)
    for device, name, wrong in zip(devices, names, troubles, strict=True):
        cells = [_end(name, name_width), SIGNS[device.state], figure(device.power_w, "W")]
        cells += [age(device.age_s)] if more else []
        if everything:
            doing = cut(_plain(_doing(device)), left - name_width - trouble_width)
            cells += [str(device.health.pending), doing]
        table.add_row(*map(Text, cells), Text(cut(wrong, trouble_width), ALARM if wrong else ""))
    return table


def _doing(device: Device) -> str:
    return device.health.case_id or device.health.waiting_for or device.health.activity


def _results(results: list[Result], width: int) -> Table:
    more, everything = width >= MORE, width >= ALL
    texts = (width - (68 if everything else 28)) // (2 if more else 1)
    table = light("result", *(["device"] if more else []), *figures("median", *(["energy"] if everything else [])))
    table.add_column("check", no_wrap=True)
    for result in results:
        case = f"{result.model} {result.variant} b{result.batch_size}"
        took = median(result) if everything else figure(result.median_ms, "ms")
        cells = [cut(_plain(case), texts), *([_end(result.device_id, texts)] if more else [])]
        cells += [took if result.status == "ok" else result.status, *([energy(result)] if everything else [])]
        is_wrong = result.checked == "failed" or result.status not in ("ok", "unsupported")
        check = Text("FAILED" if result.checked == "failed" else result.checked or "-", ALARM if is_wrong else "")
        table.add_row(*map(Text, cells), check)
    return table


def _end(device_id: str, width: int) -> str:
    """Return the end of an id, which distinguishes it from similar ones."""
    return cut(_plain(device_id)[::-1], width)[::-1]


def _plain(text: str) -> str:
    """Return a device's text without terminal control characters."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
