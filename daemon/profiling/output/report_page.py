"""The page of a profile: findings, three charts and every table in one HTML file that works offline."""

from collections.abc import Sequence
from pathlib import Path

from benchd.daemon.profiling.output.sections import MIB, Section, all_finding_lines, warning
from benchd.daemon.profiling.profile import Profile
from benchd.daemon.reporting.page import Chart, render
from benchd.daemon.reporting.results_table import figure

ROWS = 200
"""The maximum number of rows per table on the page; profile.json contains all rows."""

TEMPLATE = Path(__file__).parent / "templates" / "profile.html"


def page(profile: Profile, sections: Sequence[Section]) -> str:
    """Return the page of a profile and its tables."""
    return render(
        TEMPLATE,
        f"Profile of {profile.case_id}",
        [_steps(profile), _layers(profile), _memory(profile)],
        warning=warning(profile),
        findings=all_finding_lines(profile),
        sections=sections,
        kinds=("name", "figure"),
        limit=ROWS,
    )


def _steps(profile: Profile) -> Chart:
    steps = profile.torch.steps if profile.torch else []
    names = [f"step {step.number}" for step in steps]
    data = [
        {
            "type": "bar",
            "name": category.replace("_", " "),
            "y": names,
            "x": [step.by_category.get(category, 0) / 1e6 for step in steps],
        }
        for category in dict.fromkeys(name for step in steps for name in step.by_category)
    ]
    layout = {"xaxis": _axis("ms"), "yaxis": {}}
    note = "Each moment counts once: for the device if it is working, else for the host."
    return {"title": "Steps", "note": note, "data": data, "layout": layout}


def _layers(profile: Profile) -> Chart:
    rows = [row for row in profile.layers.layers if row.parent is None] if profile.layers else []
    floors = [f"{figure(row.x_of_floor)}x of floor ({row.binding})" if row.x_of_floor else "" for row in rows]
    bars = {"type": "bar", "y": [row.name for row in rows], "x": [row.ns / 1e6 for row in rows], "text": floors}
    layout = {"xaxis": _axis("ms"), "yaxis": {}}
    note = "Each layer is timed with a synchronisation around it; beside it is its multiple of the roofline minimum."
    return {"title": "Layers", "note": note, "data": [bars] if rows else [], "layout": layout}


def _memory(profile: Profile) -> Chart:
    points = profile.memory.timeline if profile.memory else []
    times_ms = [point.t_ns / 1e6 for point in points]
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "line": {"shape": "hv"},
            "stackgroup": "held",
            "name": category,
            "x": times_ms,
            "y": [point.by_category.get(category, 0) / MIB for point in points],
        }
        for category in dict.fromkeys(name for point in points for name in point.by_category)
    ]
    layout = {"xaxis": _axis("ms into the step"), "yaxis": _axis("MiB")}
    return {"title": "Memory over a step", "note": "Memory held, by purpose.", "data": data, "layout": layout}


def _axis(title: str) -> Chart:
    return {"title": {"text": title}}
