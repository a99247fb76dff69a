"""What this torch says of a CUDA device where there is none."""

from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

if TYPE_CHECKING:
    import pytest


def with_multiprocessors(monkeypatch: "pytest.MonkeyPatch", number: int) -> None:
    """Let torch find an Orin with so many multiprocessors."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Orin")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 7))
    properties = SimpleNamespace(multi_processor_count=number)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


def needs_a_driver() -> bool:
    """Return whether it asks CUDA for its device as soon as a fake tensor is indexed, as torch 2.8 does."""
    try:
        with FakeTensorMode():
            torch.empty(2, 2, device="cuda")[0]
    except RuntimeError:
        return True
    return False
