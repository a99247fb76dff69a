"""The rate of a GPU's exponential unit: a chain in registers, because torch.exp2 is limited by memory."""

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 1024, 4


# this source is compiled, not called: pointers and block sizes have no Python types
@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _exp2_chain_kernel(x_ptr, steps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + own)
    for _ in range(steps):
        x = tl.exp2(-x)
    tl.store(x_ptr + own, x)


def exp2_chain(x: torch.Tensor, steps: int) -> None:
    """Apply x -> 2^-x to each x `steps` times, in place; x is (n,) float32, n a multiple of BLOCK."""
    _exp2_chain_kernel[(x.numel() // BLOCK,)](x, steps, BLOCK=BLOCK, num_warps=WARPS)
