"""The results: filtered, sorted and paged on the server, with links to the raw records, histories and comparisons."""

from asyncio import to_thread
from typing import Any
from urllib.parse import urlencode

from nicegui import app, events, ui
from starlette.responses import Response, StreamingResponse

from benchd.dashboard import export, queries
from benchd.dashboard.layout import PATIENCE_S, follow, frame, history_path, notice, record_path
from benchd.dashboard.messages import Result
from benchd.dashboard.queries import Filter
from benchd.dashboard.store import Store
from benchd.dashboard.text import energy, figure, median, short, top1

ROWS = 25
EMPTY = "No results match. Clear the filters, or measure something: bench-once --mqtt URL."
COLUMNS = (
    ("model", "Model"),
    ("variant", "Variant"),
    ("batch_size", "Batch"),
    ("device_id", "Device"),
    ("median_ms", "Median [95 %]"),
    ("throughput_per_s", "Per second"),
    ("energy_mj", "Energy per inference"),
    ("checked", "Check"),
    ("accuracy_top1", "Top-1 [95 %]"),
    ("x_of_floor", "x of floor"),
    ("status", "Status"),
    ("flags", "Flags"),
    ("t_wall", "When"),
)
NARROW = "max-width: 8rem"


class _Table(ui.table, component="results_table.js"):
    """Quasar's table, made usable by keyboard and screen reader."""


def add(store: Store) -> None:
    """Serve the view at /results, raw records at /record/<key> and all rows at /results.csv."""
    app.get("/record/{key}")(lambda key: _raw(store, key))
    app.get("/results.csv")(lambda: StreamingResponse(export.lines(store, Filter()), media_type="text/csv"))

    @ui.page("/results", response_timeout=PATIENCE_S)
    async def results(device: str = "", model: str = "", variant: str = "", status: str = "", text: str = "") -> None:
        names = ("device_id", "model", "variant", "status")
        with frame("Results"):
            offered = await to_thread(lambda: {name: queries.choices(store, name) for name in names})
            with ui.row().style("gap: .75rem; width: 100%"):
                inputs = _filters(offered, {"device_id": device, "model": model, "variant": variant, "status": status})
                search = ui.input("search", value=text).props("debounce=300 clearable dense")
            empty = notice(EMPTY)
            table = _table()
            with ui.row():
                compare = ui.button("Compare two", on_click=lambda: _compare(table)).props("no-caps")
                ui.link("All as CSV", "/results.csv").classes("link")
            compare.bind_enabled_from(table, "selected", backward=lambda chosen: len(chosen) == 2)
            seen: list[Any] = []
            total = [0]

            async def show() -> None:
                which = Filter(**{name: field.value or "" for name, field in inputs.items()}, text=search.value or "")
                paging = table.pagination
                page = await to_thread(_page, store, which, paging)
                total[:] = [page.total]
                table.pagination = {**paging, "rowsNumber": page.total}
                table.rows[:] = [_row(result) for result in page.results]
                table.update()
                empty.set_visibility(not page.total)

            async def turn(event: events.GenericEventArguments) -> None:
                table.pagination = event.args["pagination"]
                await show()

            async def renew() -> None:
                newest = await to_thread(queries.newest, store)
                if [newest] != seen:
                    await show()
                    seen[:] = [newest]

            def keep_total() -> None:  # a browser's echo of an older page must not win
                if table.pagination["rowsNumber"] != total[0]:
                    table.pagination = {**table.pagination, "rowsNumber": total[0]}

            async def first_page() -> None:
                table.pagination = {**table.pagination, "page": 1}
                await show()

            table.on("request", turn)
            table.on_pagination_change(keep_total)
            for field in (*inputs.values(), search):
                field.on_value_change(first_page)
            await follow(renew)


def _filters(offered: dict[str, list[str]], chosen: dict[str, str]) -> dict[str, ui.select]:
    return {
        name: ui.select(
            sorted({*values, chosen[name]} - {""}), label=name.removesuffix("_id"), value=chosen[name] or None
        )
        .props("clearable dense options-dense")
        .style("min-width: 9rem")
        for name, values in offered.items()
    }


def _table() -> _Table:
    columns = [
        {"name": name, "label": label, "field": name, "sortable": True, "align": "left"} for name, label in COLUMNS
    ]
    columns[0]["style"] = NARROW  # so that a phone shows more than the model
    columns.append({"name": "links", "label": "Record", "field": "key", "align": "left"})
    paging = {"page": 1, "rowsPerPage": ROWS, "rowsNumber": 0, "sortBy": "t_wall", "descending": True}
    table = _Table(rows=[], columns=columns, row_key="key", selection="multiple", pagination=paging)
    table.props("binary-state-sort flat dense :rows-per-page-options='[25, 100]'").style("width: 100%")
    return table


def _page(store: Store, which: Filter, paging: dict[str, Any]) -> queries.Page:
    rows = min(int(paging["rowsPerPage"]) or ROWS, 100)
    sort = "measured_s" if paging["sortBy"] in (None, "t_wall") else str(paging["sortBy"])
    return queries.results(store, which, sort, bool(paging["descending"]), (int(paging["page"]) - 1) * rows, rows)


def _row(result: Result) -> dict[str, Any]:
    return {
        "key": result.key,
        "model": short(result.model),
        "variant": result.variant,
        "batch_size": result.batch_size,
        "device_id": short(result.device_id),
        "median_ms": median(result),
        "throughput_per_s": figure(result.throughput_per_s, "/s"),
        "energy_mj": energy(result),
        "checked": result.checked or "-",
        "accuracy_top1": top1(result),
        "x_of_floor": figure(result.x_of_floor, "x"),
        "status": result.status,
        "flags": short(result.flags),
        "t_wall": short(result.t_wall),
        "raw": record_path(result.key),
        "history": history_path(result.device_id, result.case_id),
    }


def _compare(table: ui.table) -> None:
    keys = [row["key"] for row in table.selected]
    ui.navigate.to(f"/compare?{urlencode({'a': keys[0], 'b': keys[1]})}")


def _raw(store: Store, key: str) -> Response:
    body = queries.body(store, key)
    if body is None:
        return Response("unknown record", status_code=404, media_type="text/plain")
    return Response(body, media_type="application/json")
