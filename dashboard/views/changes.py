"""Shows every case before and after an update or a date: a block per board and update, or one block's cases."""

import time
from asyncio import to_thread
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args
from urllib.parse import quote

from nicegui import ui

from benchd.dashboard import limits, queries, text
from benchd.dashboard.changes import UPDATES, Change, Changes, extent
from benchd.dashboard.layout import (
    PATIENCE_S,
    PagePart,
    changes_path,
    chip,
    follow,
    frame,
    history_path,
    notice,
    query,
    since_when,
    stacked,
)
from benchd.dashboard.limits import SHOWN, day_s
from benchd.dashboard.store import Store
from benchd.dashboard.text import age, board, clock, count, figure, more, short

DATE = "date"
SINCE = {
    "setup": "the previous setup",
    "benchd": "an update of benchd",
    "jetpack": "an update of JetPack",
    "driver": "an update of the driver",
    "fingerprint": "a change to the environment",
    DATE: "a date",
}
CAPTION = "Compares up to five runs per setup by the rule of benchd compare, corrected for all changes in the fleet."
NONE = "Nothing has changed: no case was measured both before and since. Choose a different update or date."
NO_MATCH = "No change matches. Clear the search or choose all."
ACROSS = "measured before and after, not side by side, so it need not be the cause"

Sort = Literal["slower", "faster", "inconclusive", "same", "not compared"]
SORTS: tuple[Sort, ...] = get_args(Sort)
SHAPES: dict[Sort, tuple[str, str]] = {
    "slower": ("▲", "bad"),
    "faster": ("▼", "good"),
    "inconclusive": ("≈", "warn"),
    "same": ("=", "soft"),
    "not compared": ("—", "soft"),
}

_Block = list[Change]  # the changes of a board at an update, slowest first


class _Selection(NamedTuple):
    """The selection in the URL; `since` is an update or a day."""

    since: str
    verdict: str
    q: str
    page: int

    def path(self, **changed: object) -> str:
        """Return the path of this page with a different selection, on its first page."""
        return changes_path(**self._replace(page=0)._asdict() | changed)


class _State(NamedTuple):
    counts: dict[Sort, int]
    blocks: list[_Block]
    names: dict[str, str]
    broken: dict[tuple[str, str], str]  # why the promise of a shipped folder is broken, by board and case
    known: int
    left: int


def add(store: Store, changes: Changes) -> None:
    """Serve the view at /changes; `since` is an update or a day, and `verdict`, `q` and `page` select a part."""

    @ui.page("/changes", response_timeout=PATIENCE_S)
    async def show(since: str = "setup", verdict: str = "", q: str = "", page: int = 1) -> None:
        since = since if _is_known(since) else "setup"
        selection = _Selection(since, verdict if verdict in SORTS else "", q, limits.page(page))
        async with frame("Changes"):
            _choices(selection)
            reading, strip = notice(""), PagePart("strip")
            ui.label(CAPTION).classes("soft")
            empty, place = notice(NONE), PagePart("changes")
            rest = ui.link("", "/changes").classes("link")

            async def refresh() -> None:
                now = await to_thread(_read, store, changes, selection)
                reading.set_text(f"Reading the records of {count(now.left, 'more board')}.")
                reading.set_visibility(bool(now.left))
                empty.set_text(NO_MATCH if now.known else NONE)
                empty.set_visibility(not now.blocks and not now.left)
                if strip.renew(now.counts):
                    with strip.column:
                        _strip(now.counts, selection)
                first = SHOWN * (selection.page - 1)
                rest.set_text(more(len(now.blocks) - first - SHOWN))
                rest.set_visibility(bool(rest.text))
                rest.props["href"] = selection.path(page=selection.page + 1)
                visible = now.blocks[first : first + SHOWN]
                judged = [(change.now_key, change.verdict) for block in visible for change in block]
                ages = [age(time.time() - change.first_s) for block in visible for change in block]
                if place.renew(judged, ages, now.names, now.broken):
                    with place.column:
                        for block in visible:
                            _block(block, now, selection)

            await follow(refresh)


def _is_known(since: str) -> bool:
    return since in UPDATES or day_s(since) is not None


def _choices(selection: _Selection) -> None:
    """Show the selection; choosing another one opens its page."""
    day = selection.since if selection.since not in SINCE else ""
    with ui.row().style("gap: .75rem; width: 100%; align-items: center"):
        update = ui.select(SINCE, label="since", value=DATE if day else selection.since)
        update.props("dense options-dense").style("min-width: 15rem")
        date = ui.input("day (UTC)", value=day or time.strftime("%Y-%m-%d", time.gmtime()))
        date.props("type=date dense stack-label debounce=500").bind_visibility_from(update, "value", value=DATE)
        search = ui.input("board, case or what changed, then Enter", value=selection.q)
        search.props("dense").style("min-width: 18rem")
        search.on("keydown.enter", lambda: ui.navigate.to(selection.path(q=search.value)))

    def chosen() -> None:
        since = str(date.value) if update.value == DATE else str(update.value)
        if _is_known(since):
            ui.navigate.to(selection.path(since=since))

    update.on_value_change(chosen)
    date.on_value_change(chosen)


