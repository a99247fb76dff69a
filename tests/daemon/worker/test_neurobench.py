"""NeuroBench's metrics: nets whose figures follow by hand, those of its own package in tests/daemon/worker/parity."""

import pytest
import torch
from torch import nn
from worker_jobs import changed, job, run_here, user_module

from benchd.daemon.worker.neurobench import measure
from benchd.models import catalog, demo


class Leaky(nn.Module):
    """Neurons as snnTorch has them: a base class SpikingNeuron and the potential in `mem`."""

    def __init__(self):
        super().__init__()
        self.mem = torch.zeros(0)

    def forward(self, current):
        self.mem = 0.5 * self.mem + current if self.mem.numel() else current
        spikes = (self.mem > 1).float()
        self.mem = self.mem - spikes
        return spikes


class SpikingNeuron(Leaky):
    pass


class Spiking(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.neurons_, self.last = nn.Linear(4, 5), SpikingNeuron(), nn.Linear(5, 3)
        nn.init.ones_(self.first.weight)
        nn.init.zeros_(self.first.bias)

    def forward(self, x):
        self.neurons_.mem = torch.zeros(0)
        return sum(self.last(self.neurons_(self.first(x))) for _ in range(2))


def test_a_net_s_operations_are_those_that_two_numbers_meet():
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    with torch.no_grad():
        net[0].weight.fill_(1.0)[0, :2] = 0.0
        net[0].bias.zero_()
        net[0].weight[2] = -1.0
    metrics = measure(net, torch.tensor([[1.0, 2.0, 0.0, 4.0]] * 2))
    assert metrics.connection_sparsity == 2 / 18
    assert metrics.activation_sparsity == pytest.approx(1 / 3)
    # of 12 products 3 x 3 meet an input, of them 2 a weight of 0; the second layer reads two numbers
    assert (metrics.effective_macs, metrics.effective_acs, metrics.dense_operations) == (7 + 4, 0, 12 + 6)
    assert metrics.footprint_bytes == 4 * (12 + 3 + 6 + 2)


def test_taps_on_padding_are_no_operations():
    net = nn.Conv2d(1, 1, 3, padding=1)
    metrics = measure(net, torch.full((1, 1, 4, 4), 0.5))
    assert (metrics.dense_operations, metrics.effective_macs, metrics.scaled_acs) == (100, 100, 100)


def test_spikes_accumulate_and_their_neurons_update_all_at_first_and_then_what_changes():
    metrics = measure(Spiking().eval(), torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]))
    # the first layer reads ones too; of two samples one fires, in both of the two steps
    assert (metrics.effective_macs, metrics.effective_acs) == (0, (2 * 2 * 5 + 2 * 5 * 3) / 2)
    assert metrics.dense_operations == 2 * (20 + 15)
    assert metrics.activation_sparsity == 0.5
    assert metrics.membrane_updates == (10 + 5) / 2


def test_what_is_not_counted_is_named():
    metrics = measure(nn.Sequential(nn.Linear(4, 4), nn.ConvTranspose1d(1, 1, 2)), torch.zeros(1, 4))
    assert metrics.uncounted == ["ConvTranspose1d"]


@pytest.mark.parametrize("model", ["snn_onepass", "snn_stbif_resnet18", "qann_resnet18"])
def test_a_spiking_or_quantised_net_s_record_has_them(tmp_path, model):
    options = catalog.entry(model).resolve(demo.CHECKPOINTS[model].options)
    a_job = changed(job(tmp_path, model=model, probes=True), options=options, weights=demo.DEMO, data=demo.DEMO)
    metrics = run_here(a_job).neurobench
    assert 0.5 < metrics.activation_sparsity < 1
    assert 0 < metrics.effective_acs + metrics.effective_macs < metrics.dense_operations


def test_a_module_of_your_own_has_them_too(tmp_path):
    outcome = run_here(job(tmp_path, module=user_module(tmp_path), probes=True))
    assert outcome.neurobench.dense_operations == 48 * 5
