"""`benchd selfcheck` on a disk that takes no file: what was found is printed, and what was not stored is said."""

import json

import pytest
from typer.testing import CliRunner

from benchd.daemon.commands import selfcheck
from benchd.daemon.measuring import capabilities, plan
from benchd.daemon.verdicts.sanity import SanityResult


@pytest.mark.parametrize("given", [[], ["--json"]], ids=["table", "json"])
def test_a_file_that_cannot_be_written_costs_nothing_that_is_printed(given, tmp_path, child_environment, monkeypatch):
    for name, value in child_environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(plan, "plan", lambda *_: [])
    monkeypatch.setattr(
        selfcheck, "examine", lambda records: [SanityResult("a case", "answers", "right", "as they were")]
    )
    monkeypatch.setattr(capabilities, "examine", list)
    (tmp_path / "out" / "selfcheck.json").mkdir(parents=True)
    done = CliRunner().invoke(selfcheck.app, ["--device", "cpu", "--output", str(tmp_path / "out"), *given])
    assert done.exit_code == 1, done.exception
    assert "as they were" in done.stdout
    if given:
        assert json.loads(done.stdout)["findings"][0]["judgement"] == "right"
    assert "selfcheck.json: Is a directory" in done.stderr
    assert "not stored" in done.stderr
    assert "selfcheck.json" not in done.stdout
