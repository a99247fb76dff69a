"""A profile on a terminal: the head of each table, then the findings."""

from collections.abc import Sequence
from typing import TextIO

from rich.markup import escape
from rich.table import Table

from benchd.daemon.profiling.output.sections import INDENT, Section
from benchd.daemon.reporting.console import console_on

NAME_WIDTH = 60
ROWS = 15


def print_profile(out: TextIO, findings: Sequence[Sequence[str]], sections: Sequence[Section]) -> None:
    """Print the head of each table, then the findings, each in lines."""
    console = console_on(out)
    for section in sections:
        if section.words < len(section.headings):
            console.print(_section_table(section))
        else:  # in lines, so that a command in one can be copied
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


def _section_table(section: Section) -> Table:
    table = Table(title=escape(section.title), title_justify="left", box=None, pad_edge=False)
    for place, heading in enumerate(section.headings):
        is_word = place < section.words
        table.add_column(
            escape(heading), justify="left" if is_word else "right", max_width=NAME_WIDTH if is_word else None
        )
    groups = [row for row in section.rows if not row[0].startswith(INDENT)]
    shown = section.rows if len(section.rows) <= ROWS else groups
    for row in shown[:ROWS]:
        table.add_row(*map(escape, row))
    return table
