"""The sampler under faults of its bridge, and with the real jtop service and client of two versions on a fake board.

The service runs in a mount namespace of its own, where /fake_sys is the board (JTOP_TESTING makes jtop look there) and
/run, /etc/group and the thermal zones are its own too, so that nothing of it reaches this machine.
"""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from machines import write
from simulations import slow
from waiting import WAIT_S, wait_for

from benchd.daemon.sampling.sources import PowerMeter
from benchd.daemon.sampling.sources.jtop import (
    BRIDGE,
    INTERVAL_S,
    SYSTEM_PYTHON,
    UPTIME_GRAIN_NS,
    Jtop,
    python_of,
)

VERSIONS = ["7.2.2", slow("4.3.2")]
I2C = "bus/i2c/devices/1-0040"
HWMON = f"{I2C}/hwmon/hwmon1"
GPU = "devices/platform/17000000.ga10b"
DEBUG = "kernel/debug"
USB_C = "class/power_supply/ucsi-source-psy-1-00081"
SOCKET_MODE = 0o660
MILLIVOLTS = 5000
MILLIAMPS = {"VDD_IN": 2400, "VDD_CPU_GPU_CV": 800, "VDD_SOC": 600}

READING = {
    "type": "reading",
    "uptime_s": 100.0,
    "interval_s": 0.1,
    "total": ["VDD_IN", 12.0],
    "values": [["power_w", "VDD_SOC", 3.0], ["zone_temp_c", "cpu", 46.5]],
}
UNNAMED = READING | {"total": None}
RENAMED = READING | {"total": ["VDD_SOC", 3.0], "values": []}


def test_the_python_of_jtop_s_own_environment_is_found_by_its_unit(tmp_path):
    unit, program = tmp_path / "jtop.service", tmp_path / "bin/jtop"
    assert python_of(unit) == SYSTEM_PYTHON
    write(tmp_path, {"jtop.service": f"[Service]\nExecStart={program} --force\n"})
    assert python_of(unit) == SYSTEM_PYTHON
    write(tmp_path, {"bin/jtop": "#!/opt/jtop/bin/python3.12\nimport sys\n"})
    assert python_of(unit) == Path("/opt/jtop/bin/python3.12")


def eventually(sampler, done):
    """Sample as the sampler process does until `done(samples, error)` holds; return that pair."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        samples, error = [], None
        try:
            for sample in sampler.sample():
                samples.append(sample)  # noqa: PERF402 - what came before an error counts
        except (ChildProcessError, ValueError) as found:
            error = found
        if done(samples, error):
            return samples, error
        time.sleep(0.02)
    pytest.fail(f"it did not come; at last {samples} and {error}")


def some(samples, error):
    return samples and error is None


def until_available(sampler):
    wait_for(lambda: sampler.unavailable() is None)


def values(samples):
    return {(sample.metric, sample.rail): sample.value for sample in samples}


@pytest.fixture
def jtop():
    """A maker of samplers that are closed at the end."""
    samplers = []

    def make(python):
        samplers.append(Jtop(python))
        return samplers[-1]

    yield make
    for sampler in samplers:
        sampler.close()


@pytest.fixture
def patient(monkeypatch):
    """A sampler that takes no silence for a failure, for a test of another one."""
    for name in ("START_S", "SILENCE_S"):
        monkeypatch.setattr(f"benchd.daemon.sampling.sources.jtop.{name}", WAIT_S)


@pytest.fixture
def fake(tmp_path, jtop):
    """A sampler whose Python is a script, given by its lines, that has `say(message)`."""

    def make(body):
        python = tmp_path / "python"
        head = f"#!{sys.executable} -IS\nimport json, sys, time\ndef say(m): print(json.dumps(m), flush=True)\n"
        python.write_text(f"{head}{body}\n")
        python.chmod(0o700)
        return jtop(python)

    return make


def repeating(reading):
    """Return the lines of a script that goes on saying this."""
    return f"while True: say({reading}); time.sleep(0.05)"


def test_no_such_python(tmp_path, jtop):
    assert "jtop=PYTHON" in jtop(tmp_path / "python").unavailable()


@pytest.fixture
def bare(tmp_path):
    """The Python of an environment without any package."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    return tmp_path / "venv/bin/python"


def test_a_python_without_jetson_stats(bare, jtop):
    assert f"sudo {bare} -m pip install jetson-stats" in jtop(bare).unavailable()


