"""The real `benchd compare --live` on workers whose times are known: the order, the looks, every way to end."""

import json
import re
import shlex
import signal
import subprocess
import sys
from math import exp, log
from pathlib import Path
from statistics import geometric_mean, median

import onnx_made
import pytest
from gaps import without_energy, without_gaps
from records_made import written
from stub_interpreter import interpreter
from waiting import WAIT_S
from worker_jobs import user_module

from benchd.daemon import journal

ROOT = Path(__file__).parents[2]
CONFIG = '[device]\nid = "test-device"\n'
LIMITED = f"{CONFIG}[limits]\nwarm_up_cap_s = 0.1\ncheck_images = 1\n"
CASE = "square,eager,b1,size=64"


@pytest.fixture
def stub(tmp_path):
    """Return a function that writes an interpreter whose workers take `ms`, in which `turn` counts them from 0."""
    return lambda name, ms, **fields: interpreter(tmp_path / name, ms, **fields)


OPTIONS = ("--config", "config.toml", "--device", "cpu", "--output", "out", "--json")


@pytest.fixture
def compare(tmp_path, here):
    """Return a function that runs `benchd compare` in `tmp_path` and in this process."""
    (tmp_path / "config.toml").write_text(LIMITED)
    return lambda *arguments: here("benchd", "compare", *arguments, *OPTIONS)


def said(done):
    assert done.stdout, done.stderr
    (comparison,) = json.loads(done.stdout)
    return comparison


def test_the_sides_take_turns_and_seven_pairs_are_enough_for_a_clear_case(compare, stub, tmp_path):
    fast, slow = stub("fast", "5 + turn % 2 / 1000"), stub("slow", "6 + turn % 3 / 1000")
    done = compare("--live", CASE, "--python", fast, "--python", slow)
    assert done.returncode == 3, done.stderr
    comparison = said(done)
    assert comparison["verdict"]["answer"] == "slower"
    assert comparison["verdict"]["effect"] == pytest.approx(0.2, abs=1e-3)
    assert comparison["second"] == f"{CASE} by {slow}"
    assert [set(pair) for pair in pairs(tmp_path / "log")] == [{"fast", "slow"}] * 7
    assert "pair 7 of 7 to 15: A 5 ms, B +20.00 %, " in done.stderr
    first, second = written(tmp_path)
    assert [len(record.processes) for record in (first, second)] == [7, 7]
    assert first.suite_id == second.suite_id
    assert first.environment.versions["torch"]


def pairs(log):
    """Return who took the turns, two by two."""
    turns = log.read_text().split()
    return list(zip(turns[::2], turns[1::2], strict=True))


def test_a_noisy_case_takes_all_looks_in_no_fixed_order_and_is_inconclusive(compare, stub, tmp_path):
    steady, noisy = stub("steady", "5"), stub("noisy", "5 + turn % 2 / 2 - 0.25")
    done = compare("--live", CASE, "--python", steady, "--python", noisy)
    assert done.returncode == 4
    assert len(said(done)["first_ms"]) == 15
    first = [pair[0] for pair in pairs(tmp_path / "log")]  # lots fall as any one of these once in 8,000 times
    assert first.count("steady") not in {0, 15}
    assert first not in (["steady", "noisy"] * 7 + ["steady"], ["noisy", "steady"] * 7 + ["noisy"])


