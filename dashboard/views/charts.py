"""The charts' options for Apache ECharts, which NiceGUI includes."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from benchd.daemon.records import ProcessResult, Variant, throttles
from benchd.daemon.reporting.palette import BAD, GREY, SERIES, SHADE, colour, shape
from benchd.dashboard.messages import Result
from benchd.dashboard.queries import Mark
from benchd.dashboard.trade_off import Figure, Point

CHANGED = "setup changed"
# text colours; NiceGUI evaluates the value of a key that starts with a colon
SOFT = {":color": "getComputedStyle(document.documentElement).getPropertyValue('--soft').trim()"}
STEP_LINE = {"color": SERIES[0], "type": "solid"}
STEP = {"label": {"show": True, "formatter": "{b}", **SOFT}, "lineStyle": STEP_LINE}

MANY = 60  # with more runs, the intervals would hide the medians
BLOCKS = 600  # maximum per process, as many as a screen can show
GAP_S = 120.0  # a larger gap between samples means that nothing was measured; means per minute are 60 s apart
CROSS = "path://M1,0L5,4L9,0L10,1L6,5L10,9L9,10L5,6L1,10L0,9L4,5L0,1Z"
TICKS = {"day": "{d} {MMM}", "hour": "{HH}:{mm}", "minute": "{HH}:{mm}", "second": "{HH}:{mm}:{ss}"}

Series = dict[str, list[tuple[float, float]]]

# a chart's title, its unit, the factor for converting to that unit, the suffix of its metrics
PANELS = (
    ("Power", "W", 1.0, "power_w"),
    ("Clocks", "MHz", 1e-6, "_clock_hz"),
    ("Temperature", "°C", 1.0, "_temp_c"),
    ("Memory", "MiB", 2.0**-20, "_bytes"),
    ("Utilisation", "%", 1.0, "_percent"),
)


def base(unit: str) -> dict[str, Any]:
    """Return a chart over time, without lines."""
    return {
        "aria": {"enabled": True},
        "animation": False,
        "color": list(SERIES),
        "grid": {"left": 56, "right": 40, "top": 56, "bottom": 32},
        "legend": {"textStyle": SOFT, "type": "scroll", "top": 0, "left": 0, "right": 60},
        "tooltip": {"trigger": "axis", "confine": True, "axisPointer": {"type": "cross"}}
        | {":valueFormatter": rounded(unit)},
        "toolbox": {"itemSize": 12, "feature": {"dataZoom": {"yAxisIndex": "none"}, "restore": {}}},
        "xAxis": {
            "type": "time",
            "axisLabel": SOFT | {"hideOverlap": True, "formatter": TICKS},
        },
        "yAxis": _value_axis(unit),
        "series": [],
    }


def rounded(unit: str) -> str:
    """Return the JavaScript that formats a value like `text.figure`."""
    return f"(value) => (value == null ? '-' : `${{+value.toPrecision(4)}} {unit}`)"


def _value_axis(name: str) -> dict[str, Any]:
    lines = {"lineStyle": {"color": "rgba(128, 136, 145, 0.3)"}}
    axis = {"type": "value", "name": name, "scale": True, "splitLine": lines}
    return axis | {"nameTextStyle": SOFT, "axisLabel": SOFT}


def throttled(series: Series) -> list[tuple[float, float]]:
    """Return the spans, in Unix time, in which a clock was throttled; each ends at the next sample, if that is soon."""
    spans: list[tuple[float, float]] = []
    for values in (values for name, values in series.items() if "throttle_reasons" in name):
        for (t_s, value), (next_s, _) in pairwise([*values, *values[-1:]]):
            if throttles(value):
                began_s = spans.pop()[0] if spans and spans[-1][1] == t_s else t_s
                spans.append((began_s, next_s if next_s - t_s <= GAP_S else t_s))
    return sorted(spans)


def boundaries(marks: list[Mark]) -> dict[str, Any]:
    """Return a line at each mark, with its name shown on hover."""
    lines = [{"xAxis": mark.at_s * 1e3, "name": mark.name} for mark in marks]
    hover = {"label": {"show": True, "formatter": "{b}", "position": "insideEndTop", **SOFT}}
    return {"symbol": "none", "label": {"show": False}, "emphasis": hover, "lineStyle": {"color": GREY}, "data": lines}


def bands(spans: list[tuple[float, float]]) -> dict[str, Any]:
    """Return the spans in which a clock was throttled, as shaded bands."""
    areas = [[{"xAxis": begin_s * 1e3, "name": "throttled"}, {"xAxis": end_s * 1e3}] for begin_s, end_s in spans]
    return {"silent": True, "label": SOFT, "itemStyle": {"color": SHADE}, "data": areas}


def history(results: list[Result], marks: list[Mark]) -> dict[str, Any]:
    """Return a chart of medians with their intervals over time, and a line per mark."""
    options = base("ms")
    points = [[result.measured_s * 1e3, result.median_ms] for result in results]
    bars = [_interval(one, len(results)) for one in results if one.low_ms is not None and one.high_ms is not None]
    options["series"] = [{"type": "line", "name": "median", "data": points, "symbolSize": 8}, *bars]
    options["color"] = [colour(Variant.parse(results[-1].variant))] if results[-1].variant else options["color"]
    options["series"][0]["markLine"] = lines = boundaries(marks)
    lines["data"] = [line if line["name"] == CHANGED else line | STEP for line in lines["data"]]
    options["legend"]["data"] = ["median"]
    return options


def blocks(processes: Sequence[ProcessResult]) -> dict[str, Any]:
    """Return the medians of the blocks of each process in order, disturbed ones hollow."""
    options = base("ms")
    options["xAxis"] = _value_axis("block") | {
        "nameLocation": "middle",
        "nameGap": 24,
        "scale": False,
        "minInterval": 1,
    }
    for number, process in enumerate(processes, 1):
        medians_ms = process.blocks.medians_ms if process.blocks else []
        reasons = process.interference.reasons if process.interference else []
        data = [
            {"value": [place, value], "symbol": "emptyCircle" if any(reasons[place - 1 : place]) else "circle"}
            for place, value in enumerate(medians_ms[:BLOCKS], 1)
        ]
        options["series"].append({"type": "line", "name": f"process {number}", "data": data, "symbolSize": 6})
    return options


def _interval(result: Result, runs: int) -> dict[str, Any]:
    """Return the line of a result's interval, fainter if there are many runs, so that the medians remain visible."""
    t_ms = result.measured_s * 1e3
    line = {"color": GREY, "width": 3, "opacity": 0.6 if runs <= MANY else 0.2}
    ends = [[t_ms, end_ms] for end_ms in (result.low_ms, result.high_ms)]
    return _bar(ends) | {"lineStyle": line, "tooltip": {"show": False}}


