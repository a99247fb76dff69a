"""Formats comparisons as a terminal table, as Markdown for a comment and as JUnit XML for a CI system."""

import re
from collections.abc import Sequence
from typing import TextIO
from xml.etree import ElementTree

import msgspec
from rich.text import Text

from benchd.daemon.reporting.console import console_on
from benchd.daemon.reporting.results_table import figure
from benchd.daemon.reporting.tables import ALARM, GOOD, Cell, escaped, figures, markdown_table, print_rows
from benchd.daemon.verdicts.compare import Comparison, fails
from benchd.daemon.verdicts.results import printable

HEADINGS = ("case", "A ms", "B ms", "change [interval]", "processes", "verdict")
TITLE = "B against A, + is slower"


def print_comparisons(out: TextIO, comparisons: Sequence[Comparison], as_json: bool) -> None:
    """Print one row per comparison, failed checks first, and why any of them is inconclusive; or print JSON."""
    if as_json:
        out.write(msgspec.json.encode(comparisons).decode() + "\n")
        return
    console = console_on(out)
    columns = [HEADINGS[0], *figures(*HEADINGS[1:-1]), HEADINGS[-1]]
    rows = [_row(comparison) for comparison in sorted(comparisons, key=_calm)]
    print_rows(console, columns, rows, TITLE)
    for meaning in _meanings(comparisons):
        console.print(meaning, markup=False)
    for remark in _all_remarks(comparisons):
        console.print(remark, markup=False)


def markdown(comparisons: Sequence[Comparison]) -> str:
    """Return the same table and remarks for a comment on a change."""
    table = markdown_table(
        HEADINGS, [[str(cell) for cell in _row(comparison)] for comparison in sorted(comparisons, key=_calm)]
    )
    remarks = [f"- {escaped(remark)}" for remark in _all_remarks(comparisons)]
    return "\n".join([f"{TITLE}.", "", *table, "", *remarks]) + "\n"


def junit(comparisons: Sequence[Comparison], fail_on: Sequence[str]) -> str:
    """Return one test per comparison: failed if `fail_on` applies, an error if a process failed or was interrupted.

    Other undecided comparisons count as skipped. Control characters, which XML cannot contain, are replaced.
    """
    suite = ElementTree.Element("testsuite", name="benchd compare", tests=str(len(comparisons)))
    for comparison in comparisons:
        test = ElementTree.SubElement(suite, "testcase", classname="benchd", name=printable(_case(comparison)))
        words = printable("\n".join([" ".join(map(str, _row(comparison)[1:])), *_remarks(comparison, "")]))
        if fails(comparison, fail_on):
            ElementTree.SubElement(test, "failure", message=words)
        elif comparison.broken_off:
            ElementTree.SubElement(test, "error", message=words)
        elif comparison.verdict.answer == "inconclusive":
            ElementTree.SubElement(test, "skipped", message=words)
        else:
            ElementTree.SubElement(test, "system-out").text = words
    for name, kind in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(len(suite.findall(f"testcase/{kind}"))))
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _all_remarks(comparisons: Sequence[Comparison]) -> list[str]:
    """Return the remarks on each comparison, with its case if there are several."""
    cases = [f"{_case(comparison)}: " if comparisons[1:] else "" for comparison in comparisons]
    return [
        remark for comparison, case in zip(comparisons, cases, strict=True) for remark in _remarks(comparison, case)
    ]


def _remarks(comparison: Comparison, case: str) -> list[str]:
    """Return the reasons for the verdict, and the differences that do not prevent it."""
    verdict, layers = comparison.verdict, comparison.layers
    reasons = [f"{verdict.answer}: {case}{verdict.reason}{comparison.mark}"] if verdict.reason else []
    reasons += [f"where: {case}{layers.sentence}{comparison.mark}"] if layers else []
    return reasons + [f"note: {case}{note}" for note in comparison.notes]


def _meanings(comparisons: Sequence[Comparison]) -> list[str]:
    """Return in plain words what the intervals and verdicts of these comparisons mean."""
    answers = {comparison.verdict.answer for comparison in comparisons}
    has_interval = any(comparison.verdict.interval for comparison in comparisons)
    meanings = {
        "[...]: where the true change lies, with the confidence given": has_interval,
        "FASTER, SLOWER: the interval excludes 0, and the change is large enough to count": {"faster", "slower"}
        & answers,
        "SAME: a change that counts is ruled out": "same" in answers,
        "INCONCLUSIVE: neither a change nor the absence of one is shown": "inconclusive" in answers,
    }
    return [text for text, is_shown in meanings.items() if is_shown]


def _case(comparison: Comparison) -> str:
    """Return the names of what is compared, or a single name if both sides have the same case."""
    case, _, of_first = comparison.first.partition(" ")
    if comparison.first == comparison.second:
        return comparison.second
    if comparison.second.startswith(f"{case} "):
        return f"{comparison.second} against {re.sub('^(of|by) ', '', of_first)}"
    return f"{comparison.second} against {comparison.first}"


def _calm(comparison: Comparison) -> tuple[bool, bool]:
    """Return a sort key: failed checks first, then slower cases."""
    return not comparison.check_failed, comparison.verdict.answer != "slower"


def _row(comparison: Comparison) -> list[Cell]:
    verdict = comparison.verdict
    change = "-" if verdict.effect is None else f"{100 * verdict.effect:+.2f} %"
    if verdict.interval and verdict.confidence:
        interval = f"{100 * verdict.interval.low:+.2f}, {100 * verdict.interval.high:+.2f}"
        change += f" [{interval} at {100 * verdict.confidence:.4g} %]"
    answer = (verdict.answer.upper(), {"faster": GOOD, "slower": ALARM}.get(verdict.answer, ""))
    failed = [(" check FAILED", ALARM)] if comparison.check_failed else []
    verdict_cell = Text.assemble(answer, *failed, comparison.mark)
    return [
        _case(comparison),
        *map(figure, comparison.medians_ms),
        change,
        f"{len(comparison.first_ms)}, {len(comparison.second_ms)}",
        verdict_cell,
    ]
