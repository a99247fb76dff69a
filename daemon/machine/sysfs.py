"""Reads small files in /proc, /sys and /etc, once or, kept open, repeatedly."""

import os
from pathlib import Path

GPU_CLOCKS = "sys/class/devfreq"
THOR_GPU = "gpu-gpc-0"


def text(path: Path) -> str | None:
    """Return the file's text without surrounding whitespace and NUL bytes; None if it is missing or unreadable."""
    try:
        # read_bytes returns None for EAGAIN, for example from the thermal zone of a unit that is powered off
        return (path.read_bytes() or b"").decode(errors="replace").strip("\0 \t\r\n") or None
    except OSError:
        return None


def number(path: Path) -> int | None:
    """Return the whole number in the file; None if it is missing, unreadable or not a number."""
    try:
        return int(text(path) or "")
    except ValueError:
        return None


def cpufreq_policies(root: Path) -> list[Path]:
    """Return the folder of each group of CPUs that share a clock.

    If a power mode has turned off all CPUs of a group, its folder remains, with stale values or errors.
    """
    policies = sorted((root / "sys/devices/system/cpu/cpufreq").glob("policy*"))
    return [policy for policy in policies if text(policy / "affected_cpus") or not (policy / "affected_cpus").exists()]


def gpu_nodes(root: Path) -> list[Path]:
    """Return the devfreq nodes of a Jetson's GPU; their names after the address differ between L4T releases.

    A Thor has one node per clock domain; only that of the graphics clusters is returned.
    """
    nodes = sorted((root / GPU_CLOCKS).glob("*"))
    return [node for node in nodes if node.name.rpartition(".")[2] in ("ga10b", "gv11b", "gpu", THOR_GPU)]


def i2c_chips(root: Path, kind: str) -> list[Path]:
    """Return the folders of the I2C chips whose name contains `kind`."""
    chips = sorted((root / "sys/bus/i2c/devices").glob("*"))
    return [chip for chip in chips if kind in (text(chip / "name") or "")]


class KernelFile:
    """A procfs or sysfs file that stays open between readings.

    It is opened by the first reading and reopened after a failed one, because the path may then be a new file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def read(self, size: int = 4096, start: int = 0) -> bytes:
        """Return up to `size` current bytes from offset `start`; raise OSError on failure."""
        if self._fd is None:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(self._fd, size, start)
        except OSError:
            self.close()
            raise

    def read_all(self) -> bytes:
        """Return the whole file, even if the kernel delivers a file with many records one page at a time."""
        content = bytearray()
        while part := self.read(start=len(content)):
            content += part
        return bytes(content)

    def close(self) -> None:
        """Close the file until the next reading."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __del__(self) -> None:
        self.close()


def memory_bytes() -> int:
    """Return this machine's memory in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
