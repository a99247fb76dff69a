"""Triton kernels of the tests, exported as an op exports its own: one that fits everywhere and one that spills."""

import triton
import triton.language as tl

from benchd.kernels.launch import Shipped


@triton.jit
def _add(x, y, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


@triton.jit
def _scan(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    values = tl.load(x + at)
    tl.store(out + at, tl.cumsum(values, 0) * values)


def _shipped_scan(name, block, warps, **more):
    return Shipped(
        name=name,
        kernel=_scan,
        signature={"x": "*fp32", "out": "*fp32", "BLOCK": "constexpr"},
        constants={"BLOCK": block},
        aligned=("x", "out"),
        num_warps=warps,
        fp_fusion=False,
        **more,
    )


SHIPPED = (
    Shipped(
        name="add",
        kernel=_add,
        signature={"x": "*fp32", "y": "*fp32", "out": "*fp32", "count": "i32", "BLOCK": "constexpr"},
        constants={"BLOCK": 1024},
        aligned=("x", "y", "out"),
        num_warps=4,
        fp_fusion=True,
    ),
    _shipped_scan("scan", 256, 2, architectures=(87, 90)),
    _shipped_scan("too wide", 16384, 1, architectures=(87,)),
)
