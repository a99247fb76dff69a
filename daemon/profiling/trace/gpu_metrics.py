"""Computes how well a GPU was used over a window from the launches and times in a trace, without counters.

There are three different kinds of occupancy. *Theoretical*: the share of an SM's warps that a kernel can fill, given
its registers, shared memory and block size. *Estimated*: the same, reduced if the grid was too small, as found in a
trace. *Measured*: counted by the hardware (GPM, DCGM, ncu), which no trace contains.

All shares are 0 to 1. The trace contains whole percents, which are 0 for a small grid, so `occupancy` recomputes them.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchd.daemon.profiling.trace.trace import LaunchConfiguration, Trace, TracedGpu, column, places
from benchd.kernels.occupancy import ARCHITECTURES, WARP_THREADS, theoretical

# the shapes of matrix instructions as they appear in libraries' kernel names, and families that always use them
_TENSOR_CORES = re.compile(
    r"[hisdc](?:884|8816|8832|1688|16816|16832|16864)(?!\d)|[hiqg]mma|xmma|tensorop|nvjet|flash_(?:fwd|bwd)",
    re.IGNORECASE,
)
_NO_TENSOR_CORES = re.compile(r"ffma|simt", re.IGNORECASE)


@dataclass(frozen=True)
class LaunchOccupancy:
    """The occupancies of one launch, unrounded.

    `limits` lists what limits `estimated`: resources of the SM, or "grid" if it has too few blocks.
    """

    theoretical: float
    estimated: float
    limits: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class GpuMetrics:
    """One GPU over all steps, to the end of their last kernel; a figure is None if a kernel lacks the necessary data.

    `utilization` is the share of time with a kernel running; `sm_efficiency` the mean share of SMs that had a block,
    assuming that blocks spread evenly. `estimated_occupancy` is the mean over kernel time, without idle time, with
    concurrent kernels counted separately, and without the `without_occupancy` kernels. `tensor_core_share_by_name` is a
    share of kernel time and only as reliable as the names: Triton's reveal nothing. `long_waits_share` is the part of
    the time between a step's kernels that is spent in the longest tenth of those waits: near 0.1 if the host is equally
    late for each kernel.
    """

    kernels: int
    without_occupancy: int
    utilization: float
    sm_efficiency: float | None
    estimated_occupancy: float | None
    tensor_core_share_by_name: float | None
    long_waits_share: float | None


def occupancy(launch: LaunchConfiguration, device: TracedGpu) -> LaunchOccupancy | None:
    """Return the occupancies of a launch on a device; None if the trace's calculator failed or facts are missing."""
    sms, sm_threads = device.num_sms, device.max_threads_per_multiprocessor
    if launch.estimated_occupancy_percent is None or not (launch.grid and launch.block and sms and sm_threads):
        return None
    threads, launched = math.prod(launch.block), math.prod(launch.grid) / sms
    fitting = _fitting(launch, device, threads)
    if fitting is None:
        return None
    blocks, limits = fitting
    warps = -(-threads // WARP_THREADS)
    return LaunchOccupancy(
        theoretical=blocks * warps * WARP_THREADS / sm_threads,
        estimated=min(blocks, launched) * threads / sm_threads,
        limits=("grid",) if launched < blocks else limits,
    )


def _fitting(launch: LaunchConfiguration, device: TracedGpu, threads: int) -> tuple[int, tuple[str, ...]] | None:
    """Return how many blocks fit on an SM and what limits them, from the trace or from the device's limits.

    The trace's calculator assumes that a block has at most 48 KiB of shared memory. For a kernel with more, it reports
    that no block fits, although the kernel ran.
    """
    if launch.active_blocks_per_sm:
        return launch.active_blocks_per_sm, launch.limits
    architecture = ARCHITECTURES.get(10 * (device.compute_major or 0) + (device.compute_minor or 0))
    if architecture is None or launch.registers is None or launch.shared_bytes is None:
        return None
    occupancy = theoretical(architecture, launch.registers, launch.shared_bytes, threads)
    return (occupancy.blocks, occupancy.limits) if occupancy.blocks else None


def traced_occupancy(launch: LaunchConfiguration) -> float | None:
    """Return the estimated occupancy in the trace, rounded to percent; None if its calculator failed."""
    percent = launch.estimated_occupancy_percent
    return None if percent is None or launch.active_blocks_per_sm == 0 else percent / 100


def uses_tensor_cores_by_name(kernel: str) -> bool:
    """Return whether a kernel's name shows that it uses tensor cores."""
    return bool(_TENSOR_CORES.search(kernel)) and not _NO_TENSOR_CORES.search(kernel)


def by_device(trace: Trace) -> dict[int, GpuMetrics]:
    """Return the metrics of each GPU that ran a kernel, by its id; raise ValueError for a window without length."""
    on = column(trace.kernels, "device")
    return {number: _of_device(trace, on == number, trace.device(number)) for number in np.unique(on).tolist()}


def _of_device(trace: Trace, chosen: NDArray[np.bool_], device: TracedGpu) -> GpuMetrics:
    steps = trace.steps
    start = column(trace.kernels, "start_ns")[chosen]
    end = start + column(trace.kernels, "duration_ns")[chosen]
    start_ns = min(step.start_ns for step in steps) if steps else int(start.min())
    end_ns = max([int(end.max())] + [step.end_ns for step in steps])
    if end_ns <= start_ns:
        raise ValueError(f"a window from {start_ns} to {end_ns} ns has no length")
    inside = (end > start_ns) & (start < end_ns)
    start, end = np.maximum(start[inside], start_ns), end[inside]
    blocks_per_sm, occupancies, tensor_cores = (values[inside] for values in _of_launches(trace, chosen, device))
    duration, known = end - start, ~np.isnan(occupancies)
    warp_time = float((occupancies * duration)[known].sum()) if known.any() or not len(known) else math.nan
    busy, loaded = _busy_and_loaded(start, end, blocks_per_sm)
    return GpuMetrics(
        kernels=len(duration),
        without_occupancy=int((~known).sum()),
        utilization=busy / (end_ns - start_ns),
        sm_efficiency=_share(loaded, end_ns - start_ns),
        estimated_occupancy=_share(warp_time, int(duration[known].sum())),
        tensor_core_share_by_name=_share(int(duration[tensor_cores > 0].sum()), int(duration.sum())),
        long_waits_share=_long_waits_share(start, end, [step.start_ns for step in steps]),
    )


def _of_launches(trace: Trace, chosen: NDArray[np.bool_], device: TracedGpu) -> list[NDArray[np.float64]]:
    """Return blocks per SM, occupancy and tensor core use by name for each chosen kernel; NaN if missing.

    If any occupancy cannot be recomputed, the whole percents in the trace are used for all.
    """
    place, listed = places(trace.kernels, "launch")
    used, place = np.unique(place[chosen], return_inverse=True)
    launches: list[LaunchConfiguration] = [listed[at] for at in used]
    computed = [occupancy(launch, device) for launch in launches]
    occupancies = [traced_occupancy(launch) for launch in launches]
    if all(recomputed or known is None for recomputed, known in zip(computed, occupancies, strict=True)):
        occupancies = [recomputed.estimated if recomputed else None for recomputed in computed]
    columns: tuple[Sequence[float | None], ...] = (
        [launch.blocks_per_sm for launch in launches],
        occupancies,
        [uses_tensor_cores_by_name(launch.name) for launch in launches],
    )
    return [
        np.array([math.nan if value is None else value for value in column], np.float64)[place] for column in columns
    ]


def _share(part: float, whole: int) -> float | None:
    return part / whole if whole and not math.isnan(part) else None


def _long_waits_share(start: NDArray[np.int64], end: NDArray[np.int64], step_starts_ns: Sequence[int]) -> float | None:
    """Return which share of the time between kernels is spent in the longest tenth of the waits; None without waits.

    The wait for a step's first kernel counts from the start of the step, before which benchd waits for the GPU.
    """
    order = np.argsort(start, kind="stable")
    begun, ended = np.maximum.accumulate(end[order])[:-1], start[order][1:]
    starts = np.concatenate([begun[:1], np.sort(np.array(step_starts_ns, np.int64))])
    begun = np.maximum(begun, starts[np.searchsorted(starts[1:], ended, "right")])
    waits = np.sort((ended - begun)[ended > begun])
    return _share(int(waits[-max(1, len(waits) // 10) :].sum()), int(waits.sum()))


def _busy_and_loaded(
    start: NDArray[np.int64], end: NDArray[np.int64], blocks_per_sm: NDArray[np.float64]
) -> tuple[int, float]:
    """Return the nanoseconds with a kernel running, and their sum weighted by the blocks per SM, at most one."""
    edges = np.concatenate([start, end])
    order = np.argsort(edges, kind="stable")
    between = np.diff(edges[order])
    ones = np.ones(len(start), np.int8)
    running = np.cumsum(np.concatenate([ones, -ones])[order], dtype=np.int32)[:-1] > 0
    load = np.cumsum(np.concatenate([blocks_per_sm, -blocks_per_sm])[order])[:-1]
    return int(between[running].sum()), float((np.clip(load, 0, 1) * between)[running].sum())
