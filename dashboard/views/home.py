"""Home: shows how many boards are well, which are not and why, and which variant of each model ships where."""

import time
from asyncio import to_thread
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple
from urllib.parse import quote, urlencode

from nicegui import app, ui
from sqlalchemy.exc import DBAPIError

from benchd.daemon.delivery.messages import DeployedFolder
from benchd.dashboard import queries, text
from benchd.dashboard.answers import Answers, Outcome
from benchd.dashboard.conditions import CONDITIONS, SHAPES, TROUBLES, BoardCondition, Condition, boards, counts, looks
from benchd.dashboard.layout import (
    PATIENCE_S,
    PagePart,
    changes_path,
    follow,
    frame,
    heading,
    history_path,
    notice,
    since_when,
)
from benchd.dashboard.limits import SHOWN
from benchd.dashboard.matrix import MOST_BOARDS, Cell, Matrix, MatrixRow, matrix
from benchd.dashboard.store import Store
from benchd.dashboard.text import age, count, more, short
from benchd.dashboard.views.changes import verdict
from benchd.dashboard.views.fleet import EMPTY, condition_named, strip_of
from benchd.dashboard.views.shipped import is_stale, word

NAMED = 4  # number of boards listed by name for each condition
SUBJECTS = 24
NONE = "No results yet. Measure something: bench-once --mqtt URL."
SHAPE: dict[Outcome, str] = {"ships": "✓", "fastest": "◌", "inconclusive": "≈", "nothing": "—"}
LEGEND = (
    "✓ ships, ◌ fastest, but with too few processes, ≈ INCONCLUSIVE, — nothing to ship, ✕ fails its check; ▲ slower, "
    "▼ faster and = the same as before its setup last changed"
)

_Line = tuple[str, str, str]  # text, class and link
_Head = MatrixRow | str  # a board, a kind of board or a model
_Promise = tuple[str, DeployedFolder, bool]  # a board, the deployed model, and whether its verdict is stale


class _State(NamedTuple):
    found: list[BoardCondition]
    shown: Matrix
    left: int
    wrong: list[str]
    deployed: list[_Promise]
    changed: frozenset[str]


def add(store: Store, answers: Answers) -> None:
    """Serve the view at /; `state` shows only the boards in that condition."""
    app.on_startup(partial(_begin, answers))

    @ui.page("/", response_timeout=PATIENCE_S)
    async def home(state: str = "") -> None:
        chosen = condition_named(state)
        async with frame("What ships, and who needs help"):
            problems, empty = notice(""), notice(EMPTY)
            strip, troubles = PagePart("strip"), PagePart("troubles")
            title, none, table = PagePart(""), notice(NONE), PagePart("scroll")
            legend = ui.label(LEGEND).classes("soft")
            names: dict[str, str] = {}

            async def refresh() -> None:
                now = await to_thread(_read, store, answers, chosen)
                names.update((board.device.device_id, short(board.name)) for board in now.found)
                problems.set_text(". ".join(filter(None, [*now.wrong, _reading(now.left)])))
                problems.set_visibility(bool(now.wrong or now.left))
                empty.set_visibility(not now.found and not now.wrong)
                none.set_visibility(bool(now.found) and not now.shown.rows and not now.left)
                legend.set_visibility(bool(now.shown.rows))
                if title.renew(len(now.shown.subjects)) and now.shown.rows:
                    with title.column:
                        heading(f"What ships: {count(len(now.shown.subjects), 'model')}")
                if strip.renew(counts(now.found), chosen):
                    with strip.column:
                        strip_of(now.found, "/", chosen)
                helpless = [board for board in now.found if board.condition in ({chosen} if chosen else TROUBLES)]
                summaries = [
                    (troubled.name, troubled.condition, troubled.detail, _age(troubled)) for troubled in helpless
                ]
                if troubles.renew(summaries, now.changed):
                    with troubles.column:
                        _troubles(helpless, now.changed)
                if table.renew(now.shown, names, now.deployed):
                    with table.column:
                        _table(now.shown, names, now.deployed)

            await follow(refresh)


