"""Finds out what this machine can measure and run, and otherwise the reason and the remedy.

Torch is never imported here: a child process imports it and looks for CUDA, within a time limit.
"""

import json
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from msgspec import Struct

from benchd.daemon.errors import BenchdError, NotAvailable
from benchd.daemon.machine import interpreter, sandbox
from benchd.daemon.machine.environment import installed_version, power_mode_of
from benchd.daemon.machine.sysfs import text
from benchd.daemon.measuring import power_modes
from benchd.daemon.measuring.power_modes import CONFIGURATION, Mode
from benchd.daemon.records import Record
from benchd.daemon.runtimes import PACKAGES, Package
from benchd.daemon.sampling.sources import SAMPLERS, load
from benchd.daemon.verdicts.sanity import SanityResult
from benchd.exporters import code, tegra
from benchd.exporters.tegra import install, is_tegra

PROBE_TIMEOUT_S = 120.0  # a cold import of torch from an SD card takes most of a minute
PROBE = """
import json, warnings, torch
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
warning = str(warned[-1].message).partition("\\n")[0] if warned else None
facts = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpu": gpu, "warning": warning}
try:
    import torchvision
    facts["torchvision"] = torchvision.__version__
except Exception as error:
    facts["no_torchvision"] = str(error).partition("\\n")[0]
print(json.dumps(facts))
"""
NVIDIA_VENDOR = "0x10de"
NOT_FOR_DOCTOR = "fake"  # it plays back a script, and there is none here
SYSTEM_PATH = ":/usr/sbin:/usr/local/sbin"  # folders that are not on every user's PATH

REMEDIES = {
    "devfreq": "only on Jetson boards; there: sudo modprobe nvgpu (on a Thor: sudo modprobe nvidia)",
    "ina3221": "only on Jetson Orin boards; there: sudo modprobe -r ina3221; sudo modprobe ina3221",
    "ina238": "only on Jetson Thor boards; there: sudo modprobe -r ina238; sudo modprobe ina238",
    "procfs": "mount /proc",
    "rapl": "sudo modprobe intel_rapl_msr; only root may read it: sudo chmod a+r /sys/class/powercap/*/energy_uj",
    "throttle": "only on Jetson boards; without it or nvml, throttling is not detected",
    "thermal": "virtual machines have no thermal zones",
}
ELSEWHERE = {"rapl": "only on Intel and AMD processors"}  # replaces the remedy on processors without it
CPU_PAIR = "pip install --force-reinstall torch torchvision --index-url https://download.pytorch.org/whl/cpu"
"""On x86-64, torchvision from PyPI is linked with torch's CUDA library, which a CPU-only torch lacks."""


class Capability(Struct, frozen=True, rename={"remedy": "cure"}):
    """The result of one check: `detail` describes what was checked, or why it is unusable, and `remedy` what to do."""

    name: str
    kind: Literal["board", "source", "runtime", "program", "device", "service"]
    usable: bool
    detail: str
    remedy: str = ""


class SelfCheck(Struct, frozen=True):
    """The findings of `benchd selfcheck`, stored in the file to attach to a bug report."""

    tool_version: str
    findings: list[SanityResult]
    machine: list[Capability]
    records: list[Record]


def examine(root: Path = Path("/"), probe_timeout_s: float = PROBE_TIMEOUT_S) -> Iterator[Capability]:
    """Yield a finding for the board, each sampler, runtime and program, and for the service if it is installed."""
    if is_tegra(root):
        yield from _board(root)
    for name in SAMPLERS:
        if name != NOT_FOR_DOCTOR:
            yield _source(name, root)
    yield from _torch_and_cuda(root, probe_timeout_s)
    yield from (_package(package, root) for package in PACKAGES.values())
    yield _program("cc", os.environ.get("CC", "cc"), "sudo apt install gcc, or set CC")
    yield _program("c++", os.environ.get("CXX", "g++"), "sudo apt install g++, or set CXX")
    yield _program("mosquitto", "mosquitto", "sudo apt install mosquitto, or use a broker elsewhere")
    yield from service(root)


def _board(root: Path) -> Iterator[Capability]:
    try:
        yield Capability("jetpack", "board", usable=True, detail=tegra.described(root))
    except tegra.TooOld as error:
        yield Capability("jetpack", "board", usable=False, detail=str(error))
    with suppress(NotAvailable):  # for example in a container
        yield _power_mode(power_modes.read_modes(root), power_mode_of(root))


def _power_mode(modes: Sequence[Mode], mode: str | None) -> Capability:
    fastest = power_modes.fastest(modes)
    if fastest is None:
        names = ", ".join(f"{known.number} {known.name}" for known in modes) or "none"
        remedy = f"the fastest is unknown; sudo nvpmodel -m NUMBER sets one of /{CONFIGURATION}: {names}"
    else:
        remedy = f"the fastest is {fastest.name}: sudo nvpmodel -m {fastest.number}" if fastest.name != mode else ""
    return Capability("power mode", "board", usable=True, detail=mode or "unknown", remedy=remedy)


def _source(name: str, root: Path) -> Capability:
    detail = "all of its values can be read"
    try:
        sampler = load(name if root == Path("/") else f"{name}={root}")
        reason = sampler.unavailable()
        if reason is None:
            for _ in sampler.sample():
                pass
    except BenchdError as error:
        reason = str(error)
    except (OSError, ValueError) as error:
        detail = f"all of its values can be read except: {error}"
    if reason is None:
        return Capability(name, "source", usable=True, detail=detail)
    remedies = REMEDIES if os.uname().machine == "x86_64" else REMEDIES | ELSEWHERE
    return Capability(name, "source", usable=False, detail=reason, remedy=remedies.get(name, ""))


