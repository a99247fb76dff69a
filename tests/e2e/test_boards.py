"""What a newcomer types on whole fake boards: doctor and bench-once find the release, the mode and the sensors."""

import json
import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import absent
import jetson_trees
import pytest
from broker import program
from machines import write

from benchd.daemon.verdicts.results import read

ON_BOARD = Path(__file__).parents[1] / "support/on_board.sh"
TEGRA = Path(__file__).parents[2] / "exporters/tegra.py"
NX_61 = replace(
    jetson_trees.ORIN_NX, release="# R36 (release), REVISION: 4.0, GCID: 37537400, BOARD: generic, EABI: aarch64"
)
JP6, SBSA = "https://pypi.jetson-ai-lab.io/jp6/cu126", "https://pypi.jetson-ai-lab.io/sbsa/cu130"
FASTEST = "the fastest is {}: sudo nvpmodel -m {}"
# the board, its release as doctor names it, the index of its wheels, its L4T, and what doctor says of the power mode
BOARDS = {
    "orin_nano_62": (jetson_trees.ORIN_NANO, "6.1 to 6.2.1", JP6, "R36.4.3", FASTEST.format("MAXN_SUPER", 2)),
    "orin_nano_72": (jetson_trees.ORIN_NANO_7, "7.2", SBSA, "R39.2.0", FASTEST.format("MAXN_SUPER", 2)),
    "agx_orin_72": (jetson_trees.AGX_ORIN_7, "7.2", SBSA, "R39.2.0", ""),
    "thor_72": (jetson_trees.THOR, "7.2", SBSA, "R39.2.0", FASTEST.format("MAXN", 0)),
    "orin_nx_61": (NX_61, "6.1 to 6.2.1", JP6, "R36.4.0", FASTEST.format("MAXN", 0)),
    "agx_orin_51": (jetson_trees.AGX_ORIN, "JetPack 5 or older", "needs JetPack 6.1 or newer", "R35.4.1", ""),
    "container_72": (jetson_trees.ORIN_NANO_7, "7.2, assumed", SBSA, None, None),
}
QUICK = """
[device]
id = "fake-board"

[limits]
warm_up_cap_s = 0.05
measure_cap_s = 1.0
check_images = 1
"""


class OnBoard:
    """Runs our programs in `folder` on a machine with the files of the board in `root`."""

    def __init__(self, root, folder, environment):
        self.root, self._folder, self._environment = root, folder, environment

    def run(self, name, *arguments, code=0):
        (self._folder / "machine").mkdir(exist_ok=True)
        script = [ON_BOARD, self.root, self._folder / "machine", Path(sys.executable).with_name(name), *arguments]
        line = [program("unshare"), "--mount", "--pid", "--fork", "--kill-child", *script]
        done = subprocess.run(
            line, cwd=self._folder, env=self._environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def measured(self):
        self.run("bench-once", "--models", "square", "--variants", "eager", "--device", "cpu", "--config", "quick.toml")
        return list(read(self._folder / "bench-out/records.jsonl"))[-1]


@pytest.fixture
def on_board(tmp_path, child_environment):
    """Return a function that makes a board and what runs our programs there."""
    if os.geteuid() != 0:
        pytest.skip("needs root to show a command other files under /proc and /sys")
    (tmp_path / "quick.toml").write_text(QUICK)

    def made(board, **variables):
        root = jetson_trees.build(tmp_path / "board", board)
        mode = f"#!/bin/sh\necho 'NV Power Mode: {board.modes[board.mode]}'\necho {board.mode}\n"
        write(root, {"usr/sbin/nvpmodel": mode})
        (root / "usr/sbin/nvpmodel").chmod(0o755)
        return OnBoard(root, tmp_path, child_environment | variables)

    return made


def hide_in_a_container(root):
    """Take from a board what a container without privileges and with another root does not see of it."""
    for file in ("etc/nv_tegra_release", "etc/nvpmodel.conf", "usr/sbin/nvpmodel", "proc/device-tree/compatible"):
        (root / file).unlink()


@contextmanager
def flickering(root, board):
    """Let the last digit of each rail change, as on a real board: a value that never does is no reading."""
    ended, files = threading.Event(), {}
    for label in board.rails():
        folder, channel = jetson_trees.rail(root, label)
        files[folder / f"curr{channel}_input"] = 1
    files |= dict.fromkeys(root.glob(f"{jetson_trees.DEVICES}/*/hwmon/*/power1_input"), 1000)
    values = {path: int(path.read_text()) for path in files}

    def flicker():
        for step in count():
            if ended.wait(0.02):
                return
            for path, digit in files.items():
                with path.open("r+") as file:  # in place: never empty, as a kernel's file
                    file.write(f"{values[path] + step % 2 * digit}\n")

    thread = threading.Thread(target=flicker)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def seen_by_doctor(on_board, name, **variables):
    """Return the board `name` as a machine on which doctor names its release, its mode and its sensors."""
    board, release, index, l4t, mode = BOARDS[name]
    machine = on_board(board, **variables)
    if l4t is None:
        hide_in_a_container(machine.root)
    by_name = {finding["name"]: finding for finding in json.loads(machine.run("benchd", "doctor", "--json"))}
    assert release in by_name["jetpack"]["detail"]
    assert by_name.get("power mode", {}).get("cure") == mode
    assert index in machine.run("python", TEGRA, "index", code=int(board is jetson_trees.AGX_ORIN))
    monitor = "ina238" if board.microwatts else "ina3221"
    assert all(by_name[sensor]["usable"] for sensor in (monitor, "devfreq", "thermal", "throttle"))
    return machine


def test_a_newcomer_in_a_container_sees_the_board(on_board, tmp_path):
    """Without the packages that doctor would import, which are of no board."""
    (tmp_path / "packages").mkdir()
    packages = ("onnx", "onnxruntime", "openvino", "onnxscript", "torchao")
    seen_by_doctor(on_board, "container_72", **absent.environment(tmp_path / "packages", *packages))


@pytest.mark.slow
@pytest.mark.parametrize("name", BOARDS)
def test_a_newcomer_sees_the_board_and_its_watts(on_board, name):
    machine, (board, _, _, l4t, _) = seen_by_doctor(on_board, name), BOARDS[name]
    monitor = "ina238" if board.microwatts else "ina3221"
    with flickering(machine.root, board):
        record = machine.measured()
        while record.energy is None and record.missing["energy"].startswith(
            "gaps"
        ):  # a busy machine starves the sampler
            record = machine.measured()
    assert (record.environment.l4t, record.environment.is_tegra) == (l4t, True)
    assert record.environment.power_mode == (l4t and board.modes[board.mode])
    assert re.fullmatch(r"tegra\d* integrated GPU", record.environment.gpu)
    rails = board.rails()
    # the module's input, or the sum of those that carry it: VDDQ_VDD2_1V8AO lies behind VIN_SYS_5V0
    carried = sum(watts for rail, watts in rails.items() if rail != "VDDQ_VDD2_1V8AO")
    watts = board.microwatts / 1e6 if board.microwatts else rails.get("VDD_IN", carried)
    assert record.energy, record.missing
    (process,) = record.processes
    assert record.energy.source == monitor
    assert record.energy.energy_j / process.measured_s == pytest.approx(watts, rel=0.01)
