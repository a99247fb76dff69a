"""Results beside each other: two of them, one case over time, and all variants of a model by latency and energy."""

from asyncio import to_thread

from nicegui import ui

from benchd.daemon.records import PROFILED
from benchd.dashboard import queries
from benchd.dashboard.layout import frame, heading, notice, record_path
from benchd.dashboard.messages import Result
from benchd.dashboard.store import Store
from benchd.dashboard.text import energy, figure, median, short
from benchd.dashboard.views import charts

RUNS = 200
NO_ENERGY = "No result of this model has both a latency and an energy. Energy needs a power sensor on the device."


def add(store: Store) -> None:
    """Serve the views at /compare, /history/<device>/<case> and /trade-off."""

    @ui.page("/compare")
    async def compare(a: str = "", b: str = "") -> None:
        pair = [await to_thread(queries.result, store, key) for key in (a, b)]
        with frame("Compare"):
            if pair[0] is None or pair[1] is None:
                notice("Choose two results: mark them in Results, then press Compare two.")
                return
            if any(PROFILED in side.flags for side in pair if side):
                notice("A profile is not compared: measure the case with bench-once.")
                return
            _side_by_side(pair[0], pair[1])

    @ui.page("/history/{device_id}/{case_id:path}")
    async def history(device_id: str, case_id: str) -> None:
        found = await to_thread(queries.history, store, device_id, case_id, RUNS)
        with frame(short(f"{case_id} on {device_id}")):
            if not found:
                notice("This case has not been measured on this device.")
                return
            ui.label("Median with its 95 % interval; a vertical line where the device's fingerprint or benchd changed.")
            ui.echart(charts.history(found)).style("height: 24rem; width: 100%")

    @ui.page("/trade-off")
    async def trade_off(model: str = "") -> None:
        models = await to_thread(queries.choices, store, "model")
        with frame("Trade-off"):
            if not models:
                notice("There is no result yet. Measure something: bench-once --mqtt URL.")
                return
            chosen = model if model in models else models[0]
            ui.select(models, label="model", value=chosen, on_change=lambda event: _open(event.value))
            _by_scope(await to_thread(queries.newest_of_each_case, store, chosen))


def _open(model: str) -> None:
    ui.navigate.to(f"/trade-off?model={model}")


def _side_by_side(a: Result, b: Result) -> None:
    ui.label(_ratio(a, b)).mark("ratio")
    if (a.fingerprint, a.hardware) != (b.fingerprint, b.hardware):
        notice("The two were measured on different devices or settings: hardware, clocks, power mode or versions.")
    rows = {
        "case": (a.case_id, b.case_id),
        "device": (a.device_id, b.device_id),
        "hardware": (a.hardware, b.hardware),
        "status": (a.status, b.status),
        "median [95 %]": (median(a), median(b)),
        "p99": (figure(a.p99_ms, "ms"), figure(b.p99_ms, "ms")),
        "throughput": (figure(a.throughput_per_s, "/s"), figure(b.throughput_per_s, "/s")),
        "energy an inference": (energy(a), energy(b)),
        "energy of": (a.energy_scope or "-", b.energy_scope or "-"),
        "check": (a.checked or "-", b.checked or "-"),
        "x of floor": (figure(a.x_of_floor, "x"), figure(b.x_of_floor, "x")),
        "flags": (a.flags or "-", b.flags or "-"),
        "benchd": (a.tool_version, b.tool_version),
        "when": (a.t_wall, b.t_wall),
    }
    columns = [{"name": name, "label": label, "field": name, "align": "left"} for name, label in _headings()]
    table = [{"name": name, "a": short(left), "b": short(right)} for name, (left, right) in rows.items()]
    ui.table(rows=table, columns=columns, row_key="name").props("flat wrap-cells").style("width: 100%")
    with ui.row():
        ui.link("raw record of A", record_path(a.key)).classes("link")
        ui.link("raw record of B", record_path(b.key)).classes("link")


def _headings() -> list[tuple[str, str]]:
    return [("name", ""), ("a", "A"), ("b", "B")]


def _ratio(a: Result, b: Result) -> str:
    """Return how the medians stand to each other, and whether their intervals meet."""
    if not a.median_ms or b.median_ms is None:
        return "One of the two was not measured, so that there is no ratio."
    ratio = f"The median of B is {figure(b.median_ms / a.median_ms)} times that of A"
    if a.low_ms is None or a.high_ms is None or b.low_ms is None or b.high_ms is None:
        return f"{ratio}; one of them has no interval."
    apart = a.high_ms < b.low_ms or b.high_ms < a.low_ms
    return f"{ratio}; their 95 % intervals {'do not meet' if apart else 'overlap'}."


def _by_scope(results: list[Result]) -> None:
    """Show a chart an energy scope: energies of different scope are not compared."""
    measured = [result for result in results if result.median_ms is not None and result.energy_mj is not None]
    if not measured:
        notice(NO_ENERGY)
    for scope in sorted({result.energy_scope or "" for result in measured}):
        points = [result for result in measured if (result.energy_scope or "") == scope]
        front = queries.pareto(points)
        heading(short(f"Energy of {scope}"))
        ui.echart(charts.trade_off(points, front)).style("height: 24rem; width: 100%")
        ui.label(
            "Not beaten in both: " + short(", ".join(f"{r.variant} b{r.batch_size} on {r.device_id}" for r in front))
        )
