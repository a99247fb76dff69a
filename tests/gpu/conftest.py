"""What every test on a GPU needs: float32 that is computed in float32."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _no_tf32() -> Iterator[None]:
    # cuDNN takes it by default, and its ten bits are worse than the tolerances here; a worker turns it off too
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32 = convolutions.allow_tf32 = False
    yield
    products.allow_tf32, convolutions.allow_tf32 = before
