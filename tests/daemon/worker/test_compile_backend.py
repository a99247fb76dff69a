"""torch.compile: weights become constants on a CPU, unless the module writes to its own tensors; our kernels trace."""

import pytest
import torch
import torch._inductor.config as config
from worker_jobs import job, user_module

from benchd.daemon.worker import workload
from benchd.daemon.worker.backends import compile as backend
from benchd.exporters import inductor
from benchd.kernels.exact_conv2d import layer
from benchd.models import catalog

CPU = torch.device("cpu")
KEEPING = 'self.register_buffer("kept", torch.zeros(1, 48))'
BETWEEN_GRAPHS = """
        self.kept.copy_(images.flatten(1))
        torch._dynamo.graph_break()
        return self.fc(self.kept)
"""


@pytest.fixture(autouse=True)
def settings():
    """Leave this process as it was: a worker's ends with its case."""
    torch._dynamo.reset()
    with config.patch(freezing=False):
        yield


def own(folder, forward="pass"):
    path = user_module(folder, forward=forward).partition(":")[0]
    text = (folder / "net.py").read_text().replace("self.fc = ", f"{KEEPING}\n        self.fc = ")
    (folder / "net.py").write_text(text)
    built = workload.build(job(folder, module=f"{path}:build"))
    return built, backend.load(built.source, "fp32", CPU, built.images[:1])


def test_weights_are_constants_of_the_compiled_code_and_the_record_says_so(tmp_path):
    built, loaded = own(tmp_path)
    assert loaded.runtime.provider == inductor.FROZEN
    with torch.inference_mode():
        before = loaded.run(built.images[:1]).clone()
        torch.testing.assert_close(before, built.plain(built.images[:1]))
    with torch.no_grad():
        loaded.run._orig_mod.fc.weight.zero_()
    with torch.inference_mode():
        assert torch.equal(loaded.run(built.images[:1]), before)


def test_a_module_that_writes_to_its_own_tensors_is_not_frozen(tmp_path):
    built, loaded = own(tmp_path, BETWEEN_GRAPHS)
    assert loaded.runtime.provider == inductor.PLAIN
    for start in range(3):
        images = built.images[start : start + 1]
        with torch.inference_mode():
            torch.testing.assert_close(loaded.run(images), built.plain(images))


@pytest.mark.parametrize("model", ["snn_onepass", "snn_stbif_resnet18", "qann_resnet18", "vim_tiny"])
def test_our_kernels_are_traced_in_one_graph_and_answer_the_same(model, monkeypatch):
    small = {"snn_stbif_resnet18": {"width": 16}, "qann_resnet18": {"width": 16}}.get(model, {})
    torch.manual_seed(0)
    net = catalog.build(model, kernels="custom", **small)
    images = torch.rand(2, *net.input_shape)
    graphs = []

    def counting(graph, _):
        graphs.append(graph)
        return graph

    with torch.inference_mode():
        want = net(images)
        before = layer._ran.total()
        found = torch.compile(net, backend=counting, fullgraph=True, dynamic=False)(images)
    assert len(graphs) == 1
    torch.testing.assert_close(found, want, rtol=0, atol=1e-6 * float(want.abs().max()))
    assert (layer._ran.total() > before) == (model != "vim_tiny"), "spikes are convolved by our kernels there too"
