"""Measures how well a case fills the GPU, in runs after the timed ones: hardware counters, then a short trace."""

import tempfile
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchd.daemon.errors import UsageError
from benchd.daemon.profiling.occupancy import of_trace
from benchd.daemon.profiling.trace import trace
from benchd.daemon.records import Occupancy
from benchd.daemon.sampling.sources.nvml import Gpm
from benchd.daemon.worker.steps import Step

TRACED_RUNS = 3
COUNTED_S = 1.0


def measure(step: Step, uuid: str | None) -> Occupancy | str:
    """Return the three occupancies of a case on CUDA, or why there is none."""
    # counted before the trace, because the profiler stays attached and slows all later launches
    counted, reason = _counted(step, uuid)
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
    return of_trace(traced, counted, reason)


def _counted(step: Step, uuid: str | None) -> tuple[float | None, str]:
    """Return the share of warps, as counted by the hardware over about a second of runs, or why there is none.

    The gaps between the runs count.
    """
    if uuid is None:
        return None, "the GPU's UUID is unknown"
    counters = Gpm(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    reason = counters.unavailable()
    if reason:
        return None, reason
    until, run = time.monotonic() + COUNTED_S, 0
    with torch.inference_mode():
        while time.monotonic() < until:
            step(run)
            run += 1
    try:
        for sample in counters.sample():
            if sample.metric == "gpm_sm_occupancy_percent":
                return sample.value / 100, ""
    except OSError as error:
        return None, str(error)
    return None, "GPM reported no occupancy"
