"""NeuroBench's metrics against its own package, at a fixed batch: `make test-neurobench`."""

import frameworks
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchd.daemon.worker.neurobench import measure

pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages


@pytest.fixture(scope="module")
def theirs():
    """A function that returns NeuroBench's results for its form of a net over one batch."""
    frameworks.require()
    from neurobench.benchmarks import Benchmark
    from neurobench.metrics.static import ConnectionSparsity, Footprint
    from neurobench.metrics.workload import ActivationSparsity, MembraneUpdates, SynapticOperations

    def run(model, batch):
        data = DataLoader(TensorDataset(batch, torch.zeros(len(batch))), batch_size=len(batch))
        metrics = [[Footprint, ConnectionSparsity], [ActivationSparsity, SynapticOperations, MembraneUpdates]]
        return Benchmark(model, data, [], [], metrics).run(quiet=True)

    return run


def assert_same(ours, found):
    operations = found["SynapticOperations"]
    assert ours.footprint_bytes == found["Footprint"]
    assert round(ours.connection_sparsity, 4) == found["ConnectionSparsity"]
    assert ours.activation_sparsity == pytest.approx(found["ActivationSparsity"], rel=1e-6)
    assert ours.effective_macs == pytest.approx(operations["Effective_MACs"], rel=1e-6)
    assert ours.effective_acs == pytest.approx(operations["Effective_ACs"], rel=1e-6)
    assert ours.dense_operations == pytest.approx(operations["Dense"], rel=1e-6)
    assert (ours.membrane_updates or 0.0) == pytest.approx(found["MembraneUpdates"], rel=1e-6)


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
