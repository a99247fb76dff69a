"""A NIR file as a module: each node by its equation, cycles, subgraphs, and what is refused."""

import numpy as np
import pytest
import torch
from torch.nn import functional

h5py = pytest.importorskip("h5py", reason="reads NIR files")

from nir_made import DIALECT, chain, graph, neuron, stepped, write  # noqa: E402

from benchd.daemon.errors import UsageError  # noqa: E402
from benchd.models import nir, nir_file  # noqa: E402

STEPS = 40


def net(tmp_path, content, **dialect):
    return nir.build(str(write(tmp_path / "net.nir", content)), **DIALECT | dialect)


def answers(module, arriving):
    with torch.no_grad():
        return module.double()(torch.as_tensor(arriving)).numpy()


def drawn(*sizes, seed=0):
    return np.random.default_rng(seed).random(sizes)


@pytest.mark.parametrize("kind", ["CubaLIF", "LIF", "IF", "CubaLI", "LI", "I"])
@pytest.mark.parametrize(
    "dialect",
    [
        {},
        {"reset": "subtract", "current": "old"},
        {"reset": "delayed_zero", "gain": "per_step"},
        {"reset": "delayed_subtract", "dt": 5e-4},
    ],
)
def test_neurons_follow_their_equations(tmp_path, kind, dialect):
    node = neuron(kind)
    if dialect.get("gain") == "per_step":
        node = neuron(kind, r=np.linspace(0.8, 1.2, 3))
    arriving = drawn(2, STEPS, 3)
    outputs = answers(net(tmp_path, chain(node), **dialect), arriving)
    expected = np.array([stepped(node, item, DIALECT | dialect) for item in arriving])
    assert np.allclose(outputs, expected, atol=1e-5)
    if kind.endswith("F"):
        assert 0.02 < expected.mean() < 0.98  # else the reset would not show


def test_at_the_threshold_a_neuron_fires_only_if_it_is_asked_to(tmp_path):
    node = neuron("IF", r=np.full(3, 1000.0), v_threshold=np.ones(3))
    arriving = np.full((1, 2, 3), 0.5)
    assert answers(net(tmp_path, chain(node)), arriving).sum() == 0
    assert answers(net(tmp_path, chain(node), fires="at"), arriving).sum() == 3


def test_layers_are_torchs_per_time_step(tmp_path):
    x = torch.as_tensor(drawn(2, 5, 4, 9, 8))
    weight, bias = drawn(6, 2, 3, 2), drawn(6)
    grid = {"stride": np.array([2, 1]), "padding": np.array([1, 0]), "dilation": np.array([1, 2])}
    convolution = {"type": "Conv2d", "weight": weight, "bias": bias, "groups": 2, **grid}
    outputs = answers(net(tmp_path, chain(convolution, sizes=(4, 9, 8))), x)
    expected = functional.conv2d(
        x.flatten(0, 1), torch.as_tensor(weight), torch.as_tensor(bias), (2, 1), (1, 0), (1, 2), 2
    )
    assert np.allclose(outputs, expected.unflatten(0, (2, 5)), atol=1e-5)
    window = {"kernel_size": np.array([3, 2]), "stride": np.array([2, 2]), "padding": np.array([1, 1])}
    for kind, count in (("AvgPool2d", 1), ("SumPool2d", 6)):
        outputs = answers(net(tmp_path, chain({"type": kind, **window}, sizes=(4, 9, 8))), x)
        pooled = functional.avg_pool2d(x.flatten(0, 1), (3, 2), 2, 1) * count
        assert np.allclose(outputs, pooled.unflatten(0, (2, 5)))
    flat = {"type": "Flatten", "start_dim": 0, "end_dim": -1}
    assert answers(net(tmp_path, chain(flat, sizes=(4, 9, 8))), x).shape == (2, 5, 288)


def test_a_convolution_in_one_dimension_may_keep_its_length(tmp_path):
    weight = drawn(2, 3, 5)
    node = {"type": "Conv1d", "weight": weight, "bias": np.zeros(2), "groups": 1, "stride": 1, "dilation": 1}
    x = torch.as_tensor(drawn(2, 4, 3, 7))
    outputs = answers(net(tmp_path, chain(node | {"padding": "same"}, sizes=(3, 7))), x)
    expected = functional.conv1d(x.flatten(0, 1), torch.as_tensor(weight), padding="same")
    assert np.allclose(outputs, expected.unflatten(0, (2, 4)), atol=1e-5)


