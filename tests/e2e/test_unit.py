"""The service under a systemd that was booted for it: installed by install.sh, told to reload, killed, hung, stopped.

`make test-unit` shows the figures, each beside its target; they decide nothing here.
"""

import json
import sys
import time
from pathlib import Path

import pytest
import wheels_made
from booted import booted
from broker import program

ROOT = Path(__file__).parents[2]
SERVICE = "benchd.service"
INSTALL = f"/srv/{ROOT.name}/systemd/install.sh"
PREFIX = f"/srv/{Path(sys.base_prefix).name}"
PYTHON = f"{PREFIX}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
INSTALLER = ("env", f"PYTHON={PYTHON}", INSTALL, "--wheels", "/srv/wheels")
PORT = 1883
ACCOUNT = ("-p", str(PORT), "-u", "board", "-P", "secret")
SETTINGS = f"listener {PORT} 127.0.0.1\nallow_anonymous false\npassword_file /etc/broker/users\nuser root\n"
SITE_TOML = f"""
[device]
id = "board"
name = "Test board"

[mqtt]
url = "mqtt://board@127.0.0.1:{PORT}"
"""
QUICK_TOML = """
[limits]
warm_up_cap_s = 0.2
measure_cap_s = 0.2
check_images = 1

[[suite]]
models = ["square"]
options = { size = [16] }
variants = ["eager"]
preset = "quick"
"""
BENCHD = "/opt/benchd/current/bin/benchd"
OTHER = {"schema": "benchd.status/1", "state": "online", "session": "other", "boot_id": "other"}
SOON = "[Timer]\nOnCalendar=\nOnActiveSec=1\nAccuracySec=1s\nRandomizedDelaySec=0\n"
IDLE_S = 10.0


@pytest.fixture
def machine(tmp_path):
    ours = wheels_made.build_ours(tmp_path)
    python, packages = Path(sys.base_prefix), wheels_made.PACKAGES
    wheels = wheels_made.fill(tmp_path / "wheels", ours, "constraints.txt", Path("/srv", packages.name))
    (tmp_path / "machine").mkdir()
    with booted(tmp_path / "machine", ROOT, python, packages, wheels) as machine:
        yield machine


@pytest.mark.slow
def test_the_life_of_the_service(machine):
    begin_broker(machine)
    install(machine)
    takes_its_password_from_a_credential(machine)
    tell("start to READY", f"{start_to_ready_s(machine):.2f} s", "1 s")
    is_shut_in(machine)
    a_jetson_s_gpu_opens_under_the_rule_of_systemd_249(machine)
    reloads(machine)
    idles(machine)
    tell("kill -9 to running again", f"{back_after_s(machine, 'KILL'):.2f} s", "3 s")
    tell("hang to running again", f"{back_after_s(machine, 'STOP'):.1f} s", "35 s")
    assert machine.show(SERVICE, "NRestarts") == "2"
    measures_by_a_timer(machine)
    gives_way_to_another_of_its_id(machine)
    is_shown_by_the_dashboard(machine)
    stops(machine)


def tell(what, value, target):
    sys.stdout.write(f"\n{what}: {value} (target {target})")


def begin_broker(machine):
    machine.write("/etc/broker/mosquitto.conf", SETTINGS)
    machine.run(program("mosquitto_passwd"), "-c", "-b", "/etc/broker/users", "board", "secret")
    machine.run("systemd-run", "--quiet", "--unit=broker", program("mosquitto"), "-c", "/etc/broker/mosquitto.conf")


def install(machine):
    machine.write("/etc/benchd/benchd.toml", SITE_TOML)
    # a shared libpython is looked for where it was built for, which may be a home, and then here
    machine.write("/etc/ld.so.conf.d/000-python.conf", f"{PREFIX}/lib\n")
    machine.run("ldconfig")
    machine.run(*INSTALLER, "--device-name", "Lab board")
    assert machine.show(SERVICE, "ActiveState") == "active"
    assert machine.succeeds("systemctl", "is-enabled", SERVICE)


