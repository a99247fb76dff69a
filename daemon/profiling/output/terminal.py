"""A profile on a terminal: the first rows of each table, then the findings."""

from collections.abc import Sequence
from typing import TextIO

from rich.markup import escape
from rich.table import Table

from benchd.daemon.profiling.comparison import ProfileChange, ProfileChanges
from benchd.daemon.profiling.output.sections import INDENT, Section, all_finding_lines, sections, terms, warning
from benchd.daemon.profiling.profile import Profile
from benchd.daemon.reporting.console import console_on
from benchd.daemon.reporting.results_table import figure
from benchd.daemon.reporting.tables import figures, print_rows

NAME_WIDTH, NAME_LEAST = 60, 24  # columns of a name, which is folded
GAP = 2  # columns between two others
ROWS = 15


SPARE = ("calls", "CPU avg us", "device avg us", "CPU total %", "min us", "max us", "low ms", "high ms")
"""The headings of columns that a narrow terminal leaves out first."""


def print_profile(out: TextIO, profile: Profile, sort: str) -> None:
    """Print any warning, the first rows of each table and what their headings mean, then the lines of each finding."""
    console = console_on(out)
    if doubt := warning(profile):
        console.print(f"warning: {doubt}\n", markup=False)
    fitted = [_fitted(section, console.width) for section in sections(profile, sort)]
    for section in fitted:
        if section.words < len(section.headings):
            console.print(_section_table(section, console.width))
        else:  # printed as lines, so that a command in them can be copied
            console.print("\n".join([section.title, *map(": ".join, section.rows)]), markup=False)
        if section.note:
            console.print(section.note, markup=False)
        console.print()
    if words := terms(fitted):
        console.print(f"{words}\n", markup=False)
    findings = all_finding_lines(profile)
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
            counts = f"{len(changes)} changed, {comparison.same[kind]} did not"
            console.print(f"{kind}s: {counts}{more}{comparison.mark}", markup=False)
    console.print(f"Steps vary by ±{100 * comparison.noise:.2g} % within a profile; smaller changes are ignored.")
    for text in comparison.differences:
        console.print(f"differs: {text}", markup=False)


def _changed(change: ProfileChange) -> list[str]:
    share = f"{100 * change.added_ns / change.before_ns:+.3g}" if change.before_ns and change.after_ns else "-"
    times = [figure(None if ns is None else ns / 1e6) for ns in (change.before_ns, change.after_ns)]
    return [change.name, *times, f"{change.added_ns / 1e6:+.4g}", share]


def _fitted(section: Section, width: int) -> Section:
    """Return the first rows of a table, without the columns for which the terminal is too narrow."""
    groups = [row for row in section.rows if not row[0].startswith(INDENT)]
    rows = (section.rows if len(section.rows) <= ROWS else groups)[:ROWS]
    places, hidden = list(range(len(section.headings))), list[str]()
    while sum(_width(section, rows, place) + GAP for place in places) > width and len(places) > section.words + 1:
        spare = [place for place in places if section.headings[place] in SPARE]
        places.remove(left_out := max(spare or places))
        hidden.append(section.headings[left_out])
    note = f"{section.note} Not shown in {width} columns: {', '.join(hidden)}." if hidden else section.note
    headings = [section.headings[place] for place in places]
    return section._replace(
        note=note.strip(), headings=headings, rows=[[row[place] for place in places] for row in rows]
    )


def _width(section: Section, rows: Sequence[Sequence[str]], place: int) -> int:
    """Return the least width of a column: of its figures, or of a name that is folded."""
    longest = max(map(len, [*section.headings[place].split(), *(row[place] for row in rows)]), default=0)
    return min(longest, NAME_LEAST) if place < section.words else longest


def _section_table(section: Section, width: int) -> Table:
    table = Table(title=escape(section.title), title_justify="left", box=None, pad_edge=False)
    longest = [max(map(len, column)) for column in zip(section.headings, *section.rows, strict=True)]
    is_tight = sum(min(size, NAME_WIDTH) + GAP for size in longest) > width
    for place, heading in enumerate(map(escape, section.headings)):
        if place < section.words:
            table.add_column(heading, overflow="fold", max_width=NAME_WIDTH)
        else:  # only names give way
            table.add_column("\n".join(heading.split()) if is_tight else heading, justify="right", no_wrap=True)
    for row in section.rows:
        table.add_row(*map(escape, row))
    return table
