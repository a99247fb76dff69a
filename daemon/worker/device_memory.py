"""The GPU memory that this process holds, whoever allocated it: as the driver counts it, or why that is unknown."""

import os
import re
from pathlib import Path

from benchd.daemon.errors import NotAvailable
from benchd.daemon.machine.gpu import open_nvml
from benchd.exporters.tegra import is_tegra

CLIENTS = "sys/kernel/debug/nvmap/iovmm/clients"  # CLIENT PROCESS PID SIZE, for root alone


def own_bytes(uuid: str | None, root: Path = Path("/")) -> int | str:
    """Return the bytes of this process on the GPU of this UUID, its CUDA context included; else why they are unknown.

    Free memory is no substitute: neighbours change it, and on a Tegra the page cache does.
    """
    return _of_nvmap(root / CLIENTS) if is_tegra(root) else _of_nvml(uuid)


def taken(before: int | str, after: int | str, build_s: float | None) -> int | str:
    """Return what was taken between two answers of `own_bytes`, or why it is unknown."""
    if build_s is not None:
        return "this process also built the engine, and holds memory of that; a later one tells"
    if isinstance(after, str):
        return after
    return before if isinstance(before, str) else after - before


def _of_nvmap(clients: Path) -> int | str:
    try:
        match = re.search(rf"^\s*\S+\s+.*\s{os.getpid()}\s+(\d+)K", clients.read_text(), re.MULTILINE)
    except OSError as error:
        return f"/{CLIENTS} cannot be read ({error.strerror}); only root may"
    return int(match[1]) * 1024 if match else f"/{CLIENTS} does not list this process"


def _of_nvml(uuid: str | None) -> int | str:
    try:
        nvml = open_nvml()
    except NotAvailable as error:
        return str(error)
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{(uuid or '').removeprefix('GPU-')}")
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError as error:
        return f"NVML does not list the processes of GPU {uuid}: {error}"
    finally:
        nvml.nvmlShutdown()
    own = next((process.usedGpuMemory for process in processes if process.pid == os.getpid()), None)
    return int(own) if own is not None else "NVML does not tell this process's memory, as in a container of its own"
