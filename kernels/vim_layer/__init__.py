"""A Vision Mamba layer without its scans, on a GPU in half precision, as three launches: products and their epilogues.

    in_conv      x, z = in_proj(normed);  u[g] = silu(conv[g](x)), g = 0 looks back over the tokens and 1 ahead
    steps        B[g], C[g], low[g] = x_proj[g] u[g];  delta[g] = softplus(dt_proj[g] low[g] + dt_bias[g])
    out_norm     residual' = residual + out_proj((y[0] + y[1]) silu(z));  normed = rms_norm(residual') weight

These are for float16 and bfloat16, whose products a GPU computes in tiles with float32 sums. In separate launches,
products, convolution, gate and norm would write 0.9 MB per image and layer (Vim tiny) for the next launch to read. B
images, L tokens, dim numbers per token outside and E inside the layer, N states, R = rank.
"""

import torch
from torch import Tensor

from benchd.kernels.dispatch import load_all, require_floats
from benchd.kernels.vim_layer.ops import InConv, OutNorm, Steps, in_conv_op, out_norm_op, steps_op

__all__ = ["DTYPES", "MOST_DIM", "in_conv", "out_norm", "steps", "takes"]

DTYPES = (torch.float16, torch.bfloat16)
MOST_DIM = 1024  # a program of `out_norm` processes whole tokens

load_all(__name__)


def takes(dtype: torch.dtype, dim: int, device: torch.device) -> bool:
    """Return whether "triton" supports all three in `dtype` for tokens of `dim` numbers on this GPU."""
    if dtype not in DTYPES or dim > MOST_DIM:
        return False
    return dtype == torch.float16 or device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def in_conv(
    normed: Tensor, weight: Tensor, taps: Tensor, shift: Tensor, *, implementation: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Return u (2, B, L, E) and z (B, L, E) in the dtype of normed.

    normed (B, L, dim); weight (2 E, dim), first for x, then for z; taps (2, E, 4) and shift (2, E) of the convolutions,
    as in `causal_conv1d_pair`. Errors are those of `out_norm`.
    """
    given = InConv(normed, weight, taps, shift)
    return in_conv_op("in_conv", implementation, given, lambda: _check_in_conv(given))


def steps(
    u: Tensor, weight: Tensor, dt_weight: Tensor, dt_bias: Tensor, states: int, *, implementation: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return delta (2, B, L, E) in the dtype of u, B and C (2, B, L, N) in float32.

    u (2, B, L, E); weight (2, E, at least 2 N + R columns), for B, C and the low-rank numbers; dt_weight (2, E, R);
    dt_bias (2, E). Errors are those of `out_norm`.
    """
    given = Steps(u, weight, dt_weight, dt_bias, states)
    return steps_op("steps", implementation, given, lambda: _check_steps(given))


def out_norm(
    y: Tensor, z: Tensor, weight: Tensor, residual: Tensor, norm: Tensor, *, eps: float = 1e-5,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return normed (B, L, dim) in the dtype of the norm's weight, and residual' (B, L, dim) in float32.

    y (2, B, L, E), z (B, L, E), weight (dim, E), residual (B, L, dim) in float32, norm (dim,). Raises TypeError for a
    tensor that is not floating point, ValueError for a wrong shape or a second device, and dispatch.Unavailable if the
    implementation cannot run here: there is none in C, and "triton" supports neither gradients, nor a dim above
    MOST_DIM, nor a dtype outside DTYPES.
    """
    given = OutNorm(y, z, weight, residual, norm, eps)
    return out_norm_op("out_norm", implementation, given, lambda: _check_out_norm(given))


def _check_in_conv(given: InConv) -> None:
    normed, weight, taps, shift = given
    require_floats("in_conv", normed=normed, weight=weight, taps=taps, shift=shift)
    inner, dim = weight.shape[0] // 2, normed.shape[-1]
    wanted = {"weight": (2 * inner, dim), "taps": (2, inner, 4), "shift": (2, inner)}
    _check_shapes("in_conv", {"normed": (*normed.shape[:2], dim), **wanted}, given._asdict())


def _check_steps(given: Steps) -> None:
    u, weight, dt_weight, dt_bias, states = given
    require_floats("steps", u=u, weight=weight, dt_weight=dt_weight, dt_bias=dt_bias)
    inner, columns, rank = u.shape[-1], weight.shape[-1], dt_weight.shape[-1]
    if columns < 2 * states + rank:
        raise ValueError(f"steps: weight must have {2 * states + rank} columns or more, not {columns}")
    wanted = {"u": (2, *u.shape[1:3], inner), "weight": (2, inner, columns)}
    _check_shapes("steps", wanted | {"dt_weight": (2, inner, rank), "dt_bias": (2, inner)}, given._asdict())


def _check_out_norm(given: OutNorm) -> None:
    y, z, weight, residual, norm, _ = given
    require_floats("out_norm", y=y, z=z, weight=weight, residual=residual, norm=norm)
    batch, length, inner = z.shape if z.dim() == 3 else (0, 0, 0)
    dim = len(norm)
    wanted = {"z": (batch, length, inner), "y": (2, batch, length, inner), "weight": (dim, inner)}
    _check_shapes("out_norm", wanted | {"residual": (batch, length, dim), "norm": (dim,)}, given._asdict())


def _check_shapes(op: str, wanted: dict[str, tuple[int, ...]], given: dict[str, Tensor]) -> None:
    for name, shape in wanted.items():
        if given[name].shape != shape:
            raise ValueError(f"{op}: {name} must be {tuple(shape)}, not {tuple(given[name].shape)}")
