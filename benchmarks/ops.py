"""The ops that are raced: their inputs for a shape, the work in them, and the peers that also compute them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchd.kernels.add_rms_norm import add_rms_norm
from benchd.kernels.causal_conv1d import causal_conv1d, causal_conv1d_pair
from benchd.kernels.lif import lif, lif_pool
from benchd.kernels.packed_linear import PackedLinear
from benchd.kernels.selective_scan import bidirectional_scan, delta_projection, selective_scan
from benchd.kernels.spike_conv2d import spike_conv2d
from benchd.kernels.stbif import max_pool_delta, stbif, stbif_block
from benchd.kernels.vim_layer import in_conv, out_norm, steps
from benchmarks import peers

T = 8
# maximum absolute error divided by max |y|, relative to the equation in float64
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
FLIPS = 1e-6


@dataclass(frozen=True)
class Problem:
    """One op for one shape. `exact` is set if the outputs are spikes, which are judged by how many differ.

    `exponentials` and `flops` are those of the equation; the minimum of bytes is that of the inputs and outputs.
    """

    public: Callable[..., Any]
    arguments: Mapping[str, Any]
    exact: bool = False
    flops: float = 0.0
    exponentials: float = 0.0
    peers: Mapping[str, Callable[[Mapping[str, Any]], Callable[[], Any]]] = field(default_factory=dict)

    def call(self, implementation: str) -> Callable[[], Any]:
        """Return a call of the public function with one of our implementations."""
        return lambda: self.public(**self.arguments, implementation=implementation)

    def expected(self) -> Any:
        """Return the equation's answer, in float64 or, for spikes, in the precision that defines them."""
        arguments = self.arguments if self.exact else {name: _wide(value) for name, value in self.arguments.items()}
        return self.public(**arguments, implementation="torch")

    def least_bytes(self, result: Any) -> int:
        """Return the bytes moved if every tensor is read or written once."""
        tensors = [*self.arguments.values(), *(result if isinstance(result, tuple) else (result,))]
        return sum(_bytes(tensor) for tensor in tensors if isinstance(tensor, Tensor))


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _bytes(tensor: Tensor) -> int:
    """Return the bytes that a tensor occupies in memory: one step for a current that was expanded over T."""
    sides = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(sides) * tensor.element_size()


@dataclass(frozen=True)
class OpRecipe:
    """A recipe for a Problem; `letters` names the numbers of a shape, and number `place` grows with the batch.

    That number counts `rows` for each image.
    """

    make: Callable[[Sequence[int], torch.dtype, torch.device], Problem]
    letters: str
    shapes: tuple[tuple[int, ...], ...]
    place: int = 0
    rows: int = 1

    def at(self, batch: int) -> tuple[int, ...]:
        """Return the first shape with this batch size."""
        first = self.shapes[0]
        return (*first[: self.place], batch * self.rows, *first[self.place + 1 :])


def _normal(*shape: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape)).to(device, dtype)


