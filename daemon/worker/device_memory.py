"""Finds the GPU memory of this process as counted by the driver, whatever allocated it, or why it is unknown."""

import os
import re
from pathlib import Path
from typing import NamedTuple

from benchd.daemon.errors import NotAvailable
from benchd.daemon.machine.gpu import open_nvml
from benchd.daemon.machine.sysfs import text
from benchd.exporters.tegra import is_tegra

CLIENTS = "sys/kernel/debug/nvmap/iovmm/clients"  # columns CLIENT PROCESS PID SIZE; only root can read it


class DeviceMemory(NamedTuple):
    """Bytes on the GPU: those of this process with its CUDA context, None if the driver omits it, and the total."""

    own: int | None
    of_all: int | None = None


def held(uuid: str | None, root: Path = Path("/")) -> DeviceMemory | str:
    """Return the memory in use on the GPU with this UUID, or why it is unknown.

    Free memory is no substitute, because neighbours and, on a Tegra, the page cache change it.
    """
    # only from an Orin's driver; a Thor has the same driver as other GPUs, which NVML reads
    nvmap = re.search(r"^NvMapMemUsed:\s*(\d+) kB", text(root / "proc/meminfo") or "", re.MULTILINE)
    if nvmap and is_tegra(root):
        return DeviceMemory(_of_nvmap(root / CLIENTS), int(nvmap[1]) * 1024)
    return _of_nvml(uuid)


def taken(before: DeviceMemory | str, after: DeviceMemory | str, build_s: float | None) -> tuple[int, bool] | str:
    """Return the growth between two results of `held` and whether it includes all processes, or why it is unknown."""
    if build_s is not None:
        return (
            "this process also built the engine, which took memory; a later process, which only loads the engine, "
            "reports its own memory"
        )
    if isinstance(after, str):
        return after
    if isinstance(before, str):
        return before
    if after.own is not None:
        return after.own - (before.own or 0), False  # before its first allocation, the process is not listed
    if after.of_all is None or before.of_all is None:
        return "NVML does not report this process's memory, for example in a container with its own process ids"
    grown = after.of_all - before.of_all
    return (
        (grown, True)
        if grown >= 0
        else "other processes freed more GPU memory at the same time; only root can see which process owns it"
    )


def _of_nvmap(clients: Path) -> int | None:
    match = re.search(rf"^\s*\S+\s+.*\s{os.getpid()}\s+(\d+)K", text(clients) or "", re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _of_nvml(uuid: str | None) -> DeviceMemory | str:
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
    return DeviceMemory(next((process.usedGpuMemory for process in processes if process.pid == os.getpid()), None))
