"""Plans: what an op launches again for other tensors is right, told apart by all that matters, and costs few calls."""

import sys
from importlib import import_module

import pytest
import torch
from test_conformance import OPTIONS, assert_alike, channels_last, computed, over, tensors_of

pytest.importorskip("triton")

from launches import interpreted, without_gpu

from benchd.kernels import launch
from benchd.kernels.add_rms_norm import add_rms_norm
from benchd.kernels.op import Op
from benchd.kernels.stbif import max_pool_delta, stbif_block

PACKAGES = ("add_rms_norm", "causal_conv1d", "lif", "selective_scan", "stbif")


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """Let ops have plans as on a GPU, whose launches the interpreter repeats; return the kernels of these."""
    kernels = []

    def repeated(each, places, device):
        again = interpreted(each, places, device)
        return lambda addresses, stream: (kernels.append(each.kernel), again(addresses, stream))

    without_gpu(monkeypatch, repeated)
    for op in ops():
        monkeypatch.setattr(op, "_plans", {})
    with torch.no_grad():
        yield kernels


def ops():
    modules = (import_module(f"benchd.kernels.{package}.ops") for package in PACKAGES)
    return [each for module in modules for each in vars(module).values() if isinstance(each, Op)]


def other(tensors):
    """Return tensors of the same signature with other numbers."""
    return {name: tensor * 0.75 for name, tensor in tensors.items()}


COPYING = {max_pool_delta}  # pictures that are not channels last
NAMES = ("triton", "reference")


@over("triton")
def test_a_plan_computes_what_the_op_does(op, implementation, launched):
    tensors = tensors_of(op)
    for given in (tensors, other(tensors)):
        launched.clear()
        results, wanted = (computed(op, name, given) for name in (implementation, "reference"))
        assert_alike(results, wanted, 4e-6)
        assert launched or op in COPYING
    assert sum(len(each._plans) for each in ops()) == 1


def test_where_a_copy_is_launched_there_is_no_plan(launched):
    values = tensors_of(max_pool_delta)["values"]
    both = values, channels_last(values)
    results = [max_pool_delta(each, **OPTIONS[max_pool_delta], implementation="triton") for each in both]
    assert torch.equal(*results)
    assert len(launched) == 2, "the sums and the pool of the second"


def test_arguments_that_were_one_tensor_may_become_two():
    """An address says whose it is only in storage of its own."""
    first, second = torch.randn(2, 3, 1, 4, 2, 2).unbind()
    options = {"threshold": torch.tensor(0.5), "pos_max": 3, "neg_min": 0}
    for current, residual in ((first, first), (first, second), (second, first)):
        results = [stbif_block(current, residual=residual, **options, implementation=name) for name in NAMES]
        assert torch.equal(*results)


def variants():
    """Yield calls of a norm that differ from the first in one thing each."""
    hidden, residual, weight = torch.randn(3, 6), torch.randn(3, 6), torch.randn(6)
    memory = torch.randn(40)
    yield hidden, residual, weight, 1e-5
    yield hidden[:2], residual[:2], weight, 1e-5
    yield hidden, None, weight, 1e-5
    yield hidden, residual, weight, 1e-1
    yield hidden.half(), residual, weight, 1e-5
    yield hidden, residual, weight.half(), 1e-5
    yield hidden.mT.contiguous().mT, residual, weight, 1e-5
    yield hidden, residual, memory[:12:2], 1e-5
    yield memory[1:19].view(3, 6), residual, weight, 1e-5
    yield hidden, torch.nn.Parameter(residual), weight, 1e-5


def test_calls_that_differ_in_one_thing_are_told_apart():
    for _ in range(2):
        for hidden, residual, weight, eps in variants():
            results, wanted = (add_rms_norm(hidden, residual, weight, eps=eps, implementation=name) for name in NAMES)
            assert [each.dtype for each in results] == [each.dtype for each in wanted]
            assert_alike(results, wanted, 1e-3)


def test_what_does_not_fit_is_refused_also_beside_a_plan_that_fits():
    hidden, residual, weight = torch.randn(3, 6), torch.randn(3, 6), torch.randn(6)
    for _ in range(2):
        add_rms_norm(hidden, residual, weight, implementation="triton")
        with pytest.raises(ValueError, match="weight must be"):
            add_rms_norm(hidden, residual, weight[:5], implementation="triton")
        with pytest.raises(ValueError, match="residual must be on cpu"):
            add_rms_norm(hidden, residual.to("meta"), weight, implementation="triton")


def test_a_capture_and_what_watches_ops_make_no_plan(monkeypatch, launched):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    add_rms_norm(*(torch.randn(2, 6), None, torch.randn(6)), implementation="triton")
    assert not launched


def test_plans_do_not_pile_up(monkeypatch):
    monkeypatch.setattr("benchd.kernels.op._MOST_PLANS", 3)
    for eps in range(1, 9):
        add_rms_norm(torch.randn(1, 4), None, torch.randn(4), eps=float(eps), implementation="triton")
    (norm,) = (each for each in ops() if "norm" in str(each["triton"]))
    assert len(norm._plans) <= 3


@over("triton")
def test_a_call_with_a_plan_makes_few_calls_of_python(op, implementation, monkeypatch):
    """Those of functions in C counted too; of a launch just one."""
    monkeypatch.setattr(launch, "repeated", lambda each, places, device: lambda addresses, stream: None)
    tensors = {name: channels_last(tensor) for name, tensor in tensors_of(op).items()}
    given = tensors | OPTIONS[op]
    op(**given, implementation=implementation)
    counted = []
    sys.setprofile(lambda frame, event, argument: counted.append(event))
    try:
        op(**given, implementation=implementation)
    finally:
        sys.setprofile(None)
    calls = [event for event in counted[:-1] if event in {"call", "c_call"}]  # the last one ends the counting
    assert len(calls) <= 40 + 5 * max(0, len(tensors) - 3)
