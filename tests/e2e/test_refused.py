"""Commands that end before they measure: lines that are refused, folders that cannot be written, plans and help."""

import os
import re
import sys

import pytest
from worker_jobs import user_module

from benchd.models import catalog

CASE = "square,eager,b1,size=64"
EMPTY = ("models", "baseline", "fail-on", "data", "mqtt", "artifacts", "module", "onnx", "weights", "labels", "queue")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--models", ","], "--models is empty: give values separated by commas, or omit it"),
        (["--models", " "], "--models is empty"),
        (["--dry-run", "--artifacts", "nowhere"], "--artifacts nowhere: no such folder"),
        (["--models", "square", "--module", "none.py:build"], "--models with --module"),
        (["--models", "torchvision:raft_small"], "optical flow takes two images"),
        (["--variants", "fp61"], "unknown variant 'fp61'; did you mean 'fp16'?"),
        (["--direction", "sideways"], "unknown direction 'sideways'"),
        (["--batch-sizes", "one"], "--batch-sizes one: expected whole numbers"),
        (["--weights", "nowhere.pth"], "nowhere.pth: no such file; demo and random need no file"),
        (["--module", "nowhere.py:build"], "--module nowhere.py:build: nowhere.py: no such file"),
        (["--module", "tiny.toml:build"], "--module tiny.toml:build: tiny.toml is not a .py file"),
        (["--module", "nowhere.net:build"], "--module nowhere.net:build: no module 'nowhere' in this folder"),
        (["--module", "none.py:build", "--dry-run"], "--module none.py:build: none.py has no 'build'"),
        (["--module", "none.py:build", "--input", "a=3", "--input", "a.b=3"], "--input a: either a tensor or a dict"),
        (["--module", "none.py:build", "--input", "a-b=3"], "--input a-b: not a valid argument name"),
        (["--onnx", "own.onnx", "--artifacts", "."], "--artifacts is for files of the catalog's models; measure"),
        (["--mqtt", "http://x"], "MQTT URL: expected mqtt://"),
        (["--dry-run", "--json"], "--json and --dry-run: give only one of them"),
    ],
)
def test_a_wrong_command_line_exits_2_and_names_what_is_wrong(here, tmp_path, arguments, words):
    (tmp_path / "none.py").touch()
    done = here("bench-once", *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "out").glob("raw/*"))


COMPARE = ("benchd", "compare", "a", "b")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        *((("bench-once", "--models", "square", f"--{name}", ""), f"--{name}") for name in EMPTY),
        (("bench-once", "--models", "square", "--baseline="), "--baseline"),
        *(((*COMPARE, f"--{name}", ""), f"--{name}") for name in ("fail-on", "junit", "markdown", "output", "config")),
        ((*COMPARE, "--python", "bin/python", "--python", ""), "--python"),
        (("benchd", "compare", "", "b"), "SIDES"),
        (("benchd", "baseline", "set", "a", ""), "RUNS"),
        (("benchd", "recommend", "a", "--streams", ""), "--streams"),
        (("benchd", "dashboard", "--mqtt", ""), "--mqtt"),
    ],
    ids=str,
)
def test_an_empty_value_is_refused_and_names_its_option(here, tmp_path, results, line, name):
    for side in ("a", "b"):
        results(side)
    done = here(*line)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{name} is empty: is the variable behind it set? Give a value, or leave it out" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "tiny.toml"}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--live", CASE], 2, "two cases, or one case and two --python"),
        (["--live", CASE, CASE, CASE], 2, "two cases, or one case and two --python"),
        (["--aa", CASE, CASE], 2, "--aa compares one case with itself"),
        (["--live", CASE, CASE, "--pairs", "1"], 2, "--pairs 1: must be at least 2"),
        (["--live", CASE, CASE, "--min-effect", "1"], 2, "--min-effect 1: expected a number with its unit, one of %"),
        (
            ["--live", "eager", "--module", "nowhere.py:build"],
            2,
            "--module nowhere.py:build: nowhere.py: no such file",
        ),
        (["--live", CASE, "square,offline"], 2, "square,offline matches 4 cases; add the batch size"),
        (["--live", CASE, "squre,eager"], 2, "did you mean 'square'"),
        (["--live", CASE, "--python", "nowhere/python", "--python", sys.executable], 2, "--python nowhere/python: "),
        (["--live", CASE, "square,custom"], 7, "square,custom: square has no custom kernels"),
        (["a", "b"], 2, "--config is for --live or --aa: two result files are compared as they are"),
    ],
)
def test_a_comparison_that_cannot_be_made_is_named(here, tmp_path, arguments, code, words):
    done = here("benchd", "compare", *arguments, "--config", "tiny.toml", "--device", "cpu")
    assert done.returncode == code
    assert words in done.stderr
    assert not (tmp_path / "bench-out").exists()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (("compare", CASE), "compare takes two result files"),
        (("compare", "nowhere", "nowhere"), "nowhere: no such file; give a result file"),
        (("compare", "a", "b", "--pairs", "7"), "--pairs is for --live or --aa"),
        (("doctor", "--unit", "--need", "nvml"), "--unit and --need: give only one of them"),
        (("export", "--list", "--prune", "2GiB"), "--list and --prune: give only one of them"),
        (("export", "--prune", "2GiB", "--json"), "--json and --prune: "),
        (("noise-floor", "--clear", "--json"), "--json and --clear: "),
        (("watch", "--seconds", "0", "--device", "gpu"), "unknown device 'gpu'"),
    ],
    ids=str,
)
def test_what_would_be_ignored_or_is_absent_is_refused(here, line, words):
    done = here("benchd", *line)
    assert (done.returncode, done.stdout, words in done.stderr) == (2, "", True), done.stderr