async def _begin(answers: Answers) -> None:
    """Read all boards, so that the first viewer need not wait; the pages report an unreachable database."""
    with suppress(DBAPIError):
        while (await to_thread(answers.update))[1]:
            pass


def _age(board: BoardCondition) -> str:
    return age(time.time() - board.since_s) if board.since_s else ""


def _reading(left: int) -> str:
    return f"Reading the records of {count(left, 'more board')}." if left else ""


def _read(store: Store, answers: Answers, chosen: Condition | None) -> _State:
    now_s = time.time()
    choices, left = answers.update()
    fleet = boards(store, choices, now_s, answers.changes)
    order = [board.device.device_id for board in fleet if chosen in (None, board.condition)]
    wanted = (choice for device_id in order for choice in choices.get(device_id, ()))
    board_matrix = matrix(wanted, order, by_kind=len(order) > MOST_BOARDS)
    deployed = [(on_board.device_id, on_board.found, is_stale(on_board, now_s)) for on_board in queries.deployed(store)]
    changed = frozenset(change.device_id for change in answers.changes if change.verdict.answer == "slower")
    return _State(fleet, board_matrix, left, queries.problems(store, now_s), deployed, changed)


def _troubles(helpless: list[BoardCondition], changed: frozenset[str]) -> None:
    """List the boards in each condition, with their problems; those in `changed` link to Changes."""
    for condition in CONDITIONS:
        alike = [board for board in helpless if board.condition == condition]
        if not alike:
            continue
        with ui.element("div").classes("card trouble"):
            with ui.element("h2").classes(looks(condition)):
                ui.label(f"{SHAPES[condition]} {condition}")
            for board in alike[:NAMED]:
                with ui.element("div"):
                    ui.link(short(board.name), f"/device/{quote(board.device.device_id)}").classes("link")
                    ui.label(short(board.detail)).classes("soft")
                    if board.since_s:
                        ui.label(since_when(board.since_s))
                    if board.device.device_id in changed:
                        ui.link("which, and why", changes_path(q=board.device.device_id)).classes("link")
            if rest := more(len(alike) - NAMED):
                ui.link(rest, f"/fleet?{urlencode({'state': condition})}").classes("link")


def _table(board_matrix: Matrix, names: dict[str, str], deployed: Sequence[_Promise]) -> None:
    """Show the matrix, with the longer side as rows."""
    rows, subjects = board_matrix.rows[:SHOWN], board_matrix.subjects[:SUBJECTS]
    down: Sequence[_Head] = rows
    across: Sequence[_Head] = subjects
    grid = [[board_matrix.cells.get((subject, row)) for subject in subjects] for row in rows]
    if len(subjects) > len(rows):
        down, across, grid = across, down, [list(column) for column in zip(*grid, strict=True)]
    with ui.element("table").classes("matrix"):
        with ui.element("tr"):
            ui.element("td")
            for head in across:
                with ui.element("th").props("scope=col"):
                    _head(head, names)
        for head, cells in zip(down, grid, strict=True):
            with ui.element("tr"):
                with ui.element("th").props("scope=row"):
                    _head(head, names)
                for cell, over in zip(cells, across, strict=True):
                    _show(cell, _named(over, names), beside(cell, deployed) if cell else None)
    for rest, noun in ((len(board_matrix.rows) - SHOWN, "row"), (len(board_matrix.subjects) - SUBJECTS, "model")):
        ui.label(f"and {count(rest, f'more {noun}')}" if rest > 0 else "").classes("soft")


def _named(head: _Head, names: dict[str, str]) -> str:
    if isinstance(head, str):
        return short(head)
    return names.get(head.device_id, head.device_id) or short(head.kind.chip)


def _head(head: _Head, names: dict[str, str]) -> None:
    if isinstance(head, str):
        ui.label(short(head))
        return
    if head.device_id:
        ui.link(_named(head, names), f"/device/{quote(head.device_id)}").classes("link")
    else:
        ui.label(_named(head, names))
    mode = [head.kind.power_mode, head.kind.device, "" if head.device_id else count(head.boards, "board")]
    ui.label(short(", ".join(filter(None, mode)))).classes("soft")