# What stands in for jtop shows the states that the real one cannot be brought to at will, then loses its connection.
STUB = """
from datetime import timedelta
class jtop:
    interval = 2.0
    power = {"rail": {"VDD_SOC": {"power": 3000, "avg": 1}}, "tot": {"power": 3000, "avg": 1}}
    temperature = {"cpu": {"temp": 46.5, "online": True}, "cv0": {"temp": -256, "online": False}}
    gpu = {"gpu": {"type": "integrated", "status": {}, "freq": {}}}
    memory = {"RAM": {"used": 2, "shared": 0}}
    fan = {}
    nvpmodel = None
    def __init__(self, interval):
        print("a greeting on standard output")
    def attach(self, observer):
        self.observer = observer
    def start(self):
        for uptime_s in (90.0, 100.0, 100.0, 100.5):
            self.uptime = timedelta(seconds=uptime_s)
            self.observer(self)
    def ok(self, spin):
        raise RuntimeError("Lost connection\\nwith the server")
"""


def test_only_new_readings_and_what_was_read_are_passed_on(bare):
    packages = bare.parent.parent / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    (packages / "jtop.py").write_text(STUB)
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([bare, "-I", BRIDGE, "0.5"], **pipes) as child:
        *readings, end = map(json.loads, child.stdout)
        assert b"a greeting" in child.stderr.read()
    assert [reading.pop("uptime_s") for reading in readings] == [100.0, 100.5]
    values = [["power_w", "VDD_SOC", 3.0], ["zone_temp_c", "cpu", 46.5], ["memory_used_bytes", "", 2048]]
    assert readings[0] == {"type": "reading", "interval_s": 2.0, "total": None, "values": values}
    assert end == {"type": "end", "reason": "RuntimeError: Lost connection with the server"}


def test_a_bridge_that_says_why_it_ends(fake):
    assert fake("say({'type': 'end', 'reason': 'no board'})").unavailable() == "no board"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("sys.exit(3)", "ended without a reason"),
        ("sys.stdout.write('{\\n'); sys.stdout.flush(); time.sleep(600)", "invalid message"),
        ("say({'type': 'reading', 'uptime_s': None}); time.sleep(600)", "invalid message"),
        ("sys.stdout.write('x' * 100_000); sys.stdout.flush(); time.sleep(600)", "invalid message"),
    ],
    ids=["dies", "rubbish", "other fields", "endless line"],
)
def test_a_bridge_that_fails(body, reason, fake):
    sampler = fake(body)
    assert reason in sampler.unavailable()


def test_a_bridge_that_hangs_is_replaced(fake, tmp_path):
    once = tmp_path / "once"
    sampler = fake(
        f"import os\nsay({READING})\n"
        f"if not os.path.exists({str(once)!r}): open({str(once)!r}, 'w').close(); time.sleep(600)\n"
        f"while True: time.sleep(0.1); say({READING})"
    )
    assert sampler.unavailable() is None
    _, error = eventually(sampler, lambda _, error: error is not None)
    assert "no reading for 2 s; no readings since" in str(error)
    eventually(sampler, some)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("other", [UNNAMED, RENAMED], ids=["unnamed", "renamed"])
def test_a_total_that_became_another_is_left_out_and_named(other, fake):
    sampler = fake(f"say({READING})\n{repeating(other)}")
    assert sampler.unavailable() is None
    samples, error = eventually(sampler, lambda _, error: error is not None)
    assert [(sample.metric, sample.rail, sample.value) for sample in samples[:2]] == [
        (metric, rail, value) for metric, rail, value in other["values"]
    ]
    assert "they were VDD_IN as total, and VDD_SOC" in str(error)


