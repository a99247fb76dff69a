import io
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from machines import write
from waiting import WAIT_S

from benchd.daemon.commands import ship
from benchd.daemon.errors import NotAvailable, UsageError
from benchd.daemon.measuring.power_modes import Mode, current, read_modes, run

NANO = """
# < POWER_MODEL ID=9 NAME=COMMENTED >
< PARAM TYPE=FILE NAME=CPU_ONLINE >
CORE_0 /sys/devices/system/cpu/cpu0/online

< POWER_MODEL ID=0 NAME=15W >
CPU_ONLINE CORE_0 1
GPU MAX_FREQ 612000000

< POWER_MODEL ID=1 NAME=25W >
< POWER_MODEL NAME=MAXN_SUPER ID=2 >
< POWER_MODEL ID=3 NAME=7W >
< PM_CONFIG DEFAULT=1 >
"""

# Keeps its mode in a file; mode 3 needs a reboot and asks, mode 2 takes a while.
NVPMODEL = """#!/bin/sh
read mode < {folder}/mode
case "$1" in
-q)
    set -- 15W 25W MAXN_SUPER 7W; shift "$mode"
    echo "NVPM WARN: fan mode is not set!"; echo "NV Power Mode: $1"; echo "$mode" ;;
-m)
    echo "$2" >> {folder}/asked
    if [ -e {folder}/broken ]; then echo "NVPM ERROR: Error opening a file: 13"; exit 1; fi
    if [ "$2" = 3 ]; then
        echo "NVPM WARN: Golden image context is already created"
        echo "NVPM WARN: Reboot required for changing to this power mode: 3"
        echo "NVPM WARN: DO YOU WANT TO REBOOT NOW? enter YES/yes to confirm:"
        read answer; echo "$answer" > {folder}/answer
        echo "NVPM ERROR: optMask is 1, no request for power mode"; exit 234
    fi
    if [ "$2" = 2 ]; then (sleep 0.3; echo 2 > {folder}/mode) > /dev/null 2>&1 &
    else echo "$2" > {folder}/mode; fi ;;
esac
"""
SWEEP = """
import sys
from pathlib import Path
from benchd.daemon.measuring.power_modes import run
sys.exit(run(["15W", "MAXN_SUPER"], sys.argv[2:], sys.stdout, Path(sys.argv[1])))
"""


@pytest.fixture
def board(tmp_path, monkeypatch):
    """An Orin Nano in mode 25W: `root`, its nvpmodel on the PATH, and what became of it."""
    folder = tmp_path / "state"
    write(folder, {"mode": "1\n"})
    write(tmp_path, {"bin/nvpmodel": NVPMODEL.format(folder=folder), "root/etc/nvpmodel.conf": NANO})
    (tmp_path / "bin/nvpmodel").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for name in ("SUDO_UID", "SUDO_GID"):
        monkeypatch.delenv(name, raising=False)
    return SimpleNamespace(root=tmp_path / "root", folder=folder, measured=folder / "measured")


def measure(board, codes="0"):
    """A command that notes the mode it runs in and exits with the next of `codes`."""
    script = f"read mode < {board.folder}/mode; echo $mode >> {board.measured}; set -- {codes}; shift $mode; exit $1"
    return ["/bin/sh", "-c", script]


def lines(path):
    return path.read_text().split() if path.exists() else []


def test_the_modes_of_the_boards_own_file(board):
    assert read_modes(board.root) == [Mode(0, "15W"), Mode(1, "25W"), Mode(2, "MAXN_SUPER"), Mode(3, "7W")]
    assert current() == Mode(1, "25W")


def test_each_mode_is_measured_once_it_is_in_force_and_the_former_one_comes_back(board):
    out = io.StringIO()
    assert run(["15W", "25W", "MAXN_SUPER"], measure(board, "0 0 0"), out, board.root) == 0
    assert lines(board.measured) == ["0", "1", "2"]
    assert lines(board.folder / "asked") == ["0", "1", "2", "1"]
    assert current().name == "25W"
    assert out.getvalue().splitlines() == [
        "power modes: 15W is active",
        "power modes: 25W is active",
        "power modes: MAXN_SUPER is active",
        "power modes: 25W is active, as before",
    ]


def test_a_mode_that_wants_a_reboot_is_left_out_by_name_and_not_confirmed(board):
    out = io.StringIO()
    assert run(["7W", "15W"], measure(board), out, board.root) == 7
    assert lines(board.folder / "answer") == ["no"]
    assert lines(board.measured) == ["0"]
    assert "7W skipped: it needs a reboot (sudo nvpmodel -m 3)" in out.getvalue()
    assert current().name == "25W"


