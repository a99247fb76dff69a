"""Fresh interpreters: nothing in the current folder is imported, and a module ends with its parent."""

import subprocess
import sys

from planted import planted

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
