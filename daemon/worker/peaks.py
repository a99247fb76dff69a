"""The peak memory of the timed section: that of this process, and its allocations on the GPU."""

import ctypes
from contextlib import suppress
from pathlib import Path

import torch

from benchd.daemon.measuring.protocol import Job, Outcome
from benchd.daemon.records import Memory
from benchd.daemon.runtimes import RUNTIMES
from benchd.daemon.worker.backends import LoadedModel


def forget(device: torch.device) -> bool:
    """Free the memory of build and check, and reset the peaks; return whether the kernel reset the process's."""
    ctypes.CDLL(None).malloc_trim(0)
    if device.type == "cuda":
        with suppress(RuntimeError):  # torch up to 2.12 assumes that a failed capture is still in progress
            torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def resident() -> int:
    """Return the peak of resident bytes since `forget`, or since the start if the kernel cannot reset it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def take(job: Job, loaded: LoadedModel, outcome: Outcome) -> None:
    """Store the peaks in the outcome, or the reason why the GPU's is missing."""
    peak, most = _device_peak(job, loaded), resident()
    if isinstance(peak, str):
        outcome.missing["memory.device_peak_bytes"] = peak
    outcome.process.memory = Memory(
        rss_peak_bytes=most,
        worker_peak_bytes=most,
        device_peak_bytes=None if isinstance(peak, str) else peak,
    )


def _device_peak(job: Job, loaded: LoadedModel) -> int | str | None:
    """Return this process's GPU memory as counted by torch or, for other runtimes, the driver, or why it is unknown."""
    if job.device != "cuda":
        return None
    if counted_by_driver(job):
        return loaded.taken
    if job.case.variant.backend == "cudagraph":  # a graph's memory is allocated during the capture
        return torch.cuda.max_memory_reserved()
    return torch.cuda.max_memory_allocated()


def counted_by_driver(job: Job) -> bool:
    """Return whether the case's GPU memory is allocated by a runtime other than torch."""
    return job.device == "cuda" and RUNTIMES[job.case.variant.backend].allocates
