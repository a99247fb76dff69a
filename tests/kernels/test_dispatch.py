"""Choosing an implementation: nothing falls back, and what is missing is named."""

import importlib

import pytest
import torch

from benchd.kernels import dispatch
from benchd.kernels.dispatch import Unavailable, chosen, load

CPU = torch.device("cpu")


def test_auto_is_the_kernel_of_the_device():
    assert chosen("auto", CPU) == "native"
    assert chosen("auto", torch.device("cuda")) == "triton"
    assert chosen("torch", torch.device("cuda")) == "torch"


def test_a_triton_that_cannot_load_is_told_with_its_first_words_and_leaves_the_rest(monkeypatch):
    imported, errors = importlib.import_module, iter(("libtriton.so: undefined symbol", "a module that is half there"))

    def broken(name):
        if name.endswith("triton_impl"):
            raise ImportError(next(errors))
        return imported(name)

    monkeypatch.setattr(importlib, "import_module", broken)
    monkeypatch.setattr(dispatch, "_REFUSED", {})
    monkeypatch.setattr(dispatch, "INTERPRETED", True)
    dispatch.load_all("benchd.kernels.lif")
    reason = "lif has no 'triton' implementation here: it cannot be imported: libtriton.so: undefined symbol"
    with pytest.raises(Unavailable, match=reason):
        load("benchd.kernels.lif", "triton")
