"""docs/jetson.md as its reader types it: each command, on a booted machine that is a Jetson by its kernel and its L4T.

torch and its neighbours are stubs that say they see a GPU; pip, systemd, the broker and benchd are real.
"""

import json
import re
import sys
from pathlib import Path

import jetson_trees
import pytest
import wheels_made
from booted import booted

ROOT = Path(__file__).parents[2]
PREFIX = f"/srv/{Path(sys.base_prefix).name}"
PYTHON = f"{PREFIX}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
HOME = "/srv/me"
BOARD = jetson_trees.ORIN_NANO_7
TORCH = """
__version__ = "2.10.0"
class version:
    cuda = "13.0"
class cuda:
    is_available = staticmethod(lambda: True)
    get_device_name = staticmethod(lambda: "Orin")
"""
# what is typed runs as the tests may run it: no package is installed, no clock set, and the set-up measures nothing
STUBS = {
    "sudo": 'exec "$@"',
    "apt": 'echo "$@" >>/run/installed',
    "../../bin/jetson_clocks": "touch /run/jetson_clocks",
    "nvpmodel": f"echo 'NV Power Mode: {BOARD.modes[BOARD.mode]}'; echo {BOARD.mode}",
}
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "PYTHON": PYTHON,
    "PIP_NO_INDEX": "1",
    "PIP_FIND_LINKS": "/srv/wheels",
    "PIP_NO_COMPILE": "1",
    "MAKEFLAGS": "e",
    "ARGS": "--dry-run",
}
ASKED = "benchd/v1/orin-1"


def blocks():
    """Return the commands of the page's blocks, as they are typed."""
    return re.findall(r"^```sh\n(.*?)^```", (ROOT / "docs/jetson.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def machine(tmp_path):
    ours = wheels_made.build_ours(tmp_path)
    packages = wheels_made.PACKAGES
    wheels = wheels_made.fill(
        tmp_path / "wheels", ours, "constraints-jetson72.txt", Path("/srv", packages.name), torchvision=""
    )
    (wheels / "torch-2.9.1-py3-none-any.whl").unlink()
    # an index that has moved on from the pinned version
    wheels_made.stub(wheels, "torch", "2.10.0", {"torch/__init__.py": TORCH, "torch/lib/libtorch.so": ""})
    for name in ("blas", "lapack"):
        wheels_made.stub(wheels, f"nvpl-{name}", "0.6.0", {f"nvpl/lib/libnvpl_{name}.so.0": ""})
    (tmp_path / "machine").mkdir()
    with booted(tmp_path / "machine", ROOT, Path(sys.base_prefix), packages, wheels) as machine:
        become_a_jetson(machine, jetson_trees.build(tmp_path / "board", BOARD))
        yield machine


def become_a_jetson(machine, board):
    for file in ("etc/nv_tegra_release", "etc/nvpmodel.conf"):
        machine.write(f"/{file}", (board / file).read_text())
    machine.write("/run/osrelease", (board / "proc/sys/kernel/osrelease").read_text())
    machine.run("mount", "--bind", "/run/osrelease", "/proc/sys/kernel/osrelease")
    for name, script in STUBS.items():
        machine.write(f"/usr/local/bin/{name}", f"#!/bin/sh\n{script}\n")
        machine.run("chmod", "755", f"/usr/local/bin/{name}")
    machine.write("/etc/hosts", "127.0.0.1 localhost broker.local\n")
    machine.write("/etc/ld.so.conf.d/000-python.conf", f"{PREFIX}/lib\n")
    machine.run("ldconfig")
    machine.run("mkdir", "-p", HOME)


def typed(machine, commands, folder=f"{HOME}/benchd", stdin=""):
    variables = [f"{name}={value}" for name, value in ENVIRONMENT.items()]
    return machine.run("env", "-i", f"--chdir={folder}", *variables, "bash", "-euc", commands, stdin=stdin)


def password(machine, user):
    return machine.run("cat", f"/etc/mosquitto/benchd/{user}").strip()


@pytest.mark.slow
def test_from_a_flashed_board_to_a_message_on_the_broker(machine):
    measure, power, broker, service, messages, command = blocks()
    lines = measure.strip().splitlines()
    assert len(lines) == 3  # that a newcomer types to the first table
    typed(machine, measure.replace("REPOSITORY", f"file:///srv/{ROOT.name}"), HOME)
    assert machine.run("cat", "/run/installed") == "install git g++ python3-venv python3-dev\n"
    linked = machine.run("sh", "-c", f"ls {HOME}/benchd/.venv/lib/python3*/site-packages/torch/lib")
    assert {"libnvpl_blas.so.0", "libnvpl_lapack.so.0"} <= set(linked.split())
    assert "MAXN_SUPER: sudo nvpmodel -m 2" in typed(machine, power)
    assert machine.succeeds("test", "-e", "/run/jetson_clocks")
    typed(machine, broker)
    output = typed(machine, service, stdin=password(machine, "orin-1"))
    assert "yes  cuda         13.0 on Orin" in output
    assert "benchd: benchd runs; systemctl status benchd shows what it does" in output
    machine.until(lambda: 'Status: "idle; mqtt up"' in typed(machine, "systemctl status benchd"), "benchd.service")
    assert "service" in typed(machine, "/opt/benchd/current/bin/benchd doctor --unit")
    typed(machine, "sudo systemctl reload benchd")
    heard = typed(machine, with_password(machine, "reader", messages).replace("_sub ", "_sub -C 3 -W 20 "))
    assert {line.split()[0] for line in heard.splitlines()} == {
        f"{ASKED}/{kind}" for kind in ("status", "info", "health")
    }
    answer = "mosquitto_sub -h broker.local -u collector -P PASSWORD -V 5 -C 1 -W 60 -t benchd/v1/orin-1/resp/me/1"
    both = f"({answer}) & sleep 1; {command.strip()}; wait"
    assert json.loads(typed(machine, with_password(machine, "collector", both)))["id"] == "1"


def with_password(machine, user, commands):
    return commands.replace("PASSWORD", password(machine, user))
