import os
import subprocess
import sys

import pytest
from fake_nvml import FIRST, SECOND, FakeNvml

from benchd.daemon.errors import NotAvailable
from benchd.daemon.machine.gpu import Gpu, choose, visible

TWINS = [Gpu(FIRST, "H200"), Gpu(SECOND, "H200")]
UNLIKE = [Gpu(FIRST, "GTX 1050"), Gpu(SECOND, "RTX 4090")]
BUS_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(
    ("listed", "seen"),
    [
        (None, [FIRST, SECOND]),
        ("", []),
        ("0", [FIRST]),
        ("1", [SECOND]),
        ("1,0", [SECOND, FIRST]),
        (" 1, 0", [SECOND, FIRST]),
        ("1,-1,0", [SECOND]),
        ("0,2,1", [FIRST]),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,0", []),
        (f"{SECOND},{FIRST}", [SECOND, FIRST]),
        ("GPU-1", [SECOND]),
        ("GPU-11,GPU-0", [SECOND, FIRST]),
        ("GPU-", []),  # both are called so
        ("GPU-1,GPU-9,GPU-0", [SECOND]),
        ("GPU-1,0", [SECOND]),
        ("0,GPU-1", [FIRST]),
        ("GPU-1,GPU-11", []),
    ],
)
def test_what_cuda_shows(listed, seen):
    environ = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert [gpu.uuid for gpu in visible(TWINS, environ)] == seen


def test_a_device_is_counted_among_the_visible_ones():
    reversed_order = {"CUDA_VISIBLE_DEVICES": "1,0"}
    assert choose(TWINS, "cuda", reversed_order) == SECOND
    assert choose(TWINS, "cuda:1", reversed_order) == FIRST
    assert choose(TWINS, "GPU-0", reversed_order) == FIRST


def test_the_order_of_different_cards_has_to_be_that_of_the_bus():
    with pytest.raises(NotAvailable, match="set CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        choose(UNLIKE, "cuda", {})
    with pytest.raises(NotAvailable, match="set CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        choose(UNLIKE, "cuda", {"CUDA_VISIBLE_DEVICES": "1"})
    assert choose(UNLIKE, "cuda:1", BUS_ORDER) == SECOND
    assert choose(UNLIKE, "cuda", {"CUDA_VISIBLE_DEVICES": "GPU-1"}) == SECOND


@pytest.mark.parametrize(
    ("device", "environ", "reason"),
    [
        ("cuda:2", {}, "no cuda:2: CUDA_VISIBLE_DEVICES=None leaves 2 of 2"),
        ("cuda", {"CUDA_VISIBLE_DEVICES": ""}, "no cuda:0: CUDA_VISIBLE_DEVICES='' leaves 0 of 2"),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "MIG-1a2b"}, "disable MIG"),
        ("MIG-1a2b", {}, "disable MIG"),
        ("GPU-9", {}, f"0 GPUs match GPU-9...; found: {FIRST}, {SECOND}"),
        ("GPU-", {}, "2 GPUs"),
    ],
)
def test_a_device_that_is_not_there(device, environ, reason):
    with pytest.raises(NotAvailable, match=reason):
        choose(TWINS, device, environ)


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
    fake.set(name__1="Another GPU")
    assert "CUDA_DEVICE_ORDER" in resolve("cuda:1", environment)
    assert resolve("cuda:1", environment | BUS_ORDER) == SECOND


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
