"""`benchd report`: records as a page, Markdown, CSV or JSON."""

import csv
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

import msgspec

from benchd.daemon import journal
from benchd.daemon.errors import NotAvailable
from benchd.daemon.journal import explaining
from benchd.daemon.reporting.brief import Brief
from benchd.daemon.reporting.cells import COLUMNS
from benchd.daemon.reporting.console import print_decisions
from benchd.daemon.reporting.spool import Spool, spooled
from benchd.daemon.reporting.tables import escaped, markdown_table
from benchd.daemon.verdicts.recommend import Decision, Requirements, decide, exclusions, line
from benchd.daemon.verdicts.rows import spreadsheet
from benchd.daemon.verdicts.spiking import comparisons


def report(paths: Sequence[Path], formats: Sequence[str], output: Path, out: TextIO) -> None:
    """Write the records of these files as `report.FORMAT` into `output`; print the decisions and the paths.

    Raises NotAvailable if the page's packages are absent, and UsageError if the folder cannot be written.
    """
    if "html" in formats:
        require_page()
    with explaining(output), spooled(paths, output) as found:
        decisions = decide(found.decisive, Requirements())
        output.mkdir(parents=True, exist_ok=True)
        for name in formats:
            journal.replace(output / f"report.{name}", map(str.encode, FORMATS[name](found, decisions)))
    print_decisions(out, decisions, as_json=False)
    out.writelines(f"{one.line}\n" for one in comparisons(found.decisive))
    out.writelines(f"{output / f'report.{name}'}\n" for name in formats)


def page(folder: Path, target: Path | None = None) -> Path:
    """Write the page of a folder's records, into it unless a `target` is given, and return its path."""
    path = target or folder / "report.html"
    require_page()
    with explaining(path), spooled([folder], path.parent) as found:
        journal.replace(path, map(str.encode, _html(found, decide(found.decisive, Requirements()))))
    return path


def require_page() -> None:
    """Raise NotAvailable if the page's package is absent."""
    if importlib.util.find_spec("jinja2") is None:
        raise NotAvailable("a page needs the package jinja2: pip install 'benchd[report]'")


class _Line:
    """The file of a csv writer that returns each line in place of keeping it."""

    def write(self, text: str) -> str:
        return text


def _csv(found: Spool, decisions: Sequence[Decision]) -> Iterator[str]:
    writer = csv.writer(_Line(), lineterminator="\n")
    for number, flat in enumerate(found.rows()):
        if not number:
            yield writer.writerow(flat)
        yield writer.writerow(map(spreadsheet, flat.values()))


def _json(found: Spool, decisions: Sequence[Decision]) -> Iterator[str]:
    said = [
        {"subject": one.subject, "ship": one.ship, "fastest": one.fastest, "line": line(one), "excluded": one.excluded}
        for one in decisions
    ]
    ratios = [{"line": one.line, **msgspec.to_builtins(one)} for one in comparisons(found.decisive)]
    yield msgspec.json.encode({"decisions": said, "snn_over_ann": ratios}).decode()[:-1] + ',"records":['
    for number, flat in enumerate(found.rows()):
        yield f"{',' if number else ''}{msgspec.json.encode(flat).decode()}"
    yield "]}\n"


def machines(found: Sequence[Brief]) -> list[str]:
    """Return each device with its hardware, power mode and clocks."""
    groups: dict[str, list[Brief]] = {}
    for brief in found:
        groups.setdefault(f"{brief.device_id}: {brief.machine}", []).append(brief)
    return [name + _clocks(group) for name, group in sorted(groups.items())]


def _clocks(group: Sequence[Brief]) -> str:
    """Return at which clocks these records ran, of which highest one; empty if not known."""
    known = [brief.clock_hz for brief in group if brief.clock_hz]
    if not known:
        return ""
    low, high = (f"{find(mean_hz for mean_hz, _ in known) / 1e6:.0f}" for find in (min, max))
    return f" | ran at {low if low == high else f'{low} to {high}'} of {known[0][1] / 1e6:.0f} MHz"


def caveats(found: Sequence[Brief]) -> list[str]:
    """Return what the figures cannot show: intervals of one process, and what the energies are of."""
    single = sum(len(brief.process_ms) == 1 for brief in found)
    notes = []
    if single:
        notes.append(
            f"{single} of {len(found)} records are of one process: their interval is of that process alone, and "
            f"processes differ; bench-once --processes 5 includes that"
        )
    return notes + [f"energy: {scope}" for scope in sorted({brief.scope for brief in found if brief.scope is not None})]


def _about(found: Spool) -> list[str]:
    return [*(one.line for one in comparisons(found.decisive)), *machines(found.briefs), *caveats(found.briefs)]


def _md(found: Spool, decisions: Sequence[Decision]) -> Iterator[str]:
    said = [text for one in decisions for text in (f"- {line(one)}", *(f"  - {why}" for why in exclusions(one)))]
    about = [f"- {text}" for text in _about(found)]
    table = markdown_table(list(COLUMNS.values()), found.cells())
    yield from (f"{text}\n" for text in ("# Report", "", *map(escaped, said), "", *map(escaped, about), ""))
    yield from (f"{text}\n" for text in table)


def _html(found: Spool, decisions: Sequence[Decision]) -> Iterator[str]:
    from benchd.daemon.reporting import report_page  # noqa: PLC0415 - the other formats need neither package

    yield report_page.page(found, decisions, _about(found), list(COLUMNS.values()))


FORMATS: dict[str, Callable[[Spool, Sequence[Decision]], Iterator[str]]] = {
    "html": _html,
    "md": _md,
    "csv": _csv,
    "json": _json,
}
