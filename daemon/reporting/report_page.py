"""The page of a report: five charts and a table in a self-contained HTML file, in light or dark mode."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import msgspec

from benchd.daemon.records import Energy, Floor, Record, Variant
from benchd.daemon.reporting.cells import cells
from benchd.daemon.reporting.page import FOLDER, Chart, render
from benchd.daemon.reporting.palette import GREY, colour, shape
from benchd.daemon.verdicts import doubts, recommend
from benchd.daemon.verdicts.figures import unbeaten
from benchd.daemon.verdicts.history import shifts

Point = tuple[float, float | str, str]
"""A record's position and name in a chart."""

Unable = Mapping[str, str]
"""The reasons why records cannot win, by their keys."""

ROWS = 500
"""The table shows at most this many records, the newest ones; the charts show all of them."""

RING: Chart = {"marker": {"symbol": "circle-open", "size": 14}, "showlegend": False}
CROSS: Chart = {"marker": {"symbol": "x", "size": 9}}
CROSSED = "A cross marks a record that cannot win; its name says why."


def page(
    records: Sequence[Record], decisions: Sequence[recommend.Decision], about: Sequence[str], headings: Sequence[str]
) -> str:
    """Return the page for records, given oldest first; it starts with the decisions and facts `about` them."""
    reasons = [recommend.impossible(record) for record in records]
    measured = [
        record
        for record, reason in zip(records, reasons, strict=True)
        if record.status == "ok" and record.timing and not reason
    ]
    why = recommend.unable(measured)
    charts = [*(chart(measured, why) for chart in OF_NEWEST), _history(measured)]
    return render(
        FOLDER / "report.html",
        "benchd report",
        [_warned(chart, measured) for chart in charts],
        count=len(records),
        devices=sorted({record.device_id for record in records}),
        first=records[0].t_wall,
        last=records[-1].t_wall,
        about=about,
        left_out=sorted(
            {f"{record.case_id} {reason}" for record, reason in zip(records, reasons, strict=True) if reason}
        ),
        said=[(recommend.line(decision), recommend.exclusions(decision)) for decision in decisions],
        headings=headings,
        rows=[cells(record) for record in records[-ROWS:]],
        hidden=max(0, len(records) - ROWS),
    )


def _warned(chart: Chart, measured: Sequence[Record]) -> Chart:
    """Return the chart, with a note that begins with a warning about disturbed times."""
    warning = doubts.warning(measured)
    return chart | {"note": f"{warning}. {chart['note']}"} if warning else chart


def _median_ms(record: Record) -> float:
    if record.timing is None:
        raise ValueError(f"{record.case_id} was not timed")
    return record.timing.median_ms


def _grouped(records: Iterable[Record], key: Callable[[Record], str]) -> list[tuple[str, list[Record]]]:
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return sorted(groups.items())


def _subject(record: Record) -> list[str]:
    """Return the common name of a case's variants: model, batch size and any other non-default settings."""
    model, _, *others = msgspec.structs.replace(record.case, provider=None, dla=None).case_id.split(",")
    return [model, *others]


def _named(records: Sequence[Record]) -> Callable[[Record], str]:
    """Return a function that names a record's subject, and its place if these records have several places."""
    where = recommend.place_names(map(recommend.place, records))
    return lambda record: " ".join(_subject(record)) + where[recommend.place(record)]


def _by_fitness(records: Sequence[Record], why: Unable) -> tuple[list[Record], list[Record]]:
    """Return the records that can win and those that cannot."""
    able = [record for record in records if record.key not in why]
    return able, [record for record in records if record.key in why]


def _energy(record: Record) -> Energy:
    if record.energy is None:
        raise ValueError(f"{record.case_id} has no energy")
    return record.energy


