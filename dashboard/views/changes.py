"""Every case on every board before and after an update or a date, those that became slower first."""

import time
from asyncio import to_thread
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple, get_args
from urllib.parse import quote, urlencode

from nicegui import ui

from benchd.dashboard import limits, queries, text
from benchd.dashboard.changes import UPDATES, Change, Changes, day_s
from benchd.dashboard.layout import PATIENCE_S, PagePart, changes_path, chip, follow, frame, history_path, notice
from benchd.dashboard.limits import SHOWN
from benchd.dashboard.store import Store
from benchd.dashboard.text import clock, count, figure, more, short

SUMMARY = 5  # updates named above the changes
DATE = "date"
SINCE = {
    "setup": "the setup before",
    "benchd": "an update of benchd",
    "jetpack": "an update of JetPack",
    "driver": "an update of the driver",
    "fingerprint": "a change of the environment",
    DATE: "a date",
}
CAPTION = (
    "Up to five runs of each setup, by the rule of benchd compare, corrected for all changes in the fleet. "
    "A is before, B is now."
)
NONE = "Nothing has changed: no case was measured both before and since. Choose another update or a date."
NO_MATCH = "No change matches. Clear the search or choose all."
ACROSS = "across a changed setup; cause not separable"

Sort = Literal["slower", "faster", "inconclusive", "same", "not compared"]
SORTS: tuple[Sort, ...] = get_args(Sort)
SHAPES: dict[Sort, tuple[str, str]] = {
    "slower": ("▲", "bad"),
    "faster": ("▼", "good"),
    "inconclusive": ("≈", "warn"),
    "same": ("=", "soft"),
    "not compared": ("—", "soft"),
}


class _Selection(NamedTuple):
    """What the URL asks for; `since` is an update or a day."""

    since: str
    verdict: str
    q: str
    page: int

    def path(self, **changed: object) -> str:
        """Return the path of this page with something else chosen, on its first page."""
        return changes_path(**self._replace(page=0)._asdict() | changed)


class _State(NamedTuple):
    counts: dict[Sort, int]
    updates: dict[tuple[str, ...], list[Change]]
    wanted: list[Change]
    names: dict[str, str]
    known: int
    left: int


def add(store: Store, changes: Changes) -> None:
    """Serve the view at /changes; `since` is an update or a day, and `verdict`, `q` and `page` show a part."""

    @ui.page("/changes", response_timeout=PATIENCE_S)
    async def show(since: str = "setup", verdict: str = "", q: str = "", page: int = 1) -> None:
        since = since if _is_known(since) else "setup"
        asked = [_Selection(since, verdict if verdict in SORTS else "", q, limits.page(page))]
        async with frame("Changes"):
            search = _choices(asked)
            reading, strip = notice(""), PagePart("strip")
            ui.label(CAPTION).classes("soft")
            updates, empty, table = PagePart("updates"), notice(NONE), PagePart("scroll")
            rest = ui.link("", "/changes").classes("link")

            async def refresh() -> None:
                now = await to_thread(_read, store, changes, asked[0])
                reading.set_text(f"Reading the records of {count(now.left, 'more board')}.")
                reading.set_visibility(bool(now.left))
                empty.set_text(NO_MATCH if now.known else NONE)
                empty.set_visibility(not now.wanted and not now.left)
                if strip.renew(now.counts, asked):
                    with strip.column:
                        _strip(now.counts, asked[0])
                if updates.renew(now.updates):
                    with updates.column:
                        _updates(now.updates, asked[0])
                first = SHOWN * (asked[0].page - 1)
                rest.set_text(more(len(now.wanted) - first - SHOWN))
                rest.set_visibility(bool(rest.text))
                rest.props["href"] = asked[0].path(page=asked[0].page + 1)
                shown = now.wanted[first : first + SHOWN]
                if table.renew([(one.before_key, one.now_key, one.verdict) for one in shown], now.names):
                    with table.column:
                        _table(shown, now.names)

            async def searched() -> None:
                asked[:] = [asked[0]._replace(q=search.value or "", page=1)]
                ui.navigate.history.replace(asked[0].path())
                await refresh()

            search.on_value_change(searched)
            await follow(refresh)


def _is_known(since: str) -> bool:
    return since in UPDATES or day_s(since) is not None


def _choices(asked: list[_Selection]) -> ui.input:
    """Show what to choose from; a choice of the update opens its page. Return the field of the search."""
    day = asked[0].since if asked[0].since not in SINCE else ""
    with ui.row().style("gap: .75rem; width: 100%; align-items: center"):
        update = ui.select(SINCE, label="since", value=DATE if day else asked[0].since)
        update.props("dense options-dense").style("min-width: 15rem")
        date = ui.input("day (UTC)", value=day or time.strftime("%Y-%m-%d", time.gmtime()))
        date.props("type=date dense stack-label debounce=500").bind_visibility_from(update, "value", value=DATE)
        search = ui.input("board, case or what changed", value=asked[0].q)
        search.props("debounce=300 clearable dense").style("min-width: 15rem")

    def chosen() -> None:
        since = str(date.value) if update.value == DATE else str(update.value)
        if _is_known(since):
            ui.navigate.to(asked[0].path(since=since))

    update.on_value_change(chosen)
    date.on_value_change(chosen)
    return search


