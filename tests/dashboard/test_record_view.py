"""What the page of one record says where a device, a process or a sensor is missing."""

import msgspec
import pytest
from records_made import ENVIRONMENT, made

from benchd.daemon.records import Memory, ProcessResult, Stages, Summary
from benchd.dashboard.messages import flat
from benchd.dashboard.views import record

ON_GPU = msgspec.structs.replace(ENVIRONMENT, device="cuda")


@pytest.mark.parametrize(
    ("environment", "device_bytes", "shown"),
    [
        (ENVIRONMENT, None, ("300 MiB", None)),
        (ON_GPU, 50 * 2**20, ("50 MiB", "300 MiB")),
        (ON_GPU, None, (None, "300 MiB")),
    ],
)
def test_memory_is_that_of_the_device_as_everywhere_and_the_process_has_its_own(environment, device_bytes, shown):
    memory = Memory(rss_peak_bytes=300 * 2**20, device_peak_bytes=device_bytes)
    result = made(environment=environment, memory=memory)
    fields = record._result(flat(result, 0.0), result)
    assert (fields["memory"], fields["memory of the process"]) == shown


def test_a_stage_takes_the_median_of_an_even_number_of_processes_too():
    times_s = (4.0, 1.0, None)
    processes = [ProcessResult(status="ok", stages=Stages(build_s=time_s)) for time_s in times_s]
    assert record._stages(processes) == {"build": "2.5 s"}


def test_each_clock_and_temperature_has_the_name_of_its_sensor():
    means = {"cpu_clock_hz": 1e9, "cpu_clock_hz@cpu0-3": 2e9, "gpu_memory_clock_hz": 3e9}
    means |= {"zone_temp_c@soc-thermal": 51.2, "zone_temp_c@gpu-thermal": 47.0, "gpu_temp_c": 46.0}
    result = made(telemetry={name: Summary(mean, mean, mean, 9, "sysfs") for name, mean in means.items()})
    fields = record._result(flat(result, 0.0), result)
    assert fields["clocks"] == ["cpu 1000 MHz", "cpu cpu0-3 2000 MHz", "gpu_memory 3000 MHz"]
    assert fields["temperature"] == ["zone soc-thermal 51.2 °C", "zone gpu-thermal 47 °C", "gpu 46 °C"]
