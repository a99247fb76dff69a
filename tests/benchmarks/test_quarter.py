"""A campaign that is cut at any moment: its rows are whole, none is there twice, and a second call goes on."""

import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from waiting import wait_for

from benchd.daemon.records import all_variants
from benchmarks import lines, predictions, quarter
from benchmarks.quarter import QuarterStage

ROOT = Path(__file__).parents[2]
ROWS, STAGES = 12, 4
# a stage that says that it does not race yet, as races do, and then what it found
STAGE = f"""
import json, sys, time
from pathlib import Path
from benchmarks import lines
stage, raw = int(sys.argv[1]), Path(sys.argv[2])
for shape in range({ROWS}):
    for found in (None, 1.5 + shape):
        row = {{"op": f"op {{stage}}", "shape": [shape], "median_ms": found, "pad": "x" * 3000}} | lines.stamp()
        lines.append(raw, [json.dumps(row).encode()])
    time.sleep(0.02)
"""
CAMPAIGN = """
import sys
from pathlib import Path
from benchmarks import quarter
output = Path(sys.argv[1])
command = lambda i: [sys.executable, sys.argv[2], str(i), str(output / "raw.jsonl")]
quarter.run([quarter.QuarterStage(f"stage {i}", 0.0, 60.0, command(i)) for i in range(int(sys.argv[3]))], output, 600.0)
"""


APPEND = """
import sys
from pathlib import Path
from benchmarks import lines
lines.append(Path(sys.argv[1]), [b'{"op": "c"}'])
"""


@pytest.fixture
def campaign(tmp_path):
    """Return a function that starts the campaign of small stages in a process."""
    (tmp_path / "stage.py").write_text(STAGE)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def start():
        arguments = (str(tmp_path / "out"), str(tmp_path / "stage.py"), str(STAGES))
        return subprocess.Popen([sys.executable, "-c", CAMPAIGN, *arguments], cwd=ROOT, env=environment)

    return start, tmp_path / "out"


def check(output):
    """Fail unless every row that is kept is whole and there once; return how many there are."""
    path = output / "rows.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    subjects = [(row["op"], *row["shape"]) for row in rows]
    assert len(subjects) == len(set(subjects))
    assert all(row["t_wall"] > 1.7e9 and row["commit"] and len(row["pad"]) == 3000 for row in rows)
    if (output / "results.tar").exists():
        with tarfile.open(output / "results.tar") as tar:
            inside = {member.name: tar.extractfile(member).read() for member in tar.getmembers()}
        assert {"rows.jsonl", "stages.json", "predictions.md"} <= set(inside)
        packed = [json.loads(line) for line in inside["rows.jsonl"].splitlines()]
        assert len(packed) == len({(row["op"], *row["shape"]) for row in packed})
        json.loads(inside["stages.json"])
    return len(rows)


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments_its_rows_are_whole_and_none_is_there_twice(campaign, kills):
    start, output = campaign
    chance = random.Random(kills)
    for _ in range(kills):
        running = start()
        time.sleep(chance.uniform(0.1, 1.5))
        running.send_signal(chance.choice([signal.SIGKILL, signal.SIGTERM]))
        running.wait()
        check(output)
    assert start().wait() == 0
    assert check(output) == ROWS * STAGES
    measured = [json.loads(line)["median_ms"] for line in (output / "rows.jsonl").read_text().splitlines()]
    assert all(measured), "what was found stands, not that it had yet to be"
    before = (output / "raw.jsonl").read_bytes()
    assert start().wait() == 0, "a third call has nothing to do"
    assert (output / "raw.jsonl").read_bytes() == before


def test_sigterm_ends_the_stage_at_work_and_keeps_its_rows(campaign):
    start, output = campaign
    running = start()
    wait_for(lambda: (output / "raw.jsonl").exists() and (output / "raw.jsonl").read_bytes().count(b"\n") > 4)
    running.terminate()
    assert running.wait() == 128 + signal.SIGTERM
    assert check(output) > 0
    size = (output / "raw.jsonl").stat().st_size
    time.sleep(0.2)
    assert (output / "raw.jsonl").stat().st_size == size, "nothing writes any more"


