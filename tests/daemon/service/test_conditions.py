"""What a pass waits for, read from fake machines and judged at given times."""

import os
import subprocess
import sys

import pytest
from fake_nvml import FIRST, FakeNvml
from machines import write

from benchd.daemon.config import Conditions
from benchd.daemon.service.conditions import Judge, Readings, read

COOL = Readings(temperature_c=40.0, gpu_load_percent=1.0, system_load=0.1, power_mode="MAXN", on_mains=True)
DEVFREQ = {
    "sys/class/devfreq/17000000.gpu/device/load": "437\n",
    "sys/class/devfreq/17000000.gpu/cur_freq": "306000000\n",
}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A board whose tools are absent."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    write(
        tmp_path,
        {
            "sys/class/thermal/thermal_zone0/temp": "41000\n",
            "sys/class/thermal/thermal_zone1/temp": "56500\n",
            **DEVFREQ,
            "sys/class/power_supply/BAT0/status": "Charging\n",
            "sys/firmware/acpi/platform_profile": "balanced\n",
            "proc/loadavg": "0.52 0.58 0.59 1/467 12345\n",
        },
    )
    return tmp_path


def test_a_board_is_read_from_its_files(machine):
    assert read(None, machine) == Readings(56.5, 43.7, 0.52, "balanced", True)
    write(machine, {"sys/class/power_supply/BAT0/status": "Discharging\n"})
    assert read(None, machine).on_mains is False


def test_the_battery_of_a_mouse_is_not_the_machine_s(machine):
    mouse = "sys/class/power_supply/hidpp_battery_0"
    write(machine, {f"{mouse}/status": "Discharging\n", f"{mouse}/scope": "Device\n"})
    assert read(None, machine).on_mains is True
    write(machine, {f"{mouse}/scope": "System\n"})
    assert read(None, machine).on_mains is False


def test_a_load_that_makes_no_sense_is_none(machine):
    write(machine, {"sys/class/devfreq/17000000.gpu/device/load": "4370\n"})
    assert read(None, machine).gpu_load_percent is None


def test_a_tool_tells_the_power_mode_where_no_file_does(tmp_path, monkeypatch):
    write(tmp_path, {"bin/nvpmodel": "#!/bin/sh\necho 'NV Power Mode: 15W'; echo 2\n"})
    (tmp_path / "bin/nvpmodel").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert read(None, tmp_path) == Readings(None, None, None, "15W", None)


def load_under(fake, root):
    look = f"""
from pathlib import Path
from benchd.daemon.service.conditions import read
print(read({FIRST!r}, Path({str(root)!r})).gpu_load_percent)
"""
    command = [sys.executable, "-c", look]
    done = subprocess.run(command, env=os.environ | fake.environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(("settings", "load"), [({"utilization": 12}, "12.0"), ({"init": 9}, "None")])
def test_nvml_tells_the_load_of_the_gpu_that_is_measured(tmp_path, settings, load):
    fake = FakeNvml(tmp_path)
    fake.set(**settings)
    assert load_under(fake, tmp_path) == load


def test_devfreq_tells_the_load_where_a_tegra_s_nvml_tells_none(tmp_path):
    fake = FakeNvml(tmp_path)
    fake.set(fail__nvmlDeviceGetUtilizationRates=3)
    write(tmp_path, DEVFREQ)
    assert load_under(fake, tmp_path) == "43.7"


@pytest.mark.parametrize(
    ("wanted", "now", "reason"),
    [
        ({"temperature_below_c": 40.0}, COOL, "temperature 40 C, not below 40"),
        ({"system_load_below": 0.05}, COOL, "system load 0.1, not below 0.05"),
        ({"power_mode": "15W"}, COOL, "power mode MAXN, not 15W"),
        ({"on_mains": True}, Readings(None, None, None, None, False), "on battery"),
        ({"temperature_below_c": 40.0}, Readings(None, None, None, None, None), "temperature cannot be read here"),
        ({"power_mode": "15W"}, Readings(None, None, None, None, None), "power mode cannot be read here"),
        ({"on_mains": True}, Readings(None, None, None, None, None), "the power supply cannot be read here"),
        ({"temperature_below_c": 50.0, "system_load_below": 1.0, "power_mode": "MAXN", "on_mains": True}, COOL, None),
        ({}, Readings(None, None, None, None, None), None),
    ],
)
def test_what_does_not_hold_is_the_reason(wanted, now, reason):
    assert Judge().unmet(Conditions(**wanted), now, 0.0) == reason


def test_the_gpu_has_to_stay_quiet_for_half_a_minute():
    judge, wanted = Judge(), Conditions(gpu_load_below_percent=10.0)
    busy = Readings(None, 11.0, None, None, None)
    assert judge.unmet(wanted, COOL, 0.0) == "GPU quiet for 0 of 30 s"
    assert judge.unmet(wanted, busy, 20.0) == "GPU load 11 %, not below 10"
    assert looks(judge, wanted, [30.0, 35.0, 40.0, 45.0, 50.0, 55.0]) == "GPU quiet for 25 of 30 s"
    assert judge.unmet(wanted, COOL, 60.0) is None


def looks(judge, wanted, times_s):
    """Look at a quiet GPU at each of these times; return the last judgement."""
    return [judge.unmet(wanted, COOL, t_s) for t_s in times_s][-1]


def test_a_gpu_that_nobody_looked_at_was_not_quiet():
    judge, wanted = Judge(), Conditions(gpu_load_below_percent=10.0)
    assert looks(judge, wanted, range(0, 31, 5)) is None
    assert judge.unmet(wanted, COOL, 86400.0) == "GPU quiet for 0 of 30 s"


def test_a_gpu_that_is_quiet_enough_for_one_suite_was_not_so_for_another():
    judge, some = Judge(), Readings(None, 30.0, None, None, None)
    wanted = Conditions(gpu_load_below_percent=50.0)
    assert [judge.unmet(wanted, some, t_s) for t_s in range(0, 31, 5)][-1] is None
    assert judge.unmet(Conditions(gpu_load_below_percent=10.0), COOL, 35.0) == "GPU quiet for 0 of 30 s"
