"""The real `bench-once --baseline` and the commands of benchd that judge, on files and on a real run."""

import json
import re

import msgspec
import pytest
from records_made import made, timing, written

from benchd.daemon.records import Case, ProcessResult, Variant, encode

SQUARE = ("--models", "square", "--option", "size=64", "--variants", "eager")


def test_compare_names_the_verdict_and_exits_by_it(here, results):
    before, after = results("before"), results("after", scale=1.02)
    slower = here("benchd", "compare", before, after)
    assert slower.returncode == 3
    assert len(re.findall("SLOWER(?!:)", slower.stdout)) == 2
    assert "+2.00 %" in slower.stdout
    faster = here("benchd", "compare", after, before, "--json")
    assert faster.returncode == 0
    assert [comparison["verdict"]["answer"] for comparison in json.loads(faster.stdout)] == ["faster", "faster"]
    assert here("benchd", "compare", results("close", scale=1.01), before, "--min-effect", "1%").returncode == 4
    assert len(re.findall("SAME(?!:)", here("benchd", "compare", before, results("again")).stdout)) == 2


def test_a_gate_fails_on_what_it_is_told_and_says_when_it_decided_nothing(here, results):
    before, after = results("before"), results("after", scale=1.02)
    assert here("benchd", "compare", before, after, "--fail-on", "check").returncode == 0
    assert here("benchd", "compare", before, after, "--fail-on", "speed").returncode == 2
    only = json.loads(here("benchd", "compare", before, after, "--variants", "custom", "--json").stdout)
    assert ["custom" in comparison["first"] for comparison in only] == [True]
    none = here("benchd", "compare", before, after, "--batch-sizes", "2", "--junit", "gate.xml")
    assert none.returncode == 6
    assert f"no record in {before} or {after} matches these variants and batch sizes" in none.stderr
    close = results("close", scale=1.01)
    undecided = here("benchd", "compare", close, before, "--min-effect", "1%", "--fail-on", "slower,check")
    assert undecided.returncode == 0
    assert "nothing was decided: every comparison is inconclusive" in undecided.stderr
    assert here("benchd", "compare", before, after, "--junit", "nowhere/gate.xml").returncode == 2


def test_files_in_which_nothing_was_measured_exit_6(here, tmp_path):
    absent = made(case=Case(model="vim_tiny", variant=Variant("tensorrt")), status="unsupported", timing=None)
    for name, record in (("before", absent), ("after", absent), ("failed", made(status="failed", timing=None))):
        (tmp_path / name).write_bytes(encode(record) + b"\n")
    for before in ("before", "failed"):
        done = here("benchd", "compare", before, "after")
        assert done.returncode == 6
        assert f"nothing was compared: no record in {before} or after succeeded" in done.stderr


@pytest.mark.parametrize(
    ("status", "code", "element"), [("failed", 1, "error"), ("timeout", 1, "error"), ("unsupported", 0, "skipped")]
)
def test_what_fails_in_b_alone_fails_the_comparison_of_files(here, results, tmp_path, status, code, element):
    before, both = results("before"), (tmp_path / results("after")).read_bytes().splitlines(keepends=True)
    custom = Case(model="vim_tiny", variant=Variant.parse("custom"))
    other = encode(made(case=custom, run_id="other", status=status, timing=None, processes=[])) + b"\n"
    (tmp_path / "after").write_bytes(b"".join([*both[::2], other]))
    gate = ("--fail-on", "slower,check", "--junit", "gate.xml")
    done = here("benchd", "compare", before, "after", *gate)
    assert (done.returncode, f"<{element}" in (tmp_path / "gate.xml").read_text()) == (code, True)
    assert (len(re.findall("SAME(?!:)", done.stdout)), f"B {status}: " in done.stdout) == (1, True)
    assert here("benchd", "compare", "after", before, *gate).returncode == 0  # A has failed, and B has not


