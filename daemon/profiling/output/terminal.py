"""A profile on a terminal: the first rows of each table, then the findings."""

from collections.abc import Sequence
from typing import TextIO

from rich.markup import escape
from rich.table import Table

from benchd.daemon.profiling.comparison import ProfileChange, ProfileChanges
from benchd.daemon.profiling.output.sections import INDENT, Section
from benchd.daemon.reporting.console import console_on
from benchd.daemon.reporting.results_table import figure
from benchd.daemon.reporting.tables import figures, print_rows

NAME_WIDTH = 60
ROWS = 15


def print_profile(out: TextIO, findings: Sequence[Sequence[str]], sections: Sequence[Section]) -> None:
    """Print the first rows of each table, then the lines of each finding."""
    console = console_on(out)
    for section in sections:
        if section.words < len(section.headings):
            console.print(_section_table(section))
        else:  # printed as lines, so that a command in them can be copied
            console.print("\n".join([section.title, *map(": ".join, section.rows)]), markup=False)
        if section.note:
            console.print(section.note, markup=False)
        console.print()
    for number, (first, *others) in enumerate(findings, 1):
        console.print(f"{number}. {first}", markup=False)
        for text in others:
            console.print(f"     {text}", markup=False)
    if not findings:
        console.print("no findings")


def print_compared(out: TextIO, comparison: ProfileChanges) -> None:
    """Print the changes from A to B, largest first, and any other differences between the profiles."""
    console = console_on(out)
    columns = ["what", *figures("A ms", "B ms", "B - A ms", "change %")]
    print_rows(console, columns, [_changed(comparison.step)], f"time per step, B against A{comparison.mark}")
    for kind, changes in comparison.changed.items():
        if changes:
            print_rows(console, columns, [_changed(change) for change in changes[:ROWS]], f"{kind}s{comparison.mark}")
        if comparison.same[kind] or changes:
            more = f", {len(changes) - ROWS} smaller changes not shown" if len(changes) > ROWS else ""
            console.print(f"{kind}s: {len(changes)} changed, {comparison.same[kind]} did not{more}", markup=False)
    console.print(f"Steps vary by ±{100 * comparison.noise:.2g} % within a profile; smaller changes are ignored.")
    for text in comparison.differences:
        console.print(f"differs: {text}", markup=False)


def _changed(change: ProfileChange) -> list[str]:
    share = f"{100 * change.added_ns / change.before_ns:+.3g}" if change.before_ns and change.after_ns else "-"
    times = [figure(None if ns is None else ns / 1e6) for ns in (change.before_ns, change.after_ns)]
    return [change.name, *times, f"{change.added_ns / 1e6:+.4g}", share]


def _section_table(section: Section) -> Table:
    table = Table(title=escape(section.title), title_justify="left", box=None, pad_edge=False)
    for place, heading in enumerate(section.headings):
        is_word = place < section.words
        table.add_column(
            escape(heading), justify="left" if is_word else "right", max_width=NAME_WIDTH if is_word else None
        )
    groups = [row for row in section.rows if not row[0].startswith(INDENT)]
    rows = section.rows if len(section.rows) <= ROWS else groups
    for row in rows[:ROWS]:
        table.add_row(*map(escape, row))
    return table