@pytest.mark.parametrize(
    ("codes", "code"), [("0 0 0", 0), ("5 0 0", 5), ("3 1 0", 1), ("0 7 6", 7), ("4 3 0", 3), ("0 2 7", 2)]
)
def test_the_exit_code_is_that_of_the_gravest(codes, code, board):
    assert run(["15W", "25W", "MAXN_SUPER"], measure(board, codes), io.StringIO(), board.root) == code


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_ends_the_measurement_and_brings_the_former_mode_back(number, board):
    command = ["env", f"--default-signal={number.name}", sys.executable, "-c", SWEEP, str(board.root)]
    command += ["/bin/sh", "-c", "echo started; exec sleep 6000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sweep:
        assert sweep.stdout.readline() == "power modes: 15W is active\n"
        assert sweep.stdout.readline() == "started\n"
        assert current().name == "15W"
        sweep.send_signal(number)
        output, _ = sweep.communicate(timeout=WAIT_S)
    assert sweep.returncode == 130
    assert output == "power modes: 25W is active, as before\n"
    assert current().name == "25W"


def test_a_board_that_cannot_go_back_says_how_to_by_hand(board):
    command = ["/bin/sh", "-c", f": > {board.folder}/broken"]
    with pytest.raises(NotAvailable, match=r"Error opening a file: 13.*to restore 25W: sudo nvpmodel -m 1"):
        run(["15W"], command, io.StringIO(), board.root)


def test_without_the_right_to_switch(board):
    write(board.folder, {"broken": ""})
    with pytest.raises(NotAvailable, match=r"nvpmodel -m 0 failed: .*sudo /.*/benchd$"):
        run(["15W"], measure(board), io.StringIO(), board.root)
    assert lines(board.measured) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become the invoking user")
def test_it_measures_as_the_user_who_called_sudo(board, monkeypatch, capfd):
    monkeypatch.setenv("SUDO_UID", "65534")
    monkeypatch.setenv("SUDO_GID", "65534")
    monkeypatch.setenv("XDG_CACHE_HOME", "/root-s-own")
    command = ["/bin/sh", "-c", 'echo "$(id -u) $(id -g) $HOME $USER ${XDG_CACHE_HOME-none}"']
    assert run(["15W"], command, io.StringIO(), board.root) == 0
    uid, gid, home, user, cache = capfd.readouterr().out.split()
    assert (uid, gid, user, cache) == ("65534", "65534", "nobody", "none")
    assert home != os.environ.get("HOME")


@pytest.mark.parametrize(
    ("names", "why"), [(["MAXN"], "Valid: 15W, 25W, MAXN_SUPER"), ([], "15W, 25W, MAXN_SUPER, 7W")]
)
def test_names_that_the_board_lacks_change_nothing(names, why, board):
    with pytest.raises(UsageError, match=why):
        run(names, measure(board), io.StringIO(), board.root)
    assert lines(board.folder / "asked") == []


@pytest.mark.parametrize("given", [["--power-modes", "15W,MAXN_SUPER"], ["--power-modes=15W,MAXN_SUPER"]])
def test_ship_makes_a_folder_for_each_mode(given, board, tmp_path):
    note = ["/bin/sh", "-c", f'echo "$@" >> {board.measured}; cat {board.folder}/mode >> {board.measured}', "benchd"]
    command = ship.of_each_mode([*note, "ship", "square", *given, "--output", "there"], tmp_path / "out")
    assert run(["15W", "MAXN_SUPER"], command, io.StringIO(), board.root) == 0
    prefix = f"ship square --output there --output {tmp_path}/out"
    assert board.measured.read_text().splitlines() == [f"{prefix}-15W", "0", f"{prefix}-MAXN_SUPER", "2"]
    assert current().name == "25W"


def test_a_mode_that_was_shipped_before_the_interruption_is_left_out(board, tmp_path):
    template, out = f"{tmp_path}/out-{{mode}}/manifest.json", io.StringIO()
    write(tmp_path, {"out-15W/manifest.json": "{}"})
    assert run(["15W", "MAXN_SUPER"], measure(board, "2 2 0"), out, board.root, template) == 0
    there = template.replace("{mode}", "15W")
    assert out.getvalue().splitlines()[0] == f"power modes: 15W skipped: {there} already exists"
    assert lines(board.measured) == ["2"]
    with pytest.raises(UsageError) as refused:
        run(["15W"], measure(board), out, board.root, template)
    assert str(refused.value) == f"already built: {there}; delete to rebuild"
