"""Computes how well a case fills a GPU: the three occupancies of a Record, from a trace and hardware counters."""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from benchd.daemon.profiling.trace import gpu_metrics
from benchd.daemon.profiling.trace.gpu_metrics import LaunchOccupancy
from benchd.daemon.profiling.trace.trace import Trace, TracedGpu, column, places
from benchd.daemon.records import Occupancy


def of_trace(traced: Trace, counted: float | None, reason: str) -> Occupancy | str:
    """Return the trace's and the hardware's occupancies, as shares of the warps that fit, or why there are none.

    They are for the first kernel's device. The trace's values are means over kernel time; the hardware's are over
    elapsed time, including the gaps between launches.
    """
    missing = traced.missing_kernels()
    if missing:
        return missing
    number = traced.kernels[0].device
    metrics = gpu_metrics.by_device(traced)[number]
    known = list(_launched(traced, traced.device(number)))
    total_ns = sum(duration_ns for duration_ns, _ in known)
    limits: Counter[str] = Counter()
    for duration_ns, occupancy in known:
        limits["+".join(occupancy.limits)] += duration_ns
    return Occupancy(
        theoretical=sum(duration_ns * occupancy.theoretical for duration_ns, occupancy in known) / total_ns
        if known
        else None,
        estimated=metrics.estimated_occupancy,
        measured=counted,
        measured_missing=reason,
        limits={limit: duration_ns / total_ns for limit, duration_ns in limits.most_common()},
        utilization=metrics.utilization,
        sm_efficiency=metrics.sm_efficiency,
        kernels=metrics.kernels,
        without_occupancy=metrics.without_occupancy,
    )


def _launched(traced: Trace, device: TracedGpu) -> Iterator[tuple[int, LaunchOccupancy]]:
    """Yield the time and the occupancies of each launch configuration on the device."""
    place, launches = places(traced.kernels, "launch")
    on_device = column(traced.kernels, "device") == device.id
    times_ns = np.bincount(place[on_device], column(traced.kernels, "duration_ns")[on_device], len(launches))
    for launch, duration_ns in zip(launches, times_ns.astype(np.int64).tolist(), strict=True):
        occupancy = gpu_metrics.occupancy(launch, device) if duration_ns else None
        if occupancy:
            yield duration_ns, occupancy
