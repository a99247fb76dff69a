"""Shows a case on a device over time: its levels, and where they shift."""

from asyncio import to_thread
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from statistics import median

from nicegui import ui

from benchd.daemon.machine.environment import SOURCES
from benchd.daemon.records import Record
from benchd.daemon.verdicts import sameness
from benchd.daemon.verdicts.history import shifts
from benchd.dashboard import queries
from benchd.dashboard.layout import PATIENCE_S, frame, heading, local, notice
from benchd.dashboard.messages import Result
from benchd.dashboard.queries import Mark
from benchd.dashboard.store import Store
from benchd.dashboard.text import count, figure, percent, short
from benchd.dashboard.views import charts

RUNS = 200
CAPTION = (
    f"Medians of the newest {RUNS} runs with their 95 % intervals, disturbed blocks included, by time of measurement. "
    "A labelled line marks the start of a new level, a grey line a change of the environment or of benchd."
)
BY_ARRIVAL = "by arrival: the device's clock was not set"


def add(store: Store) -> None:
    """Serve the view at /history/<device>/<case>."""

    @ui.page("/history/{device_id}/{case_id:path}", response_timeout=PATIENCE_S)
    async def history(device_id: str, case_id: str) -> None:
        async with frame(short(f"{case_id} on {device_id}")):
            points = await to_thread(queries.history, store, device_id, case_id, RUNS)
            if not points:
                notice("This case has not been measured on this device. Results lists the measured ones.")
                return
            marks = [*steps(points), *await to_thread(changes, points, partial(queries.record, store))]
            ui.label(CAPTION + undated(points))
            ui.echart(charts.history(points, marks), renderer="svg").style("height: 24rem; width: 100%")
            heading("Steps and changes")
            with ui.column().style("gap: .1rem"):
                for mark in sorted(marks, reverse=True):
                    ui.label(f"{local(mark.at_s)}  {mark.name}  {short(mark.detail)}")
                if not marks:
                    ui.label(f"none in {count(len(points), 'run')}").classes("soft")


def undated(results: list[Result]) -> str:
    """Return how many results are dated by arrival, because their device's clock cannot have been right."""
    number = sum(map(is_undated, results))
    return f" {count(number, 'run')} {BY_ARRIVAL}." if number else ""


def is_undated(result: Result) -> bool:
    """Return whether a result is dated by its arrival."""
    return result.measured_s == result.arrived_s


def steps(results: list[Result]) -> Iterator[Mark]:
    """Yield the results where a new level of the median begins, and its change from the previous level."""
    times_ms = [result.median_ms or 0.0 for result in results]
    places = shifts(times_ms)
    levels = [median(times_ms[begin:end]) for begin, end in pairwise([0, *places, len(times_ms)])]
    for place, (before, after) in zip(places, pairwise(levels), strict=True):
        detail = f"from {figure(before, 'ms')} to {figure(after, 'ms')}"
        yield Mark(results[place].measured_s, f"{percent(after / before - 1)} %", detail)


def changes(results: list[Result], record: Callable[[str], Record | None]) -> list[Mark]:
    """Return the results where the environment or benchd changed, and how; `record` returns a record by its key."""
    pairs = [pair for pair in pairwise(results) if _made_by(pair[0]) != _made_by(pair[1])]
    named = [(after, _changed(before, after, record(before.key), record(after.key))) for before, after in pairs]
    return [Mark(after.measured_s, charts.CHANGED, words) for after, words in named if words]


def _made_by(result: Result) -> tuple[str, str]:
    return result.tool_version, result.fingerprint


def _changed(before: Result, after: Result, before_record: Record | None, after_record: Record | None) -> str | None:
    """Return the changes in words, or None if an older record merely has fewer fields."""
    if before.tool_version != after.tool_version:
        return f"benchd {before.tool_version} to {after.tool_version}"
    if before_record is None or after_record is None:
        return "the device's fingerprint"
    changed = sameness.environment_difference(before_record.environment, after_record.environment)
    sources = {side.environment.software.get(SOURCES) for side in (before_record, after_record)} - {None}
    return changed or ("the sources of benchd" if len(sources) == 2 else None)
