"""A record as the row of a readable table."""

from benchd.daemon.records import Record, Requests
from benchd.daemon.reporting.results_table import energy_and_error, figure, median_and_interval
from benchd.daemon.verdicts import accuracy
from benchd.daemon.verdicts.rows import Cell, row

COLUMNS = {
    "device_id": "device",
    "model": "model",
    "options": "options",
    "variant": "variant",
    "provider": "provider",
    "batch_size": "batch",
    "direction": "direction",
    "scenario": "scenario",
    "median_ms": "median ms [95 %]",
    "p99_ms": "p99 ms",
    "p999_ms": "p99.9 ms",
    "requests": "requests",
    "clean_ms": "ms undisturbed",
    "throughput_per_s": "per second",
    "energy_per_inference_j": "energy mJ",
    "memory_mib": "memory MiB",
    "x_of_floor": "x of floor",
    "check": "check",
    "agreement": "agreement",
    "accuracy_value": "accuracy [95 %]",
    "accuracy_drop": "drop [95 %]",
    "processes": "processes",
    "status": "status",
}
"""The columns of a row for human readers, and their headings."""


def cells(record: Record) -> list[str]:
    """Return a record's cells in readable form."""
    flat = row(record)
    flat |= {
        "scenario": " ".join([record.case.scenario, *record.case.demand]),
        "requests": _requests(record.requests),
        "median_ms": median_and_interval(record),
        "energy_per_inference_j": energy_and_error(record),
        "processes": f"{sum(process.timing is not None for process in record.processes)}",
    }
    if record.accuracy:
        figure = f"{record.accuracy.metric} {accuracy.figure(record.accuracy)}"
        flat |= {"accuracy_value": figure, "accuracy_drop": accuracy.drop(record.accuracy)}
    return [_cell(flat[name]) for name in COLUMNS]


def _requests(requests: Requests | None) -> str | None:
    if requests is None:
        return None
    return f"{requests.asked} at {requests.rate_hz:.4g} per second: {requests.late} late, {requests.dropped} dropped"


def _cell(value: Cell) -> str:
    if isinstance(value, bool):
        return "ok" if value else "FAILED"
    if isinstance(value, float):
        return figure(value)
    return "-" if value in (None, "") else str(value)