def test_five_a_a_comparisons_raise_the_least_effect_that_counts_until_they_are_cleared(compare, here, stub, tmp_path):
    """A machine that calls identical code 4 % apart cannot tell 3 % from it."""
    uneven = stub("uneven", "5 + turn % 2 / 10")
    first, second = stub("one", "5"), stub("other", "5.15 + turn % 2 / 1000")
    sides = ("--live", CASE, "--python", first, "--python", second, "--pairs", "3")
    before = compare(*sides)
    assert before.returncode == 3
    assert "noise floor" not in before.stderr
    floor = tmp_path / "state" / "benchd" / "noise_floor.jsonl"
    aa = compare("--aa", CASE, "--python", uneven, "--pairs", "3")
    (effect,) = (json.loads(line) for line in journal.read(floor))
    verdict = said(aa)["verdict"]
    assert [effect[name] for name in ("effect", "effect_low", "effect_high")] == [
        verdict["effect"],
        *verdict["interval"].values(),
    ]
    assert (effect["device_id"], effect["case_id"], effect["pairs"]) == ("test-device", CASE, 3)
    apart = effect | {"effect": 0.04, "effect_low": 0.038, "effect_high": 0.042, "pairs": 7}
    floor.write_text("".join(json.dumps(line) + "\n" for line in (effect, *[apart] * 5)))
    done = compare(*sides)
    assert (done.returncode, said(done)["verdict"]["answer"]) == (0, "same")
    assert f"{CASE}: less than 4 % does not count: identical code differs by that much here\n" in done.stderr
    (entry,) = json.loads(here("benchd", "noise-floor", CASE, "--json").stdout)
    assert (entry["stored"], entry["counted"], entry["floor"]) == (6, 5, 0.04)
    assert "4 %" in here("benchd", "noise-floor").stdout
    assert "no A/A comparison of other is stored" in here("benchd", "noise-floor", "other").stderr
    assert here("benchd", "noise-floor", "--clear", CASE).stdout == "A/A comparisons deleted: 6\n"
    assert compare(*sides).returncode == 3


def test_a_noise_floor_that_cannot_be_written_leaves_the_verdict(compare, stub, tmp_path):
    floor = tmp_path / "state" / "benchd" / "noise_floor.jsonl"
    blocking = stub("blocking", f"turn and __import__('os').makedirs({str(floor)!r}, exist_ok=True) or 5")
    done = compare("--aa", CASE, "--python", blocking, "--pairs", "2", "--junit", "gate.xml")
    assert done.returncode == 1
    assert f"warning: not stored: noise floor of {CASE}: {floor}: not a regular file" in done.stderr
    assert said(done)["verdict"]["effect"] == 0.0
    assert "<testcase " in (tmp_path / "gate.xml").read_text()


def test_each_chosen_variant_is_a_comparison_and_all_share_the_error(compare, stub, tmp_path):
    fast, slow = stub("fast", "5 + turn % 2 / 1000"), stub("slow", "6 + turn % 3 / 1000")
    given = ("--live", "square,b1,size=64", "--python", fast, "--python", slow, "--pairs", "2")
    done = compare(*given, "--variants", "eager,fp16", "--junit", "gate.xml", "--markdown", "gate.md")
    assert done.returncode == 3, done.stderr
    comparisons = json.loads(done.stdout)
    assert [comparison["first"].split()[0] for comparison in comparisons] == [CASE, CASE.replace("eager", "fp16")]
    assert [comparison["verdict"]["confidence"] for comparison in comparisons] == [0.975, 0.975]
    assert len(written(tmp_path)) == 4
    assert (tmp_path / "gate.xml").read_text().count("<failure ") == 2
    assert (tmp_path / "gate.md").read_text().count("SLOWER") == 2
    assert compare(*given, "--variants", "eager", "--fail-on", "check").returncode == 0


def test_an_interrupt_counts_more_than_a_process_that_failed_before_it(command, stub):
    failing = stub(
        "failing", "os.path.getsize('out/records.jsonl') and os.kill(os.getppid(), 15) or 5", status="failed"
    )
    sides = ("--live", "square,b1,size=64", "--python", failing, "--python", failing, "--variants", "eager,fp16")
    done = command("benchd", "compare", *sides, "--device", "cpu", "--output", "out", "--json")
    assert done.returncode == 130, done.stderr
    assert len(json.loads(done.stdout)) == 2


def test_a_side_that_cannot_run_here_exits_7(compare, stub):
    """What a plan cannot know: the worker finds out."""
    done = compare("--live", CASE, "--python", stub("one", "5"), "--python", stub("other", "5", status="unsupported"))
    assert done.returncode == 7
    assert "says the stub" in said(done)["verdict"]["reason"]