def takes_its_password_from_a_credential(machine):
    machine.until(lambda: "Not authorized" in status(machine), SERVICE)
    machine.write("/etc/benchd/mqtt_password", "secret")
    machine.run("systemctl", "restart", SERVICE)
    machine.until(lambda: status(machine) == "idle; mqtt up", SERVICE)
    assert heard(machine, "status")["state"] == "online"
    assert heard(machine, "info")["name"] == "Lab board"


def status(machine):
    return machine.show(SERVICE, "StatusText")


def heard(machine, kind):
    """Return what stands on the broker under this topic of the board."""
    return json.loads(machine.run("mosquitto_sub", *ACCOUNT, "-C", "1", "-W", "20", "-t", f"benchd/v1/board/{kind}"))


def start_to_ready_s(machine):
    names = ("ActiveEnterTimestampMonotonic", "ExecMainStartTimestampMonotonic")
    ready_us, begun_us = (int(machine.show(SERVICE, name)) for name in names)
    return (ready_us - begun_us) / 1e6


def is_shut_in(machine):
    """What the unit's options promise, tried by a process under them; of a blocked device doctor says the same."""
    machine.run("mknod", "--mode=666", "/dev/nvidia0", "c", "10", "229")  # fuse's, which anybody may open elsewhere
    tried = "! touch /etc/its-own && ! ls /root && ! head -c 0 /dev/nvidia0 && touch $STATE_DIRECTORY/its-own"
    machine.write(f"/etc/systemd/system/{SERVICE}.d/try.conf", f"[Service]\nExecStartPre=/bin/sh -c '{tried}'\n")
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "restart", SERVICE)
    assert "DeviceAllow=char-misc rw" in machine.run(BENCHD, "doctor", "--unit", code=7)
    machine.run("rm", "/dev/nvidia0", f"/etc/systemd/system/{SERVICE}.d/try.conf")
    machine.run("systemctl", "daemon-reload")
    machine.until(lambda: status(machine) == "idle; mqtt up", SERVICE)
    assert "active: idle; mqtt up" in machine.run(BENCHD, "doctor", "--unit")


def a_jetson_s_gpu_opens_under_the_rule_of_systemd_249(machine):
    """ProtectClock=yes adds DeviceAllow=char-rtc there, which is written out here for a newer systemd."""
    drop_in = (ROOT / "systemd/drop-ins/jetson.conf").read_text()
    older = f"{drop_in}ProtectClock=yes\n"
    machine.run("mknod", "--mode=666", "/dev/nvmap", "c", "10", "229")
    machine.write("/etc/benchd/gpu.toml", QUICK_TOML)
    shut = machine_as_249(machine, older)
    assert "DeviceAllow=" in shut["problem"]
    record = json.loads(machine.run("tail", "-n", "1", "/var/lib/bench-once/gpu/records.jsonl"))
    assert (record["status"], record["reason"]) == ("unsupported", shut["problem"])
    machine.run(BENCHD, "doctor", "--unit", code=7)
    assert machine_as_249(machine, drop_in)["problem"] is None
    machine.run(BENCHD, "doctor", "--unit")
    machine.run("rm", "/dev/nvmap")
    restarted_with(machine, "")


def machine_as_249(machine, drop_in):
    """Return the service's health under a drop-in, once the case of gpu.toml has run under it too."""
    restarted_with(machine, drop_in)
    if machine.show(SERVICE, "ProtectClock") == "yes":
        restarted_with(machine, f"{drop_in}DeviceAllow=char-rtc r\n")
    machine.run("systemctl", "start", "bench-once@gpu.service")
    return heard(machine, "health")


def restarted_with(machine, drop_in):
    for unit in (SERVICE, "bench-once@.service"):
        machine.write(f"/etc/systemd/system/{unit}.d/jetson.conf", drop_in)
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "restart", SERVICE)
    machine.until(lambda: "mqtt up" in status(machine), SERVICE)


