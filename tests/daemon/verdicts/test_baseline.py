"""The stored baseline: what is kept, what is refused, what comes back."""

import msgspec
import pytest
from records_made import ENVIRONMENT, PASSED, made, timing

from benchd.daemon.commands.baseline import set_, show
from benchd.daemon.errors import SchemaError, UsageError
from benchd.daemon.records import ProcessResult, decode, encode
from benchd.daemon.verdicts import baseline, results


@pytest.fixture(autouse=True)
def _state(tmp_path, monkeypatch):
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def written(path, *records):
    path.write_bytes(b"".join(encode(record) + b"\n" for record in records))
    return path


def three_runs(**fields):
    return [made(run_id=f"r{number}", suite_id=f"s{number}", **fields) for number in range(3)]


def test_what_is_set_is_read_until_it_is_cleared(tmp_path):
    failed = made(run_id="r9", suite_id="s9", status="failed", timing=None)
    path = written(tmp_path / "records.jsonl", *three_runs(), failed)
    records = baseline.chosen([path, tmp_path])
    baseline.store(records)
    assert records == three_runs()
    assert baseline.read("stored") == three_runs()
    assert baseline.clear()
    assert not baseline.clear()
    with pytest.raises(UsageError, match="benchd baseline set"):
        baseline.read("stored")


def test_the_runs_that_the_service_s_configuration_names_are_shown_and_not_the_stored_ones(tmp_path, capsys):
    baseline.store(three_runs())
    pinned = runs_of_five("a", "b", "c", "d")
    written(tmp_path / "records.jsonl", *pinned, made(run_id="e", suite_id="e", status="failed", timing=None))
    config = tmp_path / "benchd.toml"
    config.write_text(f'[baseline]\nruns = ["{tmp_path}"]\n[[suite]]\nname = "s"\nevery = "1d"\nmodels = ["square"]\n')
    show(config, json=True)
    assert [decode(line).run_id for line in capsys.readouterr().out.encode().splitlines()] == ["a", "b", "c", "d"]
    show(config)
    assert f"read from {tmp_path}\n" in capsys.readouterr().out
    show()
    assert f"stored in {baseline.path()}\n" in capsys.readouterr().out
    written(tmp_path / "records.jsonl", made(status="failed", timing=None))
    with pytest.raises(UsageError, match=r"no result in .* was successful"):
        show(config)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"flags": ["simulated"]}, "is simulated"),
        ({"flags": ["output_changed"]}, "gave different answers while it was timed"),
        ({"timing": timing(0.0), "processes": []}, "reports an impossible time of 0 ms"),
    ],
)
def test_results_on_which_no_verdict_rests_are_refused_and_the_old_baseline_stays(tmp_path, fields, words):
    set_([written(tmp_path / "old", *three_runs())])
    *good, last = three_runs()
    with pytest.raises(UsageError, match=words):
        set_([written(tmp_path / "new", *good, msgspec.structs.replace(last, **fields))])
    assert baseline.read("stored") == three_runs()


def test_mixed_devices_are_refused(tmp_path):
    mixed = [*three_runs(), made(run_id="r5", suite_id="s5", device_id="orin-2")]
    with pytest.raises(UsageError, match="come from bench-abc123, orin-2"):
        baseline.chosen([written(tmp_path / "mixed", *mixed)])


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        (b"", UsageError, "contains no record"),
        (encode(made()) + b"\n" + encode(made())[:50], SchemaError, "line 2: truncated"),
        (
            encode(made()).replace(b"benchd.record/1", b"benchd.record/2") + b"\n",
            SchemaError,
            "line 1: record of schema",
        ),
        (encode(made())[:50] + b"\n" + encode(made()) + b"\n", SchemaError, "line 1: not .*; delete this line to use"),
        (b"SQLite format 3\x00\n", SchemaError, r"line 1: not a benchd record: .*\)$"),
        (encode(made()) + b"\n{}\n", SchemaError, "line 2: not a benchd record: .*; delete this line to use"),
        (encode(made()).replace(b'"median_ms":5.0', b'"median_ms":NaN') + b"\n", SchemaError, "line 1: not a benchd"),
    ],
    ids=["empty", "torn", "other major", "torn before another", "another kind of file", "no record", "nan"],
)
def test_a_damaged_file_is_named(tmp_path, content, error, words):
    path = tmp_path / "records.jsonl"
    path.write_bytes(content)
    with pytest.raises(error, match=words):
        results.read(path)


def test_a_record_that_stands_in_a_file_twice_is_read_once(tmp_path):
    first, *others = three_runs()
    path = written(tmp_path / "records.jsonl", first, *others, first)
    assert results.read(path) == results.of_case(path, first.case_id) == three_runs()


def runs_of_five(*names, environment=ENVIRONMENT):
    processes = [ProcessResult(status="ok", timing=timing(value)) for value in (5.0, 5.01, 4.99, 5.02, 4.98)]
    given = {"processes": processes, "environment": environment, "check": PASSED}
    return [made(run_id=name, suite_id=name, **given) for name in names]


def test_runs_of_another_environment_are_left_aside_where_there_are_others():
    """Else no case could be judged, once the machine has changed and the new runs were added to the old ones."""
    old = runs_of_five("a", "b", "c", environment=msgspec.structs.replace(ENVIRONMENT, kernel="6.0", fingerprint="g"))
    new = runs_of_five("d", "e", "f")
    (measured,) = runs_of_five("m")
    (comparison,) = baseline.against([*old, *new], [measured])
    assert (comparison.verdict.answer, len(comparison.first_ms)) == ("same", 15)
    (comparison,) = baseline.against([*old, *new[:1]], [measured])
    assert comparison.verdict.reason.startswith("runs from a single day: the variation between days is unknown")
    (comparison,) = baseline.against(old, [measured])
    assert "kernel: 6.0 and 6.1" in comparison.verdict.reason


@pytest.mark.parametrize(
    "pinned",
    [{"fingerprint": "0f-01", "variables": {}}, {"fingerprint": "1c", "variables": None, "system": {}}],
    ids=["by another benchd", "by one that named less"],
)
def test_an_upgrade_of_benchd_sets_no_run_aside(pinned):
    now = msgspec.structs.replace(ENVIRONMENT, fingerprint="0f-02", variables={}, system={"smt": "on"})
    pinned = runs_of_five("a", "b", "c", environment=msgspec.structs.replace(now, **pinned))
    (measured,) = runs_of_five("m", environment=now)
    assert all(baseline.is_alike(run, measured) for run in pinned)
    assert baseline.against(pinned, [measured])[0].verdict.answer == "same"
