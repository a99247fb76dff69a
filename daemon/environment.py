"""The machine and the software under a measurement, read from /proc, /sys, /etc and two vendor tools; no torch."""

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from benchd.daemon.identity import is_placeholder
from benchd.daemon.records import Environment
from benchd.daemon.sysfs import number, text

DISTRIBUTIONS = (
    "benchd",
    "torch",
    "torchvision",
    "numpy",
    "triton",
    "onnx",
    "onnxruntime",
    "onnxruntime-gpu",
    "tensorrt",
    "msgspec",
)
TOOL_TIMEOUT_S = 10.0
_ALLOCATOR = re.compile(r"MALLOC_.+|PYTORCH_.*ALLOC.*")

# CPU implementer and part of the main id register, as Arm publishes them in the cores' reference manuals.
_ARM_CORES = {
    (0x41, 0xD03): "Cortex-A53",
    (0x41, 0xD05): "Cortex-A55",
    (0x41, 0xD07): "Cortex-A57",
    (0x41, 0xD08): "Cortex-A72",
    (0x41, 0xD09): "Cortex-A73",
    (0x41, 0xD0B): "Cortex-A76",
    (0x41, 0xD0C): "Neoverse-N1",
    (0x41, 0xD40): "Neoverse-V1",
    (0x41, 0xD42): "Cortex-A78AE",
    (0x41, 0xD49): "Neoverse-N2",
    (0x41, 0xD4F): "Neoverse-V2",
    (0x41, 0xD83): "Neoverse-V3AE",
    (0x4E, 0x003): "Denver 2",
    (0x4E, 0x004): "Carmel",
}


def describe(
    device: str, threads: int | None, root: Path = Path("/"), allocator: Mapping[str, str] | None = None
) -> Environment:
    """Return the environment of a measurement on `device` (cpu or cuda) with `threads` CPU threads.

    `root` is where /proc, /sys and /etc are looked up, and `allocator` holds the settings that the worker will have;
    those that it inherits from this process are added. What cannot be found out is None.
    """
    policies = _policies(root)
    gpu, driver = _gpu(root)
    environment = Environment(
        fingerprint="",
        machine=text(root / "proc/sys/kernel/arch") or os.uname().machine,
        os=_os_name(root),
        kernel=text(root / "proc/sys/kernel/osrelease") or os.uname().release,
        board=_board(root),
        soc=_soc(root),
        cpu_model=_cpu_model(root),
        cpu_count=len(os.sched_getaffinity(0)),
        cpu_governor=_joined(text(policy / "scaling_governor") for policy in policies),
        cpu_max_hz=_max_hz(policies),
        memory_bytes=_memory_bytes(root),
        device=device,
        gpu=gpu,
        driver=driver,
        power_mode=_power_mode(root),
        clocks_locked=_clocks_locked(device, root, policies),
        threads=threads,
        allocator=_allocator(os.environ) | dict(allocator or {}),
        versions=_versions(),
    )
    return msgspec.structs.replace(environment, fingerprint=fingerprint(environment))


