"""Shows the results, filtered, sorted and paged on the server; the URL contains the selection, also for the CSV."""

import io
from asyncio import to_thread
from collections.abc import Iterable, Iterator
from csv import writer
from functools import partial
from typing import Annotated, Any, NamedTuple

from fastapi import Depends
from nicegui import app, events, ui
from starlette.responses import Response, StreamingResponse

from benchd.daemon.verdicts.rows import spreadsheet
from benchd.dashboard import limits, queries
from benchd.dashboard.layout import PATIENCE_S, follow, frame, local, notice, query, result_path
from benchd.dashboard.messages import Result
from benchd.dashboard.queries import Filter
from benchd.dashboard.store import Store
from benchd.dashboard.text import accuracy, board, energy, error_share, rounded, short, time

ROWS = (25, 100)
DAYS = {"since": "from (UTC)", "until": "to (UTC)"}
REFRESH_S = 0.5
CSV_ROWS = 1000  # rows per query, because a fleet's history may not fit in memory
NEWEST = "measured_s"
EMPTY = "No results match. Clear the filters, or measure something: bench-once --mqtt URL."
STATUSES = ["ok", "failed", "timeout", "unsupported", "aborted"]
CHECKS = ["passed", "failed", "void", queries.UNCHECKED]

_Which = Annotated[Filter, Depends()]  # its fields are the words in the URL


class _Column(NamedTuple):
    """A column: `look` is the CSS class for its minimum width; an `optional` column is hidden while empty."""

    label: str
    look: str = ""
    is_number: bool = False
    is_optional: bool = False


COLUMNS = {
    "model": _Column("Model"),
    "variant": _Column("Variant"),
    "batch_size": _Column("Batch", "from-1200", is_number=True),
    "device_id": _Column("Device"),
    "median_ms": _Column("Median", is_number=True),
    "throughput_per_s": _Column("Per second", "from-1200", is_number=True, is_optional=True),
    "energy_mj": _Column("Energy per inference", "from-600", is_number=True, is_optional=True),
    "checked": _Column("Check", "from-900"),
    "accuracy_value": _Column("Accuracy [95 %]", "from-1200", is_number=True, is_optional=True),
    "x_of_floor": _Column("x of floor", "from-1200", is_number=True, is_optional=True),
    "status": _Column("Status", "reason", is_optional=True),
    "flags": _Column("Flags", "from-1200 reason", is_optional=True),
    NEWEST: _Column("When", "from-900"),
}


class _Query(NamedTuple):
    """What the page shows: choosing anything else opens the address of that."""

    which: Filter
    sort: str
    descending: bool
    page: int
    rows: int

    def path(self) -> str:
        """Return the address of this selection, without defaults."""
        paging = {
            "sort": self.sort if self.sort != NEWEST else "",
            "up": "" if self.descending else "1",
            "page": str(self.page) if self.page > 1 else "",
            "rows": str(self.rows) if self.rows != ROWS[0] else "",
        }
        return f"/results{query(self.which._asdict() | paging)}"


class _Table(ui.table, component="results_table.js"):
    """Quasar's table, made usable by keyboard and screen reader."""


def add(store: Store) -> None:
    """Serve the view at /results, raw records at /record/<key> and the rows of a filter at /results.csv."""

    @app.get("/record/{key}")
    def raw(key: str) -> Response:
        body = queries.body(store, key)
        if body is None:
            return Response("unknown record", status_code=404, media_type="text/plain")
        return Response(body, media_type="application/json")

    @app.get("/results.csv")
    def csv(which: _Which) -> StreamingResponse:
        return StreamingResponse(csv_lines(store, which), media_type="text/csv")

    @ui.page("/results", response_timeout=PATIENCE_S)
    async def results(which: _Which, sort: str = NEWEST, up: int = 0, page: int = 1, rows: int = ROWS[0]) -> None:
        rows = rows if rows in ROWS else ROWS[0]
        requested = _Query(which, sort if sort in COLUMNS else NEWEST, not up, limits.page(page), rows)
        async with frame("Results"):
            await _show(store, requested)


def csv_lines(store: Store, which: Filter) -> Iterator[str]:
    """Yield the header, then the results in order of arrival; one flat row per record, with units in the names."""
    yield _csv([Result._fields])
    last = 0
    while page := queries.after(store, which, last, CSV_ROWS):
        yield _csv([spreadsheet(value) for value in result] for result in page.values())
        last = max(page)


def _csv(rows: Iterable[Iterable[object]]) -> str:
    out = io.StringIO()
    writer(out, lineterminator="\r\n").writerows(rows)
    return out.getvalue()


