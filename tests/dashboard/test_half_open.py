"""A device behind a cable that is pulled: its link and its broker in network namespaces of their own."""

import subprocess
import sys
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from broker import program
from waiting import wait_for

pytest.importorskip("nicegui", reason="needs nicegui, of the extra dashboard")

from test_collector import count
from test_fleet_faults import acknowledged, connected, measure

from benchd.dashboard.store import Store

BROKER, DEVICE = "10.254.254.1", "10.254.254.2"
MOSQUITTO = "listener 1883 {}\nallow_anonymous true\nuser root\n"
PYTHON = Path(sys.executable).parent


@pytest.fixture
def cable():
    """Two prefixes of commands that run at its ends, in namespaces, and a function that sets the link up or down."""
    with ExitStack() as stack:
        here, there = stack.enter_context(namespace()), stack.enter_context(namespace())
        make = f"ip link add cable0 type veth peer name cable1 netns {there}"
        if subprocess.run([*entering(here), *make.split()], check=False).returncode:
            pytest.skip("needs a kernel with veth")
        for end, name, address in ((here, "cable0", BROKER), (there, "cable1", DEVICE)):
            run(end, f"ip address add {address}/24 dev {name}")
            run(end, f"ip link set {name} up")
        run(here, "ip link set lo up")
        yield entering(here), entering(there), lambda state: run(here, f"ip link set cable0 {state}")


@contextmanager
def namespace():
    """Yield the process id of one that holds a network namespace of its own."""
    hold = ["unshare", "--net", "sh", "-c", "echo; exec sleep infinity"]
    with subprocess.Popen(hold, stdout=subprocess.PIPE) as process:
        if not process.stdout.readline():
            pytest.skip("needs the right to make a network namespace")
        try:
            yield process.pid
        finally:
            process.kill()


def entering(pid):
    return ["nsenter", f"--target={pid}", "--net"]


def run(pid, command):
    subprocess.run([*entering(pid), *command.split()], check=True)


@pytest.mark.slow
def test_a_cable_that_is_pulled_costs_nothing(tmp_path, child_environment, cable):
    here, there, link = cable
    url, log, folder = f"sqlite:///{tmp_path}/dashboard.db", tmp_path / "log", tmp_path / "device"
    folder.mkdir()
    (tmp_path / "mosquitto.conf").write_text(MOSQUITTO.format(BROKER))
    collect = [
        "dashboard",
        "--only",
        "collector",
        "--collector",
        "site",
        "--mqtt",
        f"mqtt://{BROKER}",
        "--database",
        url,
    ]
    board = [sys.executable, "-m", "tests.soak.board"]
    environment = child_environment | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with ExitStack() as stack:
        store = stack.enter_context(closing(Store(url)))
        for command in (
            [*here, program("mosquitto"), "-c", tmp_path / "mosquitto.conf"],
            [*here, PYTHON / "benchd", *collect],
            [*there, *board, f"mqtt://{BROKER}", folder, "d0", folder / "results"],
        ):
            stderr = stack.enter_context(log.open("ab"))
            process = stack.enter_context(subprocess.Popen(command, env=environment, stderr=stderr))
            stack.callback(process.kill)
        wait_for(lambda: connected(store) == 1, process)
        measure(folder, 0)
        wait_for(lambda: count(store, "result") == 1, process)
        link("down")
        measure(folder, *range(1, 50))
        wait_for(lambda: "mqtt down: the connection to" in log.read_text(), process)
        assert acknowledged(folder) < 50
        link("up")
        wait_for(lambda: count(store, "result") == 50, process)
        assert count(store, "body") == 50
