"""Shows one device: its sensors, cases and events, its identity, and the suites that it can run."""

import time
from asyncio import to_thread
from functools import partial
from typing import NamedTuple
from urllib.parse import quote

import msgspec
from nicegui import ui

from benchd.daemon.delivery.broker import Broker
from benchd.daemon.delivery.messages import Latest
from benchd.dashboard import queries
from benchd.dashboard.answers import Answers
from benchd.dashboard.commands import run_suite
from benchd.dashboard.conditions import BoardCondition, boards, looks
from benchd.dashboard.layout import (
    PATIENCE_S,
    PagePart,
    changes_path,
    facts,
    follow,
    frame,
    heading,
    history_path,
    local,
    notice,
)
from benchd.dashboard.limits import SHOWN
from benchd.dashboard.queries import Device, Mark
from benchd.dashboard.store import Store
from benchd.dashboard.text import SIGNS, accuracy, age, count, doing, fact, figure, more, short, throttling
from benchd.dashboard.views.charts import Series
from benchd.dashboard.views.live import LiveCharts

REFRESH_S = 1.0
CASE_OK, WELL = "case ok", 8
ASKED = "asked"
SPANS = {300: "5 minutes", 3600: "1 hour", 86400: "24 hours"}
QUIET = "No telemetry in this period: a device sends it while a case runs and a sensor can be read."


_Line = tuple[str, str, str]
_SuiteOfDevice = tuple[str, str]  # a device and one of its suites


class _State(NamedTuple):
    device: Device | None
    series: Series
    marks: list[Mark]
    latest: list[Latest]


def add(store: Store, broker: Broker, of_boards: Answers) -> None:
    """Serve the view at /device/<id>."""
    answers: dict[_SuiteOfDevice, str] = {}  # to the last request, for all viewers

    @ui.page("/device/{device_id}", response_timeout=PATIENCE_S)
    async def device(device_id: str) -> None:
        async with frame(short(device_id)):
            first = next(iter(await to_thread(queries.fleet, store, time.time(), device_id=device_id)), None)
            if first is None:
                notice("This device is unknown here. The fleet page lists the known devices.")
                return
            with ui.column().style("gap: .1rem"):
                info = first.info
                ui.label(short(", ".join(filter(None, [info.name, info.site, *info.tags])))).classes("soft")
                condition = ui.label().mark("condition")
                why = ui.link("which, and why", changes_path(q=device_id)).classes("link")
                state, throttled, problem = ui.label().mark("state"), ui.label(), ui.label().classes("bad")
                ui.link("its results", f"/results?device={quote(device_id)}").classes("link")
            span = ui.toggle(SPANS, value=min(SPANS)).props("aria-label='time shown' no-caps")
            quiet = notice(QUIET)
            live = LiveCharts(span.value).style("width: 100%")
            span.on_value_change(lambda: live.begin(span.value))
            suites = _Suites(broker, first, answers)
            verdicts, accuracies = _listing("Against the baseline"), _listing("Accuracy")
            _about(first)
            events = _listing("Events")

            async def refresh() -> None:
                now_s = time.time()
                now = await to_thread(_read, store, device_id, live.since_s(now_s), now_s - span.value)
                if now.device is not None:
                    state.set_text(_state_line(now.device))
                    state.classes(replace=f"state-{now.device.state}")
                    throttled.set_text(throttling(now.device))
                    throttled.classes(replace="warn" if now.device.throttled else "soft")
                    suites.show(now.device)
                    problem.set_text(short(now.device.health.problem or ""))
                    problem.set_visibility(now.device.health.problem is not None)
                    live.classes(replace=now.device.state)
                quiet.set_visibility(not live.extend(now.series, _drawn(now.marks), now_s))
                judged = [_verdict(device_id, latest) for latest in now.latest if latest.verdict]
                _list(verdicts, judged, "no case has a baseline: benchd baseline set")
                known = [_accuracy(device_id, latest) for latest in now.latest if latest.accuracy_value is not None]
                _list(accuracies, known, "no case was measured on labelled images")
                _list(events, [_event(mark) for mark in reversed(_listed(now.marks))], "none in this period")

            async def judge() -> None:
                board = await to_thread(_board, store, of_boards, device_id)
                if board is not None:
                    condition.set_text(short(board.words))
                    condition.classes(replace=looks(board.condition))
                why.set_visibility(board is not None and board.condition == "slower")

            await follow(refresh, REFRESH_S)
            await follow(judge)


def _board(store: Store, of_boards: Answers, device_id: str) -> BoardCondition | None:
    choices, _ = of_boards.update()
    fleet = boards(store, choices, time.time(), of_boards.changes)
    return next((board for board in fleet if board.device.device_id == device_id), None)


