"""Comparisons on a terminal, as JUnit XML, which fails what the command fails, and as Markdown."""

import io
from xml.etree import ElementTree

import pytest

from benchd.daemon.reporting import comparisons
from benchd.daemon.verdicts.compare import FAIL_ON, Comparison, exit_code
from benchd.daemon.verdicts.effects import Interval, Verdict


def one(answer, **fields):
    verdict = Verdict(answer=answer, effect=0.1, interval=Interval(0.05, 0.2), confidence=0.95, reason="a | b\n<c>")
    given = {"first": "A", "second": answer, "verdict": verdict, "first_ms": [1.0] * 3, "second_ms": [1.1] * 3}
    return Comparison(**given | {"medians_ms": (1.0, 1.1), "check_failed": False} | fields)


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


def test_the_terminal_explains_the_interval_and_each_verdict_that_it_shows():
    out = io.StringIO()
    comparisons.print_comparisons(out, [one("same"), one("faster", mark=" (busy machine)")], as_json=False)
    text = out.getvalue()
    assert "FASTER (busy machine)" in text
    assert "<c> (busy machine)" in text  # the reason
    assert "[...]: where the true change lies, with the confidence given" in text
    assert "FASTER, SLOWER: the interval excludes 0" in text
    assert "SAME: a change that counts is ruled out" in text
    assert "INCONCLUSIVE" not in text


def test_what_was_broken_off_is_an_error_unless_it_fails():
    given = [one("inconclusive", broken_off=True), one("inconclusive", check_failed=True, broken_off=True)]
    suite = ElementTree.fromstring(comparisons.junit(given, ["check"]))  # noqa: S314
    assert [test[0].tag for test in suite] == ["error", "failure"]
    assert [suite.get(name) for name in ("failures", "errors", "skipped")] == ["1", "1", "0"]


def test_what_a_worker_wrote_last_is_valid_xml():
    reason = "\x1b[31mout of luck\x1b[0m"
    broken = [one("inconclusive", verdict=Verdict(answer="inconclusive", reason=reason), broken_off=True)]
    suite = ElementTree.fromstring(comparisons.junit(broken, []))  # noqa: S314
    assert "out of luck" in suite[0][0].get("message")
