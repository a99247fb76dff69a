"""How functions become ops: what a call returns, that a compiler knows it, and that a gradient is not invented."""

import pytest
import torch

from benchd.kernels.op import fake, op
from benchd.kernels.stbif import max_pool_delta, stbif


@op("doubled_in_a_test", "CPU")
def doubled(x: torch.Tensor, times: int) -> torch.Tensor:
    """Return x * 2^times."""
    return x * 2**times


@fake(doubled)
def _(x: torch.Tensor, times: int) -> torch.Tensor:
    return torch.empty_like(x)


def test_it_is_an_op_of_torch_that_a_compiler_takes_as_it_is():
    x = torch.randn(3)
    assert torch.equal(torch.ops.benchd.doubled_in_a_test(x, 2), 4 * x)
    torch.library.opcheck(doubled, (x, 2))
    compiled = torch.compile(lambda x: doubled(x + 1, 1), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), 2 * (x + 1))


def test_one_that_learns_nothing_has_no_gradient():
    y = doubled(torch.ones(3, requires_grad=True), 1)
    with pytest.raises(NotImplementedError, match="has no gradient"):
        y.sum().backward()


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
