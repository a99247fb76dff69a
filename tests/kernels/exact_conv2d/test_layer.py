"""Which kernel computes a layer of spikes, and what says so."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from benchd.kernels.dispatch import Unavailable
from benchd.kernels.exact_conv2d import layer, native, pack
from benchd.kernels.exact_conv2d.layer import Grid, SpikeConvolution
from benchd.kernels.spike_conv2d import spike_conv2d
from benchd.models.snn_onepass import SpikeConv2d

ROOT = Path(__file__).parents[3]
GRID = Grid(torch.tensor(0.5), 1)

needs_instructions = pytest.mark.skipif(
    not native.paths(), reason="needs a CPU with AMX, VNNI or a dot product of bytes"
)


@pytest.fixture
def ran(monkeypatch):
    """Return what ran in the test alone."""
    counted = Counter()
    monkeypatch.setattr(layer, "_ran", counted)
    monkeypatch.setattr(SpikeConvolution, "made", False)
    return counted


def spikes(density):
    torch.manual_seed(0)
    return (torch.rand(8, 64, 8, 8) < density) * 0.5


@needs_instructions
@torch.no_grad()
def test_dense_spikes_run_in_integers_and_others_over_their_nonzeros(ran, monkeypatch):
    convolve, weight, path = SpikeConvolution(), torch.randn(32, 64, 3, 3), native.paths()[0]
    monkeypatch.setitem(layer.LEAST_DENSITY[3], path, (0.25, 0.0))
    dense, sparse = spikes(0.9), spikes(0.001)
    assert layer.ran() == "c, layers by torch"
    want = native.convolved(dense, None, pack(weight), torch.tensor(0.5), 1, 1, 1)
    assert torch.equal(convolve(dense, weight, padding=1, grid=GRID), want)
    assert layer.ran() == f"c, {path}"
    assert torch.equal(convolve(sparse, weight, padding=1, grid=GRID), spike_conv2d(sparse, weight, padding=1))
    assert torch.equal(convolve(dense, weight, padding=1), spike_conv2d(dense, weight, padding=1))
    assert layer.ran() == f"c, {path} in 33%"
    assert ran == {path: 1, "c": 2}
    pixel = (torch.arange(64).view(1, 64, 1, 1) == 3) * 0.5
    convolve(pixel, weight[..., :1, :1].contiguous(), grid=GRID)
    assert ran == {path: 2, "c": 2}, "a picture of one pixel waits for weights"


@needs_instructions
@torch.no_grad()
def test_the_nonzeros_of_a_fake_tensor_are_not_counted(monkeypatch):
    convolve, weight, x = SpikeConvolution(), torch.randn(32, 64, 3, 3), spikes(0.9)
    monkeypatch.setitem(layer.LEAST_DENSITY[3], native.paths()[0], (0.25, 0.0))
    want = convolve(x, weight, padding=1, grid=GRID)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        output = convolve(mode.from_tensor(x), weight, padding=1, grid=GRID)
    assert (output.shape, output.stride()) == (want.shape, want.stride())


@needs_instructions
@torch.no_grad()
def test_what_has_no_exact_sums_runs_over_its_nonzeros(ran):
    weight, x = torch.randn(4, 64, 3, 3), spikes(0.9)
    off_grid, infinite = x + (x > 0) * 0.1, weight.clone()
    infinite[0, 0, 0, 0] = torch.inf
    convolve = SpikeConvolution()
    for values, taps, grid in ((off_grid, weight, GRID), (x, infinite, GRID), (x, weight, Grid(GRID.scale, 127))):
        y = convolve(values, taps, padding=1, grid=grid)
        torch.testing.assert_close(y, spike_conv2d(values, taps, padding=1), rtol=0, atol=0, equal_nan=True)
    assert ran == {"c": 3}


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("density", [0.1, 0.9])
def test_half_precision_is_computed_in_float32_and_rounded_once(dtype, density):
    x, weight, bias = spikes(density), torch.randn(32, 64, 3, 3).to(dtype), torch.randn(32).to(dtype)
    wide = SpikeConvolution()(x, weight.float(), bias.float(), padding=1, grid=GRID)
    y = SpikeConvolution()(x.to(dtype), weight, bias, padding=1, grid=Grid(GRID.scale.to(dtype), 1))
    assert torch.equal(y, wide.to(dtype))


@torch.no_grad()
@pytest.mark.parametrize("has_bf16", [True, False])
def test_onednn_convolves_in_bfloat16_where_it_can_and_the_weight_is_small(monkeypatch, has_bf16):
    monkeypatch.setattr(layer, "_has_bf16", lambda: has_bf16)
    convolve, small, large = SpikeConvolution(), torch.zeros(32, 64, 3, 3), torch.zeros(128, 64, 3, 3)
    for x, weight, is_ours in ((spikes(0.5), small, not has_bf16), (spikes(0.5), large, True)):
        assert convolve.suits(x.bfloat16(), weight.bfloat16()) is is_ours
        assert convolve.suits(x.half(), weight.half())
        assert convolve.suits(x, weight)
    with pytest.raises(Unavailable, match="int8 weights are for inference in float32"):
        SpikeConvolution(per_weight=1).suits(spikes(0.5).half(), small)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bf16", [True, False])
def test_compiled_code_leaves_the_same_layers_to_torch_and_says_so(ran, monkeypatch, dtype, has_bf16):
    assert layer.ran() == "c", "no layer of spikes, as in Vim"
    monkeypatch.setattr(layer, "_has_bf16", lambda: has_bf16)
    module = SpikeConv2d(64, 32, 3, 1, per_weight=3).to(dtype)
    x, is_ours = spikes(0.1).to(dtype), not (has_bf16 and dtype == torch.bfloat16)
    y = torch.compile(module, fullgraph=True, backend="aot_eager")(x)
    assert ran.total() == is_ours
    assert (layer.ran() == "c, layers by torch") is not is_ours
    assert torch.equal(y, module(x))


@torch.no_grad()
def test_codes_that_fit_no_byte_run_over_their_nonzeros(ran, monkeypatch):
    monkeypatch.setattr(native, "paths", lambda: ("avx_vnni",))
    monkeypatch.setattr(native, "convolved", lambda *_: pytest.fail("bytes cannot hold these codes"))
    weight, codes = torch.randn(8, 16, 1, 1), torch.randint(0, 256, (2, 16, 4, 4))
    y = SpikeConvolution()(codes * 0.5, weight, grid=Grid(GRID.scale, 255))
    assert torch.equal(y, spike_conv2d(codes * 0.5, weight))
    assert ran == {"c": 1}


@needs_instructions
@torch.no_grad()
def test_a_profiler_sees_the_op_that_nobody_else_pays_for():
    convolve, weight = SpikeConvolution(), torch.randn(32, 64, 3, 3)
    with torch.profiler.profile(acc_events=True) as profile:
        convolve(spikes(0.9), weight, padding=1, grid=GRID)
    assert "benchd::exact_conv2d" in {event.key for event in profile.key_averages()}


@needs_instructions
@pytest.mark.parametrize("density", [0.05, 0.9])
def test_the_op_of_a_layer_with_its_neurons_keeps_the_rules_of_custom_ops(density, monkeypatch):
    monkeypatch.setitem(layer.LEAST_DENSITY[3], native.paths()[0], (0.25, 0.0))
    first, weight, bias = spikes(density).unflatten(0, (4, 2)), torch.randn(64, 64, 3, 3), torch.randn(64)
    arguments = (first, weight, bias, torch.tensor(0.5), 1, 3, 1, 0.9, 1.0)
    torch.library.opcheck(torch.ops.benchd.spike_layer_periods.default, arguments)


SMALL_STACK = """
import ctypes

class Stack(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("bytes", ctypes.c_size_t)]

memory = ctypes.create_string_buffer(4096)
ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 4096)), None)
"""
CONVOLVE = """
import torch
from benchd.kernels.exact_conv2d import layer

with torch.no_grad():
    x, grid = torch.ones(8, 64, 4, 4), layer.Grid(torch.tensor(1.0), 1)
    layer.SpikeConvolution()(x, torch.randn(32, 64, 3, 3), padding=1, grid=grid)
print(layer.ran())
"""


@pytest.mark.skipif(native.paths()[:1] != ("amx_int8",), reason="needs a CPU with AMX")
def test_a_process_that_is_refused_tiles_uses_vnni_and_says_so():
    # Linux refuses them to a process whose stack for signals cannot hold them
    command = [sys.executable, "-c", SMALL_STACK + CONVOLVE]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "c, avx512_vnni (amx_int8 refused)\n"
