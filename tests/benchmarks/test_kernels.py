"""The race of kernels as a user starts it: answers are judged before anything is timed, and a wrong one shows."""

import json
import random
import time
from functools import partial
from itertools import chain, groupby
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchd.daemon.records import Probes
from benchd.daemon.worker import probes
from benchd.kernels.exact_conv2d import native
from benchmarks import rows
from benchmarks.kernels import app, compiled_call
from benchmarks.ops import OPS
from benchmarks.paired import FEWEST_ROUNDS, DroppedContender, race
from benchmarks.rows import Entrant

ROOT = Path(__file__).parents[2]
RIGHT = """
import torch

def norm(hidden, residual, weight):
    total = hidden + residual
    return total * (total * total).mean(-1, keepdim=True).add(1e-5).rsqrt() * weight, total
"""


RATES = Probes(
    copy_bytes_per_s=1e10,
    matrix_flops_per_s=1e11,
    matrix_dtype="float32",
    exponentials_per_s=1e9,
    exponentials_by="torch",
)


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """Return a function that runs the race on a tiny op and returns how it ended and the rows it wrote."""
    monkeypatch.setattr(probes, "probe", lambda *_: RATES)  # probing takes longer than the race

    def run(*arguments):
        rows = tmp_path / "rows.jsonl"
        done = CliRunner().invoke(app, ["--device", "cpu", "--seconds", "0.02", "--output", str(rows), *arguments])
        lines = rows.read_text().splitlines() if rows.exists() else []
        return done, {row["contender"]: row for row in map(json.loads, lines)}

    return run


def test_everybody_is_judged_and_raced_and_who_is_absent_is_named(kernels, monkeypatch):
    # which compiler makes no difference to a race, and inductor's takes ten seconds
    monkeypatch.setattr("benchmarks.kernels.compiled_call", partial(compiled_call, backend="aot_eager"))
    done, rows = kernels("--op", "add_rms_norm", "--shape", "5,8")
    assert done.exit_code == 0, done.output
    assert rows["benchd"]["ratio"] == 1.0
    assert not rows["benchd"]["captured"]
    for name in ("benchd", "torch", "torch.compile"):
        assert rows[name]["right"], rows[name]
        assert rows[name]["median_ms"] > 0
        assert rows[name]["ratio"] > 0
    peer = rows["mamba-ssm rms_norm_fn"]
    assert peer["median_ms"] is None
    assert "not installed" in peer["verdict"] or "CUDA" in peer["verdict"]
    assert "add_rms_norm (5, 8) fp32" in done.output


def test_every_op_is_compiled_however_many_were_before():
    counters = torch._dynamo.utils.counters["frames"]
    with torch._dynamo.config.patch(recompile_limit=2):
        for rows_ in range(1, 5):
            problem = OPS["add_rms_norm"].make((rows_, 8), torch.float32, torch.device("cpu"))
            counters.clear()
            compiled_call(problem.call("torch"), "eager")()
            assert counters["ok"] == 1


def test_the_scan_of_onnxruntime_computes_the_same(kernels):
    done, rows = kernels("--op", "selective_scan", "--shape", "2,5,16,4", "--no-compile")
    assert done.exit_code == 0, done.output
    assert rows["onnxruntime Scan"]["right"], rows["onnxruntime Scan"]


@pytest.mark.skipif(not native.paths(), reason="needs a CPU with AMX, VNNI or a dot product of bytes")
def test_spikes_are_also_raced_in_integers(kernels):
    done, rows = kernels("--op", "spike_conv2d", "--shape", "2,3,4,4,5,3,50", "--no-compile")
    assert done.exit_code == 0, done.output
    assert rows["in integers"]["right"], rows["in integers"]


@pytest.mark.parametrize("op", ["lif_pool", "lif_pool_repeat", "stbif"])
def test_spikes_are_judged_bit_by_bit(kernels, op):
    done, rows = kernels("--op", op, "--shape", "3,2,4,6,6", "--no-compile")
    assert done.exit_code == 0, done.output
    assert rows["benchd"]["verdict"] == rows["torch"]["verdict"] == "bit-equal"


def test_a_kernel_of_ones_own_is_raced_against_ours(kernels, tmp_path):
    (tmp_path / "own.py").write_text(RIGHT)
    own = f"{tmp_path / 'own.py'}:norm"
    done, rows = kernels("--op", "add_rms_norm", "--shape", "5,8", "--no-compile", "--implementation", own)
    assert done.exit_code == 0, done.output
    assert rows["yours"]["right"]
    assert rows["yours"]["ratio_low"] <= rows["yours"]["ratio"] <= rows["yours"]["ratio_high"]


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (("1e-5", "1e-2"), "WRONG: error"),
        (("weight, total", "weight, total[:1]"), "wrong shape"),
        (("total = ", "raise ValueError('broken')\n    total = "), "ValueError: broken"),
    ],
)
def test_a_wrong_kernel_shows(kernels, tmp_path, change, verdict):
    (tmp_path / "own.py").write_text(RIGHT.replace(*change))
    own = f"{tmp_path / 'own.py'}:norm"
    done, rows = kernels("--op", "add_rms_norm", "--shape", "5,8", "--no-compile", "--implementation", own)
    assert done.exit_code == 5
    assert "wrong answers: yours of add_rms_norm" in done.output
    assert verdict in rows["yours"]["verdict"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--op", "selectiv_scan"),
        ("--op", "selective_scan", "--shape", "1,2,3"),
        ("--op", "selective_scan", "--shape", "1,2,3,x"),
        ("--op", "selective_scan", "--dtype", "fp8"),
        ("--shape", "1,2,3,4"),
        ("--op", "lif", "--implementation", "nowhere.py:f"),
        ("--op", "lif", "--implementation", f"{__file__}:nothing"),
    ],
)
def test_what_does_not_fit_is_refused(arguments):
    done = CliRunner().invoke(app, [*arguments, "--device", "cpu"])
    assert done.exit_code == 2


