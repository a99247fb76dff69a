"""How well a case fills the GPU, in passes of their own after the timed one: a short trace, then hardware counters."""

import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchd.daemon.errors import UsageError
from benchd.daemon.profiling import gpu_metrics, trace
from benchd.daemon.profiling.trace import Trace
from benchd.daemon.records import Occupancy
from benchd.daemon.samplers.nvml import Gpm
from benchd.daemon.worker.steps import Step

TRACED_RUNS = 3
COUNTED_S = 1.0


def measure(step: Step, uuid: str | None) -> Occupancy | str:
    """Return the three occupancies of a case on CUDA, or why there is none."""
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        path = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for run in range(TRACED_RUNS):
                step(run)
        profiler.export_chrome_trace(str(path))
        try:
            traced = trace.read(path)
        except UsageError as error:
            return str(error)
    counted, reason = _counted(step, uuid)
    return of_trace(traced, counted, reason)


def of_trace(traced: Trace, counted: float | None, reason: str) -> Occupancy | str:
    """Return what the trace says, with what the hardware counted as a share of the warps that fit, or why it did not.

    The device is that of the first kernel; each figure is a mean over kernel time.
    """
    missing = traced.missing_kernels()
    if missing:
        return missing
    number = traced.kernels[0].device
    kernels = [kernel for kernel in traced.kernels if kernel.device == number]
    device = next((each for each in traced.devices if each.id == number), None)
    metrics = gpu_metrics.by_device(traced)[number]
    found = [(kernel, gpu_metrics.occupancy(kernel.launch, device)) for kernel in kernels] if device else []
    known = [(kernel.duration_ns, each) for kernel, each in found if each]
    total_ns = sum(duration_ns for duration_ns, _ in known)
    limits: Counter[str] = Counter()
    for duration_ns, each in known:
        limits["+".join(each.limits)] += duration_ns
    return Occupancy(
        theoretical=sum(duration_ns * each.theoretical for duration_ns, each in known) / total_ns if known else None,
        estimated=metrics.total.estimated_occupancy,
        measured=counted,
        measured_missing=reason,
        limits={limit: duration_ns / total_ns for limit, duration_ns in limits.most_common()},
        utilization=metrics.total.utilization,
        sm_efficiency=metrics.total.sm_efficiency,
        kernels=metrics.total.kernels,
        without_occupancy=metrics.total.without_occupancy,
    )


def _counted(step: Step, uuid: str | None) -> tuple[float | None, str]:
    """Return the share of warps that the hardware counted over about a second of runs, or why it counts none."""
    if uuid is None:
        return None, "the GPU's UUID is not known"
    counters = Gpm(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    reason = counters.unavailable()
    if reason:
        return None, reason
    until, run = time.monotonic() + COUNTED_S, 0
    with torch.inference_mode():
        while time.monotonic() < until:
            step(run)
            run += 1
    percents = [s.value for s in counters.sample() if s.metric == "gpm_sm_occupancy_percent"]
    return (percents[0] / 100, "") if percents else (None, "GPM gave no occupancy")