def _latency_against_energy(measured: Sequence[Record], why: Unable) -> Chart:
    inference = [record for record in recommend.newest(measured) if record.case.direction == "inference"]
    known = [record for record in inference if record.energy and record.energy.gross_per_inference_j > 0]
    subject, of_many = _named(known), len({_energy(record).scope for record in known}) > 1
    able, unable = _by_fitness(known, why)
    spent = partial(_spent, why=why)
    traces: list[Chart] = []
    for name, group in _grouped(able, lambda r: subject(r) + (f" of {_energy(r).scope}" if of_many else "")):
        front = list(unbeaten(map(spent, group)))
        traces.append(_trace(f"{name}: front", front, mode="lines+markers") | RING | {"colour": GREY})
    traces += [
        _of_variant(name, sorted(map(spent, group)), group) for name, group in _grouped(able, recommend.variant_name)
    ]
    note = f"A ring marks a variant that no other beats on both axes; lower left is better. {CROSSED}"
    return {
        "title": "Latency against energy",
        "note": note,
        "data": traces + _crosses(map(spent, unable)),
        "layout": {"xaxis": _log_axis("median latency, ms"), "yaxis": _log_axis("energy per inference, mJ")},
    }


def _spent(record: Record, why: Unable) -> tuple[float, float, str]:
    return _median_ms(record), 1e3 * _energy(record).gross_per_inference_j, _text(record, why)


def _text(record: Record, why: Unable) -> str:
    """Return a point's name: its case and, if it cannot win, the reason."""
    name = f"{record.case_id}{doubts.mark([record])}"
    return f"{name}: {why[record.key]}" if record.key in why else name


def _crosses(points: Iterable[Point]) -> list[Chart]:
    quantities = list(points)
    return [_trace("cannot win", quantities, mode="markers") | CROSS] if quantities else []


def _trace(name: str, points: Sequence[Point], mode: str) -> Chart:
    x, y, text = ([point[i] for point in points] for i in range(3))
    return {"type": "scatter", "mode": mode, "name": name, "x": x, "y": y, "text": text}


def _of_variant(name: str, points: Sequence[Point], group: Sequence[Record], mode: str = "markers") -> Chart:
    return _trace(name, points, mode) | _look(group[0].case.variant)


def _look(variant: Variant) -> Chart:
    return {"colour": colour(variant), "shape": shape(variant)}


def _log_axis(title: str) -> Chart:
    return {"title": {"text": title}, "type": "log"}


def _throughput_by_batch(measured: Sequence[Record], why: Unable) -> Chart:
    known = [record for record in recommend.newest(measured) if record.throughput_per_s]
    where = recommend.place_names(map(recommend.place, known))
    able, unable = _by_fitness(known, why)
    throughput = partial(_throughput, why=why)
    traces = [
        _of_variant(name, sorted(map(throughput, group)), group, "lines+markers") | {"label": name}
        for name, group in _grouped(able, lambda record: _at_any_batch(record) + where[recommend.place(record)])
    ]
    batches = {"tickvals": sorted({record.case.batch_size for record in known})}
    axes = {"xaxis": _log_axis("batch size") | batches, "yaxis": _log_axis("images per second")}
    return {
        "title": "Throughput by batch size",
        "note": f"The newest record of each case. {CROSSED}",
        "data": traces + _crosses(map(throughput, unable)),
        "layout": axes,
    }


def _at_any_batch(record: Record) -> str:
    model, _, *others = _subject(record)
    return " ".join([model, *others, recommend.variant_name(record)])


def _throughput(record: Record, why: Unable) -> Point:
    return record.case.batch_size, record.throughput_per_s or 0.0, _text(record, why)


def _variants_by_model(measured: Sequence[Record], why: Unable) -> Chart:
    known = recommend.newest(measured)
    subject = _named(known)
    able, unable = _by_fitness(known, why)
    traces = []
    for name, group in _grouped(able, recommend.variant_name):
        timings = [record.timing for record in group if record.timing]
        above = [(t.high_ms if t.high_ms is not None else t.median_ms) - t.median_ms for t in timings]
        below = [t.median_ms - (t.low_ms if t.low_ms is not None else t.median_ms) for t in timings]
        points = [(_median_ms(record), subject(record), _text(record, why)) for record in group]
        bars = {"array": above, "arrayminus": below}
        traces.append(_of_variant(name, points, group) | {"marker": {"size": 9}, "error_x": bars})
    traces += _crosses((_median_ms(record), subject(record), _text(record, why)) for record in unable)
    axes = {"xaxis": _log_axis("median latency, ms"), "yaxis": {}}
    note = f"The newest record of each case, with its 95 % interval. {CROSSED}"
    return {
        "title": "Variants by model",
        "note": note,
        "data": [trace | {"type": "row"} for trace in traces],
        "layout": axes,
    }


