"""`benchd show`: the printed command really measures the record again; what else it prints, and what it refuses."""

import shlex

import msgspec
import pytest
from records_made import ENVIRONMENT, made

from benchd.daemon.records import Case, Inputs, UserModule, encode
from benchd.daemon.verdicts import results


def test_the_printed_command_measures_the_same_case_in_the_same_environment(here, tmp_path, monkeypatch):
    case = ("--models", "square", "--option", "size=16", "--batch-sizes", "2", "--variants", "bf16", "--seed", "3")
    variables = {"ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_PLACES": "{0:2}", "KMP_BLOCKTIME": "0"}
    how = ("--preset", "standard", "--processes", "1", "--threads", "1", "--device", "cpu", "--output", "out", "--wait")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert here("bench-once", *case, *how, "--config", "tiny.toml", limits=()).returncode == 0
    for name in variables:
        monkeypatch.delenv(name)
    (first,) = results.read(tmp_path / "out")
    done = here("benchd", "show", first.case_id, "--results", "out", "--command")
    assert "a configuration file set warm_up_cap_s 0.05, check_images 1, cap_s 0.1" in done.stderr
    assert done.stdout.split("bench-once")[1] == f" --case {first.case_id} --records out\n"
    *settings, program, option, case_id, records, folder = shlex.split(done.stdout)
    for setting in settings:
        monkeypatch.setenv(*setting.split("=", 1))
    again = here(program, option, case_id, records, folder, "--config", "tiny.toml", "--output", "again", limits=())
    assert again.returncode == 0, again.stderr
    (second,) = results.read(tmp_path / "again")
    assert second.case_id == first.case_id
    assert second.environment.fingerprint == first.environment.fingerprint
    assert (second.limits, len(second.processes)) == (first.limits, 1)
    assert f"--case {first.case_id}" in second.environment.command


def test_a_record_is_printed_with_what_is_missing(here, tmp_path):
    environment = {"variables": {"OMP_PROC_BIND": "close"}, "system": {"huge_pages": "always"}}
    missing = {"energy": "no_sensor"}
    record = made(environment=msgspec.structs.replace(ENVIRONMENT, **environment), missing=missing)
    (tmp_path / "one.jsonl").write_bytes(encode(record) + b"\n")
    lines = here("benchd", "show", "one.jsonl").stdout.splitlines()
    assert lines[0] == "vim_tiny,eager,b1: ok"
    pairs = [line.split() for line in lines]
    wanted = [["median_ms", "5"], ["OMP_PROC_BIND", "close"], ["huge_pages", "always"]]
    assert [pair for pair in wanted if pair not in pairs] == []
    assert [pair for pair in pairs if pair[:2] == ["energy", "no"]]
    assert max(map(len, lines[:-2])) <= 80
    assert lines[-2].endswith("bench-once --case vim_tiny,eager,b1 --records one.jsonl")


def test_an_id_finds_its_run_or_the_newest_of_its_case(here, tmp_path):
    cases = [Case(model="vim_tiny", batch_size=size) for size in (1, 2, 1)]
    lines = [encode(made(run_id=f"r{number}", case=case, t_mono_ns=number)) for number, case in enumerate(cases)]
    (tmp_path / "bench-out").mkdir()
    (tmp_path / "bench-out" / "records.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    assert "run_id                  r2" in here("benchd", "show", "vim_tiny,eager,b1").stdout
    assert "run_id                  r0" in here("benchd", "show", "r0").stdout
    assert here("benchd", "show", "bench-out", "--command").stdout.count("bench-once") == 2


def test_the_command_of_an_own_model_says_in_which_folder_it_runs(here, tmp_path):
    record = made(case=Case(model="own.net.build"), own=UserModule("net.py:build"), inputs=Inputs(weights="w.pt"))
    (tmp_path / "one.jsonl").write_bytes(encode(record) + b"\n")
    done = here("benchd", "show", "one.jsonl", "--command")
    note = (
        "note: own.net.build,eager,b1: run it in the folder with net.py:build, w.pt, because records do not store paths"
    )
    assert note in done.stderr


def test_the_command_of_what_ship_measured_is_one_of_bench_once_and_a_note_names_verify(here, tmp_path):
    (tmp_path / "shipped").mkdir()
    (tmp_path / "shipped" / "records.jsonl").write_bytes(encode(made(preset="ship")) + b"\n")
    done = here("benchd", "show", "shipped", "--command")
    assert "--preset" not in done.stdout
    assert done.stderr == "note: vim_tiny,eager,b1: measured by benchd ship; `benchd verify DIR` repeats it\n"


@pytest.mark.parametrize("folder", ["bench-out", "absent"])
def test_an_unknown_record_is_refused(folder, here, tmp_path):
    (tmp_path / "bench-out").mkdir()
    (tmp_path / "bench-out" / "records.jsonl").write_bytes(encode(made()) + b"\n")
    done = here("benchd", "show", "r9", "--results", folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: r9: no such file, and no ")
