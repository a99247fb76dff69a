"""Small files under /proc, /sys and /etc: their text now, or opened once and read again and again."""

import os
from pathlib import Path


def text(path: Path) -> str | None:
    """Return the file's text without the blanks and the NUL bytes around it; None where it is absent or unreadable."""
    try:
        # Python turns EAGAIN, as of a thermal zone whose unit is off, into None in place of an error
        return (path.read_bytes() or b"").decode(errors="replace").strip("\0 \t\r\n") or None
    except OSError:
        return None


def number(path: Path) -> int | None:
    """Return the whole number in the file; None where it is absent, unreadable or holds something else."""
    try:
        return int(text(path) or "")
    except ValueError:
        return None


def cpufreq_policies(root: Path) -> list[Path]:
    """Return the folder of each group of CPUs that share a clock.

    Where a power mode switched all CPUs of one off, its folder stays, and what it tells is old or an error.
    """
    policies = sorted((root / "sys/devices/system/cpu/cpufreq").glob("policy*"))
    return [policy for policy in policies if text(policy / "affected_cpus") or not (policy / "affected_cpus").exists()]


class KernelFile:
    """A file of procfs or sysfs that stays open between readings.

    It is opened by the first reading, and anew after a failed one: what comes back under the path is another file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def read(self, size: int = 4096) -> bytes:
        """Return at most `size` bytes from the start, as they are now; raise OSError where that fails."""
        if self._fd is None:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(self._fd, size, 0)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Close the file until the next reading."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __del__(self) -> None:
        self.close()