def reloads(machine):
    machine.write("/etc/benchd/benchd.toml", SITE_TOML.replace("Test board", "Renamed"))
    machine.run("systemctl", "reload", SERVICE)
    machine.until(lambda: heard(machine, "info")["name"] == "Renamed", SERVICE)
    machine.until(lambda: status(machine) == "idle; mqtt up", SERVICE)


def idles(machine):
    before = int(machine.show(SERVICE, "CPUUsageNSec"))
    time.sleep(IDLE_S)
    share = (int(machine.show(SERVICE, "CPUUsageNSec")) - before) / (IDLE_S * 1e9)
    tell("idle processor", f"{share:.2%} of a core", "0.5 %")
    tell("idle resident", f"{heard(machine, 'health')['rss_bytes'] / 1e6:.0f} MB", "60 MB")


def back_after_s(machine, signal):
    """Send the main process a signal; return how many seconds later another one is ready."""
    before = machine.show(SERVICE, "MainPID")
    begun_s = time.monotonic()
    machine.run("kill", "-s", signal, before)
    machine.until(
        lambda: machine.show(SERVICE, "MainPID") != before and machine.show(SERVICE, "ActiveState") == "active", SERVICE
    )
    return time.monotonic() - begun_s


def measures_by_a_timer(machine):
    unit, records = "bench-once@quick.service", "/var/lib/bench-once/quick/records.jsonl"
    machine.write("/etc/benchd/quick.toml", QUICK_TOML)
    machine.write("/etc/systemd/system/bench-once@quick.timer.d/soon.conf", SOON)
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "start", "bench-once@quick.timer")
    machine.until(lambda: machine.show(unit, "ExecMainExitTimestampMonotonic") not in {"", "0"}, unit)
    assert machine.show(unit, "Result") == "success", machine.run("journalctl", "--no-pager", f"--unit={unit}")
    assert json.loads(machine.run("cat", records))["status"] == "ok"


def gives_way_to_another_of_its_id(machine):
    machine.run("mosquitto_pub", *ACCOUNT, "-t", "benchd/v1/board/status", "-m", json.dumps(OTHER))
    machine.until(lambda: "in use by another machine" in status(machine), SERVICE)
    assert "change [device] id on one of them" in machine.run(BENCHD, "doctor")
    machine.run("systemctl", "restart", SERVICE)
    machine.until(lambda: status(machine) == "idle; mqtt up", SERVICE)


def is_shown_by_the_dashboard(machine):
    unit, page = "benchd-dashboard.service", "http://127.0.0.1:8420/"
    machine.write("/etc/benchd/dashboard_mqtt_password", "secret")
    machine.run(*INSTALLER, "--dashboard", "--mqtt", f"mqtt://board@127.0.0.1:{PORT}")
    assert machine.succeeds("systemctl", "is-enabled", unit)
    machine.until(lambda: status(machine) == "idle; mqtt up", SERVICE)
    look = f"from urllib.request import urlopen; assert urlopen('{page}').status == 200"
    machine.until(lambda: machine.succeeds("/opt/benchd/current/bin/python", "-c", look), unit)
    machine.run("systemctl", "stop", unit)
    assert machine.show(unit, "Result") == "success"


def stops(machine):
    machine.run("systemctl", "disable", "--now", SERVICE)
    assert machine.show(SERVICE, "Result") == "success"
    assert heard(machine, "status")["state"] == "offline"
    assert f"{SERVICE.removesuffix('.service')} is off and stays off" in machine.run(*INSTALLER)
    assert machine.show(SERVICE, "ActiveState") == "inactive"
    machine.run(INSTALL, "--uninstall")
    assert machine.show(SERVICE, "LoadState") == "not-found"
    assert machine.show("bench-once@quick.timer", "ActiveState") == "inactive"