LONG = 300 * "x"  # no file system looks this up: it refuses root too, as a closed folder refuses others


@pytest.mark.parametrize(
    "line",
    [
        ("recommend",),
        ("compare", "here"),
        ("show",),
        ("show", "r1", "--results"),
        ("report", "--format", "csv"),
        ("verify",),
        ("replay", "--mqtt", "mqtt://x"),
        ("baseline", "set"),
        ("ship", "square", "--output"),
        ("profile", "square", "--output"),
        ("export", "--precision", "int8", "--onnx"),
    ],
    ids=" ".join,
)
def test_a_path_that_cannot_be_looked_up_is_named(here, results, line):
    results("here")
    done = here("benchd", *line, LONG)
    assert (done.returncode, done.stdout, LONG in done.stderr) == (2, "", True), done.stderr


@pytest.mark.parametrize("option", ["onnx", "weights", "artifacts"])
def test_so_is_one_of_a_measurement(here, option):
    done = here("bench-once", f"--{option}", LONG)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.match(f"error: (/.*/)?{LONG}: File name too long\n", done.stderr)


@pytest.mark.parametrize("port", ["70000", "-1", "0"])
@pytest.mark.parametrize("command", [["dashboard", "--mqtt", "mqtt://h"], ["demo"]], ids=["dashboard", "demo"])
def test_a_port_that_cannot_be_is_refused(here, command, port):
    done = here("benchd", *command, "--port", port)
    assert done.returncode == 2
    assert "Invalid value for '--port': Input should be " in done.stderr


