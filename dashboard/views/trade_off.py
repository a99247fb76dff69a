"""Shows a model's variants by latency and energy: one chart per kind of board, or one for a single board."""

from asyncio import to_thread
from collections.abc import Sequence
from typing import NamedTuple

from nicegui import ui

from benchd.dashboard import queries
from benchd.dashboard.answers import Answers, Newest
from benchd.dashboard.layout import PATIENCE_S, frame, heading, notice, query
from benchd.dashboard.limits import SHOWN
from benchd.dashboard.store import Store
from benchd.dashboard.text import count, figure, short
from benchd.dashboard.trade_off import Figure, Group, Point, front, groups
from benchd.dashboard.views import charts

EVERY = "all, by kind"
CAPTION = (
    "The newest result of each case: for several boards their median and range, for one board its value and error bar. "
    "The dashed line joins the variants that none beats on both axes. ✕ marks a variant that cannot win."
)
NO_ENERGY = "No energy here, only latency: energy needs a power sensor on the board."


class _State(NamedTuple):
    models: list[str]
    boards: dict[str, str]
    newest: list[Newest]
    left: int


def add(store: Store, answers: Answers) -> None:
    """Serve the view at /trade-off; `model` and `board` select what is shown."""

    @ui.page("/trade-off", response_timeout=PATIENCE_S)
    async def trade_off(model: str = "", board: str = "") -> None:
        async with frame("Trade-off"):
            now = await to_thread(_read, store, answers)
            if now.left:
                notice(f"The records of {count(now.left, 'more board')} are still being read; reload this page.")
            if not now.models:
                notice("No results yet. Measure something: bench-once --mqtt URL.")
                return
            chosen = {"model": model if model in now.models else now.models[0], "board": board}
            _choices(now, chosen)
            wanted = [
                entry
                for entry in now.newest
                if entry.case.model == chosen["model"] and chosen["board"] in ("", entry.result.device_id)
            ]
            ui.label(CAPTION).classes("soft")
            with ui.element("div").classes("wide"):
                for group, points in list(groups(wanted).items())[:SHOWN]:
                    _chart(group, points)


def _read(store: Store, answers: Answers) -> _State:
    newest, left = answers.newest()
    models = sorted({entry.case.model for entry in newest})
    names, known = queries.names(store), {entry.result.device_id for entry in newest}
    return _State(models, {key: name for key, name in names.items() if key in known}, newest, left)


def _choices(now: _State, chosen: dict[str, str]) -> None:
    def choose(**changed: str) -> None:
        ui.navigate.to(f"/trade-off{query({**chosen, **changed})}")

    with ui.row().style("gap: .75rem; width: 100%"):
        model = ui.select(now.models, label="model", value=chosen["model"])
        model.on_value_change(lambda event: choose(model=event.value))
        boards = {"": EVERY, **now.boards}
        board = ui.select(boards, label="board", value=chosen["board"] if chosen["board"] in boards else "")
        board.on_value_change(lambda event: choose(board=event.value))
        for field in (model, board):
            field.props("dense options-dense").style("min-width: 12rem")


def _chart(group: Group, points: Sequence[Point]) -> None:
    kind = ", ".join(filter(None, [group.kind.chip, group.kind.power_mode, group.kind.device, group.work]))
    best = front(points)
    with ui.element("section").classes("card"):
        heading(short(f"{kind}: {count(max(point.boards for point in points), 'board')}"))
        ui.label(short(f"energy: {group.scope}") if best or group.scope else NO_ENERGY).classes("soft")
        if group.scope:
            ui.echart(charts.trade_off(points, best), renderer="svg").style("height: 20rem; width: 100%")
        else:
            fastest_first = sorted(points, key=lambda point: point.latency_ms.value)
            ui.label("Fastest first: " + short("; ".join(_words(point) for point in fastest_first if not point.why)))
        if best:
            ui.label("Not beaten on both axes: " + short("; ".join(map(_words, best))))
        for point in points:
            if point.why:
                where = count(point.boards, "board")
                ui.label(short(f"✕ {point.label} on {where} cannot win: {point.why}")).classes("bad")


def _words(point: Point) -> str:
    energy = f", {_figure(point.energy_mj, 'mJ')}" if point.energy_mj else ""
    return f"{point.label}: {_figure(point.latency_ms, 'ms')}{energy}"


def _figure(measured: Figure, unit: str) -> str:
    return f"{figure(measured.value)} [{figure(measured.low)}, {figure(measured.high)}] {unit}"
