"""Our kernels trace: compiled, they are one graph and answer as they do alone."""

import pytest
import torch

from benchd.kernels.exact_conv2d import layer, native
from benchd.models import catalog


@pytest.fixture(autouse=True)
def graphs():
    """Leave nothing of another test's graphs."""
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "model",
    [
        "snn_onepass",
        "snn_stbif_resnet18",
        pytest.param("qann_resnet18", marks=pytest.mark.skipif(not native.paths(), reason="no products of bytes")),
        "vim_tiny",
    ],
)
def test_our_kernels_are_traced_in_one_graph_and_answer_the_same(model):
    small = {"snn_stbif_resnet18": {"width": 16}, "qann_resnet18": {"width": 16}, "vim_tiny": {"depth": 2}}
    torch.manual_seed(0)
    net = catalog.build(model, kernels="custom", **small.get(model, {}))
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