def test_a_cache_that_cannot_be_written_is_said_before_anything_is_measured(here, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    done = here("bench-once", "--models", "square")
    assert done.returncode == 2
    assert "to move it, set XDG_CACHE_HOME" in done.stderr


def test_dry_run_prints_the_plan_and_why_not_and_creates_nothing(here, tmp_path):
    planned = ("--models", "square", "--variants", "eager,tensorrt", "--dry-run")
    done = here("bench-once", *planned, "--output", "deep/out")
    assert done.returncode == 0
    assert "square,eager,b1" in done.stdout
    assert "TensorRT needs an NVIDIA GPU" in done.stdout
    assert "2 cases, about " in done.stdout
    assert re.search(r"cannot run here: CUDA graphs need an NVIDIA GPU: cudagraph, ", done.stdout)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.toml"]


def test_the_plan_of_a_search_says_what_its_percentile_needs(here):
    search = ("--scenario", "server", "--find-rate", "--deadline", "33ms", "--percentile", "90")
    done = here("bench-once", "--models", "square", "--variants", "eager", *search, "--dry-run")
    assert "p90 needs 64 requests" in done.stdout


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--baseline", "missing.jsonl", "missing.jsonl: no such file"),
        ("--output", "tiny.toml", "--output tiny.toml: tiny.toml cannot be written: "),
        ("--output", "tiny.toml/out", "--output tiny.toml/out: tiny.toml/out cannot be written: "),
        ("--output", "dangling", "--output dangling: dangling cannot be written: "),
        ("--output", "/proc/out", "--output /proc/out: /proc/out cannot be written: "),
        ("--output", os.fsdecode(b"M\xe4rz"), "the path is not UTF-8; choose a different folder"),
    ],
)
@pytest.mark.parametrize("mode", [["--dry-run"], []], ids=["dry", "real"])
def test_a_dry_run_refuses_what_a_real_one_refuses(here, tmp_path, option, value, words, mode):
    (tmp_path / "dangling").symlink_to("nowhere/out")
    done = here("bench-once", "--models", "square", *mode, option, value)
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr
    assert not mode or {path.name for path in tmp_path.iterdir()} == {"tiny.toml", "dangling"}


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        (("bench-once", "--variants", "eager", "--dry-run"), "--module", "{}/net.py:build"),
        (("bench-once", "--variants", "eager"), "--module", "{}/net.py:build"),
        (("bench-once", "--models", "square", "--dry-run"), "--data", "imagefolder:{}"),
        (
            ("bench-once", "--models", "vim_tiny", "--variants", "onnxruntime-int8", "--dry-run"),
            "--calibration",
            "imagefolder:{}",
        ),
        (("benchd", "export"), "--module", "{}/net.py:build"),
        (("bench-once", "--models", "square", "--dry-run"), "--artifacts", "{}"),
        (("benchd", "run"), "--artifacts", "{}"),
    ],
)
def test_a_path_that_is_not_utf_8_is_refused(here, tmp_path, command, option, value):
    folder = tmp_path / os.fsdecode(b"M\xe4rz")
    folder.mkdir()
    (folder / "net.py").write_text("def build(): ...")
    done = here(*command, option, value.format(folder))
    assert (done.returncode, "its path is not UTF-8; rename it" in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--accuracy", "some"], "--accuracy some: expected full or a number of images"),
        (["--accuracy", "0"], "--accuracy 0: expected full"),
        (["--accuracy", "full"], "accuracy needs images with labels: also give --data"),
        (["--labels", "net.py"], "accuracy needs images with labels: also give --data"),
        (["--data", "imagefolder:none"], "none is not a folder"),
        (["--data", "imagefolder:images", "--labels", "net.py"], "net.py:2: 'import os, sys, time': expected a path"),
        (
            ["--data", "imagefolder:images", "--labels", "labels", "--dry-run"],
            "labels lists a.png, which is not a file in",
        ),
        (["--data", "cifar10:images", "--labels", "net.py"], "cifar10 has its own labels"),
        (["--max-drop", "1"], "--max-drop 1: expected a number with its unit"),
        (["--max-drop", "0%"], "expected more than 0 %"),
        (["--max-drop", "-1%"], "expected more than 0 %"),
        (["--max-drop", "1%"], "no accuracy is measured; add --data"),
    ],
)
def test_an_accuracy_that_cannot_be_is_refused_before_anything_is_measured(here, tmp_path, arguments, words):
    (tmp_path / "images").mkdir()
    (tmp_path / "labels").write_text("a.png 0")
    done = here("bench-once", "--module", user_module(tmp_path), *arguments)
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "out").exists()


def test_accuracy_of_random_weights_is_refused(here, tmp_path):
    (tmp_path / "images").mkdir()
    done = here("bench-once", "--models", "snn_onepass", "--data", "imagefolder:images", "--accuracy", "full")
    assert done.returncode == 2
    assert "accuracy needs trained weights, but these would be random: also give --weights FILE" in done.stderr


def test_help_names_every_option_and_list_every_model(here):
    output = here("bench-once", "--help").stdout
    for option in ("--models", "--variants", "--option", "--preset", "--mqtt", "--module", "Example:"):
        assert option in output
    listed = here("benchd", "list").stdout
    for model in catalog.MODELS:
        assert f"{model}: " in listed


def test_what_runs_nowhere_is_not_listed_and_says_why(here):
    (listed,) = (line for line in here("benchd", "list").stdout.splitlines() if line.startswith("variants: "))
    assert {"onnxruntime-fp16", "tensorrt-int8", "bf16", "int8"} <= set(listed.removeprefix("variants: ").split(", "))
    nowhere = ["onnxruntime-bf16", "tensorrt-bf16"]
    assert not {*nowhere} & set(listed.split(", "))
    planned = here("bench-once", "--models", "square", "--variants", ",".join(nowhere), "--dry-run").stdout
    assert planned.count("not run: ") == len(nowhere)
    assert "not run: square,onnxruntime-bf16,b1: files are exported in fp32, fp16 and int8 only" in planned
    assert not [line for line in planned.splitlines() if line.startswith("cannot run") and line.endswith("-bf16")]
    fp8 = here("bench-once", "--models", "square", "--variants", "tensorrt-fp8", "--dry-run")
    assert (fp8.returncode, "tensorrt-fp8: benchd does not write FP8 files: only GPUs of" in fp8.stderr) == (2, True)
    executorch = here("bench-once", "--models", "square", "--variants", "executorch-int8", "--dry-run")
    reason = "executorch-int8: benchd does not write ExecuTorch programs: ExecuTorch 1.5 needs NumPy 2"
    assert (executorch.returncode, reason in executorch.stderr) == (2, True)
    planned = here("bench-once", "--models", "vim_tiny", "--variants", "custom-int8", "--dry-run").stdout
    assert "custom-int8,b1: vim_tiny has no int8 kernels: our kernels convolve only the integers of spiking" in planned
