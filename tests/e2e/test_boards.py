"""bench-once with the sensors of whole fake boards: the watts of its record are those of the board's files."""

import threading
from contextlib import contextmanager
from itertools import count

import jetson_trees
import pytest
from simulations import slow

from benchd.daemon.verdicts.results import read

BOARDS = jetson_trees.BOARDS | {"thor": jetson_trees.THOR}
SENSED = """
[device]
id = "fake-board"

[sampling]
sources = {sources}

[limits]
warm_up_cap_s = 0.05
measure_cap_s = 1.0
check_images = 1
"""


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


def measured(once, tmp_path):
    done = once("--models", "square", "--option", "size=16", "--variants", "eager", "--config", "sensed.toml")
    assert done.returncode == 0, done.stderr
    return list(read(tmp_path / "out/records.jsonl"))[-1]


@pytest.mark.parametrize("name", [slow("orin_nano"), "agx_orin_7", slow("thor")])
def test_the_record_has_the_watts_of_the_board(once, tmp_path, name):
    board = BOARDS[name]
    root = jetson_trees.build(tmp_path / "board", board)
    monitor = "ina238" if board.microwatts else "ina3221"
    sources = [f"{sensor}={root}" for sensor in (monitor, "devfreq", "thermal", "throttle")]
    (tmp_path / "sensed.toml").write_text(SENSED.format(sources=sources))
    with flickering(root, board):
        record = measured(once, tmp_path)
        while record.energy is None and record.missing["energy"].startswith(
            "gaps"
        ):  # a busy machine starves the sampler
            record = measured(once, tmp_path)
    rails = board.rails()
    # the module's input, or the sum of those that carry it: VDDQ_VDD2_1V8AO lies behind VIN_SYS_5V0
    carried = sum(watts for rail, watts in rails.items() if rail != "VDDQ_VDD2_1V8AO")
    watts = board.microwatts / 1e6 if board.microwatts else rails.get("VDD_IN", carried)
    assert record.energy, record.missing
    (process,) = record.processes
    assert record.energy.source == monitor
    assert record.energy.energy_j / process.measured_s == pytest.approx(watts, rel=0.01)