def test_a_signal_ends_the_comparison_and_keeps_what_was_measured(stub, tmp_path, child_environment):
    (tmp_path / "config.toml").write_text(CONFIG)
    steady, slow = stub("steady", "5"), stub("slow", "__import__('time').sleep(6000 * (turn == 2)) or 5")
    benchd = ["env", "--default-signal=HUP", Path(sys.executable).parent / "benchd"]
    command = [*benchd, "compare", "--live", CASE, "--python", steady, "--python", slow]
    command += ["--config", "config.toml", "--device", "cpu", "--output", "out"]
    with subprocess.Popen(command, cwd=tmp_path, env=child_environment, stderr=subprocess.PIPE, text=True) as process:
        assert next(line for line in process.stderr if line.startswith("pair 2"))
        process.send_signal(signal.SIGHUP)
        process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    results = written(tmp_path)
    assert [[process_result.status for process_result in record.processes[:2]] for record in results] == [
        ["ok", "ok"]
    ] * 2
    assert "aborted" in {record.status for record in results}


def test_an_error_keeps_what_was_measured(compare, stub, tmp_path):
    """A folder that a log cannot be written to any more."""
    gone = "(turn and (__import__('shutil').rmtree('out/logs'), open('out/logs', 'w'))) and 5 or 5"
    compare("--live", CASE, "--python", stub("steady", "5"), "--python", stub("gone", gone))
    results = written(tmp_path)
    # as the lot fell in the second pair and in the third, whose first process has no log and fails
    assert [len(record.processes) for record in results] in ([2, 2], [2, 3], [3, 2])


def test_a_process_that_dies_ends_the_comparison_with_the_reason(compare, stub, tmp_path):
    done = compare("--live", CASE, "--python", stub("fast", "5"), "--python", stub("dead", "5", dies=True))
    assert done.returncode == 1
    assert "garbage" in said(done)["verdict"]["reason"]
    statuses = [record.status for record in written(tmp_path)]
    assert statuses in (["ok", "failed"], ["failed"])  # as the lot fell: who had no turn leaves no record


def test_what_fails_its_check_cannot_win(compare, stub):
    check = {"passed": False, "rule": "outputs", "images": 1, "max_abs_error": 1, "error_share": 1, "tolerance": 0}
    more = f', "check": {json.dumps(check | {"argmax_disagreements": 1})}'
    done = compare(
        "--live", CASE, "--python", stub("slow", "6"), "--python", stub("fast", "5", more=more), "--pairs", "2"
    )
    assert done.returncode == 5
    assert "fails its numerical check" in said(done)["verdict"]["reason"]


def test_the_documented_gate_compares_a_change_with_its_base(here, tmp_path, monkeypatch):
    """The lines are those of docs/ci.md, made short, with real workers; beside any load three pairs show the change."""
    (block,) = re.findall("```bash\n(.*?)```", (ROOT / "docs" / "ci.md").read_text(), re.DOTALL)
    worktree, words = block.replace("\\\n", "").replace("--input 64", "--input 3x4x4").splitlines()
    (tmp_path / "config.toml").write_text(LIMITED)
    (folder := tmp_path / "repository").mkdir()
    user_module(folder)
    git = "git -c user.name=a -c user.email=a@b"
    given = f"git init -q . && git add . && {git} commit -qm base && export BASE=HEAD\n"
    work = "for _ in range(200): torch.randn(96, 96) @ torch.randn(96, 96)"
    change = f"sed -i 's/        pass/        {work}/' net.py\n"
    subprocess.run(["bash", "-ec", given + change + worktree], check=True, capture_output=True, cwd=folder)
    monkeypatch.chdir(folder)
    short = ("--config", "../config.toml", "--device", "cpu", "--pairs", "3", "--threads", "1", "--output", "../out")
    done = here(*shlex.split(words), *short, "--json")
    assert done.returncode == 3, done.stderr
    comparison = said(done)
    assert comparison["second"] == "own.net.build,eager,b1,threads=1 of net.py:build"
    assert comparison["first"].endswith("of base/net.py:build")
    assert comparison["verdict"]["effect"] > 1
    assert "SLOWER" in (folder / "gate.md").read_text()
    assert '<failure message="' in (folder / "gate.xml").read_text()
    results = written(tmp_path)
    assert results[0].missing["probes"] == "no floor is computed for a comparison"
    first, second = (record.processes for record in results)
    assert all(process.blocks.is_interleaved for process in (*first, *second))
    assert [process.cpus for process in first] == [process.cpus for process in second]
    ratios = [
        exp(median(log(late / early) for early, late in zip(a.blocks.medians_ms, b.blocks.medians_ms, strict=False)))
        for a, b in zip(first, second, strict=True)
    ]
    assert comparison["ratios"] == pytest.approx(ratios)
    assert comparison["verdict"]["effect"] == pytest.approx(geometric_mean(comparison["ratios"]) - 1)