def trade_off(points: Sequence[Point], front: Sequence[Point]) -> dict[str, Any]:
    """Return a chart of energy over latency, with points and error bars, names where there is room, and the front."""
    options = base("")
    options["grid"] = {"left": 64, "right": 24, "top": 32, "bottom": 48}
    options["legend"] = {"show": False}  # because each point has a label
    options["xAxis"] = _value_axis("median, ms") | {"nameLocation": "middle", "nameGap": 28, "min": 0}
    options["yAxis"] = _value_axis("mJ per inference")
    options["tooltip"] = {"trigger": "item", "confine": True}
    del options["toolbox"]  # because there is too little to zoom into
    most_ms = max((point.latency_ms.value for point in points), default=0.0)
    for point in points:
        if point.energy_mj:
            side = "left" if point.latency_ms.value > most_ms / 2 else "right"  # the side with more room for the name
            options["series"] += _marked(point, point.energy_mj, side)
    line = [[point.latency_ms.value, point.energy_mj.value] for point in front if point.energy_mj]
    look = {"color": GREY, "type": "dashed", "width": 1}
    options["series"].append({"type": "line", "data": line, "showSymbol": False, "lineStyle": look, "silent": True})
    return options


def _marked(point: Point, energy_mj: Figure, side: str) -> list[dict[str, Any]]:
    """Return a point in its variant's colour and shape, crossed out if it cannot win, and its error bars."""
    middle = [point.latency_ms.value, energy_mj.value]
    marker = {
        "type": "scatter",
        "data": [{"value": middle, "name": f"{'✕ ' * bool(point.why)}{point.label}"}],
        "symbol": CROSS if point.why else shape(point.variant),
        "symbolSize": 13,
        "itemStyle": {"color": BAD if point.why else colour(point.variant)},
        "label": {"show": True, "position": side, "offset": [0, -9], "formatter": "{b}"}
        | ({"color": BAD} if point.why else SOFT),
        "labelLayout": {"hideOverlap": True},
    }
    latency, energy = ([[end, middle[1]] for end in point.latency_ms[1:]], [[middle[0], end] for end in energy_mj[1:]])
    return [_bar(latency), _bar(energy), marker]


def _bar(ends: Sequence[Sequence[float | None]]) -> dict[str, Any]:
    look = {"color": GREY, "width": 2, "opacity": 0.7}
    return {"type": "line", "data": ends, "showSymbol": False, "lineStyle": look, "silent": True}
