"""The selective scan of Mamba: a linear recurrence over tokens whose decay depends on the token.

    h[t,d,n] = exp(delta[t,d] A[d,n]) h[t-1,d,n] + delta[t,d] u[t,d] B[t,n]      h[-1] = 0
    y[t,d] = sum over n of h[t,d,n] C[t,n]  +  D[d] u[t,d],  times silu(z[t,d]) if there is a gate z

Tokens are t < L = length, channels d < E, states n < N; batch items are independent. `delta_bias` is added to delta,
then softplus (linear above 20) is applied if `delta_softplus`. `reverse` runs t from L-1 down to 0, with inputs and
outputs in their natural order. h, delta and all sums are in float32, or float64 for a float64 u, and y is in the dtype
of u (Gu and Dao, 2023, algorithm 2).

`bidirectional_scan` computes everything in a bidirectional layer between two matrix products: delta = softplus(low W^T
+ bias) from R numbers per token, both scans, and their sum times silu(z). `form` selects how "triton" processes the
tokens, one by one or in parallel in two levels; the other implementations have a single exact form and accept either
value.
"""

from typing import Any, Literal

from torch import Tensor

from benchd.kernels.dispatch import load_all, require_floats
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

__all__ = ["Form", "bidirectional_scan", "delta_projection", "selective_scan", "selective_scan_pair"]

Form = Literal["serial", "two_level"]

load_all(__name__)


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    reverse: bool = False,
    *,
    form: Form = "serial",
    implementation: str = "auto",
) -> Tensor:
    """Return y (batch, L, E) in the dtype of u.

    u, delta, z (batch, L, E); A (E, N), negative; B, C (batch, L, N); D, delta_bias (E,). "torch" is differentiable in
    every tensor, once. Raises TypeError for a tensor that is not floating point, ValueError for a wrong shape, a second
    device, an unknown form or implementation, and dispatch.Unavailable if the implementation cannot run here: "native"
    and "triton" support neither gradients nor float64.
    """
    name, given = "selective_scan", Scan(u, delta, A, B, C, D, z, delta_bias, delta_softplus, reverse, form)

    def check() -> None:
        _check(name, (), form, u=u, delta=delta, A=A, B=B, C=C, D=D, z=z, delta_bias=delta_bias)

    return scan_op(name, implementation, given, check)


def selective_scan_pair(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    *,
    form: Form = "serial",
    implementation: str = "auto",
) -> Tensor:
    """Return y for two scans at once, (2, batch, L, E) in the dtype of u: [0] runs forward and [1] in reverse.

    Every tensor is as in `selective_scan` with a leading dimension of 2, all in natural token order; there is no gate,
    because a bidirectional layer gates the sum. Errors are those of `selective_scan`.
    """
    name, given = "selective_scan_pair", ScanPair(u, delta, A, B, C, D, delta_bias, delta_softplus, form)

    def check() -> None:
        _check(name, (2,), form, u=u, delta=delta, A=A, B=B, C=C, D=D, delta_bias=delta_bias)

    return pair_op(name, implementation, given, check)


def delta_projection(low: Tensor, weight: Tensor, bias: Tensor, *, implementation: str = "auto") -> Tensor:
    """Return delta = softplus(low W^T + bias) for two directions, (2, batch, L, E) in the dtype of low.

    low (2, batch, L, R), weight (2, E, R), bias (2, E). Errors are those of `selective_scan`.
    """
    op, given = "delta_projection", Projection(low, weight, bias)
    return delta_op(op, implementation, given, lambda: _check_projection(op, *given))


def bidirectional_scan(
    u: Tensor,
    low: Tensor,
    weight: Tensor,
    bias: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    *,
    form: Form = "serial",
    implementation: str = "auto",
) -> Tensor:
    """Return (the scan of u[0] + the scan of u[1] in reverse) * silu(z), (batch, L, E) in the dtype of u.

    u (2, batch, L, E), B, C (2, batch, L, N) and low (2, batch, L, R) in natural token order; weight (2, E, R), bias
    (2, E), A (2, E, N), negative, D (2, E) and z (batch, L, E). delta is as in `delta_projection`. Gradients and errors
    are those of `selective_scan`.
    """
    op, given = "bidirectional_scan", Bidirectional(u, low, weight, bias, A, B, C, D, z, form)
    return bidirectional_op(op, implementation, given, lambda: _check_bidirectional(op, given))


def _check_bidirectional(op: str, given: Bidirectional) -> None:
    u, low, weight, bias, A, B, C, D, z, form = given
    _check(op, (2,), form, u=u, A=A, B=B, C=C, D=D)
    _check_low(op, low)
    require_floats(op, u=u, low=low, weight=weight, bias=bias, z=z)
    per_channel, rank = D.shape, low.shape[-1:]
    _check_shape(op, "low", low, u.shape[:-1] + rank)
    _check_shape(op, "weight", weight, per_channel + rank)
    _check_shape(op, "bias", bias, per_channel)
    _check_shape(op, "z", z, u.shape[1:])


def _check_projection(op: str, low: Tensor, weight: Tensor, bias: Tensor) -> None:
    require_floats(op, low=low, weight=weight, bias=bias)
    _check_low(op, low)
    if weight.dim() != 3 or (weight.shape[0], weight.shape[2]) != (2, low.shape[3]):
        raise ValueError(f"{op}: weight must be (2, channels, {low.shape[3]}), not {tuple(weight.shape)}")
    _check_shape(op, "bias", bias, weight.shape[:2])


def _check_low(op: str, low: Tensor) -> None:
    if low.dim() != 4 or len(low) != 2 or not low.shape[3]:
        raise ValueError(f"{op}: low must be (2, batch, length, rank of at least 1), not {tuple(low.shape)}")


def _check(op: str, lead: tuple[int, ...], form: str, **tensors: Any) -> None:
    """Raise ValueError unless all tensors fit u (*lead, batch, length, channels) and A (*lead, channels, N)."""
    if form not in {"serial", "two_level"}:
        raise ValueError(f"{op}: form must be 'serial' or 'two_level', not {form!r}")
    require_floats(op, **tensors)
    u, A = tensors["u"], tensors["A"]
    if u.dim() != len(lead) + 3 or u.shape[: len(lead)] != lead:
        raise ValueError(f"{op}: u must be ({_text(lead)}batch, length, channels), not {tuple(u.shape)}")
    if A.dim() != len(lead) + 2 or A.shape[:-1] != (*lead, u.shape[-1]):
        raise ValueError(f"{op}: A must be ({_text(lead)}{u.shape[-1]}, state), not {tuple(A.shape)}")
    per_channel, per_state = (*lead, u.shape[-1]), (*u.shape[:-1], A.shape[-1])
    expected = {"A": A.shape, "B": per_state, "C": per_state, "D": per_channel, "delta_bias": per_channel}
    for name, tensor in tensors.items():
        if tensor is not None:
            _check_shape(op, name, tensor, expected.get(name, u.shape))


def _check_shape(op: str, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{op}: {name} must be {tuple(shape)}, not {tuple(tensor.shape)}")


def _text(lead: tuple[int, ...]) -> str:
    return "".join(f"{size}, " for size in lead)
