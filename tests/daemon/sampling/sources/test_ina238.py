import shutil

import machines
import pytest

from benchd.daemon.measuring.capabilities import examine
from benchd.daemon.sampling.sources import present
from benchd.daemon.sampling.sources.ina238 import PERIOD_S, Ina238

CHIP = "sys/bus/i2c/devices/2-0044"


def thor(root, microwatts=25_000_000, hwmon="hwmon1", chip=CHIP):
    files = {"name": "ina238\n", f"hwmon/{hwmon}/name": "ina238\n", f"hwmon/{hwmon}/power1_input": f"{microwatts}\n"}
    machines.write(root, {f"{chip}/{file}": content for file, content in files.items()})
    return root


def test_the_power_of_the_module_is_read_in_microwatts(tmp_path):
    sampler = Ina238(thor(tmp_path))
    assert sampler.unavailable() is None
    (sample,) = sampler.sample()
    assert (sample.metric, sample.value, sample.source, sample.rail) == ("power_w", 25.0, "ina238", "VIN")
    (source,) = sampler.power_sources()
    assert (source.scope, source.total, source.period_s) == ("module input VIN", True, PERIOD_S)


def test_a_driver_that_says_its_interval_is_believed(tmp_path):
    machines.write(thor(tmp_path), {f"{CHIP}/hwmon/hwmon1/update_interval": "102\n"})
    sampler = Ina238(tmp_path)
    assert sampler.unavailable() is None
    assert {(source.period_s, source.averaging_s) for source in sampler.power_sources()} == {(0.102, 0.102)}


def test_it_is_found_again_under_another_number(tmp_path):
    sampler = Ina238(thor(tmp_path))
    assert sampler.unavailable() is None
    sampler._microwatts.close()
    shutil.rmtree(tmp_path / CHIP / "hwmon/hwmon1")
    thor(tmp_path, 26_000_000, "hwmon5")
    with pytest.raises(FileNotFoundError):
        list(sampler.sample())
    assert [sample.value for sample in sampler.sample()] == [26.0]


def test_a_board_without_it_or_with_two_says_so(tmp_path):
    assert Ina238(tmp_path).unavailable().startswith("found 0 INA238 in ")
    assert "ina238" not in present("cpu", root=tmp_path)
    thor(thor(tmp_path), chip=f"{CHIP[:-1]}5")
    assert Ina238(tmp_path).unavailable().startswith("found 2 INA238 in ")


def test_it_is_read_unasked_and_doctor_names_it(tmp_path):
    ina238 = next(finding for finding in examine(thor(tmp_path)) if finding.name == "ina238")
    assert ina238.usable
    assert present("cpu", root=tmp_path)[0] == "ina238"
