"""What `benchd dashboard` refuses before it starts: one line and the exit code of a wrong command line."""

import os
import socket
import subprocess
import sys

import pytest
from broker import HOST
from waiting import WAIT_S

pytest.importorskip("nicegui", reason="needs nicegui, of the extra dashboard")


def refused(*options, **environment):
    """Return what the command prints before it ends, with the exit code 2."""
    command = [sys.executable, "-m", "benchd.daemon.cli", "dashboard", "--mqtt", f"mqtt://{HOST}:1", *options]
    child = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"} | environment
    found = subprocess.run(command, env=child, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert found.returncode == 2, found.stderr
    assert found.stderr.count("\n") == 1, found.stderr
    return found.stderr


@pytest.mark.parametrize(
    ("database", "why"),
    [
        ("postgresql://u:p@127.0.0.1:abc/x", "expected sqlite:///PATH or postgresql://"),
        ("sqlite:///:memory:", "share a file, sqlite:///PATH"),
        ("sqlite://", "share a file, sqlite:///PATH"),
    ],
)
def test_a_database_that_two_processes_cannot_open_is_refused(database, why):
    assert why in refused("--database", database)


def test_a_state_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    said = refused("--only", "collector", XDG_STATE_HOME=str(tmp_path / "file"))
    assert f"{tmp_path}/file/benchd: Not a directory; choose a folder that can be read and written" in said


def test_a_port_that_is_taken_is_not_the_exit_code_of_slower(tmp_path):
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        said = refused("--database", f"sqlite:///{tmp_path}/d.db", "--port", str(port))
    assert said == f"error: --port {port} of {HOST}: Address already in use; give another\n"
