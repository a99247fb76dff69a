"""The NVIDIA GPU that a worker uses, as a full UUID: from NVML and CUDA's environment variables, without torch."""

import importlib
import os
import re
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import NamedTuple

from benchd.daemon.errors import NotAvailable, UsageError

NO_MIG = "NVML measures whole GPUs, not MIG instances; disable MIG (`sudo nvidia-smi -mig 0`)"
_DEVICE = re.compile(r"cuda(?::(\d+))?|(?:GPU|MIG)-[0-9a-f/-]+")
_INDEX = re.compile(r"\s*\d+")
# remedies by NVML's error code
_REMEDIES = {
    4: "let this user open /dev/nvidiactl and /dev/nvidia0",
    9: "load the driver with `sudo modprobe nvidia`, or install it",
    12: "install the NVIDIA driver, which includes libnvidia-ml.so.1 (not on a Jetson)",
    13: "the driver is too old; install a newer one",
    18: "the driver was updated while in use; reboot",
}


class Gpu(NamedTuple):
    """A GPU as NVML lists it, in PCI bus order."""

    uuid: str
    name: str


def open_nvml() -> ModuleType:
    """Return pynvml with NVML initialised; raise NotAvailable with what to install or do."""
    try:
        nvml = importlib.import_module("pynvml")
    except ModuleNotFoundError as error:
        raise NotAvailable("nvidia-ml-py is not installed; `pip install nvidia-ml-py`") from error
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        remedy = _REMEDIES.get(error.value, "check whether `nvidia-smi` works")
        raise NotAvailable(f"NVML failed to initialise ({error}); {remedy}") from error
    return nvml


def check(device: str) -> str:
    """Return `device`; raise UsageError unless it is `cuda`, `cuda:N` or the UUID of a GPU."""
    if not _DEVICE.fullmatch(device):
        raise UsageError(f"{device!r} is not a GPU; give cuda, cuda:N or a UUID from `nvidia-smi -L`, GPU-...")
    return device


def cuda_uuid(device: str) -> str:
    """Return the full UUID of a device as CUDA would number it in this environment.

    Raises NotAvailable if the GPU or NVML is missing, and UsageError if `check` rejects the device.
    """
    check(device)
    nvml = open_nvml()
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        gpus = [Gpu(nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)) for handle in handles]
    except nvml.NVMLError as error:
        raise NotAvailable(f"NVML does not list the GPUs: {error}") from error
    finally:
        nvml.nvmlShutdown()
    return choose(gpus, device, os.environ)


def utilization_percent(uuid: str) -> float:
    """Return the share of NVML's last sampling period in which this GPU ran a kernel; raise NotAvailable."""
    nvml = open_nvml()
    try:
        return float(nvml.nvmlDeviceGetUtilizationRates(nvml.nvmlDeviceGetHandleByUUID(uuid)).gpu)
    except nvml.NVMLError as error:
        raise NotAvailable(f"NVML does not report the load of {uuid}: {error}") from error
    finally:
        nvml.nvmlShutdown()


def measured(device: str) -> str | None:
    """Return the UUID of the GPU `device`; None if NVML does not know it and no particular GPU was requested.

    It is also None on a Tegra, whose GPU NVML does not list, or lists without the `GPU-` that CUDA_VISIBLE_DEVICES
    expects. Raises the errors of `cuda_uuid` for `cuda:N` or a UUID.
    """
    try:
        uuid = cuda_uuid("cuda" if device == "auto" else device)
    except NotAvailable:
        if device in ("auto", "cuda"):
            return None
        raise
    return uuid if uuid.startswith("GPU-") else None


def choose(gpus: Sequence[Gpu], device: str, environ: Mapping[str, str]) -> str:
    """Return the UUID of `device` among `gpus`; raise the errors of `cuda_uuid`."""
    if device.startswith("MIG-"):
        raise NotAvailable(f"{device}: {NO_MIG}")
    if device.startswith("GPU-"):
        return _unique(gpus, device)
    gpus_visible = visible(gpus, environ)
    index = int(device.partition(":")[2] or 0)
    if index >= len(gpus_visible):
        raise NotAvailable(
            f"there is no cuda:{index}: CUDA_VISIBLE_DEVICES={environ.get('CUDA_VISIBLE_DEVICES')!r} leaves "
            f"{len(gpus_visible)} of {len(gpus)} GPUs"
        )
    return gpus_visible[index].uuid


def visible(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs that CUDA would show under `CUDA_VISIBLE_DEVICES` and `CUDA_DEVICE_ORDER`, in its order.

    As in CUDA, the list ends at the first entry that is not a GPU or mixes indices with UUIDs, and is empty if a GPU is
    listed twice (CUDA programming guide, environment variables). Raises NotAvailable for MIG instances, and for indices
    with different GPU models unless they are ordered by bus.
    """
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return _counted(gpus, environ)
    if listed.startswith("MIG-"):
        raise NotAvailable(f"CUDA_VISIBLE_DEVICES={listed}: {NO_MIG}")
    gpus_visible = _by_uuid(gpus, listed) if listed.startswith("GPU-") else _by_index(gpus, listed, environ)
    return gpus_visible if len(set(gpus_visible)) == len(gpus_visible) else []


def _by_uuid(gpus: Sequence[Gpu], listed: str) -> list[Gpu]:
    chosen = []
    for start in listed.split(","):
        matches = [gpu for gpu in gpus if start.startswith("GPU-") and gpu.uuid.startswith(start.strip())]
        if len(matches) != 1:
            break
        chosen += matches
    return chosen


def _by_index(gpus: Sequence[Gpu], listed: str, environ: Mapping[str, str]) -> list[Gpu]:
    chosen = []
    for entry in listed.split(","):
        index = _INDEX.match(entry)
        if not index or int(index[0]) >= len(gpus):
            break
        chosen.append(_counted(gpus, environ)[int(index[0])])
    return chosen


def _counted(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs in CUDA's order; which of several models counts as fastest is only known to CUDA."""
    if environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and len({gpu.name for gpu in gpus}) > 1:
        raise NotAvailable("CUDA numbers different GPUs by speed; set CUDA_DEVICE_ORDER=PCI_BUS_ID")
    return list(gpus)


def _unique(gpus: Sequence[Gpu], start: str) -> str:
    matches = [gpu.uuid for gpu in gpus if gpu.uuid.startswith(start)]
    if len(matches) != 1:
        available = ", ".join(gpu.uuid for gpu in gpus) or "none"
        raise NotAvailable(f"{len(matches)} GPUs match {start}...; found: {available}")
    return matches[0]


def mismatch(sampled: str, ran_on: str) -> str | None:
    """Return why readings of the GPU `sampled` do not apply to a case on a different GPU; None if it is the same.

    torch reports UUIDs without `GPU-`.
    """
    if sampled.removeprefix("GPU-") == ran_on.removeprefix("GPU-"):
        return None
    return f"the sensors read GPU {sampled}, but the case ran on {ran_on}; give --device GPU-<uuid>"