def _scan_inputs(
    lead: tuple[int, ...], batch: int, length: int, channels: int, states: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Return inputs like those of a trained layer: A = -(1..N), and steps around 0.01 after the softplus."""
    rows = (*lead, batch, length)
    A = -torch.arange(1.0, states + 1).expand(*lead, channels, states)
    return {
        "u": _normal(*rows, channels, dtype=dtype, device=device),
        "A": A.contiguous().to(device),
        "B": _normal(*rows, states, dtype=dtype, device=device),
        "C": _normal(*rows, states, dtype=dtype, device=device),
        "D": torch.ones(*lead, channels, device=device),
    }


def _selective_scan(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Problem:
    batch, length, channels, states = shape
    arguments: dict[str, Any] = _scan_inputs((), batch, length, channels, states, dtype, device)
    arguments["delta"] = _normal(batch, length, channels, dtype=dtype, device=device, scale=0.5)
    arguments["delta_bias"] = torch.full((channels,), -4.0, device=device)
    elements = math.prod(shape)
    return Problem(
        selective_scan,
        arguments | {"delta_softplus": True},
        flops=6.0 * elements,
        exponentials=elements + batch * length * channels,
        peers={"onnxruntime Scan": peers.onnxruntime_scan, "mamba-ssm": peers.mamba_scan},
    )


def _mixer_inputs(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, rank: int
) -> tuple[dict[str, Any], float, float]:
    """Return the arguments of `bidirectional_scan`, and its flops and exponentials."""
    batch, length, channels, states = shape
    arguments: dict[str, Any] = _scan_inputs((2,), batch, length, channels, states, dtype, device)
    arguments["low"] = _normal(2, batch, length, rank, dtype=dtype, device=device)
    arguments["weight"] = _normal(2, channels, rank, dtype=dtype, device=device, scale=rank**-0.5)
    arguments["bias"] = torch.full((2, channels), -4.0, device=device)
    arguments["z"] = _normal(batch, length, channels, dtype=dtype, device=device)
    tokens = batch * length * channels
    return arguments, 2 * tokens * (6.0 * states + 2.0 * rank), tokens * (2.0 * states + 3.0)


def _bidirectional_scan(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Problem:
    *sizes, rank = shape
    arguments, flops, exponentials = _mixer_inputs(sizes, dtype, device, rank)
    return Problem(bidirectional_scan, arguments, flops=flops, exponentials=exponentials)


def _conv_scan_gate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Problem:
    *sizes, rank = shape
    arguments, flops, exponentials = _mixer_inputs(sizes, dtype, device, rank)
    batch, length, channels, _ = sizes
    del arguments["u"]
    arguments["x"] = _normal(batch, length, channels, dtype=dtype, device=device)
    arguments["taps"] = _normal(2, channels, 4, dtype=dtype, device=device, scale=0.5)
    arguments["shift"] = _normal(2, channels, dtype=dtype, device=device)
    tokens = batch * length * channels
    return Problem(
        conv_scan_gate,
        arguments,
        flops=flops + 16.0 * tokens,
        exponentials=exponentials + 2.0 * tokens,
        peers={"mamba-ssm + causal-conv1d + flip": peers.mamba_mixer},
    )


def conv_scan_gate(
    x: Tensor, taps: Tensor, shift: Tensor, z: Tensor, *, implementation: str = "auto", **scan: Any
) -> Tensor:
    """Return Vim's mixer without the in, out and x projections; x and z (batch, L, E)."""
    u = causal_conv1d_pair(x, taps, shift, implementation=implementation)
    return bidirectional_scan(u, z=z, **scan, implementation=implementation)


def _delta_projection(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Problem:
    batch, length, channels, rank = shape
    arguments, _, _ = _mixer_inputs((batch, length, channels, 1), dtype, device, rank)
    chosen = {name: arguments[name] for name in ("low", "weight", "bias")}
    tokens = 2 * batch * length * channels
    return Problem(delta_projection, chosen, flops=2.0 * tokens * rank, exponentials=tokens)


def _convolution(is_pair: bool, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Problem:
    batch, length, channels, width = shape
    lead = (2,) if is_pair else ()
    arguments = {
        "x": _normal(batch, length, channels, dtype=dtype, device=device),
        "weight": _normal(*lead, channels, width, dtype=dtype, device=device, scale=width**-0.5),
        "bias": _normal(*lead, channels, dtype=dtype, device=device),
    }
    outputs = math.prod(lead) * batch * length * channels
    public, others = (causal_conv1d_pair, {}) if is_pair else (causal_conv1d, {"causal-conv1d": peers.causal_conv1d})
    return Problem(public, arguments, flops=2.0 * outputs * width, exponentials=outputs, peers=others)


def _add_rms_norm(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Problem:
    rows, dim = shape
    arguments = {
        "hidden": _normal(rows, dim, dtype=dtype, device=device),
        "residual": _normal(rows, dim, dtype=torch.float32, device=device),
        "weight": _normal(dim, dtype=dtype, device=device),
    }
    return Problem(
        add_rms_norm, arguments, flops=5.0 * rows * dim, peers={"mamba-ssm rms_norm_fn": peers.mamba_add_rms_norm}
    )


def _vim_layer(public: Callable[..., Any], shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Problem:
    """One of the fused parts of a Vim layer; they have no kernels for float32."""
    batch, length, dim = shape
    inner, rank, rows = 2 * dim, -(-dim // 16), batch * length
    make = partial(_normal, dtype=dtype, device=device)
    if public is in_conv:
        given = {"normed": make(batch, length, dim), "weight": make(2 * inner, dim, scale=dim**-0.5)}
        arguments: dict[str, Any] = given | {"taps": make(2, inner, 4, scale=0.5), "shift": make(2, inner)}
        return Problem(in_conv, arguments, flops=rows * inner * (4.0 * dim + 16.0), exponentials=2.0 * rows * inner)
    if public is steps:
        given = {"u": make(2, batch, length, inner), "weight": make(2, inner, 32 + rank, scale=inner**-0.5)}
        arguments = given | {"dt_weight": make(2, inner, rank, scale=rank**-0.5), "dt_bias": make(2, inner) - 4}
        flops = 4.0 * rows * inner * (32 + 2 * rank)
        return Problem(steps, arguments | {"states": 16}, flops=flops, exponentials=2.0 * rows * inner)
    arguments = {"y": make(2, batch, length, inner), "z": make(batch, length, inner)}
    arguments |= {"weight": make(dim, inner, scale=inner**-0.5), "norm": make(dim)}
    arguments["residual"] = _normal(batch, length, dim, dtype=torch.float32, device=device)
    return Problem(out_norm, arguments, flops=2.0 * rows * inner * dim, exponentials=float(rows * inner))


def _packed_linear(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Problem:
    rows, inner, outer = shape
    weight = _normal(outer, inner, dtype=dtype, device=device, scale=inner**-0.5)
    packed = PackedLinear(weight)

    def product(x: Tensor, weight: Tensor, implementation: str) -> Tensor:
        return packed(x) if implementation == "auto" else functional.linear(x, weight)

    arguments = {"x": _normal(rows, inner, dtype=dtype, device=device), "weight": weight}
    return Problem(product, arguments, flops=2.0 * rows * inner * outer, peers={"oneDNN packed": peers.onednn_packed})


def _current(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    # about one neuron in ten fires, as in the catalogued nets
    return _normal(*shape, dtype=dtype, device=device, scale=0.6)


def _lif(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Problem:
    arguments = {"current": _current(shape, dtype, device), "decay": 0.95}
    return Problem(lif, arguments, exact=True, flops=4.0 * math.prod(shape), peers=peers.spikingjelly_lif())


def _lif_pool(is_steady: bool, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Problem:
    steps, *step = shape
    current = _current(step, dtype, device).expand(steps, *step) if is_steady else _current(shape, dtype, device)
    others = peers.spikingjelly_lif(then=_pool) | {"lif by torch steps + avg_pool2d": peers.plain_lif_pool}
    arguments = {"current": current, "decay": 0.95}
    return Problem(lif_pool, arguments, exact=True, flops=5.0 * current.numel(), peers=others)


def _pool(spikes: Tensor) -> Tensor:
    return functional.avg_pool2d(spikes.flatten(0, 1), 2).unflatten(0, spikes.shape[:2])


def _stbif(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Problem:
    arguments = {
        "current": _current(shape, dtype, device),
        "threshold": 0.5,
        "pos_max": 3,
        "neg_min": 0,
        "output": "values",  # which layers of neurons pass on
    }
    others = {"spikingjelly STBIF": peers.spikingjelly_stbif, "st-bif by torch steps": peers.plain_stbif}
    return Problem(stbif, arguments, exact=True, flops=7.0 * math.prod(shape), peers=others)


def _stbif_block(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Problem:
    arguments = {
        "current": _current(shape, dtype, device),
        "bias": _normal(*shape[:1], shape[2], dtype=dtype, device=device),
        "residual": _current(shape, dtype, device),
        "threshold": 0.5,
        "pos_max": 3,
        "neg_min": 0,
    }
    return Problem(stbif_block, arguments, exact=True, flops=9.0 * math.prod(shape))


def _max_pool_delta(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Problem:
    codes = torch.randint(-1, 2, tuple(shape)).to(device, dtype)
    arguments = {"values": codes, "kernel_size": 3, "stride": 2, "padding": 1}
    return Problem(max_pool_delta, arguments, exact=True, flops=4.0 * math.prod(shape))


def _spike_conv2d(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Problem:
    images, channels, height, width, out, kernel, percent = shape
    x = torch.rand(images, channels, height, width).lt(percent / 100).to(device, dtype)
    weight = _normal(out, channels, kernel, kernel, dtype=dtype, device=device, scale=(channels * kernel**2) ** -0.5)
    arguments = {"x": x.contiguous(memory_format=torch.channels_last), "weight": weight, "padding": kernel // 2}
    spikes = float(x.sum())
    others = {"in integers": peers.integers}
    return Problem(spike_conv2d, arguments, flops=2.0 * spikes * out * kernel**2, peers=others)


_VIM = ((1, 197, 384, 16), (4, 197, 384, 16), (64, 197, 384, 16))
_VIM_MIXER = tuple((*shape, 12) for shape in _VIM)
_CONV = tuple((*shape[:3], 4) for shape in _VIM)
_VIM_OPS = (in_conv, steps, out_norm)
_NEURONS = ((T, 64, 64, 32, 32),)

OPS: Mapping[str, OpRecipe] = {
    "selective_scan": OpRecipe(_selective_scan, "batch,length,channels,state", _VIM[:2]),
    "bidirectional_scan": OpRecipe(_bidirectional_scan, "batch,length,channels,state,rank", _VIM_MIXER[:2]),
    "conv_scan_gate": OpRecipe(_conv_scan_gate, "batch,length,channels,state,rank", _VIM_MIXER),
    "delta_projection": OpRecipe(_delta_projection, "batch,length,channels,rank", ((1, 197, 384, 12),)),
    "causal_conv1d": OpRecipe(partial(_convolution, False), "batch,length,channels,width", _CONV[:2]),
    "causal_conv1d_pair": OpRecipe(partial(_convolution, True), "batch,length,channels,width", _CONV[:2]),
    "add_rms_norm": OpRecipe(_add_rms_norm, "rows,dim", ((197, 192), (4 * 197, 192)), rows=197),
    **{
        f"vim_{op.__name__}": OpRecipe(partial(_vim_layer, op), "batch,length,dim", ((1, 197, 192),)) for op in _VIM_OPS
    },
    "packed_linear": OpRecipe(
        _packed_linear, "rows,inner,outer", ((197, 192, 768), (197, 384, 192), (4 * 197, 192, 768)), rows=197
    ),
    "lif": OpRecipe(_lif, "T,...", _NEURONS, place=1),
    "lif_pool": OpRecipe(partial(_lif_pool, False), "T,batch,channels,height,width", _NEURONS, place=1),
    "lif_pool_repeat": OpRecipe(partial(_lif_pool, True), "T,batch,channels,height,width", _NEURONS, place=1),
    "stbif": OpRecipe(_stbif, "T,...", _NEURONS, place=1),
    "stbif_block": OpRecipe(_stbif_block, "T,batch,channels,...", ((T, 1, 64, 8, 8), (T, 32, 64, 8, 8)), place=1),
    "max_pool_delta": OpRecipe(
        _max_pool_delta, "T,batch,channels,height,width", ((T, 1, 64, 16, 16), (T, 32, 64, 16, 16)), place=1
    ),
    "spike_conv2d": OpRecipe(
        _spike_conv2d,
        "images,channels,height,width,out,kernel,percent",
        ((512, 64, 16, 16, 128, 3, 19), (8, 64, 8, 8, 64, 3, 21), (8, 256, 2, 2, 256, 3, 21)),
        rows=T,
    ),
}