def beside(cell: Cell, deployed: Sequence[_Promise]) -> _Line | None:
    """Return the deployed folders for the cell's model and batch size on its boards."""
    result = cell.lead.result
    if result is None:
        return None
    wanted = result.case_id.split(",")[::2][:2]  # model and batch size
    promises = [
        (verified, old)
        for device_id, verified, old in deployed
        if device_id in cell.device_ids and verified.case_id.split(",")[::2][:2] == wanted
    ]
    if not promises:
        return None
    broken, stale = sum(verified.is_broken for verified, _ in promises), sum(old for _, old in promises)
    variants = ", ".join(sorted({verified.case_id.split(",")[1] for verified, _ in promises}))
    if len(promises) == 1:
        words = f"deployed: {variants}, {word(promises[0][0], is_stale=promises[0][1])}"
    else:
        words = f"deployed on {count(len(promises), 'board')}: {variants}, {broken} broken"
        words += f", {stale} stale" if stale else ""
    return short(words), "bad" if broken else "warn" if stale else "soft", "/shipped"


def _show(cell: Cell | None, name: str, deployed: _Line | None) -> None:
    with ui.element("td") as place:
        ui.label(name).classes("narrow soft")
        if cell is None:
            place.classes("from-700")
            ui.label("not measured").classes("soft")
            return
        place.classes(f"is-{cell.lead.outcome}")
        place.props["title"] = short(cell.lead.words)
        with ui.element("div").classes("lead"):
            _lead(cell)
        for words, look, target in [*lines(cell), *([deployed] if deployed else [])]:
            element = ui.link(words, target) if target else ui.label(words)
            element.classes(look)


def _lead(cell: Cell) -> None:
    """Show the variant, with its time at the other end of the line."""
    lead = cell.lead
    head = f"{SHAPE[lead.outcome]} {lead.variant or 'nothing to ship'}"
    if lead.result and cell.boards == 1:
        ui.link(head, history_path(lead.device_id, lead.result.case_id)).classes("ship")
    else:
        ui.label(head).classes("ship")
    if lead.result:
        ui.label(text.time(lead.result)).classes("figure")


def lines(cell: Cell) -> list[_Line]:
    """Return the lines of a cell below its variant and time."""
    lead = cell.lead
    lines: list[_Line] = [("INCONCLUSIVE", "warn", "")] if lead.outcome == "inconclusive" else []
    lines += [(lead.doubt, "soft", "")] if lead.doubt else []
    if lead.result:
        if cell.range_ms:
            low_ms, high_ms = map(text.figure, cell.range_ms)
            lines.append((f"{low_ms} to {high_ms} ms on {cell.agreeing}", "figure soft", ""))
        joules = text.plus_minus(lead.result.energy_mj, lead.result.energy_err_mj, "mJ")
        beside = [joules] if lead.result.energy_mj is not None else []
        lines.append((", ".join([*beside, lead.agreed]), "figure soft", ""))
    if cell.boards > 1:
        lines.append((f"{cell.agreeing} of {count(cell.boards, 'board')} agree", "" if cell.others else "soft", ""))
        lines += [(short(f"others: {', '.join(cell.others)}"), "warn", "")] if cell.others else []
    for name, boards_failing in cell.failed:
        where = f" on {boards_failing} of {cell.boards}" if cell.boards > 1 else ""
        lines.append((short(f"✕ {name} fails its check{where}"), "bad", ""))
    case_id = lead.result.case_id if lead.result else ""
    if cell.boards > 1 and cell.slower:
        target = changes_path(q=case_id, verdict="slower")
        lines.append((f"▲ {cell.slower} of {cell.boards} slower than in the previous setup", "change bad", target))
    elif lead.change and lead.change.pair.effect:
        words, look = verdict(lead.change)
        lines.append((words, f"change {look}", changes_path(q=f"{lead.device_id} {case_id}")))
    return lines
