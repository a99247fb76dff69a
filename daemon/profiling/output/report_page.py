"""The page of a profile: findings, four charts and every table in one HTML file that needs no network."""

import html
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchd.daemon.profiling.output.sections import MIB, Section, figure, finding_lines
from benchd.daemon.profiling.profile import LayerRow, MemoryProfile, Profile
from benchd.daemon.reporting.page import Chart, render

ROWS = 200
"""The page shows the first rows of a longer table; profile.json holds all rows."""

TEMPLATE = Path(__file__).parent / "templates" / "profile.html"


def page(profile: Profile, sections: Sequence[Section]) -> str:
    """Return the page of a profile and its tables."""
    return render(
        TEMPLATE,
        f"Profile of {profile.case_id}",
        [chart for chart in (_steps(profile), _icicle(profile), _layers(profile), _memory(profile)) if chart["data"]],
        findings=[finding_lines(finding) for finding in profile.findings],
        sections=sections,
        kinds=("name", "figure"),
        limit=ROWS,
    )


def _text(name: str) -> str:
    """Return the name escaped for plotly, which interprets some tags in labels."""
    return html.escape(name)


def _steps(profile: Profile) -> Chart:
    """Return the steps as stacked bars."""
    steps = profile.torch.steps if profile.torch else []
    names = [f"step {step.number}" for step in steps]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": category.replace("_", " "),
            "y": names,
            "x": [step.by_category.get(category, 0) / 1e6 for step in steps],
        }
        for category in dict.fromkeys(name for step in steps for name in step.by_category)
    ]
    layout = {"barmode": "stack", "xaxis": _axis("ms"), "yaxis": {"autorange": "reversed"}}
    note = "Each moment counts once: for the device if it is working, else for the host."
    return {"title": "Steps", "note": note, "data": data, "layout": layout}


def _icicle(profile: Profile) -> Chart:
    """Return the nesting, each frame with the time outside its children."""
    frames = profile.nesting
    inner: Counter[int | None] = Counter()
    for frame in frames:
        inner[frame.parent] += frame.ns
    icicle = {
        "type": "icicle",
        "ids": [str(place) for place in range(len(frames))],
        "parents": ["" if frame.parent is None else str(frame.parent) for frame in frames],
        "labels": [_text(frame.name) for frame in frames],
        "values": [max(0, frame.ns - inner[place]) for place, frame in enumerate(frames)],
        "text": [f"{figure(frame.ns, 1e-6)} ms" for frame in frames],
        "textinfo": "label+text+percent root",
        "hoverinfo": "label+text+percent root+percent parent",
        "tiling": {"orientation": "v"},
        "root": {"color": "rgba(127,127,127,.3)"},
    }
    whose = "the device" if profile.torch and profile.torch.device_ns else "the host"
    note = f"The last step in time of {whose}, each call below its caller; click on a call to zoom in."
    return {"title": "Where the time goes", "note": note, "data": [icicle] if frames else [], "layout": {}}


def _layers(profile: Profile) -> Chart:
    title, layout = "Layers", {"xaxis": _axis("ms"), "yaxis": {"autorange": "reversed"}}
    note = "Each timed with a synchronisation around it, and as a multiple of its roofline minimum on this device."
    rows = [row for row in profile.layers.layers if row.parent is None] if profile.layers else []
    bars = [_bars(rows)] if rows else []
    return {"title": title, "note": note, "data": bars, "layout": layout}


def _bars(rows: Sequence[LayerRow]) -> Chart:
    floors = [f"{figure(row.x_of_floor)}x of floor ({row.binding})" if row.x_of_floor else "" for row in rows]
    names, ms = [_text(row.name) for row in rows], [row.ns / 1e6 for row in rows]
    return {"type": "bar", "orientation": "h", "y": names, "x": ms, "text": floors, "textposition": "auto"}


def _memory(profile: Profile) -> Chart:
    data = _areas(profile.memory) if profile.memory else []
    layout = {"xaxis": _axis("ms into the step"), "yaxis": _axis("MiB")}
    return {"title": "Memory over a step", "note": "Memory held, by purpose.", "data": data, "layout": layout}


def _areas(memory: MemoryProfile) -> list[Chart]:
    points = memory.timeline
    times_ms = [point.t_ns / 1e6 for point in points]
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "line": {"shape": "hv", "width": 1},
            "stackgroup": "held",
            "name": _text(category),
            "x": times_ms,
            "y": [point.by_category.get(category, 0) / MIB for point in points],
        }
        for category in dict.fromkeys(name for point in points for name in point.by_category)
    ]


def _axis(title: str) -> Chart:
    return {"title": {"text": title}}
