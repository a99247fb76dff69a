"""Shows two results side by side, with the verdict that `benchd compare` gives for result files."""

import shlex
from asyncio import to_thread

from nicegui import ui

from benchd.daemon.records import PROFILED, Record
from benchd.daemon.verdicts import doubts, sameness
from benchd.daemon.verdicts.compare import compare
from benchd.daemon.verdicts.effects import MIN_EFFECT, Verdict
from benchd.dashboard import queries
from benchd.dashboard.changes import UPDATES, Change, Changes
from benchd.dashboard.layout import PATIENCE_S, frame, local, notice, record_path
from benchd.dashboard.limits import day_s
from benchd.dashboard.messages import Result
from benchd.dashboard.store import Store
from benchd.dashboard.text import energy, figure, median, short, verdict
from benchd.dashboard.views.changes import cause


def add(store: Store, changes: Changes) -> None:
    """Serve the view at /compare?a=KEY&b=KEY; `since` an update shows the verdict on the change between these sides."""

    @ui.page("/compare", response_timeout=PATIENCE_S)
    async def comparison(a: str = "", b: str = "", since: str = "setup") -> None:
        async with frame("Compare"):
            pair = [await to_thread(queries.result, store, key) for key in (a, b)]
            records = [await to_thread(queries.record, store, key) for key in (a, b)]
            if pair[0] is None or pair[1] is None or records[0] is None or records[1] is None:
                notice("Choose two results: select them in Results, then press Compare two.")
                return
            if any(PROFILED in side.flags for side in pair if side):
                notice("Profiles cannot be compared: measure the case with bench-once.")
                return
            change = await to_thread(_change, changes, since, a, b)
            answer = change.verdict if change else await to_thread(judged, records[0], records[1])
            mark = doubts.mark(filter(None, records))
            ui.label(f"{verdict(answer)}{mark}").classes(f"verdict {answer.answer}").mark("verdict")
            if change:
                ui.label(f"The newest of {change.runs[0]} and {change.runs[1]} runs; all of them decide together.")
                cause(change)
            ui.label(f"{_ratio(pair[0], pair[1])}{mark}").classes("soft")
            _side_by_side(pair[0], pair[1])
            changed = list(sameness.environment_differences(records[0].environment, records[1].environment))
            ui.label("Environment: " + ("; ".join(changed) or "the same")).classes("soft").mark("environment")


def _change(changes: Changes, since: str, a: str, b: str) -> Change | None:
    """Return the change in which these are the two sides' newest runs."""
    known = changes.update(since)[0] if since in UPDATES or day_s(since) is not None else []
    return next((change for change in known if (change.before_key, change.now_key) == (a, b)), None)


def judged(a: Record, b: Record) -> Verdict:
    """Return the verdict on B compared with A: inconclusive, with the reason, if they cannot be compared."""
    if a.case_id != b.case_id:
        line = shlex.join(["benchd", "compare", "--live", a.case_id, b.case_id])
        return Verdict(answer="inconclusive", reason=f"two cases; on one device {line} measures them alternately")
    comparison = compare([a], [b], MIN_EFFECT)
    return comparison[0].verdict if comparison else Verdict(answer="inconclusive", reason="unsupported on both sides")


def _side_by_side(a: Result, b: Result) -> None:
    rows = {
        "case": (a.case_id, b.case_id),
        "device": (a.device_id, b.device_id),
        "hardware": (a.hardware, b.hardware),
        "fingerprint": (a.fingerprint, b.fingerprint),
        "status": (a.status, b.status),
        "median [95 %]": (median(a), median(b)),
        "p99": (figure(a.p99_ms, "ms"), figure(b.p99_ms, "ms")),
        "throughput": (figure(a.throughput_per_s, "/s"), figure(b.throughput_per_s, "/s")),
        "energy per inference": (energy(a), energy(b)),
        "energy scope": (a.energy_scope or "-", b.energy_scope or "-"),
        "check": (a.checked or "-", b.checked or "-"),
        "x of floor": (figure(a.x_of_floor, "x"), figure(b.x_of_floor, "x")),
        "flags": (a.flags or "-", b.flags or "-"),
        "benchd": (a.tool_version, b.tool_version),
        "when": (local(a.measured_s), local(b.measured_s)),
    }
    headings = {"name": "", "a": "A", "b": "B"}
    columns = [{"name": name, "label": label, "field": name, "align": "left"} for name, label in headings.items()]
    table = [{"name": name, "a": short(left), "b": short(right)} for name, (left, right) in rows.items()]
    ui.table(rows=table, columns=columns, row_key="name").props("flat dense wrap-cells").style("width: 100%")
    with ui.row():
        ui.link("raw record of A", record_path(a.key)).classes("link")
        ui.link("raw record of B", record_path(b.key)).classes("link")


def _ratio(a: Result, b: Result) -> str:
    if not a.median_ms or b.median_ms is None:
        return "One of them was not measured, so there is no ratio."
    return f"The median of B is {figure(b.median_ms / a.median_ms)} times that of A."
