"""`benchd report`: records as a page, Markdown, CSV or JSON."""

import csv
import importlib.util
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import TextIO

import msgspec

from benchd.daemon.errors import NotAvailable
from benchd.daemon.records import Record
from benchd.daemon.reporting.console import print_decisions
from benchd.daemon.verdicts import accuracy, results
from benchd.daemon.verdicts.recommend import Decision, Requirements, decide, exclusions, line
from benchd.daemon.verdicts.rows import Cell, row, spreadsheet


def report(paths: Sequence[Path], formats: Sequence[str], output: Path, out: TextIO) -> int:
    """Write the records of these files as `report.FORMAT` into `output`; print the decisions and the paths.

    Raises NotAvailable if the page's packages are absent.
    """
    found = sorted(results.read_all(paths), key=lambda record: record.t_wall)
    decisions = decide(found, Requirements())
    texts = {name: FORMATS[name](found, decisions) for name in formats}
    output.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (output / f"report.{name}").write_text(text, encoding="utf-8")
    print_decisions(out, decisions, as_json=False)
    out.writelines(f"{output / f'report.{name}'}\n" for name in formats)
    return 0


def page(folder: Path) -> Path:
    """Write the page of a folder's records into it and return its path."""
    found = sorted(results.read(folder), key=lambda record: record.t_wall)
    path = folder / "report.html"
    path.write_text(_html(found, decide(found, Requirements())), encoding="utf-8")
    return path


def require_page() -> None:
    """Raise NotAvailable if the page's packages are absent."""
    for package in ("plotly", "jinja2"):
        if importlib.util.find_spec(package) is None:
            raise NotAvailable(f"a page needs the package {package}: pip install 'benchd[report]'")


def _csv(found: Sequence[Record], decisions: Sequence[Decision]) -> str:
    text = StringIO()
    writer = csv.DictWriter(text, list(row(found[0])), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: spreadsheet(value) for name, value in row(record).items()} for record in found)
    return text.getvalue()


def _json(found: Sequence[Record], decisions: Sequence[Decision]) -> str:
    said = [
        {
            "subject": one.subject,
            "ship": one.ship,
            "fastest": one.fastest,
            "line": line(one),
            "excluded": one.excluded,
        }
        for one in decisions
    ]
    return msgspec.json.encode({"decisions": said, "records": [row(record) for record in found]}).decode() + "\n"


COLUMNS = {
    "device_id": "device",
    "model": "model",
    "options": "options",
    "variant": "variant",
    "provider": "provider",
    "batch_size": "batch",
    "direction": "direction",
    "scenario": "scenario",
    "median_ms": "median ms",
    "p99_ms": "p99 ms",
    "clean_ms": "ms undisturbed",
    "throughput_per_s": "per second",
    "energy_per_inference_j": "energy J",
    "memory_mib": "memory MiB",
    "x_of_floor": "x of floor",
    "check": "check",
    "agreement": "agreement",
    "accuracy_top1": "top-1 % [95 %]",
    "accuracy_drop": "drop % [95 %]",
    "status": "status",
}
"""The columns of a row that a person sees, and their headings."""


def cells(record: Record) -> list[str]:
    """Return a record's cells as a person sees them."""
    flat = row(record)
    if record.accuracy:
        flat |= {"accuracy_top1": accuracy.top1(record.accuracy), "accuracy_drop": accuracy.drop(record.accuracy)}
    return [_cell(flat[name]) for name in COLUMNS]


def _cell(value: Cell) -> str:
    if isinstance(value, bool):
        return "ok" if value else "FAILED"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "-" if value in (None, "") else str(value)


def _md(found: Sequence[Record], decisions: Sequence[Decision]) -> str:
    rows = [list(COLUMNS.values()), ["---"] * len(COLUMNS), *map(cells, found)]
    table = [f"| {' | '.join(escaped(text) for text in texts)} |" for texts in rows]
    said = [text for one in decisions for text in (f"- {line(one)}", *(f"  - {why}" for why in exclusions(one)))]
    return "\n".join(["# Report", "", *map(escaped, said), "", *table]) + "\n"


def escaped(text: str) -> str:
    """Return the text escaped for a table cell in Markdown."""
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def _html(found: Sequence[Record], decisions: Sequence[Decision]) -> str:
    require_page()
    from benchd.daemon.reporting import report_page  # noqa: PLC0415 - the other formats need neither package

    headings, table = list(COLUMNS.values()), [cells(record) for record in found]
    return report_page.page(found, decisions, headings, table)


FORMATS: dict[str, Callable[[Sequence[Record], Sequence[Decision]], str]] = {
    "html": _html,
    "md": _md,
    "csv": _csv,
    "json": _json,
}
