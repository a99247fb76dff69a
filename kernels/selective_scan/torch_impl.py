"""The selective scan in plain PyTorch: blocks of tokens that stay in the cache, or two levels of chunks.

Internally, tokens come first, (length, *batch, channels), and the state is (*batch, N, channels). A pair shares its
steps by running `*batch` = (2, batch) through one recurrence. Only products of decays in (0, 1] are computed: dividing
by the cumulative decay is shorter, but gives NaN once delta is large.

- Blocks, on a CPU: decays and inputs of a block in two reused buffers, one in-place operation per token, one product
  with C per block. Buffers of the whole length would fault in fresh pages at every call: 3 times slower at batch 4.
- Two levels, on a GPU and for compilers: all chunks run at once from a zero state, tracking their cumulative decay;
  then one step per chunk passes the states on. About sqrt(8 * length) sequential operations instead of `length`.
"""

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchd.kernels.selective_scan.ops import (
    Bidirectional,
    Projection,
    Scan,
    ScanPair,
    bidirectional_op,
    delta_op,
    pair_op,
    scan_op,
)

# numbers per buffer of a block: two buffers take a few MB, about as much as the second-level caches of two cores
_BLOCK_NUMBERS = 2**19
# numbers in the states of images that run together on a CPU: a whole batch of 64 at once takes twice as long
_STATE_NUMBERS = 2**16
_LOG2_E = 1 / math.log(2)
ONNX_OPERATOR = "benchd::SelectiveRecurrence"


@scan_op.computes("torch")
def _one_way(given: Scan) -> Tensor:
    u, delta, A, B, C, D, z, delta_bias, delta_softplus, reverse, _ = given
    state_dtype = torch.promote_types(u.dtype, torch.float32)
    rates = A.to(state_dtype).mT

    def scanned(u: Tensor, delta: Tensor, B: Tensor, C: Tensor, *z: Tensor) -> Tensor:
        x, delta, B, C = (tensor.to(state_dtype) for tensor in (u, delta, B, C))
        delta = _steps(delta, delta_bias, delta_softplus)
        tokens_first = (tensor.transpose(0, 1) for tensor in (delta, delta * x, B, C))
        y = _scan(*tokens_first, A=rates, reverse=reverse).transpose(0, 1)
        if D is not None:
            y = torch.addcmul(y, x, D.to(state_dtype))
        for gate in z:
            y = y * functional.silu(gate.to(state_dtype))
        return y.to(u.dtype)

    return _in_groups(scanned, 0, rates.numel(), u, delta, B, C, *(() if z is None else (z,)))


@pair_op.computes("torch")
def _pair(given: ScanPair) -> Tensor:
    """Flip only the narrow inputs of the second direction, a sixteenth of what the recurrence reads."""
    u, delta, A, B, C, D, delta_bias, delta_softplus, _ = given
    state_dtype = torch.promote_types(u.dtype, torch.float32)
    rates = A.to(state_dtype).mT.unsqueeze(1)
    bias = None if delta_bias is None else delta_bias[:, None, None]

    def scanned(u: Tensor, delta: Tensor, B: Tensor, C: Tensor) -> Tensor:
        x, delta, B, C = (tensor.to(state_dtype) for tensor in (u, delta, B, C))
        delta = _steps(delta, bias, delta_softplus)
        aligned = (_aligned(tensor) for tensor in (delta, delta * x, B, C))
        y = _scan(*aligned, A=rates, reverse=False)
        y = torch.stack((y[:, 0], y[:, 1].flip(0))).transpose(1, 2)
        if D is not None:
            y = torch.addcmul(y, x, D.to(state_dtype)[:, None, None])
        return y.to(u.dtype)

    return _in_groups(scanned, 1, rates.numel(), u, delta, B, C)


@delta_op.computes("torch")
def _delta_projection(given: Projection) -> Tensor:
    low, weight, bias = given
    state_dtype = torch.promote_types(low.dtype, torch.float32)
    return _steps(_projected(low, weight).to(state_dtype), bias[:, None, None], softplus=True).to(low.dtype)


@bidirectional_op.computes("torch")
def _bidirectional_scan(given: Bidirectional) -> Tensor:
    u, low, weight, bias, A, B, C, D, z, form = given
    y = _pair(ScanPair(u, _projected(low, weight), A, B, C, D, bias, True, form))
    return (y[0] + y[1]) * functional.silu(z).to(u.dtype)