BOARD = {
    "stat": "cpu  1 2 3 4 5 6 7 8 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n",
    "devices/system/cpu/cpu0/online": "1\n",
    f"{GPU}/device/load": "437\n",
    f"{GPU}/device/of_node/name": "ga10b",
    f"{GPU}/device/railgate_enable": "0\n",
    f"{GPU}/cur_freq": "624750000\n",
    f"{GPU}/min_freq": "306000000\n",
    f"{GPU}/max_freq": "624750000\n",
    f"{GPU}/governor": "nvhost_podgov\n",
    f"{I2C}/name": "ina3221\n",
    f"{HWMON}/name": "ina3221\n",
    f"{HWMON}/in7_label": "sum of shunt voltages\n",
    f"{HWMON}/in7_input": "0\n",
    "class/hwmon/hwmon27/name": "pwmfan\n",
    "class/hwmon/hwmon27/pwm1": "51\n",
    "class/hwmon/hwmon32/name": "pwm_tach\n",
    "class/hwmon/hwmon32/rpm": "1234\n",
    f"{DEBUG}/nvmap/iovmm/maps": "CLIENT PROCESS PID SIZE\ntotal 102400K\n",
    f"{USB_C}/voltage_now": "5000000\n",
    f"{USB_C}/current_now": "3000000\n",
}
ZONES = {"cpu": 46125, "gpu": 44531}
NVPMODEL = """#!/bin/sh
case "$1" in
-q) printf 'NV Power Mode: 15W\n0\n' ;;
*) printf 'POWER_MODEL: ID=0 NAME=15W\nPOWER_MODEL: ID=1 NAME=7W\nPM_CONFIG: DEFAULT=15W(0)\n' ;;
esac
"""
# A root of binds in which what jtop reads and writes is the test's: $1 root, $2 the folder of all that is bound.
NAMESPACE = """
mount -t tmpfs tmpfs "$1"
for entry in /*; do
    if [ -L "$entry" ]; then cp -P "$entry" "$1"
    elif [ -d "$entry" ]; then mkdir "$1$entry" && mount --rbind "$entry" "$1$entry"
    fi
done
mkdir "$1/fake_sys"
mount --bind "$2/fake_sys" "$1/fake_sys"
mount --bind "$2/fake_sys/class" "$1/sys/class"
mount --bind "$2/virtual" "$1/sys/devices/virtual"
mount --bind "$2/group" "$1/etc/group"
mount -t tmpfs tmpfs "$1/run"
exec chroot "$1" sh -c "echo ready; exec sleep infinity"  # said from inside: before that, this root is the machine's
"""
# jtop keeps its settings beside the interpreter's library.
SERVICE = "import runpy, sys; sys.base_prefix = '/run'; runpy.run_module('jtop', run_name='__main__', alter_sys=True)"


class Board:
    """A fake Orin Nano in a namespace, with the jtop of one version; `python` runs that in there."""

    def __init__(self, folder, installed):
        self._installed = installed
        self._folder = folder
        self._tree = folder / "fake_sys"
        self._write_tree()
        self._service = None
        self._namespace = subprocess.Popen(
            ["unshare", "--mount", "sh", "-euc", NAMESPACE, "sh", folder / "root", folder], stdout=subprocess.PIPE
        )
        if self._namespace.stdout.readline() != b"ready\n":
            self.close()
            pytest.skip("needs root that may mount in a namespace of its own")
        self.python = self.script("python", "")

    def _write_tree(self):
        write(self._tree, BOARD)
        for channel, (rail, milliamps) in enumerate(MILLIAMPS.items(), start=1):
            write(self._tree / HWMON, {f"in{channel}_label": rail, f"in{channel}_input": f"{MILLIVOLTS}\n"})
            self.set_current(rail, milliamps)
        (self._tree / "class/devfreq").mkdir()
        (self._tree / "class/devfreq/17000000.ga10b").symlink_to(f"/fake_sys/{GPU}")
        write(self._folder / "virtual", {"dmi/id/board_name": "fake\n"})
        for zone, (name, millidegrees) in enumerate(ZONES.items()):
            files = {"type": f"{name}-thermal\n", "temp": f"{millidegrees}\n"}
            write(self._folder / f"virtual/thermal/thermal_zone{zone}", files)
        write(self._folder, {"group": "root:x:0:\njtop:x:990:\n", "bin/nvpmodel": NVPMODEL})
        (self._folder / "bin/nvpmodel").chmod(0o755)
        (self._folder / "root").mkdir()

    def set_current(self, rail, milliamps):
        write(self._tree, {"new": f"{milliamps}\n"})
        (self._tree / "new").replace(self._current(rail))  # in one step: an empty file would end the service

    def lose(self, rail):
        self._current(rail).unlink()

    def _current(self, rail):
        return self._tree / HWMON / f"curr{list(MILLIAMPS).index(rail) + 1}_input"

    @property
    def _enter(self):
        return ["nsenter", f"--target={self._namespace.pid}", "--mount", "--root", "--wd=/"]

    def script(self, name, prefix):
        """Return the path of a program that runs the board's Python in the namespace, through `prefix`."""
        path = self._folder / name
        path.write_text(f'#!/bin/sh\nexec {" ".join(self._enter)} {prefix} {self._installed} "$@"\n')
        path.chmod(0o755)
        return path

    @property
    def socket(self):
        return Path(f"/proc/{self._namespace.pid}/root/run/jtop.sock")

    def start_service(self):
        """Start it if it does not run, and wait until it lets the group in."""
        if self._service:
            return
        self.socket.unlink(missing_ok=True)
        path = f"{self._folder / 'bin'}:{os.environ['PATH']}"
        with (self._folder / "service.log").open("w") as log:
            self._service = subprocess.Popen(
                [*self._enter, self._installed, "-c", SERVICE],
                env=os.environ | {"JTOP_SERVICE": "1", "JTOP_TESTING": "1", "PATH": path},
                start_new_session=True,
                stdout=log,
                stderr=log,
            )
        wait_for(self._listens, self._service)

    def _listens(self):
        return self.socket.exists() and stat.S_IMODE(self.socket.stat().st_mode) == SOCKET_MODE

    def kill_service(self):
        if self._service:
            os.killpg(self._service.pid, signal.SIGKILL)
            self._service.wait()
            self._service = None

    def close(self):
        self.kill_service()
        self._namespace.kill()
        self._namespace.wait()
        self._namespace.stdout.close()