def test_recommend_names_what_to_ship_and_exits_4_where_it_cannot(here, results):
    clear = here("benchd", "recommend", results("clear"))
    assert clear.returncode == 0
    assert (
        "vim_tiny b1: ship: custom  5.005 ms  energy not measured  check ok  (eager takes 2x [2, 2] as long)"
        in clear.stdout
    )
    close = here("benchd", "recommend", results("close", ratio=1.001))
    assert close.returncode == 4
    assert "vim_tiny b1: inconclusive: custom and eager cannot be told apart here: they differ by " in close.stdout
    strict = here("benchd", "recommend", "clear", "--max-latency", "4ms", "--json")
    assert strict.returncode == 4
    (decision,) = json.loads(strict.stdout)
    assert decision["excluded"]["custom"] == "latency 5.055 ms is above 4 ms"
    assert here("benchd", "recommend", "clear", "--max-latency", "4").returncode == 2
    assert (
        "unknown objective 'enrgy'; did you mean 'energy'?"
        in here("benchd", "recommend", "clear", "--objective", "enrgy").stderr
    )


def test_a_baseline_is_set_shown_and_cleared(here, results, tmp_path):
    assert here("benchd", "baseline", "set", results("before")).returncode == 0
    output = here("benchd", "baseline", "show").stdout
    assert "baseline of bench-abc123" in output
    assert "vim_tiny,custom,b1" in output
    assert "Expected: at most 0.05 false alarms per month, in 61 results of 2 cases." in output
    assert "No alarm yet: the baseline has 1 of the 5 runs, half a day apart, that an alarm needs: pin" in output
    config = tmp_path / "benchd.toml"
    config.write_text(
        'baseline.false_alarms_per_month = 2.0\n[[suite]]\nname = "s"\nevery = "1h"\nmodels = ["square"]\n'
    )
    planned = here("benchd", "baseline", "show", "--config", str(config)).stdout
    assert "Expected: at most 2 false alarms per month, in " in planned
    assert len(here("benchd", "baseline", "show", "--json").stdout.splitlines()) == 6
    assert here("benchd", "baseline", "clear").stdout == "baseline cleared\n"
    gone = here("benchd", "baseline", "show")
    assert (gone.returncode, gone.stdout) == (2, "")
    assert "benchd baseline set RUN..." in gone.stderr


def far_faster(record):
    """Return three runs of three processes that took a thousandth of the time of this record."""
    faster = timing(1e-3 * record.timing.median_ms)
    processes = [ProcessResult(status="ok", timing=faster)] * 3
    changed = {"telemetry": {}, "timing": faster, "processes": processes}
    return [msgspec.structs.replace(record, run_id=name, suite_id=name, **changed) for name in "abc"]


def test_a_run_is_held_against_its_baseline_and_the_path_of_its_page_comes_last(here, once, tmp_path):
    pytest.importorskip("jinja2", reason="the extra `report` is not installed")
    missing = here("bench-once", *SQUARE, "--baseline", "stored")
    assert missing.returncode == 2
    assert "no baseline is stored" in missing.stderr
    assert not list((tmp_path / "out").glob("raw/*"))
    first = once(*SQUARE, "--report")
    assert first.returncode == 0, first.stderr
    assert first.stdout.endswith("out/report.html\n")
    assert "<h1>benchd report</h1>" in (tmp_path / "out" / "report.html").read_text()
    done = once(*SQUARE, "--baseline", "out", "--fail-on", "slower,inconclusive")
    assert done.returncode == 4, done.stdout + done.stderr
    assert "INCONCLUSIVE" in done.stdout
    assert re.search(
        r"A has 1 of the 3 processes that a verdict needs: run (\w+=\S+ )*bench-once --case square,eager", done.stdout
    )
    record = written(tmp_path)[0]
    (tmp_path / "faster").write_bytes(b"".join(encode(entry) + b"\n" for entry in far_faster(record)))
    slower = once(*SQUARE, "--processes", "3", "--baseline", "faster", "--fail-on", "slower")
    assert slower.returncode == 3, slower.stdout + slower.stderr
    assert "SLOWER" in slower.stdout
