"""Limits imposed on this process by its control group and all enclosing ones, in cgroup versions 1 and 2."""

from collections.abc import Iterator
from pathlib import Path

from benchd.daemon.machine.sysfs import number, text


def folders(root: Path, controller: str) -> tuple[list[Path], bool]:
    """Return a controller's groups, innermost first (empty if none), and whether they use cgroup version 1."""
    lines = (line.split(":", 2) for line in (text(root / "proc/self/cgroup") or "").splitlines())
    own = {name: Path(path[1:]) for _, controllers, path in lines for name in controllers.split(",")}
    is_older, mounted = controller in own, root / "sys/fs/cgroup"
    inner = own.get(controller, own.get(""))
    if inner is None:
        return [], is_older
    return [(mounted / controller if is_older else mounted) / folder for folder in (inner, *inner.parents)], is_older


def quota_cpus(root: Path = Path("/")) -> float | None:
    """Return the number of CPUs allowed by the tightest quota, or None without a quota."""
    shares = [quota / period for folder in folders(root, "cpu")[0] for quota, period in _quota(folder)]
    return min(shares, default=None)


def _quota(folder: Path) -> Iterator[tuple[int, int]]:
    """Yield the group's quota and its period in microseconds, or nothing without a quota."""
    quota, _, period = (text(folder / "cpu.max") or "").partition(" ")
    older = number(folder / "cpu.cfs_quota_us"), number(folder / "cpu.cfs_period_us")
    if quota.isdigit() and period.isdigit():
        yield int(quota), int(period)
    elif older[0] and older[1] and older[0] > 0:
        yield older[0], older[1]


def limited(root: Path = Path("/")) -> list[Path]:
    """Return the files that count how often a quota stopped this process, one per group with a quota."""
    return [folder / "cpu.stat" for folder in folders(root, "cpu")[0] if any(_quota(folder))]
