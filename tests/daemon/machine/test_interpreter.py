"""Fresh interpreters: nothing in the current folder is imported, and a module ends with its parent."""

import os
import select
import subprocess
import sys

from planted import planted
from waiting import WAIT_S

from benchd.daemon.machine import interpreter


def printed(command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_the_current_folder_replaces_no_module(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    planted(tmp_path / "here", tmp_path / "mark")
    monkeypatch.chdir(tmp_path / "here")
    assert printed(interpreter.of_code("import json; print(sys.argv[1:])", "a")) == "['a']\n"
    assert "--indent" in printed(interpreter.of_module("json.tool", "--help"))
    assert not (tmp_path / "mark").exists()


def test_a_path_without_the_current_folder_stays_whole(monkeypatch):
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # Python 3.10 does not know it
    whole = [sys.executable, "-c", "import sys; print([one for one in sys.path if one])"]
    assert printed(interpreter.of_code("print(sys.path)")) == printed(whole)


STARTS = """
import subprocess
from benchd.daemon.machine import interpreter
statement = "import time; print('begun', flush=True); time.sleep(6000)"
subprocess.run(interpreter.of_module("timeit", "-n", "1", statement))
"""


def test_a_module_ends_with_its_parent_however_that_ends():
    with subprocess.Popen([sys.executable, "-c", STARTS], stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout.readline() == b"begun\n"
        process.kill()
        assert select.select([process.stdout], [], [], WAIT_S)[0]
        assert os.read(process.stdout.fileno(), 1) == b"", "the module goes on"