def test_a_gate_fails_for_other_answers_of_the_same_weights_and_a_crash_is_an_error(compare, tmp_path):
    (tmp_path / "config.toml").write_text(f"{LIMITED}measure_cap_s = 0.3\n")
    files = {}
    for name, forward in (("base", "pass"), ("other", "images = images * 1.5"), ("crash", "os.abort()")):
        (tmp_path / name).mkdir()
        files[name] = user_module(tmp_path / name, build="torch.manual_seed(0)", forward=forward)
    options = ("--input", "3x4x4", "--variants", "eager", "--batch-sizes", "1", "--threads", "1", "--pairs", "2")

    def gate(change):
        modules = ("--module", files["base"], "--module", files[change])
        done = compare("--live", *modules, *options, "--fail-on", "check", "--junit", "gate.xml")
        return done.returncode, json.loads(done.stdout)[0]["notes"], (tmp_path / "gate.xml").read_text()

    code, notes, xml = gate("other")
    assert (code, "<failure" in xml) == (5, True)
    assert notes[0].startswith("B has the same weights as A, but its exact answers to the same inputs differ by ")
    assert notes[0].endswith(": net.py changed")
    code, _, xml = gate("crash")
    assert (code, "<error" in xml) == (1, True)


def test_two_onnx_files_are_compared_under_their_names(compare, tmp_path):
    for name, node in (("old", "Relu(x)"), ("new", "Identity(x)")):
        (tmp_path / name).mkdir()
        onnx_made.written(tmp_path / name, f"g (float[N,4] x) => (float[N,4] y) {{ y = {node} }}")
    done = compare("--live", "--onnx", "old/net.onnx", "--onnx", "new/net.onnx", "--threads", "1", "--pairs", "2")
    comparison = said(done)
    assert comparison["first"] == "own.net,onnxruntime,b1,threads=1 of old/net.onnx"
    assert comparison["second"] == "own.net,onnxruntime,b1,threads=1 of new/net.onnx"
    assert [record.status for record in written(tmp_path)] == ["ok", "ok"]


def test_where_a_sensor_gives_joules_processes_run_one_after_the_other(compare, tmp_path):
    metric = {"metric": "power_w", "scope": "module", "values": [5.0, 6.0], "period_s": 0.05}
    (tmp_path / "script.json").write_text(json.dumps({"metrics": [metric]}))
    sampling = '[sampling]\nsources = ["fake=script.json"]\nperiod_s = 0.02\n'
    (tmp_path / "config.toml").write_text(f"{CONFIG}[limits]\nwarm_up_cap_s = 0.1\nmeasure_cap_s = 0.5\n{sampling}")

    def compared():
        done = compare("--aa", CASE, "--pairs", "2", "--threads", "1")
        assert len(said(done)["ratios"]) == 2, done.stderr
        return written(tmp_path)[-2:]

    for record in without_gaps(compared, without_energy):
        assert record.energy.scope == "module"
        assert not any(process.blocks.is_interleaved or process.cpus for process in record.processes)
