"""The selective scan as torch ops; the kernels' ops are for inference, with state and sums in float32."""

from typing import Any, NamedTuple

from torch import Tensor

from benchd.kernels.op import op


class Scan(NamedTuple):
    """u, delta, z (batch, length, channels), A (channels, state), B, C (batch, length, state), D, bias (channels,).

    Only "triton" has more than one `form`.
    """

    u: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    bias: Tensor | None
    softplus: bool
    reverse: bool
    form: str


class ScanPair(NamedTuple):
    """Two scans, along the first axis of every tensor; the second runs in reverse."""

    u: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    bias: Tensor | None
    softplus: bool
    form: str


class Projection(NamedTuple):
    """low (2, batch, length, rank), weight (2, channels, rank), bias (2, channels)."""

    low: Tensor
    weight: Tensor
    bias: Tensor


class Bidirectional(NamedTuple):
    """The tensors of `ScanPair` and `Projection`, and the gate z (batch, length, channels)."""

    u: Tensor
    low: Tensor
    weight: Tensor
    bias: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    z: Tensor
    form: str


@op("selective_scan", float32=("native", "triton"))
def scan_op(given: Scan) -> Tensor:
    """Allocate y (batch, length, channels)."""
    return given.u.new_empty(given.u.shape)


@op("selective_scan_pair", float32=("native", "triton"))
def pair_op(given: ScanPair) -> Tensor:
    """Allocate y (2, batch, length, channels)."""
    return given.u.new_empty(given.u.shape)


@op("delta_projection", float32=("native", "triton"))
def delta_op(given: Projection) -> Tensor:
    """Allocate delta (2, batch, length, channels)."""
    return given.low.new_empty(*given.low.shape[:-1], given.weight.shape[1])


@op("bidirectional_scan", float32=("native", "triton"))
def bidirectional_op(given: Bidirectional) -> Tensor:
    """Allocate the gated sum of both directions (batch, length, channels)."""
    return given.u.new_empty(given.u.shape[1:])


def directions_of(given: Scan | ScanPair) -> tuple[Any, ...]:
    """Return u, delta, A, B, C, D, z and bias, each with the directions of the scan as its first axis."""
    if isinstance(given, ScanPair):
        return *given[:6], None, given.bias
    return tuple(None if tensor is None else tensor.unsqueeze(0) for tensor in given[:8])
