"""The limits that control groups set to this process: those of its own group and of all around it, versions 1 and 2."""

from collections.abc import Iterator
from pathlib import Path

from benchd.daemon.machine.sysfs import number, text


def folders(root: Path, controller: str) -> tuple[list[Path], bool]:
    """Return the groups of a controller, the innermost first, and whether they are of version 1; none without any."""
    lines = (line.split(":", 2) for line in (text(root / "proc/self/cgroup") or "").splitlines())
    own = {name: Path(path[1:]) for _, controllers, path in lines for name in controllers.split(",")}
    is_older, mounted = controller in own, root / "sys/fs/cgroup"
    inner = own.get(controller, own.get(""))
    if inner is None:
        return [], is_older
    return [(mounted / controller if is_older else mounted) / folder for folder in (inner, *inner.parents)], is_older


def quota_cpus(root: Path = Path("/")) -> float | None:
    """Return how many CPUs' time the tightest quota leaves, None without one."""
    shares = [quota / period for folder in folders(root, "cpu")[0] for quota, period in _quota(folder)]
    return min(shares, default=None)


def _quota(folder: Path) -> Iterator[tuple[int, int]]:
    """Yield the quota of a group and its period in microseconds, nothing without one."""
    quota, _, period = (text(folder / "cpu.max") or "").partition(" ")
    older = number(folder / "cpu.cfs_quota_us"), number(folder / "cpu.cfs_period_us")
    if quota.isdigit() and period.isdigit():
        yield int(quota), int(period)
    elif older[0] and older[1] and older[0] > 0:
        yield older[0], older[1]


def limited(root: Path = Path("/")) -> list[Path]:
    """Return the files that count how often a quota stopped this process, one for each group that has a quota."""
    return [folder / "cpu.stat" for folder in folders(root, "cpu")[0] if any(_quota(folder))]