def _read(store: Store, changes: Changes, asked: _Selection) -> _State:
    found, left = changes.update(asked.since)
    names = queries.names(store)
    matching = [change for change in found if _matches(change, names, asked.q)]
    wanted = [change for change in matching if asked.verdict in ("", sort(change))]
    wanted.sort(key=_by_effect)
    updates: dict[tuple[str, ...], list[Change]] = defaultdict(list)
    for change in matching:
        updates[change.differences].append(change)
    return _State(_counts(matching), dict(updates), wanted, names, len(found), left)


def _counts(changes: Sequence[Change]) -> dict[Sort, int]:
    number = Counter(map(sort, changes))
    return {name: number[name] for name in SORTS if number[name]}


def _matches(change: Change, names: dict[str, str], q: str) -> bool:
    """Return whether every word of the search is in the board's name or id, the case or what changed."""
    known = (change.device_id, names.get(change.device_id, ""), change.case_id, *change.differences)
    return all(word in " ".join(known).lower() for word in q.lower().split())


def sort(change: Change) -> Sort:
    """Return the verdict on a change, or that it was not compared."""
    return "not compared" if change.verdict.effect is None else change.verdict.answer


def _by_effect(change: Change) -> tuple[bool, float, str]:
    """Order what became slower most first, and what was not compared last."""
    effect = change.verdict.effect
    return effect is None, -(effect or 0.0), change.now_key


def _strip(counts: dict[Sort, int], asked: _Selection) -> None:
    chip(count(sum(counts.values()), "change"), asked.path(verdict=""), "all", is_chosen=not asked.verdict)
    for name, number in counts.items():
        shape, look = SHAPES[name]
        chip(f"{shape} {number} {name}", asked.path(verdict=name), look, is_chosen=name == asked.verdict)


def _updates(by_update: dict[tuple[str, ...], list[Change]], asked: _Selection) -> None:
    """Show what was updated, on most boards first, and how many cases changed with it; each is a search."""
    boards = {words: len({change.device_id for change in changes}) for words, changes in by_update.items() if words}
    usual = sorted(boards, key=lambda words: -boards[words])
    for words in usual[:SUMMARY]:
        with ui.element("div"):
            ui.label(f"{count(boards[words], 'board')}: ").classes("figure")
            ui.link(short(", ".join(words)), asked.path(q=" ".join(words))).classes("link")
            for name, number in _counts(by_update[words]).items():
                shape, look = SHAPES[name]
                ui.label(f"{shape} {number} {name}").classes(f"figure {look}")
    ui.label(more(len(usual) - SUMMARY)).classes("soft")


def _table(shown: Sequence[Change], names: dict[str, str]) -> None:
    with ui.element("table").classes("changes"):
        with ui.element("tr"):
            for words in ("change in time", "board and case", "median before and now", "what changed"):
                with ui.element("th").props("scope=col"):
                    ui.label(words)
        for change in shown:
            with ui.element("tr"):
                for cell in (_effect, partial(_case, names=names), _times, _causes):
                    with ui.element("td"):
                        cell(change)


def _effect(change: Change) -> None:
    shape, look = SHAPES[sort(change)]
    words = sort(change) if change.verdict.effect is None else f"{text.share(change.verdict)} {change.verdict.answer}"
    ui.label(f"{shape} {words}").classes(f"effect figure {look}")
    where = ACROSS if change.is_across else "in the same setup"
    ui.label(where if change.verdict.effect is not None else "").classes("soft")
    ui.label(short(change.verdict.reason)).classes("soft")


def _case(change: Change, names: dict[str, str]) -> None:
    ui.link(short(change.case_id), history_path(change.device_id, change.case_id)).classes("link")
    with ui.element("div").classes("board"):
        name = names.get(change.device_id, change.device_id)
        ui.link(short(name), f"/device/{quote(change.device_id)}").classes("link")
        ui.label(short(", ".join(filter(None, change.where)))).classes("soft")


def _times(change: Change) -> None:
    before_ms, now_ms = change.pair.medians_ms
    ui.label(f"{figure(before_ms)} → {figure(now_ms, 'ms')}").classes("figure")
    until = [f"{runs} to {clock(at_s)[:10]}" for runs, at_s in zip(change.runs, change.last_s, strict=True)]
    ui.label(f"runs: {', '.join(until)}").classes("soft figure")
    keys = urlencode({"a": change.before_key, "b": change.now_key})
    ui.link("compare the newest", f"/compare?{keys}").classes("link")


def _causes(change: Change) -> None:
    named, rest = change.differences[:SHOWN], more(len(change.differences) - SHOWN)
    ui.label(", ".join([*map(short, named), *filter(None, [rest])]) or "nothing that a record names")
    if change.separating:
        with ui.element("details"):
            with ui.element("summary"):
                ui.label("what would separate it").classes("link")
            ui.label(change.separating).classes("soft")
