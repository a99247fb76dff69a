"""One device: what its sensors say now, its cases and events, who it is, and the suites it can be asked to run."""

import time
from asyncio import to_thread
from functools import partial
from typing import NamedTuple

from nicegui import ui

from benchd.daemon.delivery.mqtt import Broker
from benchd.dashboard import queries
from benchd.dashboard.commands import run_suite
from benchd.dashboard.layout import REFRESH_S, facts, frame, heading, notice
from benchd.dashboard.messages import SuiteInfo
from benchd.dashboard.queries import Device, Happened
from benchd.dashboard.store import Store
from benchd.dashboard.text import SIGNS, age, clock, count, figure, short
from benchd.dashboard.views import charts

SPANS = {300: "5 minutes", 3600: "1 hour", 86400: "24 hours"}
EVENTS = 20
QUIET = "No telemetry in this time: a device sends it while a case runs and a sensor can be read."


class _State(NamedTuple):
    device: Device | None
    series: charts.Series
    marks: list[Happened]


def add(store: Store, broker: Broker) -> None:
    """Serve the view at /device/<id>."""

    @ui.page("/device/{device_id}")
    async def device(device_id: str) -> None:
        first = await to_thread(_read, store, device_id, min(SPANS))
        with frame(short(device_id)):
            if first.device is None:
                notice("This device has never been heard of here. The fleet shows those that were.")
                return
            state = ui.label().mark("state")
            span = ui.toggle(SPANS, value=min(SPANS)).props("aria-label='time shown'")
            quiet = notice(QUIET)
            panels = _panels()
            _suites(broker, device_id, first.device.info.suites)
            _about(first.device)
            heading("Events")
            events = ui.column().style("gap: .1rem")

        shown: list[Happened] = []

        async def refresh() -> None:
            now = await to_thread(_read, store, device_id, span.value)
            if now.device is not None:
                state.set_text(_state_line(now.device))
            quiet.set_visibility(not now.series)
            for card, chart, panel in panels:
                chart.options.clear()
                chart.options.update(charts.panel(now.series, now.marks, *panel))
                card.set_visibility(bool(chart.options["series"]))
                chart.update()
            if now.marks != shown:
                shown[:] = now.marks
                _show_events(events, now.marks)

        await refresh()
        ui.timer(2 * REFRESH_S, refresh)


def _read(store: Store, device_id: str, span_s: int) -> _State:
    now_s = time.time()
    found = next((device for device in queries.fleet(store, now_s) if device.device_id == device_id), None)
    since_s = now_s - span_s
    return _State(found, queries.series(store, device_id, since_s), queries.happenings(store, device_id, since_s))


def _state_line(device: Device) -> str:
    health = device.health
    doing = f"measuring {health.case_id}" if health.case_id else health.waiting_for or health.activity
    backlog = f"backlog {count(health.outbox_pending + health.outbox_unstored, 'result')}"
    problem = f"problem: {health.problem}" if health.problem else ""
    return short(
        "; ".join(filter(None, [SIGNS[device.state], f"last data {age(device.age_s)}", doing, backlog, problem]))
    )


def _panels() -> list[tuple[ui.column, ui.echart, tuple[str, float, str]]]:
    found = []
    with ui.element("div").classes("wide"):
        for title, unit, factor, ending in charts.PANELS:
            with ui.column().classes("card") as card:
                heading(title)
                chart = ui.echart(charts.base(unit)).style("height: 14rem; width: 100%")
            found.append((card, chart, (unit, factor, ending)))
    return found


def _suites(broker: Broker, device_id: str, suites: list[SuiteInfo]) -> None:
    heading("Suites")
    if not suites:
        notice("This device has published no suite. Its configuration lists them under [[suite]].")
    for suite in suites:
        with ui.row().style("align-items: center; gap: .75rem"):
            ui.button("Run", on_click=partial(_run, broker, device_id, suite.name)).props(
                f"aria-label='run suite' no-caps data-suite={suites.index(suite)}"
            )
            ui.label(short(f"{suite.name}: {count(len(suite.cases), 'case')}, {suite.when or 'on demand'}"))


async def _run(broker: Broker, device_id: str, suite: str) -> None:
    answer = await to_thread(run_suite, broker, device_id, suite)
    if answer.accepted:
        ui.notify(f"{device_id} runs {short(suite)}; its state above follows it", type="positive")
    else:
        ui.notify(f"not run: {short(answer.reason)}", type="warning", multi_line=True)


def _about(device: Device) -> None:
    heading("About")
    info, health = device.info, device.health
    facts(
        {
            "id": device.device_id,
            "name": info.name,
            "site": info.site,
            "tags": info.tags,
            "benchd": info.tool_version,
            "disk free": figure(health.disk_free_bytes / 2**30, "GiB") if health.disk_free_bytes else None,
            "service memory": figure(health.rss_bytes / 2**20, "MiB") if health.rss_bytes else None,
            **{name.replace("_", " "): value for name, value in info.environment.items()},
        }
    )


def _show_events(column: ui.column, marks: list[Happened]) -> None:
    column.clear()
    with column:
        for mark in marks[: -EVENTS - 1 : -1]:
            ui.label(f"{clock(mark.arrived_s)}  {short(mark.name)}  {short(mark.detail)}")
        if not marks:
            ui.label("none in this time").classes("soft")