def _projected(low: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(low.flatten(1, 2), weight.mT.to(low.dtype)).unflatten(1, low.shape[1:3])


def _in_groups(scanned: Callable[..., Tensor], dim: int, numbers: int, *tensors: Tensor) -> Tensor:
    """Return `scanned` of the tensors, on a CPU in groups of images; `numbers` is the size of one image's state."""
    images = tensors[0].shape[dim]
    if torch.compiler.is_compiling() or tensors[0].device.type != "cpu" or images * numbers <= _STATE_NUMBERS:
        return scanned(*tensors)
    size = -(-images // -(-images * numbers // _STATE_NUMBERS))
    groups = zip(*(tensor.split(size, dim) for tensor in tensors), strict=True)
    return torch.cat([scanned(*group) for group in groups], dim)


def _aligned(tensor: Tensor) -> Tensor:
    """Return (2, batch, length, ...) as (length, 2, batch, ...), each direction in the order of its scan."""
    forward, backward = tensor.transpose(1, 2).unbind()
    return torch.stack((forward, backward.flip(0)), dim=1)


def _steps(delta: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    if bias is not None:
        delta = delta + bias.to(delta.dtype)
    if not softplus:
        return delta
    if torch.compiler.is_compiling() or delta.device.type != "cpu":
        return functional.softplus(delta)
    return _Softplus.apply(delta)


class _Softplus(torch.autograd.Function):
    """Softplus in a quarter of torch's time on a CPU, where log1p is not vectorised; relative error 2e-7."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        e = x.clamp(max=20).exp_()
        w = e + 1
        # w loses the low bits of e; w - 1 is exact where it matters, and the derivative of log at w is 1 / w
        lost = e.sub_(w - 1).div_(w)
        return torch.maximum(x, w.log_().add_(lost))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * x.sigmoid()


def _scan(delta: Tensor, x: Tensor, B: Tensor, C: Tensor, *, A: Tensor, reverse: bool) -> Tensor:
    """Return sum over n of h C, (length, *batch, channels).

    delta, x = delta * u (length, *batch, channels); B, C (length, *batch, N); A broadcasts to (*batch, N, channels).
    """
    if not len(delta):
        return delta
    if torch.onnx.is_in_onnx_export():
        return _exported(delta, x, B, C, A, reverse)
    if torch.compiler.is_compiling():
        return _two_levels(delta, x, B, C, A, reverse)
    learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (delta, x, B, C, A))
    inputs = (delta, x, B, C, A, reverse)
    if not learns:
        return _blocks(*inputs, None) if delta.device.type == "cpu" else _two_levels(*inputs)
    if delta.device.type == "cpu":
        return _Blocks.apply(*inputs)
    # the states of all tokens are 16 times the activations, so a backward pass recomputes them
    return checkpoint(_two_levels, *inputs, use_reentrant=False)


def _exported(delta: Tensor, x: Tensor, B: Tensor, C: Tensor, A: Tensor, reverse: bool) -> Tensor:
    """Return the recurrence as one node: the exporter chooses how to express it in standard ops."""
    if reverse:
        delta, x, B, C = (tensor.flip(0) for tensor in (delta, x, B, C))
    y = torch.onnx.ops.symbolic(ONNX_OPERATOR, (delta, x, B, C, A), dtype=delta.dtype, shape=delta.shape, version=1)
    return y.flip(0) if reverse else y


def _two_levels(delta: Tensor, x: Tensor, B: Tensor, C: Tensor, A: Tensor, reverse: bool) -> Tensor:
    length = len(delta)
    chunk = max(1, math.isqrt(length // 2))
    delta, x, B, C = (_chunked(tensor, chunk) for tensor in (delta, x, B, C))
    decays = (delta.unsqueeze(-2) * A).exp().unbind(1)
    charges = (x.unsqueeze(-2) * B.unsqueeze(-1)).unbind(1)
    order = range(chunk - 1, -1, -1) if reverse else range(chunk)
    products, states = list(decays), list(charges)
    for before, t in itertools.pairwise(order):
        products[t] = decays[t] * products[before]
        states[t] = torch.addcmul(charges[t], decays[t], states[before])
    entering = _handed_on(products[order[-1]], states[order[-1]], reverse)
    h = torch.addcmul(torch.stack(states, 1), torch.stack(products, 1), entering.unsqueeze(1))
    # not a matrix product, because autocast would round h, and compilers fuse the sum
    return (h * C.unsqueeze(-1)).sum(-2).flatten(0, 1)[:length]


def _chunked(tensor: Tensor, chunk: int) -> Tensor:
    """Return (length, ...) as (chunks, chunk, ...); zero tokens, at either end, leave the state unchanged."""
    missing = -len(tensor) % chunk
    padded = functional.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, missing))
    return padded.unflatten(0, (-1, chunk))


def _handed_on(products: Tensor, states: Tensor, reverse: bool) -> Tensor:
    """Return the state entering each chunk, given those leaving it if it starts from 0: (chunks, *batch, N, E)."""
    chunks = list(zip(products.unbind(), states.unbind(), strict=True))
    entering = [torch.zeros_like(states[0])]
    for product, state in chunks[:0:-1] if reverse else chunks[:-1]:
        entering.append(torch.addcmul(state, product, entering[-1]))
    return torch.stack(entering[::-1] if reverse else entering)


def _spans(length: int, state_numbers: int, reverse: bool) -> Iterator[slice]:
    """Yield the blocks in the order of the scan."""
    size = min(length, max(1, _BLOCK_NUMBERS // max(1, state_numbers)))
    starts = range(0, length, size)
    for start in reversed(starts) if reverse else starts:
        yield slice(start, min(start + size, length))


@torch.no_grad()
def _blocks(
    delta: Tensor, x: Tensor, B: Tensor, C: Tensor, A: Tensor, reverse: bool, entering: list[Tensor] | None
) -> Tensor:
    """Return the result of `_scan`; the state entering each block is appended to `entering`."""
    state = delta.new_zeros(*delta.shape[1:-1], *A.shape[-2:])
    y = torch.empty_like(delta, memory_format=torch.contiguous_format).unsqueeze(-2)
    rates = _rates(A)
    for span in _spans(len(delta), state.numel(), reverse):
        if entering is not None:
            entering.append(state.clone())
        _, h = _states(delta[span], x[span], B[span], rates, state, reverse)
        state.copy_(h[0 if reverse else -1])
        torch.matmul(C[span].unsqueeze(-2), h, out=y[span])
    return y.squeeze(-2)


class _Scratch(threading.local):
    """Memory for the blocks that is kept between calls: fresh pages cost more than the arithmetic on them."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.dtype], Tensor] = {}

    def buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return uninitialised memory of this shape, the same for the same name."""
        memory = self._kept.get((name, dtype))
        if memory is None or memory.numel() < math.prod(shape):
            with torch.inference_mode(mode=False):
                memory = self._kept[name, dtype] = torch.empty(math.prod(shape), dtype=dtype)
        return memory[: math.prod(shape)].view(shape)


_scratch = _Scratch()


def _states(
    delta: Tensor, x: Tensor, B: Tensor, rates: Tensor, entering: Tensor, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Return the decays and the states of a block's tokens, both (tokens, *batch, N, channels), in scratch memory."""
    shape = (len(delta), *entering.shape)
    decays, h = (_scratch.buffer(name, shape, x.dtype) for name in ("decays", "states"))
    torch.mul(delta.unsqueeze(-2), rates, out=decays).exp2_()
    torch.mul(x.unsqueeze(-2), B.unsqueeze(-1), out=h)
    _accumulate(decays, h, entering, reverse)
    return decays, h


def _rates(A: Tensor) -> Tensor:
    """Return A scaled for exp2 in place of exp, which takes three times as long on a CPU."""
    return (A * _LOG2_E).contiguous()


def _accumulate(decays: Tensor, h: Tensor, state: Tensor, reverse: bool) -> None:
    """Turn the tokens' inputs `h` into their states, in place."""
    steps = list(zip(decays.unbind(), h.unbind(), strict=True))
    for decay, token_input in reversed(steps) if reverse else steps:
        state = token_input.addcmul_(decay, state)


class _Blocks(torch.autograd.Function):
    """`_blocks` with a gradient; the backward pass recomputes the states block by block."""

    @staticmethod
    def forward(ctx: Any, delta: Tensor, x: Tensor, B: Tensor, C: Tensor, A: Tensor, reverse: bool) -> Tensor:
        entering: list[Tensor] = []
        y = _blocks(delta, x, B, C, A, reverse, entering)
        ctx.save_for_backward(delta, x, B, C, A, *entering)
        ctx.reverse = reverse
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        delta, x, B, C, A, *entering = ctx.saved_tensors
        return *_backward(grads[0], delta, x, B, C, A, ctx.reverse, entering), None


def _backward(
    grad: Tensor, delta: Tensor, x: Tensor, B: Tensor, C: Tensor, A: Tensor, reverse: bool, entering: list[Tensor]
) -> tuple[Tensor, ...]:
    """Return the gradients of delta, x, B, C and A from that of y.

    With g[t] the gradient of h[t]: g[t] = grad[t] C[t] + decay[t+1] g[t+1], the same recurrence in the other direction.
    """
    to_delta, to_x, to_B, to_C = (
        torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (delta, x, B, C)
    )
    to_A = torch.zeros_like(A)
    carried = torch.zeros_like(entering[0])
    rates = _rates(A)
    spans = list(_spans(len(delta), carried.numel(), reverse))
    for span, state in zip(reversed(spans), reversed(entering), strict=True):
        decays, h = _states(delta[span], x[span], B[span], rates, state, reverse)
        g = _scratch.buffer("gradients", h.shape, h.dtype)
        torch.mul(C[span].unsqueeze(-1), grad[span].unsqueeze(-2), out=g)
        first, last = (-1, 0) if reverse else (0, -1)
        g[last].add_(carried)
        earlier, later = (slice(1, None), slice(-1)) if reverse else (slice(-1), slice(1, None))
        _accumulate(decays[later], g[earlier], g[last], not reverse)
        torch.mul(decays[first], g[first], out=carried)
        torch.matmul(h, grad[span].unsqueeze(-1), out=to_C[span].unsqueeze(-1))
        torch.matmul(g, x[span].unsqueeze(-1), out=to_B[span].unsqueeze(-1))
        torch.matmul(B[span].unsqueeze(-2), g, out=to_x[span].unsqueeze(-2))
        # from here on, g is the gradient of delta * A, and h a buffer for a product
        g.mul_(decays)
        g[later].mul_(h[earlier])
        g[first].mul_(state)
        torch.sum(torch.mul(g, A, out=h), -2, out=to_delta[span])
        to_A += torch.mul(g, delta[span].unsqueeze(-2), out=h).sum(0).sum_to_size(A.shape)
    return to_delta, to_x, to_B, to_C, to_A
