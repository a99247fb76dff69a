"""Options of the charts for Apache ECharts, which NiceGUI includes."""

from typing import Any

from benchd.daemon.records import Variant, throttles
from benchd.daemon.reporting.palette import COLOURS, GREY, OF_RUNTIME, SHADE, colour
from benchd.dashboard.messages import Result
from benchd.dashboard.queries import Happened

CHANGED = "setup changed"
# of text: NiceGUI evaluates what stands under a key with a colon
SOFT = {":color": "getComputedStyle(document.documentElement).getPropertyValue('--soft').trim()"}
STEP_LINE = {"color": OF_RUNTIME["custom"], "type": "solid"}
STEP = {"label": {"show": True, "formatter": "{b}", **SOFT}, "lineStyle": STEP_LINE}

TICKS = {"day": "{d} {MMM}", "hour": "{HH}:{mm}", "minute": "{HH}:{mm}", "second": "{HH}:{mm}:{ss}"}

Series = dict[str, list[tuple[float, float]]]

# a chart's title, its unit, the factor to that unit, the suffix of its metrics
PANELS = (
    ("Power", "W", 1.0, "power_w"),
    ("Clocks", "MHz", 1e-6, "_clock_hz"),
    ("Temperature", "°C", 1.0, "_temp_c"),
    ("Memory", "MiB", 2.0**-20, "_bytes"),
    ("Utilisation", "%", 1.0, "_percent"),
)


def base(unit: str) -> dict[str, Any]:
    """Return a chart over time without lines yet."""
    text = SOFT
    return {
        "aria": {"enabled": True},
        "useUTC": True,  # as all times in text
        "animation": False,
        "color": list(COLOURS),
        "grid": {"left": 56, "right": 40, "top": 56, "bottom": 32},
        "legend": {"textStyle": text, "type": "scroll", "top": 0, "left": 0, "right": 60},
        "tooltip": {"trigger": "axis", "confine": True, "axisPointer": {"type": "cross"}}
        | {":valueFormatter": rounded(unit)},
        "toolbox": {"itemSize": 12, "feature": {"dataZoom": {"yAxisIndex": "none"}, "restore": {}}},
        "xAxis": {
            "type": "time",
            "name": "UTC",
            "nameTextStyle": text,
            "axisLabel": text | {"hideOverlap": True, "formatter": TICKS},
        },
        "yAxis": _value_axis(unit),
        "series": [],
    }


def rounded(unit: str) -> str:
    """Return the JavaScript that writes a value as `text.figure` does."""
    return f"(value) => (value == null ? '-' : `${{+value.toPrecision(4)}} {unit}`)"


def _value_axis(name: str) -> dict[str, Any]:
    text = SOFT
    lines = {"lineStyle": {"color": "rgba(128, 136, 145, 0.3)"}}
    axis = {"type": "value", "name": name, "scale": True, "splitLine": lines}
    return axis | {"nameTextStyle": text, "axisLabel": text}


def throttled(series: Series) -> list[tuple[float, float]]:
    """Return the spans, in Unix time, in which a clock was throttled."""
    spans: list[tuple[float, float]] = []
    for name, values in series.items():
        began_s: float | None = None
        for t_s, value in values if "throttle_reasons" in name else ():
            if throttles(value) and began_s is None:
                began_s = t_s
            elif not throttles(value) and began_s is not None:
                spans.append((began_s, t_s))
                began_s = None
        if began_s is not None:
            spans.append((began_s, values[-1][0]))
    return sorted(spans)


def boundaries(marks: list[Happened]) -> dict[str, Any]:
    """Return a line at each mark, with its name on hover."""
    lines = [{"xAxis": mark.at_s * 1e3, "name": mark.name} for mark in marks]
    hover = {"label": {"show": True, "formatter": "{b}", "position": "insideEndTop", **SOFT}}
    return {"symbol": "none", "label": {"show": False}, "emphasis": hover, "lineStyle": {"color": GREY}, "data": lines}


def bands(spans: list[tuple[float, float]]) -> dict[str, Any]:
    """Return the spans in which a clock was throttled, as shaded bands."""
    found = [[{"xAxis": begin_s * 1e3, "name": "throttled"}, {"xAxis": end_s * 1e3}] for begin_s, end_s in spans]
    return {"silent": True, "label": SOFT, "itemStyle": {"color": SHADE}, "data": found}


def history(results: list[Result], clean: dict[str, float], marks: list[Happened]) -> dict[str, Any]:
    """Return medians with their intervals over time, those of `clean` blocks beside them, and one line per mark."""
    options = base("ms")
    points = [[result.measured_s * 1e3, result.median_ms] for result in results]
    bars = [_interval(result) for result in results if result.low_ms is not None and result.high_ms is not None]
    options["series"] = [{"type": "line", "name": "as experienced", "data": points, "symbolSize": 8}, *bars]
    options["color"] = [colour(Variant.parse(results[-1].variant))] if results[-1].variant else options["color"]
    options["series"][0]["markLine"] = lines = boundaries(marks)
    lines["data"] = [line if line["name"] == CHANGED else line | STEP for line in lines["data"]]
    if clean:
        hollow = [[result.measured_s * 1e3, clean[result.key]] for result in results if result.key in clean]
        options["series"].append(
            {"type": "scatter", "name": "clean", "data": hollow, "symbol": "emptyCircle", "symbolSize": 10}
        )
    options["legend"]["data"] = ["as experienced", "clean"] if clean else ["as experienced"]
    return options


def _interval(result: Result) -> dict[str, Any]:
    t_ms = result.measured_s * 1e3
    line = {"color": GREY, "width": 3, "opacity": 0.6}
    data = [[t_ms, result.low_ms], [t_ms, result.high_ms]]
    return {
        "type": "line",
        "data": data,
        "showSymbol": False,
        "lineStyle": line,
        "silent": True,
        "tooltip": {"show": False},
    }


def trade_off(results: list[Result], front: list[Result]) -> dict[str, Any]:
    """Return energy over latency, one point per variant and device, and the line through the unbeaten ones."""
    options = base("mJ per inference")
    options["grid"]["bottom"] = 48
    options["xAxis"] = _value_axis("median, ms") | {"nameLocation": "middle", "nameGap": 28}
    options["tooltip"] = {"trigger": "item"}
    by_device: dict[str, list[Result]] = {}
    for result in results:
        by_device.setdefault(result.device_id, []).append(result)
    for device_id, found in by_device.items():
        data = [{"value": [r.median_ms, r.energy_mj], "name": f"{r.variant} b{r.batch_size}"} for r in found]
        options["series"].append({"type": "scatter", "name": device_id, "data": data, "symbolSize": 12})
    line = [[result.median_ms, result.energy_mj] for result in front]
    options["series"].append({"type": "line", "name": "not beaten", "data": line, "symbolSize": 4})
    return options