@pytest.fixture(scope="module", params=VERSIONS)
def installed(request, tmp_path_factory):
    """The Python of an environment with this version of jetson-stats, which installs its service outside of one."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter", "setpriv"))):
        pytest.skip("needs root and util-linux, for a mount namespace")
    folder = tmp_path_factory.mktemp("jtop")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    install = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--quiet"]
    done = subprocess.run([*install, f"jetson-stats=={request.param}"], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"needs jetson-stats {request.param}: {done.stderr.strip().splitlines()[-1]}")
    return folder / "bin/python"


@pytest.fixture(scope="module")
def board(installed, tmp_path_factory):
    board = Board(tmp_path_factory.mktemp("board"), installed)
    yield board
    board.close()


@pytest.fixture
def served(board):
    """The board with its service running, as it may have been for a while."""
    board.start_service()
    return board


def test_everything_the_service_knows(served, jtop):
    begin_ns = time.monotonic_ns() - UPTIME_GRAIN_NS
    sampler = jtop(served.python)
    until_available(sampler)
    samples, _ = eventually(sampler, some)
    assert all(begin_ns < sample.t_ns < time.monotonic_ns() + UPTIME_GRAIN_NS for sample in samples)
    by_metric = values(samples)
    assert by_metric.pop(("memory_used_bytes", "")) > 2**20
    assert by_metric == {
        ("power_w", "VDD_IN"): 12.0,
        ("power_w", "VDD_CPU_GPU_CV"): 4.0,
        ("power_w", "VDD_SOC"): 3.0,
        ("zone_temp_c", "cpu"): 46.125,
        ("zone_temp_c", "gpu"): 44.531,
        ("gpu_utilization_percent", ""): 43.7,
        ("gpu_clock_hz", ""): 624.75e6,
        ("nvmap_used_bytes", ""): 102400 * 1024,
        ("fan_speed_percent", "pwmfan0"): pytest.approx(20.0),
        ("fan_speed_rpm", "pwmfan0"): 1234,
        ("nvpmodel_id", "15W"): 0,
    }
    assert isinstance(sampler, PowerMeter)
    assert [(source.rail, source.scope, source.total, source.period_s) for source in sampler.power_sources()] == [
        ("VDD_IN", "module input VDD_IN", True, INTERVAL_S),
        ("VDD_CPU_GPU_CV", "rail VDD_CPU_GPU_CV", False, INTERVAL_S),
        ("VDD_SOC", "rail VDD_SOC", False, INTERVAL_S),
    ]


def test_the_bridge_ends_with_its_parent(served):
    bridge = [served.python, "-I", BRIDGE, "0.1"]
    with subprocess.Popen(bridge, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert json.loads(child.stdout.readline())["type"] == "reading"
        child.stdin.close()
        assert child.wait(WAIT_S) == 0


def test_a_service_that_does_not_run(board, jtop):
    board.kill_service()
    assert board.socket.exists()
    assert "sudo systemctl restart jtop.service" in jtop(board.python).unavailable()
    board.socket.unlink()
    assert "sudo systemctl restart jtop.service" in jtop(board.python).unavailable()
