"""The page of a report: five charts and the table in one HTML file that needs no network, light or dark."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from benchd.daemon.history import shifts
from benchd.daemon.page import CHARTS, Chart, render
from benchd.daemon.records import Record

ROWS = 500
"""Of more records the newest are shown in the table; the charts hold them all."""

RING: Chart = {"marker": {"symbol": "circle-open", "size": 14}, "showlegend": False}

SUMMARY = """<p>{{ count }} records of {{ devices|join(", ") }}, {{ first }} to {{ last }}</p>
<ul class="ship">{% for text in ship %}<li>{{ text }}</li>{% endfor %}</ul>
"""
TABLE = """<h2>Records</h2>
{% if hidden %}<p>The newest {{ rows|length }}; {{ hidden }} older ones are in the CSV.</p>{% endif %}
<div class="wide"><table>
<thead><tr>{% for heading in headings %}<th>{{ heading }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody>
</table></div>
"""


def page(found: Sequence[Record], ship: Sequence[str], headings: Sequence[str], table: Sequence[Sequence[str]]) -> str:
    """Return the page of these records, at least one and in order of time, with the lines of the decisions on top."""
    measured = [record for record in found if record.status == "ok" and record.timing]
    return render(
        "benchd report",
        SUMMARY + CHARTS + TABLE,
        [chart(measured) for chart in DRAWN],
        count=len(found),
        devices=sorted({record.device_id for record in found}),
        first=found[0].t_wall,
        last=found[-1].t_wall,
        ship=ship,
        headings=headings,
        rows=table[-ROWS:],
        hidden=max(0, len(table) - ROWS),
    )


def _median_ms(record: Record) -> float:
    if record.timing is None:
        raise ValueError(f"{record.case_id} was not timed")
    return record.timing.median_ms


def _grouped(records: Sequence[Record], key: Callable[[Record], str]) -> Iterator[tuple[str, list[Record]]]:
    for name, group in groupby(sorted(records, key=key), key=key):
        yield name, list(group)


def _newest(records: Sequence[Record]) -> list[Record]:
    """Return the last record of each case and device."""
    return list({(record.device_id, record.case_id): record for record in records}.values())


def _subject(record: Record) -> str:
    """Return the case without its variant: what variants compete at."""
    model, _, *others = record.case_id.split(",")
    return " ".join([model, *others])


def _subject_at_any_batch(record: Record) -> str:
    model, _, _, *others = record.case_id.split(",")
    return " ".join([model, *others, record.case.variant.label])


def _latency_against_energy(measured: Sequence[Record]) -> Chart:
    known = [record for record in _newest(measured) if record.energy and record.case.direction == "inference"]
    traces: list[Chart] = []
    for name, group in _grouped(known, _subject):
        points = sorted((_median_ms(r), 1e3 * r.energy.gross_per_inference_j, r.case_id) for r in group if r.energy)
        traces.append(_trace(name, points, mode="markers"))
        traces.append(_trace(f"{name}: front", list(_pareto(points)), mode="lines+markers") | RING)
    note = (
        "A ring marks what no other variant beats in both; lower left is better."
        if known
        else "No record holds energy."
    )
    axes = {"xaxis": _log_axis("median latency, ms"), "yaxis": _log_axis("energy per inference, mJ")}
    return {"title": "Latency against energy", "note": note, "data": traces, "layout": axes}


def _trace(name: str, points: Sequence[tuple[float | str, float, str]], mode: str) -> Chart:
    x, y = [point[0] for point in points], [point[1] for point in points]
    return {"type": "scatter", "mode": mode, "name": name, "x": x, "y": y, "text": [point[2] for point in points]}


def _pareto(points: Sequence[tuple[float, float, str]]) -> Iterator[tuple[float, float, str]]:
    """Yield the points that no other one beats in both, of points in ascending order."""
    least = float("inf")
    for point in points:
        if point[1] < least:
            least = point[1]
            yield point


def _log_axis(title: str) -> Chart:
    return {"title": {"text": title}, "type": "log"}


def _throughput_by_batch(measured: Sequence[Record]) -> Chart:
    known = [record for record in _newest(measured) if record.throughput_per_s]
    traces = [
        _trace(name, sorted((r.case.batch_size, r.throughput_per_s or 0.0, r.case_id) for r in group), "lines+markers")
        for name, group in _grouped(known, _subject_at_any_batch)
    ]
    batches = {"tickvals": sorted({record.case.batch_size for record in known})}
    axes = {"xaxis": _log_axis("batch size") | batches, "yaxis": _log_axis("images a second")}
    return {
        "title": "Throughput by batch size",
        "note": "The newest record of each case.",
        "data": traces,
        "layout": axes,
    }


def _variants_by_model(measured: Sequence[Record]) -> Chart:
    traces = []
    for name, group in _grouped(_newest(measured), lambda record: record.case.variant.label):
        timings = [record.timing for record in group if record.timing]
        above = [(t.high_ms if t.high_ms is not None else t.median_ms) - t.median_ms for t in timings]
        below = [t.median_ms - (t.low_ms if t.low_ms is not None else t.median_ms) for t in timings]
        points = [(_subject(record), _median_ms(record), record.case_id) for record in group]
        bars = {"type": "data", "array": above, "arrayminus": below}
        traces.append(_trace(name, points, mode="markers") | {"marker": {"size": 9}, "error_y": bars})
    axes = {"xaxis": {}, "yaxis": _log_axis("median latency, ms")}
    note = "The newest record of each case, with its 95 % interval."
    return {"title": "Variants by model", "note": note, "data": traces, "layout": axes}


def _consistency(measured: Sequence[Record]) -> Chart:
    """Return how far the processes of each case lie from its median."""
    traces = []
    for name, group in _grouped(measured, lambda record: f"{record.device_id} {record.case_id}"):
        shares = [
            100 * (process.timing.median_ms / _median_ms(record) - 1)
            for record in group
            for process in record.processes
            if process.timing
        ]
        traces.append({"type": "box", "name": name, "y": shares, "boxpoints": "all", "showlegend": False})
    layout = {"xaxis": {"showticklabels": len(traces) <= 20}, "yaxis": {"title": {"text": "off the case's median, %"}}}
    note = "One point a process, against the median of its own run."
    return {"title": "Run-to-run consistency", "note": note, "data": traces, "layout": layout}


def _history(measured: Sequence[Record]) -> Chart:
    """Return each case over time by device and fingerprint, with a ring where a new level begins."""
    traces: list[Chart] = []
    for name, group in _grouped(measured, lambda r: f"{r.device_id} {r.case_id} {r.environment.fingerprint}"):
        if len(group) < 2:
            continue
        points = [(record.t_wall, _median_ms(record)) for record in group]
        steps = [points[place] for place in shifts([median_ms for _, median_ms in points])]
        traces.append(_series(name, points, mode="lines+markers"))
        if steps:
            traces.append(_series(f"{name}: a new level", steps, mode="markers") | RING)
    note = "A ring marks the first run of a new level." if traces else "No case was measured twice in one environment."
    axes = {"xaxis": {"type": "date"}, "yaxis": _log_axis("median latency, ms")}
    return {"title": "History by device", "note": note, "data": traces, "layout": axes}


def _series(name: str, points: Sequence[tuple[str, float]], mode: str) -> Chart:
    return {"type": "scatter", "mode": mode, "name": name, "x": [x for x, _ in points], "y": [y for _, y in points]}


DRAWN = (_latency_against_energy, _throughput_by_batch, _variants_by_model, _consistency, _history)