def stage(code, **limits):
    return QuarterStage("stage", limits.get("least", 0.0), limits.get("most", 30.0), [sys.executable, "-c", code])


def test_a_stage_is_cut_with_its_children_and_the_next_finds_no_time(tmp_path):
    child = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    mark = tmp_path / "mark"
    code = f"{child}; open({str(mark)!r}, 'w').write('x'); time.sleep(60)"
    assert quarter.finished(stage(code, most=2.0), tmp_path, 60.0) == "cut"
    assert mark.exists()
    assert quarter.finished(stage("pass", least=10.0), tmp_path, 5.0) == "no time left"
    assert quarter.finished(stage("raise SystemExit(3)"), tmp_path, 5.0) == "failed"
    assert "== stage ==" in (tmp_path / "said.txt").read_text()


def test_what_found_no_time_runs_in_the_next_call_and_what_ended_does_not(tmp_path):
    count = tmp_path / "count"
    code = f"open({str(count)!r}, 'a').write('x')"
    first, second = (QuarterStage(name, 0.0, 9.0, [sys.executable, "-c", code]) for name in ("first", "second"))
    dear = QuarterStage("second", 1e6, 2e6, second.command)
    assert quarter.run([first, dear], tmp_path, 60.0) == {"first": "ok", "second": "no time left"}
    assert quarter.run([first, second], tmp_path, 60.0) == {"first": "ok", "second": "ok"}
    assert count.read_text() == "xx"


def test_a_line_that_a_kill_has_cut_costs_itself_alone(tmp_path):
    raw = tmp_path / "raw.jsonl"
    raw.write_bytes(b'{"op": "a", "median_ms": 1.0}\n{"op": "b", "medi')
    assert (
        quarter.finished(QuarterStage("more", 0.0, 30.0, [sys.executable, "-c", APPEND, str(raw)]), tmp_path, 30.0)
        == "ok"
    )
    assert [row["op"] for row, _ in lines.whole(raw)] == ["a", "c"]


def test_the_stages_begin_with_what_is_worth_most_and_a_cpu_has_those_that_it_can_run():
    gpu, cpu = (list(quarter.stages(device, Path("out"))) for device in ("cuda", "cpu"))
    names = [each.name for each in gpu]
    assert names[:4] == ["rates", "smoke", "graphs", "compiled"]
    assert len(names) == len(set(names))
    assert [name for name in names if name.startswith("ncu")] == ["ncu b1", "ncu b64"]
    assert not [each.name for each in cpu if each.name.startswith(("ncu", "engine"))]
    most = sum(each.most_s for each in gpu[: names.index("tests")])
    assert most < 20 * 60, "cut stages aside, it is a quarter of an hour"
    variants = {variant.name for variant in all_variants()}
    assert {*quarter.VIM, *quarter.SPIKING, *quarter.RACED} <= variants
    assert {variant for _, variant in quarter.RECORDED} <= variants


def test_a_prediction_stands_beside_what_was_measured():
    row = {"model": "vim_tiny", "batch_size": 1, "contender": "custom-cudagraph-fp16", "median_ms": 0.5, "device": "H"}
    text = predictions.page([row | {"median_ms": 0.7}, row])
    assert "| vim_tiny fp16, batch 1 | 0.45 to 0.6 | 0.5 on H |" in text
    assert "| vim_tiny fp16, batch 64 | 3 to 3.4 | - |" in text


@pytest.mark.slow
def test_its_dry_run_runs_every_stage(tmp_path):
    command = [sys.executable, "-m", "benchmarks.quarter", "--device", "cpu", "--dry", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + (tmp_path / "said.txt").read_text()[-3000:]
    came_to = json.loads((tmp_path / "stages.json").read_text())
    assert came_to == dict.fromkeys((each.name for each in quarter.stages("cpu", tmp_path, dry=True)), "ok")
    rows = [row for row, _ in lines.whole(tmp_path / "rows.jsonl")]
    assert {"add_rms_norm", "lif"} <= {row.get("op") for row in rows}
    assert {"vim_tiny", "snn_onepass"} <= {row.get("model") for row in rows}
