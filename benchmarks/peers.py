"""Other libraries' code for the same ops, if installed: each function takes an op's arguments and returns a call.

Inputs are converted to a peer's layout before timing starts. Missing is raised, with the reason, for an absent peer.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchd.kernels.exact_conv2d import native, pack

Arguments = Mapping[str, Any]
Call = Callable[[], Any]
Prepare = Callable[[Arguments], Call]


PACKAGES = {
    "mamba_ssm": "mamba-ssm",
    "causal_conv1d": "causal-conv1d",
    "spikingjelly": "spikingjelly",
    "mambapy": "mambapy",
    "onnx": "onnx",
    "onnxruntime": "onnxruntime",
}
"""The package of each module that `required` may import; the versions of these packages are reported."""


class Missing(RuntimeError):
    """A peer is not installed, or does not run on this device."""


def required(name: str) -> Any:
    """Return a peer's module, one of PACKAGES; raise Missing if it is not installed."""
    package = PACKAGES[name.partition(".")[0]]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Missing(f"{package} is not installed: {error}") from error


def _channels_first(tensor: Tensor) -> Tensor:
    return tensor.transpose(-1, -2).contiguous()


def mamba_scan(arguments: Arguments) -> Call:
    """mamba-ssm's CUDA scan, on (batch, channels, length)."""
    scan = required("mamba_ssm.ops.selective_scan_interface").selective_scan_fn
    u, delta, B, C = (_channels_first(arguments[name]) for name in ("u", "delta", "B", "C"))
    needs_cuda(u)
    A, D, bias = (arguments[name] for name in ("A", "D", "delta_bias"))
    return lambda: scan(u, delta, A, B, C, D, None, bias, True).transpose(1, 2)


def mamba_mixer(arguments: Arguments) -> Call:
    """Run the layer as the official Vim does, with mamba-ssm and causal-conv1d."""
    scan = required("mamba_ssm.ops.selective_scan_interface").selective_scan_fn
    convolve = required("causal_conv1d").causal_conv1d_fn
    needs_cuda(arguments["x"])
    return official_mixer(arguments, scan, convolve)


def official_mixer(arguments: Arguments, scan: Callable[..., Tensor], convolve: Callable[..., Tensor]) -> Call:
    """For each direction, run the convolution and the gated scan, laid out as in the official code.

    x and z are one tensor, channels outermost, which is flipped once for the second direction. Projections of flipped
    channels are already flipped.
    """
    xz = torch.cat((arguments["x"], arguments["z"]), dim=-1).permute(2, 0, 1).contiguous().transpose(0, 1)
    low, B, C = (_second_flipped(arguments[name]) for name in ("low", "B", "C"))
    low, B, C = low.flatten(1, 2).mT, _channels_first(B), _channels_first(C)
    taps, shift, weight, bias, A, D = (arguments[name] for name in ("taps", "shift", "weight", "bias", "A", "D"))

    def direction(g: int, xz: Tensor) -> Tensor:
        x, z = xz.chunk(2, dim=1)
        u = convolve(x, taps[g], shift[g], activation="silu")
        delta = (weight[g] @ low[g]).unflatten(1, (len(xz), -1)).transpose(0, 1)
        return scan(u, delta, A[g], B[g], C[g], D[g], z, bias[g], True)

    return lambda: (direction(0, xz) + direction(1, xz.flip(-1)).flip(-1)).transpose(1, 2)


def _second_flipped(pair: Tensor) -> Tensor:
    """Return (2, batch, L, ...) with the second direction's tokens in the order in which it reads them."""
    return torch.stack((pair[0], pair[1].flip(1)))


def causal_conv1d(arguments: Arguments) -> Call:
    """Dao's CUDA convolution, on (batch, channels, length)."""
    convolve = required("causal_conv1d").causal_conv1d_fn
    x = _channels_first(arguments["x"])
    needs_cuda(x)
    return lambda: convolve(x, arguments["weight"], arguments["bias"], activation="silu").transpose(1, 2)


