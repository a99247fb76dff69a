"""The hardware and software environment of a measurement, from /proc, /sys, /etc and two vendor tools; no torch."""

import hashlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from benchd.daemon.machine import cgroup
from benchd.daemon.machine.identity import is_placeholder
from benchd.daemon.machine.sysfs import cpufreq_policies, gpu_nodes, number, text
from benchd.daemon.records import Environment
from benchd.daemon.runtimes import PACKAGES

DISTRIBUTIONS = (
    "benchd",
    "torch",
    "torchvision",
    "numpy",
    "onnx",
    "msgspec",
    *(name for package in PACKAGES.values() for name in package.distributions),
)
# The wheels that contain a library, and the system package that torch uses instead, for example on a Jetson.
LIBRARIES = {
    "cuda": (("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"), r"cuda-cudart-\d+-\d+"),
    "cudnn": (("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"), r"libcudnn\d+(-cuda-\d+)?"),
    "tensorrt": (("tensorrt", "tensorrt-cu13", "tensorrt-cu12"), r"libnvinfer\d+"),
}
CPU_FLAGS = (
    *("avx", "f16c", "fma", "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni"),
    *("amx_tile", "amx_int8", "amx_bf16"),
    *("neon", "asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)
SOURCES = "benchd_sources"
PLAIN = ("fingerprint", "threads", "temperature_c", "cooling", "load", "command", "affinity")
"""The fields of an Environment outside the first part of its fingerprint."""

TOOL_TIMEOUT_S = 10.0  # for nvidia-smi, nvpmodel and systemctl, whose bus may hang
OFF_MILLIDEGREES = -200_000  # a unit that is powered off reads -256 degrees
# LD_LIBRARY_PATH contains only folders; `software` lists the libraries found there.
_VARIABLES = re.compile(
    r"(G?OMP|KMP|MKL|ONEDNN|DNNL|OPENBLAS|ATEN|ORT|OV|OPENVINO|CUDA|CUDNN|CUBLAS|TRITON|MALLOC|TCMALLOC|MIMALLOC|TBB)_\w+|"
    r"(PY)?TORCH\w*|PYTHON(MALLOC|DEVMODE|OPTIMIZE|_GIL|_JIT)|NVIDIA_TF32_OVERRIDE|_RJEM_MALLOC_CONF|(HEAP|CPU)PROFILE|"
    "GLIBC_TUNABLES|LD_PRELOAD|LRU_CACHE_CAPACITY|THP_MEM_ALLOC_ENABLE"
)
_LEFT_OUT = re.compile(
    r"_(DIR|HOME|PATH|ROOT|KEY|PW|PASS|SAS|SIG)$|TOKEN|SECRET|PASSW|PASSPHRASE|PWD|AUTH|BEARER|COOKIE|CREDENTIAL"
)
_OPAQUE = re.compile(r"(?=[\w+-]*[0-9])(?=[\w+-]*[A-Za-z])[\w+-]{20,}")  # matches every key or token, but no setting
_CREDENTIALS = re.compile(r"(?<=//)[^/\s]*@|[?#]\S*")
_FOLDERS = re.compile(r"/?([^/\s:,;=]*/)+")
_PACKAGE = re.compile(r"^Package: (\S+)\nStatus: install ok installed\n(?:.+\n)*?Version: (\S+)$", re.MULTILINE)
_L4T = re.compile(r"# (R\d+) \(release\), REVISION: ([\d.]+)")

# The system settings, each with its file and a pattern whose group is the value ("none" if empty).
_SYSTEM = {
    "microcode": ("proc/cpuinfo", r"^microcode\s*: (.+)$"),
    "hypervisor": ("proc/cpuinfo", r"^flags\s*:.*?(?:\b(hypervisor)\b.*)?$"),
    "online_cpus": ("sys/devices/system/cpu/online", r"(.+)"),
    "smt": ("sys/devices/system/cpu/smt/control", r"(.+)"),
    "no_turbo": ("sys/devices/system/cpu/intel_pstate/no_turbo", r"(.+)"),
    "boost": ("sys/devices/system/cpu/cpufreq/boost", r"(.+)"),
    "huge_pages": ("sys/kernel/mm/transparent_hugepage/enabled", r"\[(.+)\]"),
    "huge_page_defrag": ("sys/kernel/mm/transparent_hugepage/defrag", r"\[(.+)\]"),
    "numa_nodes": ("sys/devices/system/node/online", r"(.+)"),
    "numa_policy": ("proc/self/numa_maps", r"^\S+ (\S+)"),
    "numa_balancing": ("proc/sys/kernel/numa_balancing", r"(.+)"),
}
# The cgroup limits, each with its file in version 2, and the controller and file in version 1.
_LIMITS = {
    "cpuset": ("cpuset.cpus.effective", "cpuset", "cpuset.effective_cpus"),
    "memory_nodes": ("cpuset.mems.effective", "cpuset", "cpuset.effective_mems"),
    "memory_limit": ("memory.max", "memory", "memory.limit_in_bytes"),
    "memory_high": ("memory.high", "memory", "memory.soft_limit_in_bytes"),
}
# settings whose innermost value already includes the limits of enclosing groups
_EFFECTIVE = ("cpuset", "memory_nodes")
_UNLIMITED = ("max", "-1", "9223372036854")

# CPU implementer and part number from the main id register, as published in Arm's core reference manuals.
_ARM_CORES = {
    (0x41, 0xD03): "Cortex-A53",
    (0x41, 0xD04): "Cortex-A35",
    (0x41, 0xD05): "Cortex-A55",
    (0x41, 0xD07): "Cortex-A57",
    (0x41, 0xD08): "Cortex-A72",
    (0x41, 0xD09): "Cortex-A73",
    (0x41, 0xD0A): "Cortex-A75",
    (0x41, 0xD0B): "Cortex-A76",
    (0x41, 0xD0C): "Neoverse-N1",
    (0x41, 0xD0D): "Cortex-A77",
    (0x41, 0xD40): "Neoverse-V1",
    (0x41, 0xD41): "Cortex-A78",
    (0x41, 0xD42): "Cortex-A78AE",
    (0x41, 0xD44): "Cortex-X1",
    (0x41, 0xD46): "Cortex-A510",
    (0x41, 0xD47): "Cortex-A710",
    (0x41, 0xD48): "Cortex-X2",
    (0x41, 0xD49): "Neoverse-N2",
    (0x41, 0xD4D): "Cortex-A715",
    (0x41, 0xD4E): "Cortex-X3",
    (0x41, 0xD4F): "Neoverse-V2",
    (0x41, 0xD80): "Cortex-A520",
    (0x41, 0xD81): "Cortex-A720",
    (0x41, 0xD82): "Cortex-X4",
    (0x41, 0xD83): "Neoverse-V3AE",
    (0x41, 0xD85): "Cortex-X925",
    (0x41, 0xD87): "Cortex-A725",
    (0x4E, 0x003): "Denver 2",
    (0x4E, 0x004): "Carmel",
    (0x51, 0x001): "Oryon",
}


def describe(
    device: str,
    threads: int | None,
    root: Path = Path("/"),
    allocator: Mapping[str, str] | None = None,
    gpu_uuid: str | None = None,
) -> Environment:
    """Return the environment of a measurement on `device` (cpu or cuda) with `threads` CPU threads.

    `root` is the root of /proc, /sys and /etc, and `allocator` the worker's heap settings. `gpu_uuid` is the measured
    GPU; None means the first. Unknown values are None; a worker adds its variables and its software.
    """
    policies, gpus = cpufreq_policies(root), gpu_nodes(root)
    gpu, driver, power_limit_w = _gpu(root, gpu_uuid)
    power_mode = power_mode_of(root)
    zones = _thermal(root, "thermal_zone", "temp", OFF_MILLIDEGREES)
    packages = dict(_PACKAGE.findall(text(root / "var/lib/dpkg/status") or ""))
    environment = Environment(
        fingerprint="",
        machine=_machine(root),
        os=_os_name(root),
        kernel=text(root / "proc/sys/kernel/osrelease") or os.uname().release,
        board=_board(root),
        soc=_soc(root),
        cpu_model=_cpu_model(root),
        cpu_count=len(os.sched_getaffinity(0)),
        cpu_governor=_joined(text(policy / "scaling_governor") for policy in policies),
        # a power mode may lower this limit
        cpu_max_hz=_highest((policy / "scaling_max_freq" for policy in policies), 1e3),
        memory_bytes=_meminfo_bytes(root, "MemTotal"),
        device=device,
        gpu=gpu,
        driver=driver,
        power_mode=power_mode,
        clocks_locked=_clocks_locked(device, gpus, policies),
        threads=threads,
        allocator=dict(allocator or {}),
        versions=_versions(packages),
        cpu_flags=_cpu_flags(root),
        swap_bytes=_meminfo_bytes(root, "SwapTotal"),
        jetpack=packages.get("nvidia-jetpack"),
        l4t=_l4t(root),
        power_limit_w=power_limit_w or _watts(power_mode),
        gpu_governor=_joined(text(gpu / "governor") for gpu in gpus),
        gpu_max_hz=_highest((gpu / "max_freq" for gpu in gpus), 1.0),
        temperature_c={name: millidegrees / 1000 for name, millidegrees in zones.items()},
        cooling=_thermal(root, "cooling_device", "cur_state", 0),  # shows running fans and throttled clocks
        system=_system(root),
        load=float(load) if (load := _found(root / "proc/loadavg", r"^(\S+)")) else None,
        command=shlex.join(map(_without_folders, sys.argv)),
        affinity=_found(root / "proc/self/status", r"^Cpus_allowed_list:\s*(.+)$"),
    )
    return msgspec.structs.replace(environment, fingerprint=fingerprint(environment))


def fingerprint(environment: Environment) -> str:
    """Return 16 hex digits for `comparable`, a dash, and 8 hex digits for the version and sources of benchd."""
    benchd = [environment.versions.get("benchd"), environment.software.get(SOURCES)]
    parts = (comparable(environment), 16), (benchd, 8)
    return "-".join(hashlib.sha256(msgspec.json.encode(part, order="sorted")).hexdigest()[:n] for part, n in parts)


def comparable(environment: Environment) -> dict[str, Any]:
    """Return what must be equal in two environments for their measurements to be comparable.

    This is everything except: benchd itself, which each record lists and whose versions a baseline serves to compare;
    fractions of a GiB of memory and swap, because firmware and kernel reserve a different amount at each boot, and zram
    makes swap a share of memory; the threads, which belong to the case; momentary values (thermal state, load, command
    line, affinity); and, for the device cpu, everything about the GPU.
    """
    facts = {name: value for name, value in msgspec.structs.asdict(environment).items() if name not in PLAIN}
    facts |= {name: -(-facts[name] // 2**30) for name in ("memory_bytes", "swap_bytes")}
    for field, ours in (("versions", "benchd"), ("software", SOURCES)):
        facts[field] = {name: value for name, value in facts[field].items() if name != ours}
    if environment.device == "cpu":
        del facts["gpu"], facts["driver"], facts["gpu_governor"], facts["gpu_max_hz"], facts["power_limit_w"]
    return facts


def _joined(values: Iterator[str | None]) -> str | None:
    """Return the distinct values in order, or None if there are none."""
    return ", ".join(dict.fromkeys(value for value in values if value)) or None


def _os_name(root: Path) -> str:
    for file in (root / "etc/os-release", root / "usr/lib/os-release"):
        match = re.search(r"^PRETTY_NAME=[\"']?(.*?)[\"']?$", text(file) or "", re.MULTILINE)
        if match:
            return match[1]
    return os.uname().sysname


def _board(root: Path) -> str | None:
    """Return the model from the device tree, or `vendor product` from DMI."""
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
    """Return the model name; on ARM the core types by name or, if unknown here, by id."""
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


def _machine(root: Path) -> str:
    """Return the architecture that programs see: an emulator exposes the host's files, but its own uname."""
    arch = None if root == Path("/") else text(root / "proc/sys/kernel/arch")
    return arch or os.uname().machine


def _cpu_flags(root: Path) -> list[str]:
    has = (_found(root / "proc/cpuinfo", r"^(?:flags|Features)\s*:(.*)$") or "").split()
    return [flag for flag in CPU_FLAGS if flag in has]


def _highest(files: Iterable[Path], unit: float) -> float | None:
    return max((value * unit for file in files if (value := number(file))), default=None)


def _meminfo_bytes(root: Path, name: str) -> int:
    return int(_found(root / "proc/meminfo", rf"^{name}:\s*(\d+) kB") or 0) * 1024


def _l4t(root: Path) -> str | None:
    release = _L4T.match(text(root / "etc/nv_tegra_release") or "")
    return f"{release[1]}.{release[2]}" if release else None


def _gpu(root: Path, uuid: str | None) -> tuple[str | None, str | None, float | None]:
    """Return an NVIDIA GPU, its driver and its power limit in watts; on a Tegra its SoC and the L4T release, if known.

    On a Tegra, nvidia-smi gives the GPU a different name in each release, if it works at all.
    """
    soc, release = _soc(root) or _found(root / "proc/sys/kernel/osrelease", "(tegra)") or "", _l4t(root)
    if soc.startswith("tegra"):
        return f"{soc} integrated GPU", release and f"L4T {release}", None
    chosen = [f"--id={uuid}"] if uuid else []  # unlike CUDA, nvidia-smi ignores CUDA_VISIBLE_DEVICES
    query = tool_output("nvidia-smi", *chosen, "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader")
    fields = [field.strip() for field in (query or "").partition("\n")[0].split(",")]
    return (fields[0], fields[1], _watts(fields[2])) if len(fields) == 3 else (None, None, None)


def _watts(name: str | None) -> float | None:
    """Return the watts in `450.00 W` or in the name of a power mode; None for a name without watts, such as MAXN."""
    match = re.search(r"(\d+(?:\.\d+)?) ?W", name or "")
    return float(match[1]) if match else None


def tool_output(*command: str) -> str | None:
    """Return a tool's output, whatever its exit status; None if it is missing or hangs.

    `nvpmodel -q` prints the mode for an ordinary user, and then fails to read a file that is only readable by root.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout


def power_mode_of(root: Path) -> str | None:
    """Return nvpmodel's mode, else the firmware's profile, or None if neither is known."""
    match = re.search(r"^NV Power Mode: *(.+)$", tool_output("nvpmodel", "-q") or "", re.MULTILINE)
    return match[1].strip() if match else text(root / "sys/firmware/acpi/platform_profile")


def _clocks_locked(device: str, gpus: list[Path], policies: list[Path]) -> bool | None:
    """Return whether the device's clocks are locked; None if that cannot be known, as for a desktop GPU.

    Clocks are locked if minimum and maximum are equal, as set by jetson_clocks, which leaves the governor no choice.
    """
    if not policies or (device != "cpu" and not gpus):
        return None
    ranges = [(policy / "scaling_min_freq", policy / "scaling_max_freq") for policy in policies]
    ranges += [(gpu / "min_freq", gpu / "max_freq") for gpu in gpus if device != "cpu"]
    return all(number(low) is not None and number(low) == number(high) for low, high in ranges)


def _thermal(root: Path, kind: str, file: str, least: int) -> dict[str, int]:
    """Return the highest value above `least` of the kernel's thermal zones or cooling devices, by type."""
    readings: dict[str, int] = {}
    for entry in sorted((root / "sys/class/thermal").glob(f"{kind}*")):
        name, value = text(entry / "type"), number(entry / file)
        if name and value is not None and value > least:
            readings[name] = max(readings.get(name, value), value)
    return readings


def variables(given: Mapping[str, str], ours: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables in `given` that affect a worker's computation, except the settings in `ours`.

    Variables with secrets or folders are left out, and folders in a value are removed. Anything in a value that looks
    like a key is replaced by a hash, except the GPUs in CUDA_VISIBLE_DEVICES.
    """
    names = (name for name in sorted(given) if _VARIABLES.fullmatch(name) and not _LEFT_OUT.search(name))
    return {name: _public(name, given[name]) for name in names if given[name] != ours.get(name)}


def _public(name: str, value: str) -> str:
    redacted = _without_folders(value)
    return redacted if name == "CUDA_VISIBLE_DEVICES" else _OPAQUE.sub(_hashed, redacted)


def _hashed(match: re.Match[str]) -> str:
    return f"#{hashlib.sha256(match[0].encode()).hexdigest()[:8]}"


def without_credentials(word: str) -> str:
    """Return a command line word as valid UTF-8, with user, password and query removed if it is a URL."""
    word = word.encode(errors="surrogateescape").decode(errors="replace")
    return _CREDENTIALS.sub("", word) if "://" in word else word


def _without_folders(value: str) -> str:
    """Replace each path, which may differ between equal machines, by `.../file`, and remove credentials from URLs."""
    redacted = without_credentials(value)
    return redacted if "://" in value else _FOLDERS.sub(".../", redacted)


def _found(file: Path, pattern: str) -> str | None:
    """Return the group of the first match ("none" if empty); None without a match or a file."""
    match = re.search(pattern, text(file) or "", re.MULTILINE)
    return (match[1] or "none") if match else None


def _system(root: Path) -> dict[str, str]:
    """Return the settings of kernel, firmware and cgroup, and the kernel's mitigations of CPU vulnerabilities."""
    settings = {name: _found(root / file, pattern) for name, (file, pattern) in _SYSTEM.items()}
    flaws = {file.name: text(file) for file in (root / "sys/devices/system/cpu/vulnerabilities").glob("*")}
    settings |= {name: flaws[name] for name in sorted(flaws) if flaws[name] != "Not affected"}
    return {name: value for name, value in (settings | _limits(root)).items() if value}


def _limits(root: Path) -> dict[str, str | None]:
    """Return the limits of this process's cgroup and all enclosing ones, "none" if unlimited."""
    quota_cpus = cgroup.quota_cpus(root)
    none = "none" if cgroup.folders(root, "cpu")[0] else None
    by_name: dict[str, str | None] = {"cpu_limit": none if quota_cpus is None else f"{quota_cpus:g} CPUs"}
    for name, (file, controller, older) in _LIMITS.items():
        groups, is_older = cgroup.folders(root, controller)
        values = [text(group / (older if is_older else file)) for group in groups]
        limits = [value for value in values if value and not value.startswith(_UNLIMITED)]
        setting = ", ".join(dict.fromkeys(limits[:1] if name in _EFFECTIVE else limits))
        by_name[name] = setting or ("none" if groups else None)
    return by_name


def _versions(packages: Mapping[str, str]) -> dict[str, str]:
    versions = {name: installed_version(name) for name in DISTRIBUTIONS}
    for library, (wheels, package) in LIBRARIES.items():
        of_system = _joined(release for name, release in packages.items() if re.fullmatch(package, name))
        versions[library] = next(filter(None, map(installed_version, wheels)), of_system)
    python = ".".join(map(str, sys.version_info[:3]))
    return {"python": python} | {name: installed for name, installed in versions.items() if installed}


def installed_version(distribution: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
