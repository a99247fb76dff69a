"""Whether this torch computes the shapes of a CUDA device's tensors where there is none."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def needs_a_driver() -> bool:
    """Return whether it asks CUDA for its device as soon as a fake tensor is indexed, as torch 2.8 does."""
    try:
        with FakeTensorMode():
            torch.empty(2, 2, device="cuda")[0]
    except RuntimeError:
        return True
    return False
