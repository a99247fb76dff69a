"""Computes, without a GPU, how many warps of a kernel fit on a multiprocessor (SM) at once, and what limits them.

The limits per compute capability are from the tables "Compute Capabilities" in the CUDA Programming Guide; the
allocation of registers and shared memory follows NVIDIA's occupancy calculator, which the tests compare with. Left out:
barriers and thread block clusters, which our kernels do not use, and a grid too small to fill the GPU.
"""

from dataclasses import dataclass

WARP_THREADS = 32
MAX_THREADS = 1024  # per block, on every architecture
MAX_REGISTERS = 255  # per thread, on every architecture
KIB = 1024


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The resources of one SM, and their allocation units."""

    warps: int
    blocks: int
    shared_bytes: int
    reserved_bytes: int = KIB  # reserved by the driver in every block's shared memory
    shared_unit: int = 128  # bytes
    registers: int = 64 * KIB  # shared by all blocks, and the maximum for one block
    register_unit: int = 256  # per warp
    partitions: int = 4  # each has an equal part of the registers


ARCHITECTURES = {
    75: Architecture(warps=32, blocks=16, shared_bytes=64 * KIB, reserved_bytes=0, shared_unit=256),
    80: Architecture(warps=64, blocks=32, shared_bytes=164 * KIB),
    86: Architecture(warps=48, blocks=16, shared_bytes=100 * KIB),
    87: Architecture(warps=48, blocks=16, shared_bytes=164 * KIB),
    89: Architecture(warps=48, blocks=24, shared_bytes=100 * KIB),
    90: Architecture(warps=64, blocks=32, shared_bytes=228 * KIB),
    100: Architecture(warps=64, blocks=32, shared_bytes=228 * KIB),
    103: Architecture(warps=64, blocks=32, shared_bytes=228 * KIB),
    110: Architecture(warps=48, blocks=24, shared_bytes=228 * KIB),
    120: Architecture(warps=48, blocks=24, shared_bytes=100 * KIB),
    121: Architecture(warps=48, blocks=24, shared_bytes=100 * KIB),
}


@dataclass(frozen=True)
class SmOccupancy:
    """The blocks and warps that fit on an SM together, the occupied share of its warps, and the limiting resources.

    `limits` contains one or several of "warps", "blocks", "registers" and "shared memory". A kernel that cannot be
    launched has no blocks, and `limits` says which resource it exceeds.
    """

    blocks: int
    warps: int
    share: float
    limits: tuple[str, ...]


def theoretical(architecture: Architecture, registers: int, shared_bytes: int, threads: int) -> SmOccupancy:
    """Return a kernel's occupancy, given its registers per thread, and its shared memory and threads per block."""
    if threads < 1:
        raise ValueError(f"a block has at least one thread, not {threads}")
    warps = -(-threads // WARP_THREADS)
    allowed = {
        "warps": architecture.warps // warps if threads <= MAX_THREADS else 0,
        "blocks": architecture.blocks,
        "registers": _blocks_by_registers(architecture, registers, warps),
        "shared memory": _blocks_by_shared_memory(architecture, shared_bytes),
    }
    blocks = min(allowed.values())
    limits = tuple(resource for resource, most in allowed.items() if most == blocks)
    return SmOccupancy(blocks, blocks * warps, blocks * warps / architecture.warps, limits)


def _blocks_by_registers(architecture: Architecture, registers: int, warps: int) -> int:
    a_warp = _rounded_up(max(registers, 1) * WARP_THREADS, architecture.register_unit)
    # the launch check counts a block's warps as if they filled every partition evenly
    checked = a_warp * _rounded_up(warps, architecture.partitions)
    if registers > MAX_REGISTERS or checked > architecture.registers:
        return 0
    in_partition = architecture.registers // architecture.partitions // a_warp
    return in_partition * architecture.partitions // warps


def _blocks_by_shared_memory(architecture: Architecture, shared_bytes: int) -> int:
    unit = architecture.shared_unit
    a_block = _rounded_up(shared_bytes + architecture.reserved_bytes, unit)
    return architecture.shared_bytes // max(a_block, unit)


def _rounded_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit
