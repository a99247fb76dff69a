"""Writes a profile as a page and as Markdown: the findings first, then every table."""

from collections.abc import Sequence

from benchd.daemon.profiling.output.sections import Section, all_finding_lines, sections, warning
from benchd.daemon.profiling.profile import Profile
from benchd.daemon.reporting.report import require_page
from benchd.daemon.reporting.tables import escaped, markdown_table

MARKDOWN_ROWS = 30
"""The maximum number of rows per table in Markdown, except for the model's parts, which are all shown."""

PARTS = ("Components", "Layers")


def page(profile: Profile, sort: str) -> str:
    """Return the profile as an HTML page; raise NotAvailable if the required packages are not installed."""
    require_page()
    from benchd.daemon.profiling.output import report_page  # noqa: PLC0415 - Markdown needs neither package

    return report_page.page(profile, sections(profile, sort))


def markdown(profile: Profile, sort: str) -> str:
    """Return the profile as Markdown."""
    findings = [_finding(number, lines) for number, lines in enumerate(all_finding_lines(profile), 1)]
    tables = [_table(section) for section in sorted(sections(profile, sort), key=_depth)]
    doubt = [f"**{escaped(text)}**"] if (text := warning(profile)) else []
    head = [f"# Profile of {escaped(profile.case_id)}", *doubt, "## Findings", "\n".join(findings) or "None."]
    return "\n\n".join([*head, *tables]) + "\n"


def _depth(section: Section) -> int:
    """Return a key that sorts the kinds of time and the parts of the model before single operators and kernels."""
    leading = ("Profile", "Step time by category", *PARTS)
    return leading.index(section.title) if section.title in leading else len(leading)


def _finding(number: int, lines: Sequence[str]) -> str:
    first, *others = map(escaped, lines)
    return "\n".join([f"{number}. **{first}**", *(f"   - {line}" for line in others)])


def _table(section: Section) -> str:
    limit = len(section.rows) if section.title in PARTS else MARKDOWN_ROWS
    lines = markdown_table(section.headings, section.rows[:limit], section.words)
    hidden = len(section.rows) - limit
    note = [escaped(section.note)] * bool(section.note)
    more = [f"More rows in profile.json: {hidden}."] * (hidden > 0)
    return "\n\n".join([f"## {section.title}", *note, "\n".join(lines), *more])
