"""Comparisons as JUnit XML, which fails what the command fails, and as Markdown."""

from xml.etree import ElementTree

import pytest

from benchd.daemon.reporting import comparisons
from benchd.daemon.verdicts.compare import FAIL_ON, Comparison, exit_code
from benchd.daemon.verdicts.effects import Interval, Verdict


def one(answer, *, check_failed=False):
    verdict = Verdict(answer=answer, effect=0.1, interval=Interval(0.05, 0.2), confidence=0.95, reason="a | b\n<c>")
    return Comparison(
        first="A", second=answer, verdict=verdict, first_ms=[1.0] * 3, second_ms=[1.1] * 3, check_failed=check_failed
    )


GIVEN = [one("same"), one("slower"), one("inconclusive"), one("faster", check_failed=True)]


@pytest.mark.parametrize(
    ("fail_on", "outcomes"),
    [
        (list(FAIL_ON), ["system-out", "failure", "failure", "failure"]),
        (["slower"], ["system-out", "failure", "skipped", "system-out"]),
        ([], ["system-out", "system-out", "skipped", "system-out"]),
    ],
)
def test_a_test_fails_where_the_command_does(fail_on, outcomes):
    suite = ElementTree.fromstring(comparisons.junit(GIVEN, fail_on))  # noqa: S314
    assert [test[0].tag for test in suite] == outcomes
    assert (suite.get("tests"), suite.get("failures")) == ("4", str(outcomes.count("failure")))
    assert bool(exit_code(GIVEN, fail_on)) == ("failure" in outcomes)
    assert "+10.00 % [+5.00, +20.00 at 95 %]" in (suite[1][0].get("message") or suite[1][0].text)


def test_markdown_keeps_to_its_cells():
    table, _, remarks = comparisons.markdown(GIVEN).partition("\n\n- ")
    assert {line.replace("\\|", "").count("|") for line in table.splitlines()[2:]} == {7}
    assert "a \\| b &lt;c>" in remarks
    assert table.splitlines()[4].startswith("| faster against A | 1 | 1.1 |")  # the failed check leads
