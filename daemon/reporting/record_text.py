"""A record as lines of text: what was measured, its environment, and what is missing."""

import textwrap
from collections.abc import Iterator, Mapping

import msgspec

from benchd.daemon.records import Record
from benchd.daemon.reporting.results_table import figure
from benchd.daemon.verdicts.compare import command
from benchd.daemon.verdicts.rows import row

WIDTH, INDENT = 80, 26


def lines(record: Record, where: str = "") -> Iterator[str]:
    """Yield the lines of a record, at most 80 columns wide except for the command, which is copied whole.

    `where` is its file or folder, for that command.
    """
    environment = msgspec.structs.asdict(record.environment)
    groups = {name: value for name, value in environment.items() if isinstance(value, dict)}
    yield f"{record.case_id}: {record.status}{f', {record.reason}' if record.reason else ''}"
    yield from _section("", {name: value for name, value in row(record).items() if name not in ("status", "reason")})
    yield from _section("environment", {name: value for name, value in environment.items() if name not in groups})
    for name, group in {**groups, "limits": record.limits, "missing": record.missing}.items():
        yield from _section(name, group)
    yield "measure it again"
    yield f"  {command(record, records=where)}"
    yield ""


def _section(name: str, facts: Mapping[str, object]) -> Iterator[str]:
    """Yield a heading and a line for each known fact; nothing without facts."""
    known = {name: _text(value) for name, value in facts.items() if value not in (None, "", [], {})}
    yield from [name] if known and name else []
    for key, text in known.items():
        first = f"  {key}".ljust(INDENT - 1) + " "
        rest = " " * INDENT
        yield textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def _text(value: object) -> str:
    if isinstance(value, float):
        return figure(value)
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