def _read(store: Store, device_id: str, sampled_s: float, since_s: float) -> _State:
    """Return the state with the samples and events since these times."""
    device = next(iter(queries.fleet(store, time.time(), device_id=device_id)), None)
    series, marks = queries.series(store, device_id, sampled_s), queries.marks(store, device_id, since_s)
    return _State(device, series, marks, queries.latest(store, device_id))


def _state_line(device: Device) -> str:
    health = device.health
    backlog = f"backlog {count(health.pending, 'result')}"
    return short("; ".join([SIGNS[device.state], f"last data {age(device.age_s)}", doing(device), backlog]))


def _drawn(marks: list[Mark]) -> list[Mark]:
    """Return the marks to draw in the charts: all or, if there are many, all except those of successful cases."""
    odd = [mark for mark in marks if mark.name != CASE_OK]
    drawn = marks if len(marks) <= SHOWN else odd[-SHOWN:]
    return [mark._replace(name=short(f"{mark.name} {mark.detail}"), detail="") for mark in drawn]


def _listed(marks: list[Mark]) -> list[Mark]:
    """Return the marks to list: all, except that only the last few successful cases are included."""
    well = [mark for mark in marks if mark.name == CASE_OK]
    return sorted([*(mark for mark in marks if mark.name != CASE_OK), *well[-WELL:]])


class _Suites:
    """A device's suites, each with a button that is disabled while its last request waits for an answer."""

    def __init__(self, broker: Broker, device: Device, answers: dict[_SuiteOfDevice, str]) -> None:
        self._broker, self._device, self._answers = broker, device, answers
        suites, self._rows = device.info.suites, list[tuple[str, ui.button, ui.label]]()
        heading("Suites")
        if not suites:
            notice("This device has published no suites. Add them as [[suite]] in its configuration.")
        for suite in suites[:SHOWN]:
            with ui.row().style("align-items: center; gap: .75rem"):
                button = ui.button("Run", on_click=partial(self._run, suite.name)).props("no-caps")
                button.props["aria-label"] = short(f"Run {suite.name}")
                button.disable()
                ui.label(short(f"{suite.name}: {count(len(suite.cases), 'case')}, {suite.when or 'on demand'}"))
                self._rows.append((suite.name, button, ui.label().classes("soft").props("role=status")))
        ui.label(more(len(suites) - SHOWN)).classes("soft")

    def show(self, device: Device) -> None:
        """Show the answers, and whether the device can be asked."""
        self._device = device
        away = "" if device.state == "online" else f"the device is {device.state}"
        for suite, button, label in self._rows:
            answer = self._answers.get((device.device_id, suite), "")
            label.set_text("; ".join(filter(None, [answer, away])))
            button.set_enabled(not away and answer != ASKED)

    async def _run(self, suite: str) -> None:
        place = self._device.device_id, suite
        if self._answers.get(place) == ASKED:  # a second click, or another viewer, was faster
            return
        self._answers[place] = ASKED
        self.show(self._device)
        self._answers[place] = await to_thread(run_suite, self._broker, *place)


def _about(device: Device) -> None:
    heading("About")
    info, health = device.info, device.health
    known = msgspec.structs.asdict(info.environment) if info.environment else {}
    facts(
        {
            "id": device.device_id,
            "name": info.name,
            "site": info.site,
            "tags": info.tags,
            "benchd": info.tool_version,
            "disk free": figure(health.disk_free_bytes / 2**30, "GiB") if health.disk_free_bytes else None,
            "service memory": figure(health.rss_bytes / 2**20, "MiB") if health.rss_bytes else None,
            **dict(fact(name, value) for name, value in known.items()),
        }
    )


def _listing(title: str) -> PagePart:
    heading(title)
    return PagePart("lines")


def _list(part: PagePart, lines: list[_Line], empty: str) -> None:
    """Show these lines, each a text with class and link; only changes are sent to the browser."""
    lines, rest = lines[:SHOWN], more(len(lines) - SHOWN)
    lines += [(rest, "soft", "")] if rest else []
    if part.renew(lines):
        with part.column:
            for text, look, target in lines or [(empty, "soft", "")]:
                element = ui.link(short(text), target) if target else ui.label(short(text))
                element.classes(look)


def _verdict(device_id: str, latest: Latest) -> _Line:
    against = f"{figure(latest.median_ms, 'ms')} against {figure(latest.baseline_ms, 'ms')}"
    text = f"{latest.verdict}: {latest.case_id}, {latest.verdict_reason or against}"
    return text, f"link {latest.verdict}", history_path(device_id, latest.case_id)


def _accuracy(device_id: str, latest: Latest) -> _Line:
    return f"{latest.case_id}: {accuracy(latest)}", "link", history_path(device_id, latest.case_id)


def _event(mark: Mark) -> _Line:
    return f"{local(mark.at_s)}  {mark.name}  {mark.detail}", "slower" if mark.name == "regression" else "", ""