def mamba_add_rms_norm(arguments: Arguments) -> Call:
    """mamba-ssm's Triton norm with its residual in float32."""
    norm = required("mamba_ssm.ops.triton.layer_norm").rms_norm_fn
    hidden, residual, weight = (arguments[name] for name in ("hidden", "residual", "weight"))
    needs_cuda(hidden)
    return lambda: norm(hidden, weight, None, residual=residual, prenorm=True, residual_in_fp32=True, eps=1e-5)


def onednn_packed(arguments: Arguments) -> Call:
    """Multiply using oneDNN with the weight in oneDNN's layout, as torch.compile does with freezing."""
    x, weight = arguments["x"], arguments["weight"]
    if x.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        raise Missing("it runs on a CPU whose torch has oneDNN")
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, len(x))
    return lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def needs_cuda(tensor: Tensor) -> None:
    """Raise Missing for a tensor that is not on a GPU."""
    if tensor.device.type != "cuda":
        raise Missing("it runs on CUDA only")


def onnxruntime_scan(arguments: Arguments) -> Call:
    """ONNX Runtime's Scan op on the CPU in float32; its body computes each step's exponential."""
    runtime = required("onnxruntime")
    u = arguments["u"]
    if u.device.type != "cpu" or u.dtype != torch.float32:
        raise Missing("raced on the CPU in float32 only")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    model = _scan_model(tuple(u.shape), arguments["A"].shape[-1])
    session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = ("u", "delta", "A", "B", "C", "D", "delta_bias")
    feed = {name: arguments[name].numpy() for name in names}
    return lambda: torch.from_numpy(session.run(None, feed)[0])


def _scan_model(shape: tuple[int, ...], states: int) -> Any:
    """Return an ONNX model of softplus(delta + bias), the recurrence as a Scan, and D u."""
    parser = required("onnx.parser")
    batch, length, channels = shape
    state, tokens = f"float[{batch},{channels},{states}]", f"float[{batch},{length},{channels}]"
    rows = f"float[{batch},{length},{states}]"
    return parser.parse_model(f"""
        <ir_version: 9, opset_import: ["" : 20]>
        scan ({tokens} u, {tokens} delta, float[{channels},{states}] A, {rows} B, {rows} C, float[{channels}] D,
              float[{channels}] delta_bias) => ({tokens} y)
        <int64[1] last = {{-1}}, int64[1] before_last = {{-2}}, int64[3] sizes = {{{batch}, {channels}, {states}}},
         float zero = {{0}}>
        {{
            biased = Add(delta, delta_bias)
            step = Softplus(biased)
            x = Mul(step, u)
            start = Expand(zero, sizes)
            last_state, scanned = Scan <num_scan_inputs = 4, scan_input_axes = [1, 1, 1, 1], scan_output_axes = [1],
                body = token ({state} h, float[{batch},{channels}] d, float[{batch},{channels}] v,
                              float[{batch},{states}] b, float[{batch},{states}] c)
                    => ({state} next, float[{batch},{channels}] out)
                {{
                    d3 = Unsqueeze(d, last)
                    v3 = Unsqueeze(v, last)
                    b3 = Unsqueeze(b, before_last)
                    c3 = Unsqueeze(c, before_last)
                    exponent = Mul(d3, A)
                    decay = Exp(exponent)
                    kept = Mul(decay, h)
                    input = Mul(v3, b3)
                    next = Add(kept, input)
                    weighted = Mul(next, c3)
                    out = ReduceSum <keepdims = 0> (weighted, last)
                }}> (start, step, x, B, C)
            through = Mul(u, D)
            y = Add(scanned, through)
        }}
    """)


def spikingjelly(name: str) -> Callable[..., Any]:
    """Return a function of spikingjelly 2.0 that takes its neurons' state; raise Missing if there is none.

    Its modules keep their state in the current's type and only have kernels for float32. For half-precision currents, a
    function with float32 state is the fast path; in float32, the module calls the same function.
    """
    functions = required("spikingjelly.activation_based.functional")
    if not hasattr(functions, name):
        raise Missing(f"this version has no {name}")
    return getattr(functions, name)


