import os
import subprocess
import sys

import pytest
from fake_nvml import FIRST, SECOND, FakeNvml

from benchd.daemon.errors import NotAvailable
from benchd.daemon.machine.gpu import choose

TWINS = [FIRST, SECOND]


@pytest.mark.parametrize(
    ("device", "listed", "uuid"),
    [
        ("cuda", None, FIRST),
        ("cuda:1", None, SECOND),
        ("cuda", "1", SECOND),
        ("cuda", " 1, 0", SECOND),
        ("cuda:1", "1,0", FIRST),
        ("cuda:1", f"{SECOND},{FIRST}", FIRST),
        ("cuda", "GPU-1", SECOND),
        ("GPU-0", "1", FIRST),
    ],
)
def test_a_device_is_counted_among_the_visible_ones(device, listed, uuid):
    assert choose(TWINS, device, listed) == uuid


@pytest.mark.parametrize(
    ("device", "listed", "reason"),
    [
        ("cuda:2", None, "no cuda:2: CUDA_VISIBLE_DEVICES=None, and NVML has 2 GPUs"),
        ("cuda:1", "1", "no cuda:1: CUDA_VISIBLE_DEVICES='1', and"),
        ("cuda", "", f"0 GPUs match ''; found: {FIRST}, {SECOND}"),
        ("cuda", "-1", "0 GPUs match '-1'"),
        ("cuda", "MIG-1a2b", "disable MIG"),
        ("MIG-1a2b", None, "disable MIG"),
        ("GPU-9", None, "0 GPUs match 'GPU-9'"),
        ("GPU-", None, "2 GPUs"),
    ],
)
def test_a_device_that_is_not_there(device, listed, reason):
    with pytest.raises(NotAvailable, match=reason):
        choose(TWINS, device, listed)


CODE = """
import sys
from benchd.daemon.errors import NotAvailable
from benchd.daemon.machine.gpu import cuda_uuid
try:
    print(cuda_uuid(sys.argv[1]))
except NotAvailable as error:
    print(error)
"""


def resolve(device, environment, code=CODE):
    command = [sys.executable, "-c", code, device]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def test_through_the_real_binding(tmp_path):
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    fake = FakeNvml(tmp_path)
    environment = os.environ | fake.environment
    assert resolve("cuda", environment | {"CUDA_VISIBLE_DEVICES": "1,0"}) == SECOND
    assert resolve("cuda", environment | {"CUDA_VISIBLE_DEVICES": "GPU-1"}) == SECOND
    assert resolve("cuda:1", environment) == SECOND


MEASURED = "import sys; from benchd.daemon.machine.gpu import measured; print(measured(sys.argv[1]))"


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:0"])
def test_a_tegra_s_uuid_is_none_that_cuda_takes(device, tmp_path):
    """Its NVML, from JetPack 6 on, gives one without the `GPU-`."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    fake = FakeNvml(tmp_path)
    assert resolve(device, os.environ | fake.environment, MEASURED) == FIRST
    fake.set(cards=1, uuid__0=FIRST.removeprefix("GPU-"), name__0="Orin (nvgpu)", fail=3)
    assert resolve(device, os.environ | fake.environment, MEASURED) == "None"


@pytest.mark.parametrize(("code", "remedy"), [(9, "modprobe nvidia"), (18, "reboot"), (999, "nvidia-smi")])
def test_a_driver_that_does_not_start(code, remedy, tmp_path):
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    fake = FakeNvml(tmp_path)
    fake.set(init=code)
    assert remedy in resolve("cuda", os.environ | fake.environment)


def test_no_library(tmp_path):
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    (tmp_path / "libnvidia-ml.so.1").write_text("no library")
    reason = resolve("cuda", os.environ | {"LD_LIBRARY_PATH": str(tmp_path)})
    assert "install the NVIDIA driver" in reason
    assert "not on a Jetson" in reason  # whose own driver Ubuntu's would replace
