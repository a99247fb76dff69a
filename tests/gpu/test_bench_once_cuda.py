"""`bench-once --device cuda` from its command line to its records, with all that a GPU adds to one."""

import pytest

from benchd.daemon.errors import NotAvailable
from benchd.daemon.machine.gpu import open_nvml
from benchd.daemon.verdicts import results
from benchd.exporters.tegra import is_tegra

pytestmark = [pytest.mark.gpu, pytest.mark.area("bench-once")]
WHAT = ("--models", "snn_onepass", "--variants", "eager,custom,cudagraph", "--batch-sizes", "4")
HOW = ("--scenario", "single_stream,offline", "--preset", "quick", "--output", "out")
VARIANTS = ["eager", "custom", "cudagraph"]


@pytest.fixture(scope="module")
def records(command, folder):
    """Return the records of a run by variant and scenario."""
    command("bench-once", "--device", "cuda", *WHAT, *HOW)
    return {(one.case.variant.name, one.case.scenario): one for one in results.read(folder / "out")}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_record_is_of_the_gpu_right_and_held_against_its_floor(records, variant):
    one = records[variant, "single_stream"]
    assert (one.status, one.environment.device, one.check.passed) == ("ok", "cuda", True)
    assert one.kernels_ran == ("triton" if variant == "custom" else None)
    assert one.x_of_floor > 0
    assert (one.probes.copy_bytes_per_s > 0, one.probes.matrix_flops_per_s > 0) == (True, True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_inference_has_parts_and_memory(records, variant):
    one = records[variant, "single_stream"]
    assert set(one.parts) == {"compute", "h2d", "d2h", "enqueue"}
    assert all(part.median_ms > 0 for part in one.parts.values())
    assert one.memory.device_peak_bytes > 0, one.missing


def test_offline_has_two_in_flight(records):
    # eager's runs may end before the host has launched them
    one = records["cudagraph", "offline"]
    assert one.throughput_per_s > 0
    assert "one_in_flight" not in one.flags


@pytest.mark.area("energy")
def test_energy_is_power_times_time(records):
    one = records["eager", "single_stream"]
    if one.energy is None:
        refuse_sensors(one.missing["energy"])
    window = one.processes[0].window
    assert one.energy.source == ("ina3221" if is_tegra() else "nvml")
    assert one.energy.gross_per_inference_j > 0
    power = [summary.mean for name, summary in one.telemetry.items() if name.startswith("power_w")]
    assert any(one.energy.energy_j == pytest.approx(mean_w * window.seconds, rel=0.2) for mean_w in power)


def refuse_sensors(reason):
    """Fail for a GPU whose driver answers, and skip with the reason for one without a driver to ask."""
    try:
        open_nvml()
    except NotAvailable as error:
        pytest.skip(f"{reason}: {error}")
    pytest.fail(f"the driver answers, and there is no energy: {reason}")


@pytest.mark.area("occupancy")
def test_occupancy_is_measured_beside_the_times(records):
    one = records["custom", "single_stream"]
    if one.occupancy is None and "was not allowed" in one.missing["occupancy"]:
        pytest.skip(one.missing["occupancy"])
    assert one.occupancy.kernels > 0, one.missing
    assert 0 < one.occupancy.theoretical <= 1
    assert one.occupancy.measured is not None or one.occupancy.measured_missing
