"""`benchd report`: records as a page, Markdown, CSV or JSON."""

import csv
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

import msgspec

from benchd.daemon.errors import NotAvailable
from benchd.daemon.records import Record, Requests, of_range
from benchd.daemon.reporting.console import print_decisions
from benchd.daemon.reporting.essentials import Essentials
from benchd.daemon.reporting.results_table import energy_and_error, machine, median_and_interval
from benchd.daemon.reporting.tables import escaped, markdown_table
from benchd.daemon.verdicts import accuracy, results
from benchd.daemon.verdicts.recommend import Decision, Requirements, decide, exclusions, line
from benchd.daemon.verdicts.rows import Cell, row, spreadsheet
from benchd.daemon.verdicts.spiking import comparisons


def report(paths: Sequence[Path], formats: Sequence[str], output: Path, out: TextIO) -> int:
    """Write the records of these files as `report.FORMAT` into `output`; print the decisions and the paths.

    Raises NotAvailable if the page's packages are absent.
    """
    if "html" in formats:
        require_page()
    found = sorted(results.read_all(paths, Essentials()), key=lambda record: record.t_wall)
    decisions = decide(found, Requirements())
    output.mkdir(parents=True, exist_ok=True)
    for name in formats:
        _replace(output / f"report.{name}", FORMATS[name](found, decisions))
    print_decisions(out, decisions, as_json=False)
    out.writelines(f"{one.line}\n" for one in comparisons(found))
    out.writelines(f"{output / f'report.{name}'}\n" for name in formats)
    return 0


def page(folder: Path) -> Path:
    """Write the page of a folder's records into it and return its path."""
    found = sorted(results.read(folder, Essentials()), key=lambda record: record.t_wall)
    path = folder / "report.html"
    require_page()
    _replace(path, _html(found, decide(found, Requirements())))
    return path


def _replace(path: Path, text: Iterable[str]) -> None:
    """Replace the file once all of its text is written, so that a format that fails leaves the last report."""
    unfinished = path.with_name(f".{path.name}.part")
    with unfinished.open("w", encoding="utf-8", newline="") as file:
        file.writelines(text)
    unfinished.replace(path)


def require_page() -> None:
    """Raise NotAvailable if the page's package is absent."""
    if importlib.util.find_spec("jinja2") is None:
        raise NotAvailable("a page needs the package jinja2: pip install 'benchd[report]'")


class _Line:
    """The file of a csv writer that returns each line in place of keeping it."""

    def write(self, text: str) -> str:
        return text


def _csv(found: Sequence[Record], decisions: Sequence[Decision]) -> Iterator[str]:
    writer = csv.writer(_Line(), lineterminator="\n")
    yield writer.writerow(row(found[0]))
    for record in found:
        yield writer.writerow(map(spreadsheet, row(record).values()))


def _json(found: Sequence[Record], decisions: Sequence[Decision]) -> Iterator[str]:
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
    ratios = [{"line": one.line, **msgspec.to_builtins(one)} for one in comparisons(found)]
    yield msgspec.json.encode({"decisions": said, "snn_over_ann": ratios}).decode()[:-1] + ',"records":['
    for number, record in enumerate(found):
        yield f"{',' if number else ''}{msgspec.json.encode(row(record)).decode()}"
    yield "]}\n"


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
    "accuracy_top1": "top-1 % [95 %]",
    "accuracy_drop": "drop % [95 %]",
    "processes": "processes",
    "status": "status",
}
"""The columns of a row that a person sees, and their headings."""


def cells(record: Record) -> list[str]:
    """Return a record's cells as a person sees them."""
    flat = row(record)
    flat |= {
        "scenario": " ".join([record.case.scenario, *record.case.demand]),
        "requests": _requests(record.requests),
        "median_ms": median_and_interval(record),
        "energy_per_inference_j": energy_and_error(record),
        "processes": f"{sum(process.timing is not None for process in record.processes)}",
    }
    if record.accuracy:
        flat |= {"accuracy_top1": accuracy.top1(record.accuracy), "accuracy_drop": accuracy.drop(record.accuracy)}
    return [_cell(flat[name]) for name in COLUMNS]


def _requests(found: Requests | None) -> str | None:
    """Return how many requests were asked, at which rate, and how many of them were not answered in time."""
    if found is None:
        return None
    return f"{found.asked} at {found.rate_hz:.4g} per second: {found.late} late, {found.dropped} dropped"


def _cell(value: Cell) -> str:
    if isinstance(value, bool):
        return "ok" if value else "FAILED"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "-" if value in (None, "") else str(value)


def machines(found: Sequence[Record]) -> list[str]:
    """Return each device with its hardware, power mode and clocks."""
    groups: dict[str, list[Record]] = {}
    for record in found:
        groups.setdefault(f"{record.device_id}: {machine(record.environment)}", []).append(record)
    return [name + _clocks(group) for name, group in sorted(groups.items())]


def _clocks(group: Sequence[Record]) -> str:
    """Return at which clocks these records ran, of which highest one; empty if not known."""
    known = [of for record in group if (of := of_range(record.environment, record.clocks))]
    if not known:
        return ""
    low, high = (f"{find(mean_hz for mean_hz, _ in known) / 1e6:.0f}" for find in (min, max))
    return f" | ran at {low if low == high else f'{low} to {high}'} of {known[0][1] / 1e6:.0f} MHz"


def caveats(found: Sequence[Record]) -> list[str]:
    """Return what the figures cannot show: intervals of one process, and what the energies are of."""
    single = sum(sum(process.timing is not None for process in record.processes) == 1 for record in found)
    notes = []
    if single:
        notes.append(
            f"{single} of {len(found)} records are of one process: their interval is of that process alone, and "
            f"processes differ; bench-once --processes 5 includes that"
        )
    return notes + [f"energy: {scope}" for scope in sorted({r.energy.scope for r in found if r.energy})]


def _about(found: Sequence[Record]) -> list[str]:
    return [*(one.line for one in comparisons(found)), *machines(found), *caveats(found)]


def _md(found: Sequence[Record], decisions: Sequence[Decision]) -> Iterator[str]:
    said = [text for one in decisions for text in (f"- {line(one)}", *(f"  - {why}" for why in exclusions(one)))]
    about = [f"- {text}" for text in _about(found)]
    table = markdown_table(list(COLUMNS.values()), map(cells, found))
    yield from (f"{text}\n" for text in ("# Report", "", *map(escaped, said), "", *map(escaped, about), ""))
    yield from (f"{text}\n" for text in table)


def _html(found: Sequence[Record], decisions: Sequence[Decision]) -> Iterator[str]:
    from benchd.daemon.reporting import report_page  # noqa: PLC0415 - the other formats need neither package

    table = [cells(record) for record in found[-report_page.ROWS :]]
    yield report_page.page(found, decisions, _about(found), list(COLUMNS.values()), table)


FORMATS: dict[str, Callable[[Sequence[Record], Sequence[Decision]], Iterator[str]]] = {
    "html": _html,
    "md": _md,
    "csv": _csv,
    "json": _json,
}