def test_scale_threshold_and_a_delay_of_each_number(tmp_path):
    x = drawn(2, 6, 3)
    nodes = {"type": "Scale", "scale": np.array([1.0, 2.0, 3.0])}, {"type": "Threshold", "threshold": np.full(3, 1.0)}
    above = (x * [1.0, 2.0, 3.0] > 1.0).astype(float)
    assert np.array_equal(answers(net(tmp_path, chain(*nodes)), x), above)
    late = answers(net(tmp_path, chain({"type": "Delay", "delay": np.array([0.0, 1e-3, 3e-3])})), x)
    assert np.allclose(late[:, 3:], np.stack([x[:, 3:, 0], x[:, 2:-1, 1], x[:, :-3, 2]], -1))
    assert np.array_equal(late[:, 0, 1:], np.zeros((2, 2)))


@pytest.mark.parametrize("named", ["back", "a_back"])  # before and behind the neurons in the file's order
def test_a_cycle_passes_on_the_spikes_of_the_step_before(tmp_path, named):
    weight, bias = np.random.default_rng(1).normal(size=(3, 3)), np.array([0.2, -0.1, 0.3])
    node = neuron("LIF")
    returning = {"type": "Affine", "weight": weight, "bias": bias}
    edges = f"input lif, lif {named}, {named} lif, lif output"
    outputs = answers(net(tmp_path, graph({"lif": node, named: returning}, edges)), drawn(1, STEPS, 3))
    arriving, spikes = drawn(1, STEPS, 3)[0], np.zeros(3)
    currents = []
    for t in range(STEPS):  # each step anew, because what arrives depends on the spikes
        currents.append(arriving[t] + weight @ spikes + bias)
        spikes = stepped(node, np.array(currents), DIALECT)[-1]
    assert np.array_equal(outputs[0], stepped(node, np.array(currents), DIALECT))
    assert outputs.any()


def test_a_cycle_of_two_populations_is_late_only_where_it_closes(tmp_path):
    first, second = neuron("IF"), neuron("LIF")
    back = {"type": "Linear", "weight": -0.5 * np.eye(3)}
    content = graph({"one": first, "two": second, "back": back}, "input one, one two, two back, back one, two output")
    outputs = answers(net(tmp_path, content), drawn(1, STEPS, 3))
    arriving, out, currents = drawn(1, STEPS, 3)[0], np.zeros(3), []
    for t in range(STEPS):
        currents.append(arriving[t] - 0.5 * out)
        between = stepped(first, np.array(currents), DIALECT)
        out = stepped(second, between, DIALECT)[-1]
    assert np.array_equal(outputs[0], stepped(second, between, DIALECT))


def test_subgraphs_are_the_same_net(tmp_path):
    weight = {"type": "Linear", "weight": np.random.default_rng(2).normal(size=(3, 3))}
    inner = graph({"lif": neuron("LIF"), "back": weight}, "input lif, lif back, back lif, lif output")
    whole = net(tmp_path, graph({"layer": inner, "last": neuron("LI")}, "input layer, layer last, last output"))
    flat = net(
        tmp_path,
        graph(
            {"lif": neuron("LIF"), "back": weight, "last": neuron("LI")},
            "input lif, lif back, back lif, lif last, last output",
        ),
    )
    x = drawn(2, STEPS, 3)
    assert np.array_equal(answers(whole, x), answers(flat, x))


def test_spikes_given_as_true_and_false_are_ones_and_the_answers_may_be_summed(tmp_path):
    path = chain(neuron("IF"), {"type": "Linear", "weight": np.eye(3)})
    spikes = drawn(2, STEPS, 3) < 0.5
    each = answers(net(tmp_path, path), spikes)
    assert np.allclose(answers(net(tmp_path, path, readout="sum"), spikes.astype(float)), each.sum(1))


