"""Records of another's making, in the commands that show them: nothing in them reaches the terminal as a command."""

import csv

import msgspec
import pytest
from records_made import ENVIRONMENT, made
from typer.testing import CliRunner

from benchd.daemon.commands import compare, recommend, report
from benchd.daemon.records import Case, encode
from benchd.daemon.verdicts import results

CLEAR = "\x1b[2J\x1b]0;owned\x07\x9b2J\u202e"
FORMULA = '=HYPERLINK("http://evil.example")'


@pytest.fixture
def foreign(tmp_path):
    """Return a file of records with commands of a terminal in every text, and with a formula."""
    device = msgspec.structs.replace(ENVIRONMENT, cpu_model=CLEAR, power_mode=FORMULA)
    texts = {"device_id": "d", "environment": device, "suite_id": CLEAR, "tool_version": CLEAR}
    case = Case(model=f"{CLEAR}m", options={CLEAR: CLEAR})
    good, bad = made(case=case, **texts), made(run_id="r2", case=case, status="failed", reason=CLEAR, **texts)
    path = tmp_path / "foreign.jsonl"
    path.write_bytes(b"".join(encode(record) + b"\n" for record in (good, bad)))
    return path


@pytest.mark.parametrize("char", list("\r\b\f\t"))
def test_no_control_character_comes_back_from_a_file(tmp_path, char):
    path = tmp_path / "foreign.jsonl"
    path.write_bytes(encode(made(status="failed", reason=f"wrong{char}okay")) + b"\n")
    (record,) = results.read(path)
    assert record.reason == "wrong\N{REPLACEMENT CHARACTER}okay"


APPS = {"recommend": recommend.app, "compare": compare.app, "report": report.app}


def said(command, *arguments):
    return CliRunner().invoke(APPS[command], [*map(str, arguments)]).output


@pytest.mark.parametrize("command", ["recommend", "compare", "report"])
def test_what_is_hostile_in_a_record_does_not_reach_the_terminal(foreign, tmp_path, command):
    more = {"compare": [foreign], "report": ["--format", "md", "--output", tmp_path]}
    output = said(command, foreign, *more.get(command, []))
    assert "owned" in output
    assert [char for char in output if not char.isprintable() and char != "\n"] == []


def test_csv_holds_no_formula(foreign, tmp_path):
    said("report", foreign, "--format", "csv", "--output", tmp_path)
    with (tmp_path / "report.csv").open() as file:
        assert {row["power_mode"] for row in csv.DictReader(file)} == {f"'{FORMULA}"}