def spikingjelly_lif(then: Callable[[Tensor], Tensor] = lambda spikes: spikes) -> dict[str, Prepare]:
    """Return spikingjelly's LIF, from 2.0 or with an earlier version's back ends; `then` pools the spikes."""
    named: dict[str, Prepare] = {"spikingjelly LIF": partial(_lif_multi_step, then)}
    for backend in ("cupy", "triton"):
        named[f"spikingjelly LIF ({backend})"] = partial(_lif_node, backend, then)
    return named


def _lif_multi_step(then: Callable[[Tensor], Tensor], arguments: Arguments) -> Call:
    neurons, current = spikingjelly("lif_multi_step"), arguments["current"]
    v = torch.zeros_like(current[0], dtype=torch.float32)
    tau = 1 / (1 - arguments["decay"])
    return lambda: then(neurons(current, v, tau, decay_input=False)[0])


def _lif_node(backend: str, then: Callable[[Tensor], Tensor], arguments: Arguments) -> Call:
    neurons = required("spikingjelly.activation_based.neuron")
    reset = required("spikingjelly.activation_based.functional").reset_net
    current = arguments["current"].contiguous()
    chosen = {"tau": 1 / (1 - arguments["decay"]), "decay_input": False, "v_reset": 0.0, "step_mode": "m"}
    try:
        node = neurons.LIFNode(**chosen, backend=backend).to(current.device)
    except (TypeError, ValueError, ImportError, NotImplementedError) as error:
        raise Missing(f"this version does not offer it: {error}") from error
    node.eval()

    def run() -> Tensor:
        reset(node)
        return then(node(current))

    return run


def spikingjelly_stbif(arguments: Arguments) -> Call:
    """Run spikingjelly's SpikeZIP neurons from their initial state."""
    neurons, current = spikingjelly("stbif_multi_step"), arguments["current"]
    q = torch.full_like(current[0], 0.5, dtype=torch.float32)
    released = torch.zeros_like(q)
    bounds = [torch.tensor(float(arguments[name])).to(q) for name in ("threshold", "pos_max", "neg_min")]
    return lambda: neurons(current, q, released, *bounds)[0]


def plain_lif_pool(arguments: Arguments) -> Call:
    """LIF as it is usually written, with five operations per step, then avg_pool2d."""
    current, decay = arguments["current"], arguments["decay"]

    def run() -> Tensor:
        v = torch.zeros_like(current[0])
        spikes = []
        for x in current:
            v = decay * v + x
            fired = (v >= 1.0).to(v.dtype)
            v = torch.where(fired.bool(), torch.zeros_like(v), v)
            spikes.append(fired)
        return functional.avg_pool2d(torch.stack(spikes).flatten(0, 1), 2).unflatten(0, current.shape[:2])

    return run


def integers(arguments: Arguments) -> Call:
    """Our integer convolution of the same spikes, with a packed weight."""
    if not native.paths():
        raise Missing("the CPU has no AMX, VNNI or dot product of bytes")
    scale, packed, x, padding = torch.ones(()), pack(arguments["weight"]), arguments["x"], arguments["padding"]
    return lambda: native.convolved(x, None, packed, scale, 1, 1, padding)


def plain_stbif(arguments: Arguments) -> Call:
    """ST-BIF as it is usually written, with a comparison and a masked write for each sign."""
    current, s = arguments["current"], arguments["threshold"]
    high, low = arguments["pos_max"], arguments["neg_min"]

    def run() -> Tensor:
        v = torch.full_like(current[0], s / 2)
        k = torch.zeros_like(v)
        spikes = []
        for x in current:
            v = v + x
            q = torch.zeros_like(v)
            q[(v >= s) & (k < high)] = 1
            q[(v < 0) & (k > low)] = -1
            spikes.append(s * q)
            v = v - spikes[-1]
            k = k + q
        return torch.stack(spikes)

    return run
