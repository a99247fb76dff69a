"""The GPU memory of one's own process: by the real NVML binding over a library of ours, and by a Tegra's debugfs."""

import os
import subprocess
import sys

import jetson_trees
import pytest
from fake_nvml import FIRST, FakeNvml
from machines import write

from benchd.daemon.worker.device_memory import CLIENTS, own_bytes, taken

CODE = "import sys; input(); from benchd.daemon.worker.device_memory import own_bytes; print(own_bytes(sys.argv[1]))"


def told(fake, uuid, own=True):
    """What a process is told of its own memory, which the library lists if `own`."""
    command = [sys.executable, "-c", CODE, uuid]
    environment = os.environ | fake.environment
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as child:
        fake.set(pids=f"1,{child.pid}" if own else "1")
        return child.communicate("\n")[0].strip()


def test_nvml_counts_this_process_alone(tmp_path):
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    fake = FakeNvml(tmp_path)
    assert told(fake, FIRST) == told(fake, FIRST.removeprefix("GPU-")) == str(2**20)
    assert told(fake, FIRST, own=False).startswith("NVML does not tell this process's memory")
    assert told(fake, "GPU-none").startswith("NVML does not list the processes of GPU GPU-none")


def test_a_tegra_s_are_nvmap_s_clients_of_this_process(tmp_path):
    root = jetson_trees.build(tmp_path, jetson_trees.ORIN_NANO)
    assert "No such file" in own_bytes(None, root)
    lines = [
        "CLIENT                        PROCESS      PID        SIZE",
        "user           gnome shell     77     9000K",
    ]
    write(root, {CLIENTS: "\n".join([*lines, "total                                   9000K\n"])})
    assert "does not list this process" in own_bytes(None, root)
    write(root, {CLIENTS: "\n".join([*lines, f"user           python     {os.getpid()}     512K\n"])})
    assert own_bytes(None, root) == 512 * 1024


def test_what_was_taken_is_known_only_where_both_are():
    assert taken(100, 350, None) == 250
    assert taken(100, "refused", None) == "refused"
    assert "built the engine" in taken(100, 350, 12.0)
