"""Nets of snnTorch, SpikingJelly and Norse against the NIR files that these write of them: `make test-nir`.

Each file leaves open how its net is stepped; the options say what each framework does.
"""

import frameworks
import pytest
import torch
from torch import nn

pytest.importorskip("h5py", reason="reads NIR files")

from benchd.models import nir
from benchd.models.catalog import NIR

STEPS, BATCH = 60, 4
pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages


@pytest.fixture(scope="module", autouse=True)
def _installed():
    frameworks.require()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(1)


def spikes(*sizes):
    return (torch.rand(BATCH, STEPS, *sizes, generator=torch.Generator().manual_seed(0)) < 0.3).float()


def assert_same(tmp_path, graph, run, x, **options):
    """Hold the net of a file against its source; `run` takes one time step (B, ...)."""
    import nir as package

    path = tmp_path / "net.nir"
    package.write(path, graph, compression=None)  # of one number, as Norse has, HDF5 compresses none
    ours = nir.build(str(path), **NIR.resolve(options))
    with torch.no_grad():
        answers, expected = ours(x), torch.stack([run(x[:, t]) for t in range(STEPS)], 1)
    assert len(expected.unique()) > 1
    assert answers.shape == expected.shape
    assert torch.allclose(answers, expected, atol=1e-5)


def of_snntorch(factor, *layers):
    """Return a net with larger weights than the usual ones, so that all of it spikes.

    Immediate subtraction is snnTorch's only while no potential reaches twice the threshold.
    """
    net = nn.Sequential(*layers).eval()
    with torch.no_grad():
        for layer in net:
            if isinstance(layer, nn.Linear):
                layer.weight.mul_(factor)
    return net


@pytest.mark.parametrize("how", ["zero", "delayed_subtract", "subtract"])
def test_leaky_of_snntorch(tmp_path, how):
    import snntorch
    from snntorch import utils
    from snntorch.export_nir import export_to_nir

    given = {"reset_mechanism": how.rpartition("_")[2], "reset_delay": how == "delayed_subtract", "init_hidden": True}
    net = of_snntorch(
        1.3,
        nn.Linear(10, 20),
        snntorch.Leaky(beta=torch.full((20,), 0.9), threshold=torch.ones(20), **given),
        nn.Linear(20, 5),
        snntorch.Leaky(beta=torch.linspace(0.6, 0.9, 5), threshold=torch.ones(5), **given),
    )
    graph = export_to_nir(net, torch.zeros(1, 10), ignore_dims=[0])
    utils.reset(net)
    assert_same(tmp_path, graph, net, spikes(10), reset=how)


@pytest.mark.parametrize("how", ["delayed_zero", "delayed_subtract"])
def test_a_recurrent_net_with_synapses_of_snntorch(tmp_path, how):
    import snntorch
    from snntorch import utils
    from snntorch.export_nir import export_to_nir

    given = {"reset_mechanism": how.rpartition("_")[2], "init_hidden": True}
    net = of_snntorch(
        2.0,
        nn.Linear(10, 20),
        snntorch.RSynaptic(alpha=0.5, beta=0.8, linear_features=20, **given),
        nn.Linear(20, 5),
        snntorch.Synaptic(alpha=torch.full((5,), 0.6), beta=torch.full((5,), 0.7), threshold=torch.ones(5), **given),
    )
    graph = export_to_nir(net, torch.zeros(1, 10), ignore_dims=[0])
    utils.reset(net)
    assert_same(tmp_path, graph, net, spikes(10), reset=how)


@pytest.mark.parametrize("decay_input", [False, True])
def test_a_convolutional_net_of_spikingjelly(tmp_path, decay_input):
    from spikingjelly.activation_based import functional, layer, neuron
    from spikingjelly.activation_based.nir_exchange import export_to_nir

    net = nn.Sequential(
        layer.Conv2d(2, 4, 3, padding=1, stride=2),
        neuron.IFNode(v_threshold=0.3),
        layer.AvgPool2d(2),
        layer.Flatten(),
        layer.Linear(16, 6),
        neuron.LIFNode(tau=3.0, decay_input=decay_input, v_threshold=0.1),
    ).eval()
    graph = export_to_nir(net, torch.zeros(1, 2, 8, 8), dt=1e-3)
    functional.reset_net(net)
    assert_same(tmp_path, graph, net, spikes(2, 8, 8), dt=1e-3, fires="at")


def test_synapses_behind_a_convolution_in_one_dimension_of_spikingjelly(tmp_path):
    from spikingjelly.activation_based import functional, layer, neuron
    from spikingjelly.activation_based.nir_exchange import export_to_nir

    net = nn.Sequential(
        layer.Conv1d(2, 4, 3, padding=1), neuron.CUBALIFNode(c_decay=0.5, v_decay=0.7, v_threshold=0.8)
    ).eval()
    graph = export_to_nir(net, torch.zeros(1, 2, 9))
    functional.reset_net(net)
    assert_same(tmp_path, graph, net, spikes(2, 9), fires="at")


def of_norse(*layers):
    """Return a net, one step of it with its state, and its graph; `dt` of its export is to be left at 1.

    It divides dt by the inverse of a time constant, which then is that constant only for 1.
    """
    import norse

    net = norse.torch.SequentialState(*layers).eval()
    states = [None]

    def step(x):
        out, states[0] = net(x, states[0])
        return out

    graph = norse.torch.to_nir(net, torch.zeros(10), dt=1.0)
    return step, graph


def test_membranes_of_norse(tmp_path):
    from norse.torch import LIBoxCell, LIFBoxCell, LIFBoxParameters

    step, graph = of_norse(
        nn.Linear(10, 20), LIFBoxCell(LIFBoxParameters(v_th=torch.tensor(0.1))), nn.Linear(20, 5), LIBoxCell()
    )
    assert_same(tmp_path, graph, step, spikes(10), dt=1e-3)


def test_synapses_of_norse_take_a_spike_whole(tmp_path):
    from norse.torch import LIFCell, LIFParameters

    step, graph = of_norse(nn.Linear(10, 20), LIFCell(LIFParameters(v_th=torch.tensor(0.2))))
    assert_same(tmp_path, graph, step, spikes(10), dt=1e-3, gain="per_step")


def test_neurons_without_a_leak_of_norse(tmp_path):
    from norse.torch import IAFCell

    step, graph = of_norse(nn.Linear(10, 20), IAFCell())
    assert_same(tmp_path, graph, step, spikes(10), gain="per_step")
