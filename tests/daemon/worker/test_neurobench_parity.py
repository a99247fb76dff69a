"""NeuroBench's metrics against its own package, at a fixed batch: `make test-neurobench`."""

import copy
from collections import OrderedDict

import frameworks
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchd.daemon.worker.neurobench import by_layer, measure
from benchd.models import catalog
from benchd.models.snn_onepass import PooledLif
from benchd.models.stbif import StBif

pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages


@pytest.fixture(scope="module")
def theirs():
    """A function that returns NeuroBench's results for its form of a net over one batch."""
    frameworks.require()
    from neurobench.benchmarks import Benchmark
    from neurobench.metrics.static import ConnectionSparsity, Footprint
    from neurobench.metrics.workload import ActivationSparsity, MembraneUpdates, SynapticOperations

    def run(model, batch, metrics=None):
        data = DataLoader(TensorDataset(batch, torch.zeros(len(batch))), batch_size=len(batch))
        metrics = metrics or [
            [Footprint, ConnectionSparsity],
            [ActivationSparsity, SynapticOperations, MembraneUpdates],
        ]
        return Benchmark(model, data, [], [], metrics).run(quiet=True)

    return run


def assert_same(ours, found, *, updates=True):
    operations = found["SynapticOperations"]
    assert ours.footprint_bytes == found["Footprint"]
    assert round(ours.connection_sparsity, 4) == found["ConnectionSparsity"]
    assert ours.activation_sparsity == pytest.approx(found["ActivationSparsity"], rel=1e-6)
    assert ours.effective_macs == pytest.approx(operations["Effective_MACs"], rel=1e-6)
    assert ours.effective_acs == pytest.approx(operations["Effective_ACs"], rel=1e-6)
    assert ours.dense_operations == pytest.approx(operations["Dense"], rel=1e-6)
    if updates:
        assert (ours.membrane_updates or 0.0) == pytest.approx(found["MembraneUpdates"], rel=1e-6)


def with_activations(net, *kinds):
    """Return NeuroBench's form of a net whose neurons it does not know."""
    from neurobench.models import TorchModel

    model = TorchModel(net)
    for kind in kinds:
        model.add_activation_module(kind)
    return model


@pytest.mark.parametrize("padding_mode", ["zeros", "reflect"])
def test_a_pruned_ann(theirs, padding_mode):
    from neurobench.models import TorchModel

    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, stride=2, padding_mode=padding_mode), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)
    ).eval()
    with torch.no_grad():
        net[3].weight[torch.rand_like(net[3].weight) < 0.5] = 0.0
    batch = torch.randn(6, 2, 8, 8)
    assert_same(measure(net, batch), theirs(TorchModel(net), batch))


def test_a_net_of_snntorch_with_its_membrane_updates(theirs):
    import snntorch
    from neurobench.models import SNNTorchModel

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(10, 7), nn.Linear(7, 3)
            self.inner = snntorch.Leaky(beta=0.9, init_hidden=True)
            self.outer = snntorch.Leaky(beta=0.8, init_hidden=True, output=True)

        def forward(self, x):
            return self.outer(self.last(self.inner(self.first(x))))

    class Unrolled(nn.Module):
        """As it is given with --module: all steps in one forward."""

        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, x):
            self.net.inner.reset_hidden()
            self.net.outer.reset_hidden()
            return torch.stack([self.net(x[:, step])[0] for step in range(x.shape[1])])

    torch.manual_seed(0)
    net = Net().eval()
    with torch.no_grad():
        net.first.weight.mul_(4)
        net.last.weight.mul_(4)
    batch = (torch.rand(5, 6, 10) > 0.6).float()
    ours = measure(Unrolled(net), batch)
    net.inner.mem, net.outer.mem = torch.zeros(0), torch.zeros(0)  # which their footprint includes
    assert 0 < ours.effective_acs < ours.dense_operations
    assert_same(ours, theirs(SNNTorchModel(net), batch))


