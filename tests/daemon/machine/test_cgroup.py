"""Quotas of control groups: of made trees of both versions, and of a real group where root may make one."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from machines import write

from benchd.daemon.machine import cgroup
from benchd.daemon.sampling.sources.procfs import Procfs

GROUPS = "sys/fs/cgroup"
BUSY = """
import sys, time
from benchd.daemon.machine import cgroup
open(sys.argv[1], "w").write("0")
end_s = time.process_time() + 0.03
while time.process_time() < end_s: pass
print(cgroup.quota_cpus())
"""
STATED = "nr_periods 91\nnr_throttled {}\nthrottled_usec 5\n"


def of_version_2(root, *limits):
    write(root, {"proc/self/cgroup": "0::/a.slice/b.scope\n"})
    for folder, limit in zip((f"{GROUPS}/a.slice/b.scope", f"{GROUPS}/a.slice", GROUPS), limits, strict=False):
        write(root, {f"{folder}/cpu.max": f"{limit}\n", f"{folder}/cpu.stat": STATED.format(3)})
    return root


@pytest.mark.parametrize(
    ("limits", "cpus"),
    [
        (("max 100000", "max 100000"), None),
        (("60000 100000", "max 100000"), 0.6),
        (("max 100000", "150000 100000"), 1.5),
        (("400000 100000", "150000 50000"), 3.0),
        ((), None),
    ],
)
def test_the_tightest_quota_of_all_groups_counts(tmp_path, limits, cpus):
    assert cgroup.quota_cpus(of_version_2(tmp_path, *limits)) == cpus


@pytest.mark.parametrize(("quota", "cpus"), [(-1, None), (60000, 1.2)])
def test_a_quota_of_version_1_has_its_own_period(tmp_path, quota, cpus):
    folder = f"{GROUPS}/cpu/in"
    files = {"proc/self/cgroup": "1:cpu:/in\n0::/\n", f"{folder}/cpu.cfs_quota_us": f"{quota}\n"}
    write(tmp_path, files | {f"{folder}/cpu.cfs_period_us": "50000\n", f"{folder}/cpu.stat": STATED.format(0)})
    assert cgroup.quota_cpus(tmp_path) == cpus
    assert len(cgroup.limited(tmp_path)) == (cpus is not None)


def test_a_machine_without_groups_has_no_quota(tmp_path):
    assert cgroup.quota_cpus(tmp_path) is None


def test_stops_by_a_quota_are_sampled_since_the_last_reading(tmp_path):
    root = of_version_2(tmp_path, "60000 100000", "max 100000")
    write(root, {"proc/stat": "cpu  1 2 3 4 5 6 7 8 0 0\n", "proc/meminfo": "MemAvailable: 1 kB\n"})
    procfs = Procfs(root)
    assert procfs.unavailable() is None
    assert stops(procfs) == []
    write(root, {f"{GROUPS}/a.slice/b.scope/cpu.stat": STATED.format(10)})
    assert stops(procfs) == [7.0]
    assert stops(procfs) == [0.0]


def stops(procfs):
    return [sample.value for sample in procfs.sample() if sample.metric == "cpu_quota_stops"]


@contextmanager
def group_of(quota_us):
    """Make a real group with this quota in periods of 100 ms, and return its list of processes."""
    older, newer = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    folder = (older if older.is_dir() else newer) / f"benchd-test-{os.getpid()}"
    try:
        folder.mkdir()
        if folder.parent == older:
            (folder / "cpu.cfs_quota_us").write_text(f"{quota_us}")
        else:
            (folder / "cpu.max").write_text(f"{quota_us} 100000")
    except OSError as error:
        pytest.skip(f"no group with a quota can be made here: {error}")
    try:
        yield folder / "cgroup.procs"
    finally:
        folder.rmdir()


def test_a_real_quota_is_found_and_stops_what_needs_more():
    with group_of(2000) as processes:
        output = subprocess.check_output([sys.executable, "-c", BUSY, processes], text=True)
        deadline = time.monotonic() + 10.0
        while processes.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        counted = (processes.parent / "cpu.stat").read_text()
    assert output == "0.02\n"
    assert "nr_throttled 0\n" not in counted
