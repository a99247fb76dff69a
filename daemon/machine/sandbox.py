"""Finds the devices that the installed unit blocks, with the blocking options, and the service's status.

Reads the unit and its drop-ins in /etc/systemd/system as systemd does: each file adds to a list, and an empty value
clears it. Sources: systemd.exec(5), systemd.resource-control(5).
"""

import grp
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from benchd.daemon.errors import NotAvailable
from benchd.daemon.machine.environment import tool_output
from benchd.daemon.machine.sysfs import text

NAME = "benchd.service"
UNIT = f"etc/systemd/system/{NAME}"
# files that CUDA opens for a desktop GPU and for an integrated one (L4T 35 and 36), the WSL node, jtop's socket, and a
# CPU's energy counters
WANTED = (
    "dev/nvidia[0-9]*",
    "dev/nvidiactl",
    "dev/nvidia-uvm",
    "dev/nvhost-gpu",
    "dev/nvhost-ctrl-gpu",
    "dev/nvhost-as-gpu",
    "dev/nvgpu/*/as",
    "dev/nvgpu/*/channel",
    "dev/nvgpu/*/ctrl",
    "dev/nvgpu/*/power",
    "dev/host1x-fence",
    "dev/nvmap",
    "dev/dri/render*",
    "dev/dxg",
    "run/jtop.sock",
    "sys/class/powercap/*/energy_uj",
)
READ_ALONE = ("nvmap", "energy_uj")  # names of files that are only read; all others also need write access
YES = {"yes", "true", "1", "on"}
ROOT = 0  # the service never joins this group
Options = dict[str, list[str]]


@dataclass(frozen=True)
class Access:
    """The service's access to a path: `reason` is None or the blocking option, `remedy` is the line to add."""

    path: Path
    reason: str | None = None
    remedy: str = ""


def examine(root: Path = Path("/")) -> Iterator[Access]:
    """Yield the installed service's access to each device and counter; raise NotAvailable if no unit is installed."""
    options = _options(root)
    names = _driver_names(root)
    for path in sorted(path for pattern in WANTED for path in root.glob(pattern) if not path.is_dir()):
        yield _hidden(path, options, names) or _forbidden(path, options) or Access(path)


def hidden(node: Path, root: Path = Path("/")) -> Access | None:
    """Return the access to a device that an option of the installed unit hides, else None."""
    return _hidden(node, _options(root), _driver_names(root)) if (root / UNIT).exists() else None


def status(root: Path = Path("/")) -> tuple[str, str] | None:
    """Return the service's state and its status line; None if systemd does not run, respond or know it."""
    if not (root / "run/systemd/system").is_dir():
        return None
    # fails in a container or chroot that sees the host's /run
    output = tool_output("systemctl", "show", NAME, "--property=LoadState,ActiveState,StatusText")
    properties = dict(line.split("=", 1) for line in (output or "").splitlines() if "=" in line)
    return (properties["ActiveState"], properties["StatusText"]) if properties.get("LoadState") == "loaded" else None


def _options(root: Path) -> Options:
    unit = root / UNIT
    if not unit.exists():
        raise NotAvailable(f"{unit} does not exist; install it with sudo systemd/install.sh")
    options: Options = {}
    for file in (unit, *sorted(Path(f"{unit}.d").glob("*.conf"))):
        for line in file.read_text().splitlines():
            name, assigned, value = line.partition("=")
            if value.strip():
                options.setdefault(name.strip(), []).append(value.strip())
            elif assigned:
                options.pop(name.strip(), None)
    return options


def _driver_names(root: Path) -> dict[int, list[str]]:
    """Return the driver names for each major number of character devices, as used in DeviceAllow."""
    names: dict[int, list[str]] = {}
    for line in (text(root / "proc/devices") or "").partition("Block devices:")[0].splitlines()[1:]:
        if line.strip():
            major, name = line.split()
            names.setdefault(int(major), []).append(name)
    return names


def _hidden(path: Path, options: Options, names: dict[int, list[str]]) -> Access | None:
    """Return the denied access if an option hides the node, regardless of the node's mode."""
    status = path.stat()
    if not stat.S_ISCHR(status.st_mode):
        return None
    if options.get("PrivateDevices", ["no"])[-1] in YES:
        return Access(path, "PrivateDevices= hides it", "PrivateDevices=no")
    allowed = options.get("DeviceAllow", [])
    policy = options.get("DevicePolicy", ["auto"])[-1]
    if policy == "auto" and not allowed and options.get("ProtectClock", ["no"])[-1] in YES:
        return Access(path, "ProtectClock= hides it in versions of systemd before 253", "ProtectClock=no")
    drivers = [f"char-{name}" for name in names.get(os.major(status.st_rdev), [])]
    if (policy == "auto" and not allowed) or any(_allows(entry, path, drivers) for entry in allowed):
        return None
    node = drivers[0] if drivers else f"/dev/{path.name}"
    return Access(path, f"DevicePolicy={policy}, and no DeviceAllow= lists it", f"DeviceAllow={node} rw")


def _allows(entry: str, path: Path, drivers: list[str]) -> bool:
    node, _, access = entry.partition(" ")
    listed = str(path).endswith(node) if node.startswith("/") else any(fnmatch(name, node) for name in drivers)
    return listed and set(_needed(path)) <= set(access.strip() or "rwm")


def _needed(path: Path) -> str:
    return "r" if path.name in READ_ALONE else "rw"


def _forbidden(path: Path, options: Options) -> Access | None:
    """Return the denied access if the file's mode excludes the service's user and groups."""
    status, access = path.stat(), _needed(path)
    needed = 0o4 if access == "r" else 0o6
    if status.st_mode & needed == needed:
        return None
    if status.st_mode >> 3 & needed != needed or status.st_gid == ROOT:
        remedy = f"sudo chmod a+{access} {path}, or add a udev rule"
        return Access(path, "User=: only its owner has access", remedy)
    group = _group(status.st_gid)
    if group in " ".join(options.get("SupplementaryGroups", []) + options.get("Group", [])).split():
        return None
    return Access(path, f"SupplementaryGroups= lacks {group}", f"SupplementaryGroups={group}")


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