def test_spiking_neurons_show_their_spikes(tmp_path):
    module = net(tmp_path, chain(neuron("LIF"), neuron("LI"), neuron("IF")))
    assert len(module.neurons()) == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            chain({"type": "Sigmoid"}),
            "node n0 has the type Sigmoid, which benchd does not support; it supports Affine,",
        ),
        (chain(neuron("LIF", tau=np.full(3, 1e-4))), "tau 0.0001 is shorter than the time step 0.001"),
        (chain({"type": "Linear"}), r"node n0 \(Linear\): it lacks 'weight'"),
        (chain({"type": "Linear", "weight": np.ones((2, 4))}), "its nodes do not fit together"),
        (chain({"type": "Scale", "scale": np.array([1.0, np.inf, 1.0])}), "scale has values that are not finite"),
        (chain({"type": "Delay", "delay": np.array([-1.0])}), "a delay of -1 is outside 0 to"),
        (graph({}, "input gone, gone output"), "begins or ends at gone, and there is no such node"),
        (graph({"n": neuron("IF")}, "input n, n n"), "no path leads from the Input to the Output"),
        (
            graph({"n": neuron("IF"), "m": neuron("IF")}, "input n, n output, m n"),
            "node m receives nothing from the Input",
        ),
        (graph({"again": {"type": "Input", "shape": np.array([3])}}, "input output"), "has 2 Input nodes"),
        ({"type": "Linear"}, "it has no graph under `node`"),
    ],
)
def test_a_file_that_is_no_net_is_refused_in_a_sentence(tmp_path, content, words):
    with pytest.raises(UsageError, match=f"^net.nir: .*{words}"):
        net(tmp_path, content)


def test_a_file_that_is_no_hdf5_is_refused(tmp_path):
    (tmp_path / "net.nir").write_bytes(b"\x89HDF\r\n\x1a\n damaged")
    with pytest.raises(UsageError, match=r"net.nir: not a complete NIR file"):
        nir_file.read(tmp_path / "net.nir")


def test_a_file_reads_nothing_but_itself(tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(np.arange(9.0).tobytes())
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["weight"] = np.eye(3)
    layout = h5py.VirtualLayout((3, 3), "f8")
    layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "weight", (3, 3))

    def external(group):
        group["weight"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "weight")

    def soft(group):
        group["weight"] = h5py.SoftLink("/node/edges")

    def stored_elsewhere(group):
        group.create_dataset("weight", (3, 3), "f8", external=[(str(secret), 0, 72)])

    def virtual(group):
        group.create_virtual_dataset("weight", layout)

    for change, words in {
        external: "weight is a link",
        soft: "weight is a link",
        stored_elsewhere: "the data of weight is in a different file",
        virtual: "the data of weight is in a different file",
    }.items():
        path = write(tmp_path / "net.nir", chain({"type": "Linear"}))
        with h5py.File(path, "a") as file:
            change(file["node/nodes/n0"])
        with pytest.raises(UsageError, match=f"net.nir: {words}"):
            nir_file.read(path)


def test_a_small_file_that_expands_to_gigabytes_is_refused_before_it_does(tmp_path):
    path = write(tmp_path / "net.nir", chain({"type": "Linear"}))
    with h5py.File(path, "a") as file:  # chunks that were never written read as zeros
        file["node/nodes/n0"].create_dataset("weight", (2**18, 2**18), "f4", compression="gzip")
    assert path.stat().st_size < 100_000
    with pytest.raises(UsageError, match="expands to many times its size"):
        nir_file.read(path)


def test_a_group_that_contains_itself_ends(tmp_path):
    path = write(tmp_path / "net.nir", chain(neuron("IF")))
    with h5py.File(path, "a") as file:
        file["node/nodes/n0/again"] = file["node"]
    with pytest.raises(UsageError, match="nested too deeply"):
        nir_file.read(path)


def test_compressed_files_are_read(tmp_path):
    node = neuron("LIF")
    path = write(tmp_path / "net.nir", chain(node), compression="gzip", shuffle=True, fletcher32=True)
    assert np.array_equal(nir_file.read(path).nodes["n0"]["tau"], node["tau"])