async def _show(store: Store, requested: _Query) -> None:
    _filters(await to_thread(_offered, store), requested)
    empty = notice(EMPTY)
    # the total is known before the table is sent: the browser echoes the first one, even after a later one was set
    table = _table(requested, (await to_thread(_page, store, requested)).total)
    with ui.row():
        compare = ui.button("Compare two", on_click=lambda: _compare(table)).props("no-caps").classes("from-600")
        ui.link("Download as CSV", f"/results.csv{query(requested.which._asdict())}").classes("link")
    compare.bind_enabled_from(table, "selected", backward=lambda chosen: len(chosen) == 2)
    filled_with: list[tuple[int, int]] = []  # the newest result and event when the table was filled

    async def show() -> None:
        now = [await to_thread(queries.newest, store)]
        if now == filled_with:
            return
        page = await to_thread(_page, store, requested)
        names = await to_thread(queries.names, store)
        table.pagination = {**table.pagination, "rowsNumber": page.total}
        table.rows[:] = [_row(result, names) for result in page.results]
        table.columns[:] = _columns(page.results)
        table.update()
        empty.set_visibility(not page.total)
        filled_with[:] = now

    await follow(show, REFRESH_S)


def _turn(requested: _Query, event: events.GenericEventArguments) -> None:
    """Open the page, or the order, that was chosen in the table."""
    paging = event.args["pagination"]
    sort, rows = str(paging["sortBy"] or NEWEST), int(paging["rowsPerPage"])
    turned = requested._replace(sort=sort, descending=bool(paging["descending"]), page=int(paging["page"]), rows=rows)
    ui.navigate.to(turned.path())


def _offered(store: Store) -> dict[str, dict[str, str]]:
    """Return the values of each filter with their labels; a device has its name and its id."""
    words = {name: queries.choices(store, name) for name in ("model", "variant")}
    words |= {"status": STATUSES, "check": CHECKS}
    return {"device": queries.names(store)} | {
        name: dict(zip(values, values, strict=True)) for name, values in words.items()
    }


def _filters(offered: dict[str, dict[str, str]], requested: _Query) -> None:
    chosen = requested.which._asdict()

    def choose(name: str, value: str | None) -> None:
        which = requested.which._replace(**{name: value or ""})
        ui.navigate.to(requested._replace(which=which, page=1).path())

    with ui.row().style("gap: .75rem; width: 100%"):
        for name, values in offered.items():
            options = {**({chosen[name]: chosen[name]} if chosen[name] else {}), **values}
            field = ui.select(options, label=name, value=chosen[name] or None)
            field.on_value_change(lambda event, name=name: choose(name, event.value))
            field.props("clearable dense options-dense").style("min-width: 9rem")
        search = ui.input("search, then Enter", value=chosen["text"]).props("dense")
        search.on("keydown.enter", lambda: choose("text", search.value))
        for name, label in DAYS.items():
            day = ui.input(label, value=chosen[name]).props("type=date dense stack-label clearable debounce=500")
            day.on_value_change(lambda event, name=name: choose(name, event.value))


def _table(requested: _Query, total: int) -> _Table:
    paging: dict[str, Any] = {"page": requested.page, "rowsPerPage": requested.rows, "rowsNumber": total}
    paging |= {"sortBy": requested.sort, "descending": requested.descending}
    table = _Table(rows=[], columns=_columns([]), row_key="key", selection="multiple", pagination=paging)
    table.on("request", partial(_turn, requested))
    return table.props(f"binary-state-sort flat dense :rows-per-page-options='{list(ROWS)}'").style("width: 100%")


def _columns(results: list[Result]) -> list[dict[str, Any]]:
    """Return the columns, without optional ones that are empty."""
    return [
        {
            "name": name,
            "label": column.label,
            "field": name,
            "sortable": True,
            "align": "right" if column.is_number else "left",
            "classes": column.look,
            "headerClasses": column.look,
        }
        for name, column in COLUMNS.items()
        if not column.is_optional or any(getattr(result, name) not in (None, "", "ok") for result in results)
    ]


def _page(store: Store, requested: _Query) -> queries.Page:
    return queries.results(
        store,
        requested.which,
        requested.sort,
        requested.descending,
        (requested.page - 1) * requested.rows,
        requested.rows,
    )


def _row(result: Result, names: dict[str, str]) -> dict[str, Any]:
    """Return the table's cells for a result, with numbers rounded according to their errors."""
    share = error_share(result)
    is_ok = result.status == "ok"
    return {
        "key": result.key,
        "model": short(result.model),
        "variant": result.variant,
        "batch_size": result.batch_size,
        "device_id": board(names, result.device_id),
        "median_ms": time(result) if is_ok else f"✕ {result.status}",
        "throughput_per_s": rounded(result.throughput_per_s, share, "/s"),
        "energy_mj": energy(result),
        "checked": f"✕ {result.checked}" if result.checked == "failed" else result.checked or queries.UNCHECKED,
        "accuracy_value": accuracy(result),
        "x_of_floor": rounded(result.x_of_floor, share, "x"),
        "status": "ok" if is_ok else short(f"✕ {result.status}: {result.reason or 'no reason given'}"),
        "flags": short(result.flags),
        NEWEST: local(result.measured_s),
        "record": result_path(result.key),
    }


def _compare(table: ui.table) -> None:
    keys = [row["key"] for row in table.selected]
    ui.navigate.to(f"/compare{query({'a': keys[0], 'b': keys[1]})}")
