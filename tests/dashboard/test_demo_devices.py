"""The records of the demo's simulated devices."""

import random

import pytest
from records_made import made, timing

pytest.importorskip("nicegui", reason="needs nicegui, of the extra dashboard")

from benchd.daemon.records import Case
from benchd.dashboard.demo.devices import DEVICES, derived


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
@pytest.mark.parametrize("batch_size", [1, 64])
def test_the_energy_of_an_inference_times_their_rate_is_the_power(device, batch_size):
    real = made(case=Case(model="square", batch_size=batch_size), timing=timing(3.0))
    for run in (1, 20):
        record = derived(real, device, run, random.Random(run))
        assert record.energy.gross_per_inference_j * record.throughput_per_s == pytest.approx(device.power_w)