def fingerprint(environment: Environment) -> str:
    """Return 16 hex digits that two environments share if their measurements may be compared.

    Everything counts but the version of benchd itself, which each record names and which a baseline is there to
    compare; memory below a whole GiB, because firmware and kernel keep a different part of it for themselves at each
    boot; and for the device cpu the GPU and its driver.
    """
    facts = msgspec.structs.asdict(environment)
    del facts["fingerprint"]
    facts["memory_bytes"] = -(-environment.memory_bytes // 2**30)
    facts["versions"] = {name: value for name, value in environment.versions.items() if name != "benchd"}
    if environment.device == "cpu":
        del facts["gpu"], facts["driver"]
    return hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()[:16]


def _joined(values: Iterator[str | None]) -> str | None:
    """Return the different values, in order, or None for none."""
    return ", ".join(dict.fromkeys(value for value in values if value)) or None


def _os_name(root: Path) -> str:
    for file in (root / "etc/os-release", root / "usr/lib/os-release"):
        found = re.search(r"^PRETTY_NAME=[\"']?(.*?)[\"']?$", text(file) or "", re.MULTILINE)
        if found:
            return found[1]
    return os.uname().sysname


def _board(root: Path) -> str | None:
    """Return the device tree's model or what DMI says, as `vendor product`."""
    model = text(root / "proc/device-tree/model")
    if model:
        return model
    dmi = root / "sys/class/dmi/id"
    for vendor, name in (("sys_vendor", "product_name"), ("board_vendor", "board_name")):
        product = text(dmi / name)
        if product and not _unnamed(product):
            maker = text(dmi / vendor)
            return product if not maker or _unnamed(maker) else f"{maker} {product}"
    return None


def _unnamed(value: str) -> bool:
    return is_placeholder(value) or value in ("System Product Name", "System manufacturer")


def _soc(root: Path) -> str | None:
    """Return the last and most general entry of the device tree's `compatible`, without its vendor."""
    compatible = text(root / "proc/device-tree/compatible")
    return compatible.split("\0")[-1].rpartition(",")[2] if compatible else None


def _cpu_model(root: Path) -> str:
    """Return the model name; on ARM the kinds of cores, by name or by the ids of those not known here."""
    cpuinfo = text(root / "proc/cpuinfo") or ""
    named = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    if named and "CPU implementer" not in cpuinfo:
        return " ".join(named[1].split())
    ids = re.findall(
        r"^CPU implementer\s*:\s*(0x[0-9a-f]+)$.*?^CPU part\s*:\s*(0x[0-9a-f]+)$", cpuinfo, re.MULTILINE | re.DOTALL
    )
    return _joined(_arm_core(implementer, part) for implementer, part in ids) or "unknown"


def _arm_core(implementer: str, part: str) -> str:
    return _ARM_CORES.get((int(implementer, 16), int(part, 16)), f"ARM implementer {implementer} part {part}")


def _policies(root: Path) -> list[Path]:
    return sorted((root / "sys/devices/system/cpu/cpufreq").glob("policy*"))


def _max_hz(policies: list[Path]) -> float | None:
    """Return the highest clock that any CPU is allowed now: a power mode may lower it."""
    return max(
        (kilohertz * 1e3 for policy in policies if (kilohertz := number(policy / "scaling_max_freq"))), default=None
    )


def _memory_bytes(root: Path) -> int:
    found = re.search(r"^MemTotal:\s*(\d+) kB", text(root / "proc/meminfo") or "", re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _gpu(root: Path) -> tuple[str | None, str | None]:
    """Return the name of the first NVIDIA GPU and the driver; on a Tegra its SoC and the L4T release."""
    release = re.match(r"# (R\d+) \(release\), REVISION: ([\d.]+)", text(root / "etc/nv_tegra_release") or "")
    if release:
        return f"{_soc(root) or 'tegra'} integrated GPU", f"L4T {release[1]}.{release[2]}"
    query = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    name, comma, driver = (query or "").partition("\n")[0].partition(",")
    return (name.strip(), driver.strip()) if comma else (None, None)


def _output(*command: str) -> str | None:
    """Return what a tool prints, None where it is absent, fails or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout


def _power_mode(root: Path) -> str | None:
    found = re.search(r"^NV Power Mode: *(.+)$", _output("nvpmodel", "-q") or "", re.MULTILINE)
    return found[1].strip() if found else text(root / "sys/firmware/acpi/platform_profile")


def _clocks_locked(device: str, root: Path, policies: list[Path]) -> bool | None:
    """Say whether the clocks the device depends on are held; None where that cannot be known, as of a desktop GPU."""
    cpu = all(_held(policy) for policy in policies) if policies else None
    if device == "cpu":
        return cpu
    gpus = _tegra_gpus(root)
    if not gpus or cpu is None:
        return None
    return cpu and all(_same(gpu / "min_freq", gpu / "max_freq") for gpu in gpus)


def _held(policy: Path) -> bool:
    fixed = _same(policy / "scaling_min_freq", policy / "scaling_max_freq")
    return fixed and text(policy / "scaling_governor") == "performance"


def _same(low: Path, high: Path) -> bool:
    return number(low) is not None and number(low) == number(high)


def _tegra_gpus(root: Path) -> list[Path]:
    """Return the devfreq nodes of the integrated GPU, whose name changed from one L4T release to the next."""
    nodes = sorted((root / "sys/class/devfreq").glob("*"))
    return [node for node in nodes if node.name.rpartition(".")[2] in ("ga10b", "gv11b", "gpu")]


def _allocator(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: variables[name] for name in sorted(variables) if _ALLOCATOR.fullmatch(name)}


def _versions() -> dict[str, str]:
    found = {name: _version(name) for name in DISTRIBUTIONS}
    python = ".".join(map(str, sys.version_info[:3]))
    return {"python": python} | {name: installed for name, installed in found.items() if installed}


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