def _read(store: Store, changes: Changes, selection: _Selection) -> _State:
    known_changes, left = changes.update(selection.since)
    names = queries.names(store)
    blocks: dict[tuple[str, tuple[str, ...]], _Block] = defaultdict(list)
    matching = [change for change in known_changes if _matches(change, names, selection.q)]
    for change in sorted(matching, key=_by_effect):
        blocks[change.device_id, change.differences].append(change)
    wanted = [
        of for of in blocks.values() if not selection.verdict or any(sort(member) == selection.verdict for member in of)
    ]
    counts = {name: len(alike) for name, alike in _by_verdict(matching).items()}
    broken = {
        (on_board.device_id, on_board.found.case_id): on_board.found.reason
        for on_board in queries.deployed(store)
        if on_board.found.is_broken and on_board.found.reason
    }
    return _State(counts, wanted, names, broken, len(known_changes), left)


def _by_verdict(changes: Sequence[Change]) -> dict[Sort, list[Change]]:
    """Return the changes by their verdicts."""
    by_verdict = {name: [change for change in changes if sort(change) == name] for name in SORTS}
    return {name: alike for name, alike in by_verdict.items() if alike}


def _matches(change: Change, names: dict[str, str], q: str) -> bool:
    """Return whether every word of the search occurs in the board's name or id, the case or the differences."""
    known = (change.device_id, names.get(change.device_id, ""), change.case_id, *change.differences)
    return all(word in " ".join(known).lower() for word in q.lower().split())


def sort(change: Change) -> Sort:
    """Return the verdict on a change, or a text for one that was not compared."""
    return "not compared" if change.verdict.effect is None else change.verdict.answer


def _by_effect(change: Change) -> tuple[bool, float, str]:
    """Sort key: largest slowdown first, cases not compared last."""
    effect = change.verdict.effect
    return effect is None, -(effect or 0.0), change.now_key


def _strip(counts: dict[Sort, int], selection: _Selection) -> None:
    chip(count(sum(counts.values()), "change"), selection.path(verdict=""), "all", is_chosen=not selection.verdict)
    for name, number in counts.items():
        shape, look = SHAPES[name]
        chip(f"{shape} {number} {name}", selection.path(verdict=name), look, is_chosen=name == selection.verdict)


def _block(block: _Block, now: _State, selection: _Selection) -> None:
    """Show how a board's cases changed with an update, and how to find the cause; if alone, show its cases too."""
    first = block[0]
    with ui.element("section").classes("card"):
        with ui.element("h2"):
            ui.link(board(now.names, first.device_id), f"/device/{quote(first.device_id)}").classes("link")
            for kind, alike in _by_verdict(block).items():
                shape, look = SHAPES[kind]
                words = extent(alike, len(block)) if kind in ("slower", "faster") else f"{len(alike)} {kind}"
                ui.label(f"{shape} {words}").classes(f"figure {look}")
        cause(first._replace(first_s=min(change.first_s for change in block)))
        if len(now.blocks) == 1:
            _table([change for change in block if selection.verdict in ("", sort(change))], now.broken, selection.since)
        else:
            words = " ".join([first.device_id, *first.differences])
            ui.link(f"its {count(len(block), 'case')}", selection.path(q=words)).classes("link")


def cause(change: Change) -> None:
    """Show what changed in the setup, since when and, if the time also changed, how to find the cause."""
    named, rest = change.differences[:SHOWN], more(len(change.differences) - SHOWN)
    known = ", ".join([*map(short, named), *filter(None, [rest])])
    is_same = sort(change) in ("same", "not compared")
    where = ("different from before" if is_same else ACROSS) if change.is_across else "in the same setup"
    ui.label(since_when(change.first_s))
    ui.label(f"{known or 'nothing that a record lists'}: {where}").classes("soft")
    if change.separating and not is_same:
        ui.label(f"to find the cause: {change.separating}").classes("soft")


def _table(changes: Sequence[Change], broken: dict[tuple[str, str], str], since: str) -> None:
    with stacked("case", "change in time", "median before and now", "runs", ""):
        for change in changes[:SHOWN]:
            _row(change, broken.get((change.device_id, change.case_id), ""), since)
    ui.label(more(len(changes) - SHOWN)).classes("soft")


def _row(change: Change, broken: str, since: str) -> None:
    before_ms, now_ms = change.pair.medians_ms
    keys = query({"a": change.before_key, "b": change.now_key, "since": since})
    with ui.element("tr"):
        with ui.element("td"):
            ui.link(short(change.case_id), history_path(change.device_id, change.case_id)).classes("link")
            ui.label(short(", ".join(filter(None, change.where)))).classes("soft")
        with ui.element("td"):
            words, look = verdict(change)
            ui.label(words).classes(f"figure {look}")
            ui.label(short(change.verdict.reason)).classes("soft")
            if broken:
                ui.link(short(f"shipped folder: {broken}"), "/shipped").classes("link soft")
        with ui.element("td"):
            ui.label(f"{figure(before_ms)} → {figure(now_ms, 'ms')}").classes("figure")
        with ui.element("td"):
            until = [f"{runs} to {clock(at_s)[:10]}" for runs, at_s in zip(change.runs, change.last_s, strict=True)]
            ui.label(", ".join(until)).classes("soft figure")
        with ui.element("td"):
            ui.link("side by side", f"/compare{keys}").classes("link")


def verdict(change: Change) -> tuple[str, str]:
    """Return the verdict on a change in words, and its CSS class."""
    shape, look = SHAPES[sort(change)]
    words = sort(change) if change.verdict.effect is None else f"{text.share(change.verdict)} {change.verdict.answer}"
    return f"{shape} {words}{change.mark}", look
