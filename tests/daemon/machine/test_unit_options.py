"""What an installed unit keeps from the service: the real unit and drop-ins in a tree with nodes of this machine's."""

import grp
import io
import os
import shutil
from pathlib import Path

import pytest
from machines import write

from benchd.daemon.commands import doctor
from benchd.daemon.errors import NotAvailable
from benchd.daemon.machine import environment, sandbox

SYSTEMD = Path(__file__).parents[3] / "systemd"
# one that files may be given to, and not root's
GROUP = grp.getgrgid(os.getegid()) if os.getegid() else grp.getgrnam("daemon")
DEVICES = "Character devices:\n  1 {name}\n 13 input\n\nBlock devices:\n  1 ramdisk\n"


@pytest.fixture
def root(tmp_path):
    """A tree with our unit whose GPU node is /dev/null under another name: major number 1, open to all."""
    target = tmp_path / sandbox.UNIT
    target.parent.mkdir(parents=True)
    shutil.copy(SYSTEMD / "benchd.service", target)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").symlink_to("/dev/null")
    driver(tmp_path, "nvidia")
    return tmp_path


def driver(root, name):
    write(root, {"proc/devices": DEVICES.format(name=name)})


def drop_in(root, text):
    write(root, {f"{sandbox.UNIT}.d/override.conf": f"[Service]\n{text}\n"})


def reasons(root):
    return {access.path.name: access.reason for access in sandbox.examine(root)}


def test_a_listed_device_is_free(root):
    assert reasons(root) == {"nvidia0": None}
    drop_in(root, "DeviceAllow=")
    assert "DeviceAllow" in reasons(root)["nvidia0"]
    drop_in(root, "DeviceAllow=\nDeviceAllow=char-nvid* r")
    assert "DeviceAllow" in reasons(root)["nvidia0"]
    drop_in(root, "DeviceAllow=\nDeviceAllow=/dev/nvidia0 rw")
    assert reasons(root) == {"nvidia0": None}


def test_a_device_that_no_line_names_is_shown_with_the_line_to_add(root):
    driver(root, "nvidia-new")
    (access,) = sandbox.examine(root)
    assert access.reason == "DevicePolicy=closed, and no DeviceAllow= lists it"
    assert access.remedy == "DeviceAllow=char-nvidia-new rw"
    drop_in(root, (SYSTEMD / "drop-ins/jetson.conf").read_text())
    assert reasons(root) == {"nvidia0": None}


def test_protect_clock_closes_a_jetson_s_devices_before_systemd_253(root):
    """The unit as installed there until now; the drop-in that ships turns it off."""
    drop_in(root, "DevicePolicy=auto\nDeviceAllow=")
    (access,) = sandbox.examine(root)
    assert access.reason.startswith("ProtectClock=")
    assert access.remedy == "ProtectClock=no"
    drop_in(root, (SYSTEMD / "drop-ins/jetson.conf").read_text())
    assert reasons(root) == {"nvidia0": None}


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("echo LoadState=loaded; echo ActiveState=active; echo StatusText=a=b", ("active", "a=b")),
        ("echo LoadState=not-found; echo ActiveState=inactive; echo StatusText=", None),
        ("echo Failed to connect to bus >&2; exit 1", None),
        ("echo Running in chroot, ignoring", None),
        ("exec /bin/sleep 60", None),
        (None, None),
    ],
)
def test_the_status_of_a_service_that_systemctl_cannot_tell_is_none(tmp_path, monkeypatch, script, found):
    write(tmp_path, {"run/systemd/system/a": "", "bin/systemctl": f"#!/bin/sh\n{script}\n"})
    (tmp_path / "bin/systemctl").chmod(0o755 if script else 0o644)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(environment, "TOOL_TIMEOUT_S", 0.5)
    assert sandbox.status(tmp_path) == found
    assert sandbox.status(tmp_path / "bin") is None


def test_a_group_that_the_unit_lacks_is_named(root):
    write(root, {"run/jtop.sock": "", "sys/class/powercap/intel-rapl:0/energy_uj": "1\n"})
    (root / "run/jtop.sock").chmod(0o660)
    os.chown(root / "run/jtop.sock", -1, GROUP.gr_gid)
    (root / "sys/class/powercap/intel-rapl:0/energy_uj").chmod(0o400)
    by_name = reasons(root)
    assert by_name["jtop.sock"] == f"SupplementaryGroups= lacks {GROUP.gr_name}"
    assert "only its owner" in by_name["energy_uj"]
    drop_in(root, f"SupplementaryGroups={GROUP.gr_name}")
    assert reasons(root)["jtop.sock"] is None


def test_the_doctor_prints_them_and_exits_with_7(root):
    out = io.StringIO()
    assert doctor.run_unit(out, root, as_json=False) == 0
    driver(root, "nvidia-new")
    assert doctor.run_unit(out, root, as_json=False) == 7
    free, blocked = out.getvalue().splitlines()
    assert free.startswith("yes  ")
    assert blocked.startswith("no   ")
    assert blocked.endswith("DeviceAllow=char-nvidia-new rw   # sudo systemctl edit benchd")


def test_without_a_unit_it_says_what_installs_one(tmp_path):
    with pytest.raises(NotAvailable, match=r"install\.sh"):
        list(sandbox.examine(tmp_path))
