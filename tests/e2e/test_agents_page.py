"""docs/agents.md: its commands as printed, what each prints by its schema, and its exit codes."""

import json
import re
import shlex
from pathlib import Path

import jsonschema
import pytest

from benchd.daemon.errors import EXIT_CODES

PAGE = (Path(__file__).parents[2] / "docs/agents.md").read_text()
LINES = [re.sub(r"\s+#.*", "", line) for line in re.findall("```sh\n(.*?)```", PAGE, re.DOTALL)[0].splitlines()]
MEASURING = ("bench-once", "benchd compare", "benchd ship", "benchd verify", "benchd selfcheck")
LIMITS = ("--config", "tiny.toml")


def kind_of(line):
    program, verb, *_ = line.split()
    return "record" if program == "bench-once" else verb


@pytest.fixture
def told(here):
    """Return a function that runs a line on the CPU and returns its exit code and the values that it printed."""

    def run(line):
        program, *words = shlex.split(line)
        more = ["--device", "cpu", "--wait"] if line.startswith(MEASURING) else []
        more += LIMITS if kind_of(line) in {"record", "compare", "ship", "verify"} else []
        more += ["--option", "size=64"] if kind_of(line) == "record" else []
        done = here(program, *words, *more, limits=())
        texts = done.stdout.splitlines() if kind_of(line) == "record" else [done.stdout]
        return done.returncode, [json.loads(text) for text in texts], done.stderr

    return run


def valid(here, kind, value):
    jsonschema.validate(value, json.loads(here("benchd", "schema", kind).stdout))


def test_the_page_is_short_and_its_exit_codes_are_all():
    assert len(PAGE.split()) <= 400
    named = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)}
    assert named == {0, 1, 2, 3, 4, 5, 6, 7, 130}
    assert set(EXIT_CODES) <= named
    assert {kind_of(line) for line in LINES} >= {"doctor", "ship", "verify", "selfcheck", "compare", "recommend"}


def test_what_a_program_measures_it_can_read_and_decide_by(told, here):
    chosen = [line for line in LINES if kind_of(line) in {"doctor", "list", "record", "recommend"}]
    printed = {}
    for line in chosen:
        code, values, output = told(line)
        assert code in {0, 4}, output  # beside other load it may stay undecided
        printed[kind_of(line)] = values
    valid(here, "doctor", printed["doctor"][0])
    assert [record["case"]["variant"]["backend"] for record in printed["record"]] == ["eager", "onnxruntime"]
    for record in printed["record"]:
        valid(here, "record", record)
        assert (record["status"], record["check"]["passed"]) == ("ok", True)
        low_ms, median_ms, high_ms = (record["timing"][name] for name in ("low_ms", "median_ms", "high_ms"))
        assert low_ms is None or low_ms <= median_ms <= high_ms  # beside other load there may be too few blocks
    (decision,) = printed["recommend"][0]
    assert {"ship", "candidates", "excluded"} <= decision.keys()


def test_an_error_is_a_sentence_and_no_json(here):
    done = here("benchd", "verify", "nothing", "--json")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    done = here("benchd", "schema", "shipp")
    assert (done.returncode, "did you mean 'ship'?" in done.stderr) == (2, True)


@pytest.mark.slow  # a race, its verification and a check of every variant: minutes
def test_what_decides_prints_what_its_schema_says(told, here):
    for line in [line for line in LINES if kind_of(line) in {"compare", "ship", "verify", "selfcheck"}]:
        code, values, output = told(line)
        for _ in range(9):  # beside other load a race may promise nothing
            if kind_of(line) != "ship" or code == 0:
                break
            code, values, output = told(line)
        assert code in {0, 3, 4}, output
        valid(here, kind_of(line), values[0])
