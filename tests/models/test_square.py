"""The microbenchmark's model."""

import pytest
import torch

from benchd.kernels.dispatch import Unavailable
from benchd.models.catalog import build


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_squares_every_element(dtype):
    model = build("square", size=5)
    x = torch.randn(3, *model.input_shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert model.input_shape == (5, 5)
    assert torch.equal(model(x), x * x)


def test_custom_kernels_are_refused():
    with pytest.raises(Unavailable, match="square has no custom kernels"):
        build("square", kernels="custom")
