"""All variants of a model by latency and energy, and those that no other beats in both."""

from asyncio import to_thread
from urllib.parse import quote

from nicegui import ui

from benchd.dashboard import queries
from benchd.dashboard.layout import PATIENCE_S, frame, heading, notice
from benchd.dashboard.messages import Result
from benchd.dashboard.store import Store
from benchd.dashboard.text import short
from benchd.dashboard.views import charts

NO_ENERGY = "No result of this model has both latency and energy. Energy needs a power sensor on the device."


def add(store: Store) -> None:
    """Serve the view at /trade-off."""

    @ui.page("/trade-off", response_timeout=PATIENCE_S)
    async def trade_off(model: str = "") -> None:
        with frame("Trade-off"):
            models = await to_thread(queries.choices, store, "model")
            if not models:
                notice("No results yet. Measure something: bench-once --mqtt URL.")
                return
            chosen = model if model in models else models[0]
            ui.select(models, label="model", value=chosen, on_change=lambda event: _open(event.value))
            _by_scope(await to_thread(queries.newest_of_each_case, store, chosen))


def _open(model: str) -> None:
    ui.navigate.to(f"/trade-off?model={quote(model)}")


def _by_scope(results: list[Result]) -> None:
    """Show one chart per energy scope: energies of different scopes are not comparable."""
    measured = [result for result in results if result.median_ms is not None and result.energy_mj is not None]
    if not measured:
        notice(NO_ENERGY)
    for scope in sorted({result.energy_scope or "" for result in measured}):
        points = [result for result in measured if (result.energy_scope or "") == scope]
        front = queries.pareto(points)
        heading(short(f"Energy, {scope}"))
        ui.echart(charts.trade_off(points, front)).style("height: 24rem; width: 100%")
        ui.label(
            "Not beaten in both: " + short(", ".join(f"{r.variant} b{r.batch_size} on {r.device_id}" for r in front))
        )
