"""The search with a session of its own, on workers whose times depend on what their environment contains."""

import io
import json
import re
from dataclasses import replace

import msgspec
import pytest
from packages_made import environment, package
from sessions_made import session
from stub_interpreter import interpreter

from benchd.daemon.errors import NotAvailable, UsageError
from benchd.daemon.measuring.paired import Request
from benchd.daemon.why import comparisons, text
from benchd.daemon.why.comparing import Explaining
from benchd.daemon.why.comparisons import Comparing
from benchd.daemon.why.environments import EnvironmentSide

CASE = "square,eager,b1,size=16"
MODULES = "{p.name: p.read_text() for p in __import__('pathlib').Path(sys.argv[0]).parents[1].glob('lib/*/*/*.py')}"
SLOW = f"(5 + turn % 3 / 1000) * (1.2 if \"'2.0'\" in {MODULES}.get('guilty.py', '') else 1)"
NAMES = ("alpha", "beta", "gamma", "guilty", "omega")


@pytest.fixture
def explaining(tmp_path):
    """Return a function that prepares a search over five packages of version 1.0 and 2.0, with workers of `ms`."""
    with session(tmp_path / "out") as opened:

        def prepared(ms, first=None, second=None, **fields):
            base = interpreter(tmp_path / "base", ms, **fields)
            packages = [[package(tmp_path / version, name, version) for name in NAMES] for version in ("1.0", "2.0")]
            a, b = (environment(each, base=base) for each in packages)
            sides = EnvironmentSide(a, first or {}), EnvironmentSide(b, second or {})
            return Explaining(*sides, Request([CASE], "quick", 0.01), Comparing(opened, io.StringIO()))

        yield prepared


def test_the_package_is_named_with_its_cost_and_a_search_that_was_cut_off_goes_on(explaining, tmp_path):
    explanation = explaining(SLOW).explain()
    assert explanation.verdict.answer == "slower"
    assert not explanation.is_open
    (cause,) = json.loads(msgspec.json.encode(explanation))["causes"]
    assert cause["differences"] == ["guilty 1.0 → 2.0"]
    assert cause["interval"]["low"] <= 0.2 <= cause["interval"]["high"]
    change = r"\+20\.0 % \[\+(19\.9|20\.0), \+20\.[01]\]"
    first, second, *_ = quiet = list(text.lines(msgspec.structs.replace(explanation, mark="")))
    busy = msgspec.structs.replace(explanation, mark=" (busy machine)")
    assert list(text.lines(busy)) == [f"{line} (busy machine)" for line in quiet]
    assert re.fullmatch(rf"{re.escape(CASE)}: B is slower: {change}", first)
    assert re.fullmatch(rf"  guilty 1\.0 → 2\.0, alone: {change}", second)
    log, turns = tmp_path / "out" / comparisons.LOG, (tmp_path / "log").read_text()
    assert explaining(SLOW).explain() == explanation
    assert (tmp_path / "log").read_text() == turns
    *whole, last = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(whole) + last[:20])
    again = explaining(SLOW)
    assert again.explain().causes[0].differences == ["guilty 1.0 → 2.0"]
    assert again.comparing.err.getvalue().count("measured before") == explanation.comparisons - 1


def test_a_variable_is_named_as_a_package_is(explaining):
    ms = "(5 + turn % 3 / 1000) * (1.2 if os.environ.get('GUILTY') == 'yes' else 1)"
    explanation = explaining(ms, {"SAME": "1"}, {"SAME": "1", "GUILTY": "yes"}).explain()
    assert [cause.differences for cause in explanation.causes] == [["GUILTY absent → yes"]]


def test_a_part_of_the_case_is_named_and_parts_that_exclude_each_other_are_passed_over(explaining):
    ms = "(5 + turn % 3 / 1000) * (1.2 if '\"threads\":1' in job else 1)"
    search = explaining(ms, {"SAME": "1"}, {"SAME": "1"})
    search.second, search.request = search.first, replace(search.request, cases=[CASE, f"{CASE},threads=1,seed=7"])
    assert [cause.differences for cause in search.explain().causes] == [["default → threads=1"]]


def test_sides_of_one_speed_name_nobody_and_originals_that_differ_say_where_to_look(explaining, tmp_path):
    steady = "5 + turn % 3 / 1000"
    explanation = explaining(steady).explain()
    assert (explanation.verdict.answer, explanation.causes, explanation.comparisons) == ("same", [], 1)
    assert list(text.lines(msgspec.structs.replace(explanation, mark=""))) == ["B is as fast as A"]
    originals = [interpreter(tmp_path / "one", "5"), interpreter(tmp_path / "other", "6 + turn % 3 / 1000")]
    explanation = explaining(steady).explain(originals)
    assert explanation.outside.answer == "slower"
    assert "something outside their packages" in "\n".join(text.lines(explanation))


def test_a_mixture_that_cannot_run_is_passed_over(explaining):
    broken = f"\"'2.0'\" in {MODULES}['beta.py'] and \"'1.0'\" in {MODULES}['gamma.py']"
    explanation = explaining(f"1 / 0 if {broken} else {SLOW}").explain()
    assert [cause.differences for cause in explanation.causes] == [["guilty 1.0 → 2.0"]]
    assert not explanation.unresolved


def test_a_case_that_one_side_cannot_run_is_refused_with_the_reason(explaining):
    with pytest.raises(NotAvailable, match=rf"{re.escape(CASE)}: .*says the stub"):
        explaining("5", status="failed").explain()


def test_sides_that_do_not_differ_are_refused(explaining):
    search = explaining("5")
    search.second = search.first
    with pytest.raises(UsageError, match="nothing to search"):
        search.explain()
