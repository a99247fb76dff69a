"""`benchd report`: writes records as a page, Markdown, CSV or JSON."""

import csv
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

import msgspec

from benchd.daemon import journal
from benchd.daemon.errors import NotAvailable
from benchd.daemon.journal import explaining
from benchd.daemon.machine.installed import adding
from benchd.daemon.records import Record, of_range
from benchd.daemon.reporting.cells import COLUMNS, cells
from benchd.daemon.reporting.console import check_notes, print_decisions
from benchd.daemon.reporting.results_table import machine
from benchd.daemon.reporting.tables import escaped, markdown_table
from benchd.daemon.verdicts import results
from benchd.daemon.verdicts.recommend import Decision, Requirements, decide, exclusions, line
from benchd.daemon.verdicts.rows import row, spreadsheet
from benchd.daemon.verdicts.spiking import comparisons


def report(paths: Sequence[Path], formats: Sequence[str], output: Path, out: TextIO) -> None:
    """Write the newest records of these files as `report.FORMAT` in `output`; print the decisions and the paths.

    Raises NotAvailable if the page's packages are missing, and UsageError if the folder is not writable.
    """
    if "html" in formats:
        require_page()
    records, left_out = results.newest(paths)
    decisions = decide(records, Requirements())
    with explaining(output):
        output.mkdir(parents=True, exist_ok=True)
    for name in formats:
        journal.replace(output / f"report.{name}", map(str.encode, FORMATS[name](records, left_out, decisions)))
    print_decisions(out, decisions, as_json=False)
    out.writelines(f"{text}\n" for text in (*_of_spikes(records), *_left_out(left_out)))
    out.writelines(f"{output / f'report.{name}'}\n" for name in formats)


def page(folder: Path, target: Path | None = None) -> Path:
    """Write the page of a folder's records, in the folder unless a `target` is given, and return its path."""
    path = target or folder / "report.html"
    require_page()
    records, left_out = results.newest([folder])
    journal.replace(path, map(str.encode, _html(records, left_out, decide(records, Requirements()))))
    return path


def require_page() -> None:
    """Raise NotAvailable if the page's package is missing."""
    if importlib.util.find_spec("jinja2") is None:
        raise NotAvailable(f"a page needs the package jinja2: {adding('report')}")


class _Line:
    """A file for a csv writer that returns each line instead of storing it."""

    def write(self, text: str) -> str:
        return text


def _csv(records: Sequence[Record], left_out: int, decisions: Sequence[Decision]) -> Iterator[str]:
    writer = csv.writer(_Line(), lineterminator="\n")
    for number, flat in enumerate(map(row, records)):
        if not number:
            yield writer.writerow(flat)
        yield writer.writerow(map(spreadsheet, flat.values()))


def _json(records: Sequence[Record], left_out: int, decisions: Sequence[Decision]) -> Iterator[str]:
    rows = [
        {
            "subject": decision.subject,
            "ship": decision.ship,
            "fastest": decision.fastest,
            "line": line(decision),
            "excluded": decision.excluded,
        }
        for decision in decisions
    ]
    ratios = [{"line": ratio.line, **msgspec.to_builtins(ratio)} for ratio in comparisons(records)]
    about = {"decisions": rows, "snn_over_ann": ratios, "left_out": left_out}
    yield msgspec.json.encode(about).decode()[:-1] + ',"records":['
    for number, flat in enumerate(map(row, records)):
        yield f"{',' if number else ''}{msgspec.json.encode(flat).decode()}"
    yield "]}\n"


def machines(records: Sequence[Record]) -> list[str]:
    """Return each device with its hardware, power mode and clocks."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(f"{record.device_id}: {machine(record.environment)}", []).append(record)
    return [name + _clocks(group) for name, group in sorted(groups.items())]


def _clocks(group: Sequence[Record]) -> str:
    """Return the clocks of these records, including the maximum; empty if unknown."""
    known = [clock_hz for record in group if (clock_hz := of_range(record.environment, record.telemetry))]
    if not known:
        return ""
    low, high = (f"{find(mean_hz for mean_hz, _ in known) / 1e6:.0f}" for find in (min, max))
    return f" | ran at {low if low == high else f'{low} to {high}'} of {known[0][1] / 1e6:.0f} MHz"


def caveats(records: Sequence[Record]) -> list[str]:
    """Return the limits of the figures: intervals within one process, notes of checks, and the scope of energies."""
    single = sum(sum(process.timing is not None for process in record.processes) == 1 for record in records)
    notes = []
    if single:
        notes.append(
            f"{single} of {len(records)} records with only one process: the interval is for that process alone; "
            "bench-once --processes 5 also captures how processes differ"
        )
    return [*notes, *check_notes(records)] + [
        f"energy: {scope}" for scope in sorted({record.energy.scope for record in records if record.energy})
    ]


def _left_out(count: int) -> list[str]:
    return [f"{count} older records left out: a report shows the newest {results.NEWEST}"] if count else []


def _of_spikes(records: Sequence[Record]) -> list[str]:
    return [ratio.line for ratio in comparisons(records)]


def _about(records: Sequence[Record], left_out: int) -> list[str]:
    return [*_left_out(left_out), *_of_spikes(records), *machines(records), *caveats(records)]


def _md(records: Sequence[Record], left_out: int, decisions: Sequence[Decision]) -> Iterator[str]:
    lines = [
        text
        for decision in decisions
        for text in (f"- {line(decision)}", *(f"  - {why}" for why in exclusions(decision)))
    ]
    about = [f"- {text}" for text in _about(records, left_out)]
    table = markdown_table(list(COLUMNS.values()), map(cells, records))
    yield from (f"{text}\n" for text in ("# Report", "", *map(escaped, lines), "", *map(escaped, about), ""))
    yield from (f"{text}\n" for text in table)


def _html(records: Sequence[Record], left_out: int, decisions: Sequence[Decision]) -> Iterator[str]:
    from benchd.daemon.reporting import report_page  # noqa: PLC0415 - the other formats need neither package

    yield report_page.page(records, decisions, _about(records, left_out), list(COLUMNS.values()))


FORMATS: dict[str, Callable[[Sequence[Record], int, Sequence[Decision]], Iterator[str]]] = {
    "html": _html,
    "md": _md,
    "csv": _csv,
    "json": _json,
}