def _roofline(measured: Sequence[Record], why: Unable) -> Chart:
    """Return the chart of each case's rate over its products per byte, below the rates probed in the same run."""
    known = [record for record in recommend.newest(measured) if record.floor and _products(record.floor)]
    where = recommend.place_names(map(recommend.place, known))
    able, unable = _by_fitness(known, why)
    placed = partial(_placed, why=why)
    traces: list[Chart] = []
    for name, group in _grouped(
        known, lambda record: f"{record.case.variant.precision}{where[recommend.place(record)]}"
    ):
        reached = [placed(record)[0] for record in group]
        roof = max((_roof(record.floor) for record in group if record.floor), key=lambda rates: rates[0])
        traces.append(_trace(f"roof of {name}", _roof_line(*roof, reached), mode="lines") | {"colour": GREY})
    traces += [
        _of_variant(name, list(map(placed, group)), group) for name, group in _grouped(able, recommend.variant_name)
    ]
    axes = {"xaxis": _log_axis("FLOP per byte"), "yaxis": _log_axis("GFLOP/s")}
    note = (
        "The roof is the lower of the probed peak rate and the probed bandwidth times FLOP per byte. Matrix products "
        f"count, in a spiking net only those that spikes cause; 'at least' means that some are missing. {CROSSED}"
    )
    return {
        "title": "Roofline",
        "note": note,
        "data": traces + _crosses(map(placed, unable)),
        "layout": axes,
    }


def _products(floor: Floor) -> float:
    """Return the FLOP count that determines a run's position; 0 for a run without products or bytes."""
    flops = floor.matrix_flops if floor.synaptic_flops is None else floor.synaptic_flops
    return flops if min(floor.matrix_ms, floor.bytes_ms, floor.bytes) > 0 else 0.0


def _roof(floor: Floor) -> tuple[float, float]:
    """Return the probed GFLOP/s and GB/s behind the floor."""
    return 1e-6 * _products(floor) / floor.matrix_ms, 1e-6 * floor.bytes / floor.bytes_ms


def _roof_line(peak: float, bandwidth: float, reached: Sequence[float]) -> list[tuple[float, float, str]]:
    corner = peak / bandwidth
    ends = (min(corner, *reached) / 2, corner, 2 * max(corner, *reached))
    return [(x, min(peak, x * bandwidth), f"{peak:.3g} GFLOP/s, {bandwidth:.3g} GB/s") for x in ends]


def _placed(record: Record, why: Unable) -> tuple[float, float, str]:
    floor = record.floor
    if floor is None:
        raise ValueError(f"{record.case_id} has no floor")
    flops, text = _products(floor), _text(record, why)
    at_least = f" (at least: without {', '.join(floor.uncounted)})" if floor.uncounted else ""
    return flops / floor.bytes, 1e-6 * flops / _median_ms(record), f"{text}{at_least}"


def _history(measured: Sequence[Record]) -> Chart:
    """Return the chart of each case over time, by device and fingerprint, with a ring where a new level starts."""
    traces: list[Chart] = []
    for name, group in _grouped(measured, lambda r: f"{r.device_id} {r.case_id} {r.environment.comparable_part}"):
        if len(group) < 2:
            continue
        points, look = [(record.t_wall, _median_ms(record)) for record in group], _look(group[0].case.variant)
        steps = [points[place] for place in shifts([median_ms for _, median_ms in points])]
        traces.append(_series(name, points, mode="lines+markers") | look)
        if steps:
            traces.append(_series(f"{name}: a new level", steps, mode="markers") | RING | look)
    note = "A ring marks the first run of a new level."
    axes = {"xaxis": {"type": "date"}, "yaxis": _log_axis("median latency, ms")}
    return {"title": "History by device", "note": note, "data": traces, "layout": axes}


def _series(name: str, points: Sequence[tuple[str, float]], mode: str) -> Chart:
    return {"type": "scatter", "mode": mode, "name": name, "x": [x for x, _ in points], "y": [y for _, y in points]}


OF_NEWEST = (_latency_against_energy, _throughput_by_batch, _variants_by_model, _roofline)
"""The charts of the newest record of each case."""
