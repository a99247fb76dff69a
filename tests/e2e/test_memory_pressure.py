"""A service whose memory is limited: a worker that exceeds it costs its case, never the service."""

import os
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from test_service import site  # noqa: F401 - a fixture
from waiting import wait_for

LIMITS = {Path("/sys/fs/cgroup/memory"): "memory.limit_in_bytes", Path("/sys/fs/cgroup"): "memory.max"}
TOO_FEW_BYTES, ENOUGH_BYTES = 96 * 2**20, 8 * 2**30  # for a worker with torch, beside a sampler


@pytest.fixture
def group():
    """A group of processes with a limit of memory, and the file of that limit."""
    for root, name in LIMITS.items():
        folder = root / f"benchd-memory-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        if (folder / name).exists():
            yield folder, folder / name
            folder.rmdir()
            return
        folder.rmdir()
    pytest.skip("needs a cgroup with a limit of memory that it may make")


def scores(pid):
    """Return by how much the kernel kills the children of a process before others."""
    readings = []
    for child in psutil.Process(pid).children():
        with suppress(OSError):  # it has ended meanwhile
            readings.append(int(Path(f"/proc/{child.pid}/oom_score_adj").read_text()))
    return readings


def test_a_worker_that_exceeds_the_memory_does_not_stop_the_service(site, group):  # noqa: F811
    folder, limit = group
    limit.write_text(str(TOO_FEW_BYTES))
    with site.configure(sizes="[16]").service(is_apart=True) as process:
        (folder / "cgroup.procs").write_text(str(process.pid))
        site.command("run", suite="small")
        result = site.until("result/")
        assert (result["status"], process.poll()) == ("failed", None)
        assert "was killed by SIGKILL, probably because memory ran out" in result["reason"]
        limit.write_text(str(ENOUGH_BYTES))
        site.command("run", suite="small")
        wait_for(lambda: 500 in scores(process.pid), process)
        while site.until("result/")["status"] != "ok":
            pass
    wait_for(lambda: not (folder / "cgroup.procs").read_text())
