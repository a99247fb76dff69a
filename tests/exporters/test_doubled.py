"""A module in float64 whose large weights are read in float64 only while they are used."""

import copy
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional
from worker_jobs import changed, job

from benchd.daemon.records import InputSpec
from benchd.daemon.worker import backends, workload
from benchd.daemon.worker.check import checking as check
from benchd.daemon.worker.check.rounding import Rounding
from benchd.exporters import doubled


class Shapes(nn.Module):
    """Reads large weights in most of the ways that a module can."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9000, 128)
        self.wide, self.narrow = nn.Linear(128, 9000), nn.Linear(9000, 128, bias=False)
        self.conv = nn.Conv1d(400, 1000, 3).to(memory_format=torch.contiguous_format)
        self.lstm, self.attention = nn.LSTM(128, 640, batch_first=True), nn.MultiheadAttention(640, 4, batch_first=True)
        self.own = nn.Parameter(torch.randn(640, 2000))

    def forward(self, rows):
        x = self.narrow(self.wide(self.table(rows)).relu())
        x, _ = self.lstm(x)
        x, _ = self.attention(x, x, x)
        x = (x @ self.own)[..., :400] + self.own.dtype.itemsize + self.own[0, :400]
        tied = functional.linear(self.table(rows), weight=self.table.weight)
        return self.conv(x.transpose(1, 2)), tied


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return Shapes().eval()


@torch.inference_mode()
def test_its_answers_are_those_of_the_module_in_float64(net):
    rows = torch.randint(9000, (2, 5))
    answers = doubled.reading(doubled.in_float64(net))(rows)
    for answer, wanted in zip(answers, copy.deepcopy(net).double()(rows), strict=True):
        assert answer.dtype == torch.float64
        torch.testing.assert_close(answer, wanted, rtol=1e-12, atol=1e-12)


def test_a_copy_shares_large_weights_alone_and_a_cast_of_it_leaves_them(net):
    copied = doubled.copied(net)
    shared = {name for name, weight in copied.named_parameters() if weight.data_ptr() in doubled.places(net)}
    assert {"table.weight", "wide.weight", "narrow.weight", "conv.weight", "own"} < shared
    assert "wide.bias" not in shared
    before = net.wide.weight.clone()
    assert copied.half().wide.weight.dtype == torch.float16
    assert torch.equal(net.wide.weight, before)


@torch.inference_mode()
def test_a_large_weight_is_rounded_as_it_is_read(net):
    linear, read = nn.Sequential(net.wide), torch.randn(200, 128, dtype=torch.float64)
    exact, noisy = doubled.reading(doubled.in_float64(linear)), doubled.reading(doubled.in_float64(linear))
    with Rounding(8, 0.0, 0, torch.device("cpu")):
        rounded = noisy(read)
    whole, rounding = copy.deepcopy(linear).double(), Rounding(8, 0.0, 0, torch.device("cpu"))
    whole[0].weight.copy_(rounding.rounded(whole[0].weight))
    with rounding:
        wanted = whole(read)
    errors, usual = ((answer - exact(read)).abs().mean().item() for answer in (rounded, wanted))
    assert errors == pytest.approx(usual, rel=0.05)
    assert torch.equal(exact(read), doubled.reading(doubled.in_float64(linear))(read))


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:The .grad attribute")
def test_torchscript_which_no_mode_sees_is_in_float64_as_a_whole(net):
    scripted = nn.Sequential(torch.jit.script(nn.Linear(1024, 2000)))
    doubled_net = doubled.in_float64(scripted)
    assert doubled.places(doubled_net) == set()
    assert doubled_net(torch.ones(1, 1024, dtype=torch.float64)).dtype == torch.float64


WIDE = """
from torch import nn

def build():
    return nn.Sequential(nn.Linear(128, 2**15), nn.ReLU(), nn.Linear(2**15, 128))
"""


def peak_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


@pytest.mark.parametrize("read", [lambda table, at: table(at), lambda table, at: table.weight[at]])
def test_a_table_is_read_in_float64_by_its_rows(read):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(2**17, 128)

        def forward(self, at):
            return read(self.table, at)

    net, at = Net(), torch.tensor([[1, 5], [7, 2**17 - 1]])
    run = doubled.reading(doubled.in_float64(net))
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()
    with torch.inference_mode():
        answer = run(at)
    assert peak_bytes() - before < net.table.weight.numel()
    assert torch.equal(answer, net.table.weight[at].double())


def test_a_check_takes_less_than_half_the_memory_of_the_weights_in_float64(tmp_path):
    """Beside the weights in float32, which are half of it too."""
    (tmp_path / "net.py").write_text(WIDE)
    a_job = job(tmp_path, module=f"{tmp_path}/net.py:build", batch_size=8)
    a_job = changed(a_job, inputs=[InputSpec("", "float32", [128])])
    built = workload.build(a_job)
    loaded = backends.load(a_job.case.variant, built.source, torch.device("cpu"), built.example(8))
    check.check_and_answers(built, loaded, msgspec.structs.replace(a_job, cache=f"{tmp_path}/warm"))
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()
    assert check.check_and_answers(built, loaded, a_job).check.passed
    assert peak_bytes() - before < 0.5 * 8 * built.facts.parameters