def test_a_net_of_norse_whose_cells_it_takes_only_wrapped(theirs):
    from norse.torch import LIFBoxCell, LIFBoxParameters, LIFCell, LIFParameters

    class Spiking(nn.Module):
        def __init__(self, cell):
            super().__init__()
            self.cell, self.state = cell, None

        def forward(self, x):
            spikes, self.state = self.cell(x, self.state)
            return spikes

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(10, 7), nn.Linear(7, 3)
            self.inner = Spiking(LIFBoxCell(LIFBoxParameters(v_th=torch.tensor(0.1))))
            self.outer = Spiking(LIFCell(LIFParameters(v_th=torch.tensor(0.05))))

        def forward(self, x):
            self.inner.state = self.outer.state = None
            return torch.stack([self.outer(self.last(self.inner(self.first(step)))) for step in x.unbind(1)])

    torch.manual_seed(0)
    net, batch = Net().eval(), (torch.rand(5, 20, 10) > 0.6).float()
    ours = measure(net, batch)
    assert 0 < ours.effective_acs < ours.dense_operations
    assert 0 < ours.activation_sparsity < 1
    assert_same(ours, theirs(with_activations(net, Spiking), batch))


def test_a_net_of_spikingjelly_whose_membranes_it_does_not_see(theirs):
    from spikingjelly.activation_based import functional, layer, neuron

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(
                layer.Conv2d(2, 4, 3, padding=1),
                neuron.IFNode(v_threshold=0.4),
                layer.MaxPool2d(2),
                layer.Flatten(),
                layer.Linear(64, 5),
                neuron.LIFNode(v_threshold=0.2),
            )

        def forward(self, x):
            functional.reset_net(self)
            return torch.stack([self.layers(step) for step in x.unbind(1)])

    torch.manual_seed(0)
    net, batch = Net().eval(), (torch.rand(5, 6, 2, 8, 8) > 0.6).float()
    ours = measure(net, batch)
    functional.reset_net(net)
    reported = theirs(with_activations(net, neuron.BaseNode), batch)
    assert 0 < ours.effective_acs < ours.dense_operations
    assert_same(ours, reported, updates=False)
    assert 0 < ours.membrane_updates <= 6 * (4 * 64 + 5)
    assert reported["MembraneUpdates"] == 0.0


def test_onepass(theirs):
    torch.manual_seed(0)
    net, batch = catalog.build("snn_onepass", time_steps=3), torch.rand(2, 3, 32, 32)
    ours = measure(net, batch)
    assert ours.scaled_acs == 0  # pooled counts have several heights
    assert_same(ours, theirs(with_activations(net, PooledLif), batch))


class AsLayers(nn.Module):
    """A net whose layers are folded, as the plain layers that its weights are of, each given what arrives there."""

    def __init__(self, net):
        super().__init__()
        self._net = (net,)  # out of sight
        self.layers = nn.ModuleList(copy.deepcopy(each.layer) for each in net.synapses())

    def forward(self, x):
        (net,) = self._net
        arrived = []
        hooks = [
            each.module.register_forward_pre_hook(lambda _, inputs, layer=layer: arrived.append((layer, inputs[0])))
            for each, layer in zip(net.synapses(), self.layers, strict=True)
        ]
        net(x)
        for hook in hooks:
            hook.remove()
        for layer, inputs in arrived:
            layer(inputs)
        return x


def test_a_stbif_net_whose_folded_layers_it_does_not_see(theirs):
    torch.manual_seed(0)
    net, batch = catalog.build("snn_stbif_resnet18", time_steps=4, width=8), torch.randn(2, 3, 32, 32)
    ours = measure(net, batch)
    reported = theirs(with_activations(net, StBif), batch)
    assert reported["SynapticOperations"] == dict.fromkeys(("Effective_MACs", "Effective_ACs", "Dense"), 0.0)
    reported["SynapticOperations"] = theirs(with_activations(AsLayers(net)), batch)["SynapticOperations"]
    assert 0 < ours.scaled_acs < ours.effective_macs  # spikes of another height are multiplied by its rule
    assert_same(ours, reported)


def test_by_layer_under_whole_names_where_it_merges_those_of_one_name(theirs):
    from neurobench.metrics.workload import ActivationSparsity, ActivationSparsityByLayer

    torch.manual_seed(0)
    block = [nn.Sequential(OrderedDict(fc=nn.Linear(8, 8), act=nn.ReLU())) for _ in range(2)]
    net, batch = nn.Sequential(OrderedDict(a=block[0], b=block[1])).eval(), torch.randn(6, 8)
    rows = {row.name: row for row in by_layer(net, lambda: net(batch))}
    reported = theirs(with_activations(net), batch, [[], [ActivationSparsity, ActivationSparsityByLayer]])
    assert rows.keys() == {"a.fc", "a.act", "b.fc", "b.act"}
    both = (rows["a.act"].activation + rows["b.act"].activation) / 2
    assert reported["ActivationSparsityByLayer"] == {"act": pytest.approx(both, rel=1e-6)}
    assert rows["a.act"].activation != rows["b.act"].activation
