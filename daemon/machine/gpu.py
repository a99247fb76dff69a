"""The NVIDIA GPU that a worker uses, as a full UUID: from NVML and CUDA's environment variables, without torch."""

import importlib
import os
import re
from collections.abc import Sequence
from types import ModuleType

from benchd.daemon.errors import NotAvailable, UsageError

NO_MIG = "NVML measures whole GPUs, not MIG instances; disable MIG (`sudo nvidia-smi -mig 0`)"
_DEVICE = re.compile(r"cuda(?::(\d+))?|(?:GPU|MIG)-[0-9a-f/-]+")
# remedies by NVML's error code
_REMEDIES = {
    4: "let this user open /dev/nvidiactl and /dev/nvidia0",
    9: "load the driver with `sudo modprobe nvidia`, or install it",
    12: "install the NVIDIA driver, which includes libnvidia-ml.so.1 (not on a Jetson)",
    13: "the driver is too old; install a newer one",
    18: "the driver was updated while in use; reboot",
}


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
    """Return the full UUID of a device, counted in PCI bus order among the GPUs in CUDA_VISIBLE_DEVICES.

    Raises NotAvailable if the GPU or NVML is missing, and UsageError if `check` rejects the device.
    """
    check(device)
    nvml = open_nvml()
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        uuids = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
    except nvml.NVMLError as error:
        raise NotAvailable(f"NVML does not list the GPUs: {error}") from error
    finally:
        nvml.nvmlShutdown()
    return choose(uuids, device, os.environ.get("CUDA_VISIBLE_DEVICES"))


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


def choose(uuids: Sequence[str], device: str, listed: str | None) -> str:
    """Return the UUID of `device` among those of all GPUs, of which CUDA_VISIBLE_DEVICES contains those `listed`.

    A worker gets the UUID, so that it runs on the GPU whose sensors are read. Raises NotAvailable for none or several
    such GPUs and for MIG instances.
    """
    if device.startswith("cuda"):
        visible = [str(number) for number in range(len(uuids))] if listed is None else listed.split(",")
        index = int(device.partition(":")[2] or 0)
        if index >= len(visible):
            raise NotAvailable(
                f"there is no cuda:{index}: CUDA_VISIBLE_DEVICES={listed!r}, and NVML has {len(uuids)} GPUs"
            )
        device = visible[index].strip()
    if device.startswith("MIG-"):
        raise NotAvailable(f"{device}: {NO_MIG}")
    is_uuid = device.startswith("GPU-")
    matches = [uuid for n, uuid in enumerate(uuids) if (uuid.startswith(device) if is_uuid else device == str(n))]
    if len(matches) != 1:
        raise NotAvailable(f"{len(matches)} GPUs match {device!r}; found: {', '.join(uuids) or 'none'}")
    return matches[0]


def mismatch(sampled: str, ran_on: str) -> str | None:
    """Return why readings of the GPU `sampled` do not apply to a case on a different GPU; None if it is the same.

    torch reports UUIDs without `GPU-`.
    """
    if sampled.removeprefix("GPU-") == ran_on.removeprefix("GPU-"):
        return None
    return f"the sensors read GPU {sampled}, but the case ran on {ran_on}; give --device GPU-<uuid>"
