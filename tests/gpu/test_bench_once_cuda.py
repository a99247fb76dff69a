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
    return {(record.case.variant.name, record.case.scenario): record for record in results.read(folder / "out")}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_record_is_of_the_gpu_right_and_held_against_its_floor(records, variant):
    record = records[variant, "single_stream"]
    assert (record.status, record.environment.device, record.check.passed) == ("ok", "cuda", True)
    assert record.kernels_ran == ("triton" if variant == "custom" else None)
    assert record.x_of_floor > 0
    assert (record.probes.copy_bytes_per_s > 0, record.probes.matrix_flops_per_s > 0) == (True, True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_inference_has_parts_and_memory(records, variant):
    record = records[variant, "single_stream"]
    assert set(record.parts) == {"compute", "h2d", "d2h", "enqueue"}
    assert all(part.median_ms > 0 for part in record.parts.values())
    assert record.memory.device_peak_bytes > 0, record.missing


def test_offline_has_two_in_flight(records):
    # eager's runs may end before the host has launched them
    record = records["cudagraph", "offline"]
    assert record.throughput_per_s > 0
    assert "one_in_flight" not in record.flags


@pytest.mark.area("energy")
def test_energy_is_power_times_time(records):
    record = records["eager", "single_stream"]
    if record.energy is None:
        refuse_sensors(record.missing["energy"])
    window = record.processes[0].window
    assert record.energy.source == ("ina3221" if is_tegra() else "nvml")
    assert record.energy.gross_per_inference_j > 0
    power = [summary.mean for name, summary in record.telemetry.items() if name.startswith("power_w")]
    assert any(record.energy.energy_j == pytest.approx(mean_w * window.seconds, rel=0.2) for mean_w in power)


def refuse_sensors(reason):
    """Fail for a GPU whose driver answers, and skip with the reason for one without a driver to ask."""
    try:
        open_nvml()
    except NotAvailable as error:
        pytest.skip(f"{reason}: {error}")
    pytest.fail(f"the driver answers, and there is no energy: {reason}")


@pytest.mark.area("occupancy")
def test_occupancy_is_measured_beside_the_times(records):
    record = records["custom", "single_stream"]
    if record.occupancy is None and "was not allowed" in record.missing["occupancy"]:
        pytest.skip(record.missing["occupancy"])
    assert record.occupancy.kernels > 0, record.missing
    assert 0 < record.occupancy.theoretical <= 1
    assert record.occupancy.measured is not None or record.occupancy.measured_missing