def test_what_a_call_costs_the_host_is_timed_alone(kernels):
    done, rows = kernels("--op", "add_rms_norm", "--shape", "5,8", "--no-compile", "--host")
    assert done.exit_code == 0, done.output
    assert rows["benchd"]["host"]
    assert 0 < rows["benchd"]["median_ms"] < 1e3
    assert rows["benchd"]["t_wall"] > 1.7e9


def test_a_cut_is_of_the_scan_in_graphs(kernels):
    done, _ = kernels("--op", "bidirectional_scan", "--cut", "2,8,1,1")
    assert done.exit_code == 2
    assert "--cut needs --graph" in done.output


def test_graphs_are_refused_on_a_cpu(kernels):
    done, rows = kernels("--op", "add_rms_norm", "--shape", "5,8", "--graph")
    assert done.exit_code == 2
    assert "--graph needs a CUDA device" in done.output
    assert not rows


def test_a_race_visits_everybody_forth_and_back_in_orders_that_are_drawn():
    visits = []

    def contender(name):
        def call():
            visits.append(name)
            time.sleep(0.002)

        return name, call, 1

    random.seed(1)
    results = race([contender(name) for name in "abc"], torch.device("cpu"), 0.0, "a")
    random.seed(1)
    orders = [random.sample("abc", 3) for _ in range(FEWEST_ROUNDS)]
    assert [(result.name, result.rounds) for result in results] == [(name, FEWEST_ROUNDS) for name in "abc"]
    assert results[0].ratio == 1.0
    assert len({tuple(order) for order in orders}) > 1
    turns = ["abc", *(order + order[::-1] for order in orders)]
    assert [name for name, _ in groupby(visits)] == [name for name, _ in groupby(chain.from_iterable(turns))]


def short_of_memory(calls):
    """A call that finds no memory any more after so many."""
    left = iter(range(calls))

    def call():
        if next(left, None) is None:
            raise MemoryError("18 GiB are wanted\nand 2 GiB are free")

    return call


@pytest.mark.parametrize("calls", [0, 3, 400], ids=["at once", "while it warms up", "in a round"])
def test_who_fails_in_the_race_costs_nobody_else_s_times(calls):
    entrants = [
        Entrant(name, call, "error 0", right=True)
        for name, call in [("a", lambda: None), ("b", short_of_memory(calls)), ("c", lambda: None)]
    ]
    results = rows.run(entrants, torch.device("cpu"), 0.0)
    assert results["b"] == DroppedContender("b", "failed: MemoryError: 18 GiB are wanted")
    assert results["a"].rounds == results["c"].rounds == FEWEST_ROUNDS
    assert results["a"].ratio == 1.0
    columns = rows.fields(entrants[1], results["b"])
    assert columns == {"contender": "b", "verdict": "failed: MemoryError: 18 GiB are wanted", "right": False}


@pytest.mark.parametrize("first", [None, short_of_memory(0)], ids=["did not start", "failed"])
def test_without_the_first_there_are_times_and_no_ratios(first):
    entrants = [Entrant("ours", first, "why", right=False)]
    entrants += [Entrant(name, lambda: None, "error 0", right=True) for name in "bc"]
    results = rows.run(entrants, torch.device("cpu"), 0.0)
    for entrant in entrants[1:]:
        columns = rows.fields(entrant, results[entrant.name])
        assert columns["median_ms"] > 0
        assert columns["ratio"] is columns["ratio_low"] is columns["ratio_high"] is None


def test_a_race_of_nobody_ends():
    assert rows.run([Entrant("ours", None, "why", right=False)], torch.device("cpu"), 60.0) == {}


def test_a_contender_that_does_not_get_ready_is_named_and_the_others_race(tmp_path, kernels, monkeypatch):
    monkeypatch.setattr(rows, "ENTRANT_S", 1.0)
    own = tmp_path / "own.py"
    own.write_text("import time\n\ndef norm(**_):\n    while True:\n        time.sleep(0.01)\n")
    arguments = ("--op", "add_rms_norm", "--shape", "5,8", "--no-compile", "--implementation", f"{own}:norm")
    done, by_contender = kernels(*arguments)
    assert by_contender["yours"]["verdict"] == "failed: TimeoutError: not ready in 1 s"
    assert by_contender["benchd"]["median_ms"] > 0, done.output


def test_who_would_keep_the_others_waiting_does_not_race():
    contenders = [("quick", lambda: None, 1), ("slow", lambda: time.sleep(0.1), 1)]
    quick, slow = race(contenders, torch.device("cpu"), 0.02, "quick", limit_s=0.5)
    assert quick.rounds >= FEWEST_ROUNDS
    assert "too long to race in 0.5 s" in slow.reason


def test_where_a_call_computes_the_answer_several_times_its_time_is_of_one():
    single = Entrant("one", lambda: time.sleep(0.01), "error 0", right=True)
    ten = Entrant("ten", lambda: time.sleep(0.1), "error 0", right=True, calls=10)
    results = rows.run([single, ten], torch.device("cpu"), 0.0)
    assert 10 <= results["ten"].median_ms < 50
    assert 0.2 < results["ten"].ratio < 5
