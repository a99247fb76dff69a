"""The work of a module as counted while it runs: the products of each kind of layer, bytes, and what has no formula."""

import pytest
import torch
from torch import nn
from worker_jobs import job, run_here, user_module

from benchd.daemon.worker.counting import count
from benchd.daemon.worker.structures import Tensors


class Attention(nn.Module):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x)


class Spectrum(nn.Module):
    def forward(self, x):
        return torch.fft.rfft(x).real


class Vector(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 7))

    def forward(self, x):
        return torch.mv(self.weight, x[0]) * 2


class OutOfPlace(nn.Module):
    def forward(self, x):
        sums = torch.baddbmm(x, x, x)
        first = torch.addmm(x[0], x[0], x[1])
        column = torch.addmv(x[0, 0], x[0], x[0, 1])
        return torch._C._nn.gelu(torch.floor_divide(sums, 2) * 3 + first + column)


class InPlace(nn.Module):
    def forward(self, x):
        sums = x.clone().baddbmm_(x, x)
        first = x[0].clone().addmm_(x[0], x[1])
        column = x[0, 0].clone().addmv_(x[0], x[0, 1])
        return torch._C._nn.gelu_(sums.floor_divide_(2).mul_(3).add_(first).add_(column))


class LastStep(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0]


@pytest.mark.parametrize(
    ("module", "shape", "flops"),
    [
        (nn.Linear(7, 5), (3, 7), 2 * 3 * 7 * 5),
        (nn.utils.parametrizations.weight_norm(nn.Linear(7, 5)), (3, 7), 2 * 3 * 7 * 5),
        (
            nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Hardswish(inplace=True)),
            (2, 3, 6, 6),
            31104,
        ),
        (nn.ConvTranspose2d(2, 4, 2), (1, 2, 5, 5), 2 * 25 * 2 * 4 * 4),
        (Attention(), (2, 4, 10, 8), 2 * 2 * 2 * 4 * 10 * 10 * 8),
        (Vector(), (1, 7), 2 * 5 * 7),
        (LastStep(6, 4, 2, bidirectional=True), (5, 3, 6), 2 * 2 * 15 * (16 * 6 + 16 * 4 + 16 * 8 + 16 * 4)),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 5, 8), 10 * 2 * 512 + 2 * 2 * 2 * 2 * 25 * 4),
    ],
)
def test_every_product_is_counted_at_two_operations(module, shape, flops):
    work = count(module.eval(), torch.zeros(shape))
    assert (work.matrix_flops, work.uncounted) == (flops, [])


def test_the_bytes_are_each_parameter_the_inputs_and_the_answers_once():
    work = count(nn.Linear(7, 5), torch.zeros(3, 7))
    assert (work.bytes, work.parameters_bytes) == (4 * (40 + 21 + 15), 160)
    both = count(nn.Bilinear(2, 3, 4), Tensors({"a": torch.zeros(5, 2), "b": torch.zeros(5, 3)}))
    assert both.bytes == 4 * (28 + 10 + 15 + 20)


def test_an_operation_in_place_counts_as_much_as_out_of_place():
    x = torch.zeros(2, 3, 3)
    work = count(InPlace(), x)
    assert work == count(OutOfPlace(), x)
    assert (work.matrix_flops, work.uncounted) == (2 * 54 + 54 + 18, [])


def test_what_has_no_formula_is_named():
    assert count(Spectrum(), torch.zeros(2, 16)).uncounted == ["_fft_r2c"]


def test_most_products_of_a_convolution_may_be_fewer_and_of_a_linear_layer_not():
    assert count(nn.Conv2d(1, 1, 3), torch.zeros(1, 1, 5, 5)).is_convolved
    assert not count(nn.Linear(3, 3), torch.zeros(1, 3)).is_convolved


def test_a_module_that_a_mode_breaks_is_measured_all_the_same(tmp_path):
    lines = "torch.utils._python_dispatch._get_current_dispatch_mode() is None or (_ for _ in ()).throw(RuntimeError())"
    outcome = run_here(job(tmp_path, module=user_module(tmp_path, forward=lines), probes=True))
    assert (outcome.process.status, outcome.counted.uncounted) == ("ok", ["after RuntimeError"])
