"""Choosing an implementation: nothing falls back, and what is missing is named."""

import pytest
import torch

from benchd.kernels.dispatch import Unavailable, chosen, load

CPU = torch.device("cpu")


def test_auto_is_the_kernel_of_the_device():
    assert chosen("auto", CPU) == "native"
    assert chosen("auto", torch.device("cuda")) == "triton"
    assert chosen("torch", torch.device("cuda")) == "torch"


def test_an_unknown_name_is_refused():
    with pytest.raises(
        ValueError, match="unknown implementation 'cuda'; choose one of reference, torch, triton, native"
    ):
        chosen("cuda", CPU)


def test_an_implementation_that_is_not_there_is_named():
    with pytest.raises(Unavailable, match="packed_linear has no 'triton' implementation here: this version has none"):
        load("benchd.kernels.packed_linear", "triton")


BROKEN_TRITON = """
import sys
if "seen" in vars(sys):
    raise ImportError("cannot import name 'jit' from a module that is half there")
sys.seen = True
raise ImportError("libtriton.so: undefined symbol: PyInterpreterState_Get")
"""


def test_a_triton_that_cannot_load_is_told_with_its_words_and_leaves_the_rest(tmp_path, printed):
    (tmp_path / "triton.py").write_text(BROKEN_TRITON)
    code = (
        "import torch\nfrom benchd.kernels.lif import lif\n"
        "print(lif(torch.ones(2, 3), decay=0.5, implementation='torch').sum().item())\n"
        "try:\n    lif(torch.ones(2, 3), decay=0.5, implementation='triton')\n"
        "except RuntimeError as error:\n    print(error)"
    )
    assert printed(code, TRITON_INTERPRET="1").splitlines() == [
        "6.0",
        "lif has no 'triton' implementation here: it cannot be imported: libtriton.so: undefined symbol: "
        "PyInterpreterState_Get",
    ]
