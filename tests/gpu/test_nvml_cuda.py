"""NVML against the real library: sensible values in their units, and the memory of this process."""

import time

import pytest
import torch

from benchd.daemon.sampling.sources.nvml import Gpm, Nvml
from benchd.daemon.worker import device_memory
from benchd.exporters.tegra import is_tegra

pytestmark = [pytest.mark.gpu, pytest.mark.area("nvml")]
BYTES = 2**28
# what a GPU of any size lies between
SENSIBLE = {
    "power_w": (1, 2000),
    "gpu_clock_hz": (1e8, 1e10),
    "gpu_temp_c": (1, 120),
    "gpu_utilization_percent": (0, 100),
    "gpu_memory_used_bytes": (1e6, 1e13),
}


@pytest.fixture(scope="module")
def uuid():
    """Return the UUID of the GPU that torch uses, as NVML names it."""
    if is_tegra():
        pytest.skip("NVML reads nothing on a Jetson")
    return f"GPU-{str(torch.cuda.get_device_properties(0).uuid).removeprefix('GPU-')}"


def test_values_are_sensible_and_energy_rises(uuid):
    source = Nvml(uuid)
    assert source.unavailable() is None
    by_metric = {}
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        for sample in source.sample():
            by_metric.setdefault(sample.metric, []).append(sample.value)
        time.sleep(0.05)
    for metric, (least, most) in SENSIBLE.items():
        assert by_metric.get(metric), f"no {metric}"
        assert all(least <= value <= most for value in by_metric[metric]), (metric, by_metric[metric])
    energy = by_metric.get("energy_counter_j", [])
    assert energy == sorted(energy)


def test_the_memory_of_this_process_grows_by_what_it_takes(uuid):
    torch.zeros(1, device="cuda")
    torch.cuda.empty_cache()  # else the tests before this one may have left enough
    before = device_memory.held(uuid)
    if isinstance(before, str) or before.own is None:
        pytest.skip(str(before))
    tensor = torch.zeros(BYTES, dtype=torch.uint8, device="cuda")
    assert device_memory.held(uuid).own - before.own == pytest.approx(BYTES, rel=0.1)
    del tensor
    torch.cuda.empty_cache()


def test_counters_of_hopper_and_newer_are_shares(uuid):
    counters = Gpm(uuid)
    reason = counters.unavailable()
    if reason:
        pytest.skip(reason)
    time.sleep(0.3)
    shares = [sample.value for sample in counters.sample()]
    assert shares
    assert all(0 <= share <= 100 for share in shares)
