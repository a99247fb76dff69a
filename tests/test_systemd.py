"""The units: systemd reads them, their exposure stays low, every hardening option has its reason, and paths agree."""

import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from broker import program

from benchd.daemon.delivery.broker import CREDENTIAL
from benchd.daemon.machine import environment, lock
from benchd.daemon.measuring import process
from benchd.daemon.sampling import child
from benchd.daemon.service import background, service

SYSTEMD = Path(__file__).parents[1] / "systemd"
UNITS = ["benchd.service", "bench-once@.service"]  # those that need the GPU
DASHBOARD = "benchd-dashboard.service"
EXPOSURE = {**dict.fromkeys(UNITS, 1.7), DASHBOARD: 1.2}
HARDENING = re.compile(
    r"^((?:NoNew|Capability|Ambient|Protect|Private|Restrict|Lock|SystemCall|RemoveIPC|DevicePolicy)\w*)=", re.MULTILINE
)


def unit(name):
    return (SYSTEMD / name).read_text()


@pytest.fixture
def installed(tmp_path):
    """Return a folder with the units, their program replaced by one that exists."""
    for path in SYSTEMD.glob("*.[st][ei][rm]*"):
        text = re.sub(r"/opt/benchd/current/bin/\S+|/usr/bin/jetson_clocks", shutil.which("true"), path.read_text())
        (tmp_path / path.name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("name", [*EXPOSURE, "bench-once@.timer", "jetson-clocks.service"])
def test_systemd_finds_nothing_wrong(installed, name):
    command = [program("systemd-analyze"), "verify", "--man=no", str(installed / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (
        done.returncode,
        [line for line in done.stderr.splitlines() if "benchd" in line or "bench-once" in line],
    ) == (0, [])


@pytest.mark.parametrize("name", EXPOSURE)
def test_the_exposure_stays_low(installed, name):
    command = [program("systemd-analyze"), "security", "--offline=true", f"--threshold={EXPOSURE[name] * 10:.0f}"]
    done = subprocess.run([*command, str(installed / name)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-500:]


def test_every_hardening_option_of_the_service_has_its_reason_in_the_line_above():
    lines = unit("benchd.service").splitlines()
    options = [(above, line) for above, line in pairwise(lines) if HARDENING.match(line)]
    assert len(options) > 20
    assert [line for above, line in options if not above.startswith("# ")] == []


def test_no_single_wait_is_as_long_as_the_watchdog_s():
    """Each follows upon a last sign of life that may be WATCHDOG_S old."""
    watchdog_s = float(re.search(r"^WatchdogSec=(\d+)$", unit("benchd.service"), re.MULTILINE)[1])
    waits_s = {
        "the sampler does not start": child.START_S + 3 * child.STOP_S,
        "a worker does not exit": process.TERMINATE_GRACE_S + process.EXIT_GRACE_S + child.FLUSH_S,
        "the tools that describe the machine hang": 2 * environment.TOOL_TIMEOUT_S,
    }
    longest_s = watchdog_s - background.WATCHDOG_S - service.TICK_S
    assert [why for why, wait_s in waits_s.items() if wait_s >= longest_s] == []


@pytest.mark.parametrize("name", UNITS)
def test_the_driver_is_there_before_its_devices_are_allowed_by_their_numbers(name):
    text = unit(name)
    assert "DeviceAllow=char-nvidia-uvm rw" in text
    for option in ("Wants", "After"):
        assert "modprobe@nvidia_uvm.service" in re.search(rf"^{option}=(.+)$", text, re.MULTILINE)[1].split()


@pytest.mark.parametrize("name", UNITS)
def test_a_worker_that_is_killed_for_memory_ends_no_other_case(name):
    assert {"KillMode=mixed", "OOMPolicy=continue"} <= set(unit(name).splitlines())


def test_the_service_is_started_again_for_ever():
    assert {"StartLimitIntervalSec=0", "Restart=on-failure"} <= set(unit("benchd.service").splitlines())


def test_units_and_code_agree_on_paths():
    service = unit("benchd.service")
    credential = re.compile(rf"^LoadCredential={CREDENTIAL}:(.+)$", re.MULTILINE)
    assert f"f {credential.search(service)[1]} 0600 " in unit("tmpfiles.conf")
    assert f"to=$root{credential.search(unit(DASHBOARD))[1]}\n" in unit("install.sh")
    assert f"f {lock.RUN_LOCK / lock.NAME} 0644 " in unit("tmpfiles.conf")
    groups = re.search(r"^SupplementaryGroups=(.+)$", service, re.MULTILINE)[1].split()
    assert [group for group in groups if f"g {group} -" not in unit("sysusers.conf")] == []


def test_nothing_that_breaks_cuda_or_old_systemd_is_set():
    for name in UNITS:
        for option in ("PrivateDevices", "MemoryDenyWriteExecute", "ProcSubset", "PrivateNetwork", "ImportCredential"):
            assert f"\n{option}=" not in unit(name)
    assert "\nType=notify\n" in unit("benchd.service")


def test_every_file_stands_in_the_readme():
    text = unit("README.md")
    files = [path for path in SYSTEMD.rglob("*") if path.is_file() and path.name != "README.md"]
    assert [path.name for path in files if f"{path.relative_to(SYSTEMD)}`" not in text] == []
