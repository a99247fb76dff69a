"""The campaign: stages leave their files, a part that fails costs its own rows, and the page tells what they hold."""

import json
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from benchmarks import campaign, models, performance

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/performance.md"


@pytest.fixture
def run(tmp_path, child_environment):
    def start(*arguments):
        command = [sys.executable, "-m", "benchmarks.campaign", "--device", "cpu", "--seconds", "0.02"]
        command += ["--output", str(tmp_path / "results"), "--no-compile", *arguments]
        environment = child_environment | {"PYTHONPATH": f"{child_environment.get('PYTHONPATH', '')}:{ROOT}"}
        done = subprocess.run(command, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True)
        (folder,) = (tmp_path / "results").iterdir()
        return done, folder

    return start


def test_stages_leave_their_files_and_the_page_tells_them(run):
    done, folder = run("--stage", "probes", "--stage", "kernels", "--op", "add_rms_norm", "--batch-size", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = [each for each in performance.read(folder).kernels if each.contender == "benchd"]
    assert row.shape == [197, 192]
    assert f"| {row.median_ms:.4g} |" in done.stdout
    machine = json.loads((folder / "machine.json").read_text())
    assert f"{machine['launch_us']:.2f} us" in done.stdout
    parts = [json.loads(line) for line in (folder / "campaign.jsonl").read_text().splitlines()]
    assert [(part["part"], part["status"]) for part in parts] == [
        ("machine", "ok"),
        ("add_rms_norm fp32 batch 1", "ok"),
    ]


def test_a_part_that_fails_or_finds_no_time_is_named_and_the_others_are_run(run):
    done, folder = run("--stage", "kernels", "--op", "nonsense", "--op", "add_rms_norm", "--batch-size", "1")
    assert done.returncode == 1
    parts = [json.loads(line) for line in (folder / "campaign.jsonl").read_text().splitlines()]
    assert [part["status"] for part in parts] == ["failed", "ok"]
    assert "nonsense" in parts[0]["said"]
    assert "failed: kernels nonsense" in done.stdout


def test_a_part_that_does_not_end_is_ended_and_the_next_finds_no_time():
    sleep = campaign.Part("sleep", [sys.executable, "-c", "import time; time.sleep(60)"], "sleep")
    end = time.monotonic() + 0.3
    assert campaign.finished("kernels", sleep, end).status == "timeout"
    assert campaign.finished("kernels", sleep, end).status == "no time left"


def test_an_unknown_stage_is_refused():
    done = CliRunner().invoke(campaign.app, ["--device", "cpu", "--stage", "probing"])
    assert done.exit_code == 2
    assert "probing" in done.output


def race(contender, ratio, **facts):
    facts = {"model": "vim_tiny", "batch_size": 4, "right": True, "is_peer": False} | facts
    return models.Row(
        device="NVIDIA H200",
        contender=contender,
        verdict="",
        ratio=ratio,
        median_ms=ratio,
        versions={},
        options={},
        direction="inference",
        **facts,
    )


def test_a_target_is_read_off_the_race_and_what_was_not_raced_is_said(tmp_path):
    folder = tmp_path / "nvidia-h200"
    folder.mkdir()
    official = race("mamba-ssm + causal-conv1d", 1.5, is_peer=True)
    rows = [race("eager", 1.0), race("custom-fp16", 0.1, right=False), race("custom", 0.25), official]
    (folder / "models.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    page = performance.page(folder)
    assert "| vim_tiny batch 4, our best against mamba-ssm | 5 x | 6 x |" in page, "a wrong answer is no best"
    assert "| vim_tiny batch 64, our best against mamba-ssm | 3 x | not measured |" in page


def test_of_repeated_races_the_last_one_stands(tmp_path):
    folder = tmp_path / "cpu"
    folder.mkdir()
    rows = [race("eager", 1.0), race("custom", 0.5), race("eager", 1.0), race("custom", 0.4)]
    (folder / "models.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    assert [row.ratio for row in performance.read(folder).models] == [1.0, 0.4]


@pytest.mark.skipif(not (ROOT / "results").is_dir(), reason="no campaign is kept yet")
def test_the_page_is_made_of_the_records():
    assert PAGE.read_text() == performance.whole(ROOT / "results")
