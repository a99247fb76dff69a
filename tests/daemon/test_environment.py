import os
import subprocess
import sys

import msgspec
import pytest
from machines import desktop, orin_nano, write

from benchd.daemon.environment import describe, fingerprint


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A folder that is the whole PATH, and a function that puts a tool there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def tool(name, script):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return tool


def test_an_orin_nano(tmp_path, tools):
    tools("nvpmodel", "echo 'NV Power Mode: 25W'; echo 1")
    found = describe("cuda", None, orin_nano(tmp_path), {"MALLOC_MMAP_MAX_": "0"})
    assert (found.machine, found.os, found.kernel) == ("aarch64", "Ubuntu 22.04.5 LTS", "5.15.148-tegra")
    assert (found.board, found.soc) == ("NVIDIA Jetson Orin Nano Developer Kit", "tegra234")
    assert (found.cpu_model, found.cpu_governor, found.cpu_max_hz) == ("Cortex-A78AE", "schedutil", 1510.4e6)
    assert (found.gpu, found.driver) == ("tegra234 integrated GPU", "L4T R36.4.3")
    assert (found.power_mode, found.clocks_locked) == ("25W", False)
    assert found.memory_bytes == 7800000 * 1024
    assert found.allocator["MALLOC_MMAP_MAX_"] == "0"


def test_jetson_clocks_locks_cpu_and_gpu(tmp_path, tools):
    root = orin_nano(tmp_path, governor="performance")
    assert describe("cpu", None, root).clocks_locked is False
    for policy in ("policy0", "policy4"):
        write(root, {f"sys/devices/system/cpu/cpufreq/{policy}/scaling_min_freq": "1510400\n"})
    assert describe("cpu", None, root).clocks_locked is True
    assert describe("cuda", None, root).clocks_locked is False
    write(root, {"sys/class/devfreq/17000000.gpu/min_freq": "624750000\n"})
    assert describe("cuda", None, root).clocks_locked is True


def test_a_desktop(tmp_path, tools):
    tools("nvidia-smi", "echo 'NVIDIA GeForce RTX 4090, 560.35.03'; echo 'NVIDIA GeForce RTX 3060, 560.35.03'")
    found = describe("cuda", 4, desktop(tmp_path))
    assert (found.os, found.board, found.soc) == ("Debian GNU/Linux 12 (bookworm)", "ASRock X570 Taichi", None)
    assert found.cpu_model == "AMD Ryzen 7 5800X 8-Core Processor"
    assert (found.gpu, found.driver) == ("NVIDIA GeForce RTX 4090", "560.35.03")
    assert (found.cpu_governor, found.cpu_max_hz, found.clocks_locked) == (None, None, None)
    assert (found.power_mode, found.threads) == ("balanced", 4)


@pytest.mark.parametrize("script", ["echo 'No devices were found'; exit 6", "echo 'NVIDIA-SMI has failed'", "exit 0"])
def test_a_driver_without_a_gpu(script, tmp_path, tools):
    tools("nvidia-smi", script)
    found = describe("cpu", None, desktop(tmp_path))
    assert (found.gpu, found.driver) == (None, None)


def test_an_unknown_arm_core_is_named_by_its_ids(tmp_path, tools):
    cpuinfo = (
        "processor\t: 0\nmodel name\t: ARMv8\nCPU implementer\t: 0x41\nCPU part\t: 0xd05\n\n"
        "processor\t: 1\nCPU implementer\t: 0x99\nCPU part\t: 0x123\n"
    )
    write(tmp_path, {"proc/cpuinfo": cpuinfo})
    assert describe("cpu", None, tmp_path).cpu_model == "Cortex-A55, ARM implementer 0x99 part 0x123"


def test_a_machine_that_tells_nothing(tmp_path, tools):
    found = describe("cpu", None, tmp_path)
    assert (found.board, found.soc, found.cpu_model, found.power_mode) == (None, None, "unknown", None)
    assert (found.machine, found.kernel) == (os.uname().machine, os.uname().release)


def test_allocator_settings_that_the_worker_inherits_are_told(tmp_path, tools, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "7")
    found = describe("cpu", None, tmp_path, {"MALLOC_ARENA_MAX": "2"}).allocator
    assert found == {"MALLOC_ARENA_MAX": "2", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def test_this_machine():
    found = describe("cpu", None)
    assert found.fingerprint == fingerprint(found) == describe("cpu", None).fingerprint
    assert found.cpu_count == len(os.sched_getaffinity(0))
    assert found.kernel == os.uname().release
    assert found.versions["python"] == sys.version.split()[0].rstrip("+")
    assert {"benchd", "torch", "numpy", "msgspec"} <= set(found.versions)
    assert found.memory_bytes > 2**20


@pytest.mark.parametrize(
    "change",
    [
        {"kernel": "6.6"},
        {"cpu_governor": "performance"},
        {"power_mode": "MAXN"},
        {"device": "cuda"},
        {"threads": 1},
        {"clocks_locked": True},
        {"allocator": {"MALLOC_ARENA_MAX": "1"}},
        {"versions": {"torch": "2.8.0"}},
        {"memory_bytes": 2**36},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_fingerprint_tells_what_makes_a_difference(change, tmp_path, tools):
    found = describe("cpu", None, orin_nano(tmp_path))
    assert fingerprint(msgspec.structs.replace(found, **change)) != found.fingerprint


def test_the_fingerprint_leaves_out_what_makes_none(tmp_path, tools):
    found = describe("cpu", None, orin_nano(tmp_path))
    same = msgspec.structs.replace(
        found,
        memory_bytes=found.memory_bytes - 2**20,
        driver="another",
        gpu="another",
        versions=found.versions | {"benchd": "9"},
    )
    assert fingerprint(same) == found.fingerprint
    on_gpu = msgspec.structs.replace(found, device="cuda")
    assert fingerprint(on_gpu) != fingerprint(msgspec.structs.replace(on_gpu, driver="another"))


def test_light_to_import():
    code = (
        "import sys, benchd.daemon.environment, benchd.daemon.identity, benchd.daemon.lock, benchd.daemon.sampling\n"
        "import benchd.daemon.samplers.__main__, benchd.daemon.samplers.procfs, benchd.daemon.samplers.fake\n"
        "print({'torch', 'numpy', 'rich', 'typer', 'paho', 'psutil'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
