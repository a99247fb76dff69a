"""A worker that the machine does not let begin: each error of the kernel is a failed case with its reason."""

import errno
import os
import subprocess

import pytest

# measures one case under a fault, in the current folder, and prints its status and reason
MEASURING = """
import os, resource
from pathlib import Path
from sessions_made import session
from benchd.daemon.config import Config, Suite
from benchd.daemon.measuring import plan
from benchd.daemon.measuring.supervisor import Supervisor

os.chdir({folder!r})
planned = plan.plan([Suite(models=["square"], variants=["eager"])], Config().limits, plan.Machine("cpu", has_cxx=True))
with session(Path()) as one, one.measuring():
    one.sampler(planned)
    one.run("s")  # the environment is described before the fault
    {fault}
    (record,) = Supervisor(one, planned, "s").measure(planned)
print(record.status, record.reason, sep="|")
"""
FAULTS = {
    errno.EMFILE: "resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir('/proc/self/fd'))),) * 2)",
    # root has as many processes as it likes
    errno.EAGAIN: "os.getuid() or os.setuid(65534); resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))",
}


def measured(folder, printed, fault="pass"):
    code = MEASURING.format(folder=str(folder), fault=fault)
    return printed(code, XDG_CACHE_HOME=".").strip().split("|")  # there, where the user who is not root may write


def failed(number):
    return ["failed", f"the worker could not be run: {os.strerror(number)}"]


@pytest.mark.parametrize("number", FAULTS, ids=errno.errorcode.get)
def test_a_kernel_refusal_is_the_reason_for_a_failed_case(tmp_path, printed, number):
    for folder in (tmp_path, tmp_path / "logs", tmp_path / "benchd"):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o777)  # for the user who is not root
    assert measured(tmp_path, printed, FAULTS[number]) == failed(number)


def test_a_log_that_cannot_be_created_is_the_reason_of_a_failed_case(tmp_path, printed):
    logs = tmp_path / "logs"
    logs.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "nr_inodes=1", "tmpfs", logs], check=False).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        assert measured(tmp_path, printed) == failed(errno.ENOSPC)
    finally:
        subprocess.run(["umount", logs], check=True)
