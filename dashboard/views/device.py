"""One device: its sensors, cases and events, its identity, and the suites that it can run."""

import time
from asyncio import to_thread
from functools import partial
from typing import NamedTuple, get_args
from urllib.parse import quote

from nicegui import ui

from benchd.daemon.delivery.broker import Broker
from benchd.daemon.verdicts.effects import Answer
from benchd.dashboard import queries
from benchd.dashboard.commands import run_suite
from benchd.dashboard.layout import PATIENCE_S, REFRESH_S, facts, follow, frame, heading, history_path, notice
from benchd.dashboard.limits import SHOWN
from benchd.dashboard.messages import Latest, SuiteInfo
from benchd.dashboard.queries import Device, Happened
from benchd.dashboard.store import Store
from benchd.dashboard.text import SIGNS, age, clock, count, doing, figure, more, short, throttling, top1
from benchd.dashboard.views import charts

SPANS = {300: "5 minutes", 3600: "1 hour", 86400: "24 hours"}
QUIET = "No telemetry in this period: a device sends it while a case runs and a sensor can be read."


_Line = tuple[str, str, str]


class _State(NamedTuple):
    device: Device | None
    series: charts.Series
    marks: list[Happened]
    latest: list[Latest]


def add(store: Store, broker: Broker) -> None:
    """Serve the view at /device/<id>."""

    @ui.page("/device/{device_id}", response_timeout=PATIENCE_S)
    async def device(device_id: str) -> None:
        with frame(short(device_id)):
            first = await to_thread(_read, store, device_id, min(SPANS))
            if first.device is None:
                notice("This device is unknown here. The fleet page lists the known devices.")
                return
            state, throttled, problem = ui.label().mark("state"), ui.label(), ui.label().classes("bad")
            ui.link("its results", f"/results?device={quote(device_id)}").classes("link")
            span = ui.toggle(SPANS, value=min(SPANS)).props("aria-label='time shown'")
            quiet = notice(QUIET)
            with ui.column().style("width: 100%") as live:
                panels = _panels()
            _suites(broker, device_id, first.device.info.suites)
            verdicts = _Lines("Against the baseline", "no case has a baseline: benchd baseline set")
            accuracies = _Lines("Accuracy", "no case was measured on labelled images")
            _about(first.device)
            events = _Lines("Events", "none in this period")

            async def refresh() -> None:
                now = await to_thread(_read, store, device_id, span.value)
                if now.device is not None:
                    state.set_text(_state_line(now.device))
                    state.classes(replace=f"state-{now.device.state}")
                    throttled.set_text(throttling(now.device))
                    throttled.classes(replace="warn" if now.device.throttled else "soft")
                    problem.set_text(short(now.device.health.problem or ""))
                    live.classes(replace=f"column {now.device.state}")
                quiet.set_visibility(not now.series)
                for card, chart, panel in panels:
                    chart.options.clear()
                    chart.options.update(charts.panel(now.series, now.marks, *panel))
                    card.set_visibility(bool(chart.options["series"]))
                    chart.update()
                verdicts.show([_verdict(device_id, latest) for latest in now.latest if latest.verdict])
                accuracies.show(
                    [_accuracy(device_id, latest) for latest in now.latest if latest.accuracy_top1 is not None]
                )
                events.show([_event(mark) for mark in reversed(now.marks)])

            await follow(refresh, 2 * REFRESH_S)


def _read(store: Store, device_id: str, span_s: int) -> _State:
    now_s = time.time()
    found = next(iter(queries.fleet(store, now_s, device_id=device_id)), None)
    since_s = now_s - span_s
    series, marks = queries.series(store, device_id, since_s), queries.happenings(store, device_id, since_s)
    return _State(found, series, marks, queries.latest(store, device_id))


def _state_line(device: Device) -> str:
    health = device.health
    backlog = f"backlog {count(health.outbox_pending + health.outbox_unstored, 'result')}"
    return short("; ".join([SIGNS[device.state], f"last data {age(device.age_s)}", doing(device), backlog]))


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
        notice("This device has published no suites. Its configuration lists them under [[suite]].")
    for number, suite in enumerate(suites[:SHOWN]):
        with ui.row().style("align-items: center; gap: .75rem"):
            ui.button("Run", on_click=partial(_run, broker, device_id, suite.name)).props(
                f"aria-label='run suite' no-caps data-suite={number}"
            )
            ui.label(short(f"{suite.name}: {count(len(suite.cases), 'case')}, {suite.when or 'on demand'}"))
    ui.label(more(len(suites) - SHOWN)).classes("soft")


async def _run(broker: Broker, device_id: str, suite: str) -> None:
    answer = await to_thread(run_suite, broker, device_id, suite)
    if answer.accepted:
        ui.notify(f"{device_id} is running {short(suite)}; see its state above", type="positive")
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


class _Lines:
    """A heading with lines below it, each a text, its class and its link; only changes are sent to the browser."""

    def __init__(self, title: str, empty: str) -> None:
        heading(title)
        self._column, self._empty = ui.column().style("gap: .1rem"), empty
        self._shown: list[_Line] | None = None

    def show(self, lines: list[_Line]) -> None:
        """Replace the lines."""
        lines, rest = lines[:SHOWN], more(len(lines) - SHOWN)
        lines += [(rest, "soft", "")] if rest else []
        if lines == self._shown:
            return
        self._shown = lines
        self._column.clear()
        with self._column:
            for text, look, target in lines or [(self._empty, "soft", "")]:
                shown = ui.link(short(text), target) if target else ui.label(short(text))
                shown.classes(look)


def _verdict(device_id: str, latest: Latest) -> _Line:
    against = f"{figure(latest.median_ms, 'ms')} against {figure(latest.baseline_ms, 'ms')}"
    text = f"{latest.verdict}: {latest.case_id}, {latest.verdict_reason or against}"
    look = latest.verdict if latest.verdict in get_args(Answer) else ""  # a foreign word must not become classes
    return text, f"link {look}", history_path(device_id, latest.case_id)


def _accuracy(device_id: str, latest: Latest) -> _Line:
    return f"{latest.case_id}: top-1 {top1(latest)}", "link", history_path(device_id, latest.case_id)


def _event(mark: Happened) -> _Line:
    return f"{clock(mark.at_s)}  {mark.name}  {mark.detail}", "slower" if mark.name == "regression" else "", ""
