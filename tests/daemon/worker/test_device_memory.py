"""The GPU memory of one's own process: by the real NVML binding over a library of ours, and by a Tegra's debugfs."""

import os
import subprocess
import sys

import jetson_trees
import pytest
from fake_nvml import FIRST, FakeNvml
from machines import write

from benchd.daemon.worker.device_memory import CLIENTS, DeviceMemory, held, taken

CODE = "import sys; input(); from benchd.daemon.worker.device_memory import held; print(held(sys.argv[1]))"


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
    mine = str(DeviceMemory(2**20))
    assert told(fake, FIRST) == told(fake, FIRST.removeprefix("GPU-")) == mine
    assert told(fake, FIRST, own=False) == str(DeviceMemory(None))
    assert told(fake, "GPU-none").startswith("NVML does not list the processes of GPU GPU-none")


def test_an_orin_s_are_nvmap_s_clients_of_this_process_and_of_all(tmp_path):
    root = jetson_trees.build(tmp_path, jetson_trees.ORIN_NANO)
    assert held(None, root) == DeviceMemory(None, 100 * 2**20)  # as everybody but root is told
    lines = [
        "CLIENT                        PROCESS      PID        SIZE",
        "user           gnome shell     77     9000K",
    ]
    write(root, {CLIENTS: "\n".join([*lines, "total                                   9000K\n"])})
    assert held(None, root) == DeviceMemory(None, 100 * 2**20)
    write(root, {CLIENTS: "\n".join([*lines, f"user           python     {os.getpid()}     512K\n"])})
    assert held(None, root) == DeviceMemory(512 * 1024, 100 * 2**20)


def test_a_thor_has_no_nvmap_and_is_asked_by_nvml(tmp_path):
    root = jetson_trees.build(tmp_path, jetson_trees.THOR)
    write(root, {CLIENTS: f"user           python     {os.getpid()}     0K\n"})
    assert "NVML" in held(None, root)


def test_what_was_taken_is_this_process_s_where_the_driver_tells_else_everybody_s():
    assert taken(DeviceMemory(100, 900), DeviceMemory(350, 2000), None) == (250, False)
    assert taken(DeviceMemory(None), DeviceMemory(350), None) == (350, False)  # it held nothing before
    assert taken(DeviceMemory(None, 900), DeviceMemory(None, 2000), None) == (1100, True)
    assert "other processes freed" in taken(DeviceMemory(None, 900), DeviceMemory(None, 800), None)
    assert "does not report" in taken(DeviceMemory(None), DeviceMemory(None), None)
    assert taken(DeviceMemory(100), "refused", None) == taken("refused", DeviceMemory(100), None) == "refused"
    assert "built the engine" in taken(DeviceMemory(100), DeviceMemory(350), 12.0)