def _torch_and_cuda(root: Path, timeout_s: float) -> Iterator[Capability]:
    facts, reason = _probe(timeout_s)
    if facts is None:
        remedy = (is_tegra(root) and tegra.library(reason, root)) or install("torch torchvision", root)
        yield Capability("torch", "runtime", usable=False, detail=reason, remedy=remedy)
        yield Capability("cuda", "runtime", usable=False, detail="torch is not usable", remedy="see torch")
        return
    yield Capability("torch", "runtime", usable=True, detail=str(facts["torch"]))
    yield _torchvision(facts, root)
    if facts["gpu"]:
        yield Capability("cuda", "runtime", usable=True, detail=f"{facts['cuda']} on {facts['gpu']}")
        yield _python_headers()
    else:
        detail, remedy = _why_no_cuda(facts, root)
        yield Capability("cuda", "runtime", usable=False, detail=detail, remedy=remedy)


def _probe(timeout_s: float) -> tuple[dict[str, str | None] | None, str]:
    """Return a child's report about torch, or None and the reason."""
    if find_spec("torch") is None:
        return None, "not installed"
    command = interpreter.of_code(PROBE)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return None, f"importing it and looking for CUDA took longer than {timeout_s:g} s"
    if done.returncode:
        return None, (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return json.loads(done.stdout.splitlines()[-1]), ""


def _torchvision(facts: dict[str, str | None], root: Path) -> Capability:
    if "torchvision" in facts:
        return Capability("torchvision", "runtime", usable=True, detail=str(facts["torchvision"]))
    remedy = install("torchvision", root) if is_tegra(root) or facts["cuda"] else CPU_PAIR
    return Capability("torchvision", "runtime", usable=False, detail=str(facts["no_torchvision"]), remedy=remedy)


def _python_headers() -> Capability:
    """Return whether Python.h is installed, which Triton needs to compile its launchers on a GPU."""
    path = Path(sysconfig.get_path("include"), "Python.h")
    if path.exists():
        return Capability("Python.h", "program", usable=True, detail=str(path))
    remedy = "sudo apt install python3-dev"
    return Capability("Python.h", "program", usable=False, detail=f"no {path}, which Triton needs", remedy=remedy)


def _why_no_cuda(facts: dict[str, str | None], root: Path) -> tuple[str, str]:
    if facts["cuda"] is None:
        on_board = f"pip uninstall -y torch torchvision; {install('torch torchvision triton', root)}"
        return "torch is a CPU-only build", on_board if is_tegra(root) else "install torch from the index for your CUDA"
    nodes = [node for name in ("nvidia[0-9]", "nvhost-gpu", "nvgpu/*/ctrl") for node in (root / "dev").glob(name)]
    if not nodes:
        return "no NVIDIA GPU, or its kernel module is not loaded", _driver_remedy(root)
    closed = next((node for node in nodes if not os.access(node, os.R_OK | os.W_OK)), None)
    if closed:
        return f"no permission to open {closed}", "sudo usermod -aG video,render $USER; then log in again"
    detail = facts["warning"] or "torch gives no reason"
    return detail, f"torch is built for CUDA {facts['cuda']}: install a matching driver, or torch for the driver's CUDA"


def _driver_remedy(root: Path) -> str:
    if is_tegra(root):
        return "sudo apt install nvidia-jetpack"
    on_bus = [text(device / "vendor") for device in (root / "sys/bus/pci/devices").glob("*")]
    return "sudo modprobe nvidia, or install the NVIDIA driver" if NVIDIA_VENDOR in on_bus else "use a machine with one"


def _package(package: Package, root: Path) -> Capability:
    """Return whether a package is usable; if two distributions contain it, the later one overwrote the other."""
    name, installed = package.name, code.versions(*package.distributions)
    if len(installed) > 1:
        remedy = f"pip uninstall -y {' '.join(installed)}, then install the one you want"
        detail = f"installed twice: {', '.join(installed)}"
        return Capability(name, "runtime", usable=False, detail=detail, remedy=remedy)
    if find_spec(name) is None:
        return Capability(name, "runtime", usable=False, detail="not installed", remedy=tegra.remedy(package, root))
    known = [f"{other} {its_version}" if other != name else its_version for other, its_version in installed.items()]
    detail = next(iter(known), None) or installed_version(name) or "installed, version unknown"
    return Capability(name, "runtime", usable=True, detail=detail)


def _program(name: str, command: str, remedy: str) -> Capability:
    program = shutil.which(command, path=os.environ.get("PATH", os.defpath) + SYSTEM_PATH)
    if program:
        return Capability(name, "program", usable=True, detail=program)
    return Capability(name, "program", usable=False, detail=f"{command} is not on the PATH", remedy=remedy)


def service(root: Path) -> Iterator[Capability]:
    """Yield the service's status, including whether another machine has the same id, and how to rename one of them."""
    of_sandbox = sandbox.status(root)
    if of_sandbox:
        state, status = of_sandbox
        usable = state == "active" and "mqtt down" not in status
        detail = f"{state}: {status}" if status else state
        yield Capability("service", "service", usable, detail, "" if usable else "see journalctl -u benchd")
