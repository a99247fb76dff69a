"""How ops reach their kernels: which are imported, what a GPU's calls return, and the second gradient that none has."""

import pytest
import torch

from benchd.kernels.stbif import max_pool_delta, stbif

WITHOUT_INTERPRETER = """
import sys
import torch
from importlib import import_module
from torch._subclasses.fake_tensor import FakeTensorMode
from benchd.kernels import add_rms_norm, causal_conv1d, lif, selective_scan, stbif
print("benchd.kernels.lif.triton_impl" in sys.modules)
try:
    lif.lif(torch.ones(1, 2), decay=0.9, implementation="triton")
except RuntimeError as error:
    print(error)
with FakeTensorMode():
    current = torch.empty(4, 2, 3, 8, 8, device="cuda")
    for result in (lif.lif_pool(current, decay=0.9), stbif.stbif(current, threshold=1.0, pos_max=3, neg_min=0)):
        print(result.device, result.dtype, *result.shape)
for package in (add_rms_norm, causal_conv1d, lif, selective_scan, stbif):
    import_module(f"{package.__name__}.triton_impl")
    for name, op in vars(package.ops).items():
        if name.endswith("_op"):
            assert op["native"] is op["triton"], name
            for key in ("CPU", "CUDA", "Meta"):
                assert torch._C._dispatch_has_kernel_for_dispatch_key(op["native"].name(), key), (name, key)
            print(name)
"""


def test_without_the_interpreter_one_op_serves_cpu_and_cuda_tensors(printed):
    """Triton is imported where it can run only; a fake CUDA tensor goes through the kernels of a GPU."""
    pytest.importorskip("triton")
    is_imported, refused, pooled, fired, *ops = printed(WITHOUT_INTERPRETER, CUDA_VISIBLE_DEVICES="").splitlines()
    assert (is_imported, len(ops)) == ("False", 13)
    assert "a CPU tensor needs TRITON_INTERPRET=1" in refused
    assert [pooled, fired] == ["cuda:0 torch.float32 4 2 3 4 4", "cuda:0 torch.int8 4 2 3 8 8"]


@pytest.mark.parametrize(
    "spikes",
    [
        lambda x: stbif(x, threshold=1.0, pos_max=3, neg_min=0, output="values"),
        lambda x: max_pool_delta(x, kernel_size=2, stride=2, padding=0),
    ],
    ids=["stbif", "max_pool_delta"],
)
def test_a_gradient_of_a_gradient_is_refused(spikes):
    x = torch.randn(2, 1, 3, 4, 4, requires_grad=True)
    (first,) = torch.autograd.grad(spikes(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="has no gradient"):
        first.sum().backward()
