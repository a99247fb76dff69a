"""The race of kernels in CUDA graphs: answers of the replays, times of one call, and who cannot be captured."""

import json

import pytest
from typer.testing import CliRunner

from benchmarks.kernels import app

pytestmark = [pytest.mark.gpu, pytest.mark.area("graphs")]
OURS = ("benchd", "torch")
OWN = """
import torch

def norm(hidden, residual, weight):
    with torch.cuda.stream(torch.cuda.{stream}_stream()):
        total = hidden + residual
        total.{sync}
        return total * (total * total).mean(-1, keepdim=True).add(1e-5).rsqrt() * weight, total
"""


@pytest.fixture
def kernels(tmp_path):
    """Return a function that races a tiny op and returns how it ended and each contender's row."""

    def run(*arguments):
        output = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        what = ("--op", "add_rms_norm", "--shape", "16,192", "--device", "cuda", "--seconds", "0.1")
        done = CliRunner().invoke(app, [*what, "--output", str(output), *arguments])
        return done, {row["contender"]: row for row in map(json.loads, output.read_text().splitlines())}

    return run


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # Inductor's advice
def test_replays_answer_right_and_a_call_of_them_takes_less_than_one_that_is_launched(kernels):
    plain, launched = kernels("--no-compile")
    done, replayed = kernels("--graph")
    assert (plain.exit_code, done.exit_code) == (0, 0), plain.output + done.output
    assert "in CUDA graphs" in done.output
    for name in (*OURS, "torch.compile"):
        row = replayed[name]
        assert row["right"], row
        assert row["captured"]
        assert row["median_ms"] > 0
    for name in OURS:
        assert 0 < replayed[name]["median_ms"] < launched[name]["median_ms"]
        assert not launched[name]["captured"]


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize(
    ("stream", "sync", "verdict"),
    [("current", "sum().item()", "cannot be captured"), ("default", "sum()", "WRONG")],
    ids=["it waits", "it runs elsewhere"],
)
def test_who_is_not_captured_is_told_and_the_others_race(kernels, tmp_path, stream, sync, verdict):
    own = tmp_path / "own.py"
    own.write_text(OWN.format(stream=stream, sync=sync))
    done, rows = kernels("--graph", "--no-compile", "--implementation", f"{own}:norm")
    assert done.exit_code == 5, done.output
    assert verdict in rows["yours"]["verdict"]
    for name in OURS:
        assert rows[name]["right"], rows[name]
        assert rows[name]["median_ms"] > 0
