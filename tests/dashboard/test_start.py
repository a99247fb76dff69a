"""What `benchd dashboard` refuses before it starts: one line and the exit code of a wrong command line."""

import signal
import socket
import sys

import pytest
from broker import HOST

from benchd.daemon import cli
from benchd.dashboard.app import TOKEN_VARIABLE

DASHBOARD = ("dashboard", "--mqtt", f"mqtt://{HOST}:1", "--database", "sqlite:///d.db")


@pytest.fixture
def refused(monkeypatch, capfd):
    """Return a function that runs the command and returns the line that it prints before it ends with the code 2."""

    def run(*options, command=DASHBOARD):
        monkeypatch.setattr(sys, "argv", ["benchd", *command, *options])
        with pytest.raises(SystemExit) as end:
            cli.benchd()
        output = capfd.readouterr().err
        assert (end.value.code, output.count("\n")) == (2, 1), output
        return output

    before = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--database", "postgresql://u:p@127.0.0.1:abc/x"], "expected sqlite:///PATH or postgresql://"),
        (["--database", "sqlite:///:memory:"], "share a file, sqlite:///PATH"),
        (["--database", "sqlite://"], "share a file, sqlite:///PATH"),
        (["--host", "0.0.0.0"], TOKEN_VARIABLE),  # noqa: S104
    ],
)
def test_a_line_that_cannot_be_served_is_refused(refused, options, why):
    assert why in refused(*options)


def test_a_state_folder_that_cannot_be_made_is_named(refused, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    output = refused("--only", "collector", command=DASHBOARD[:3])
    assert f"{tmp_path}/file/benchd: Not a directory; choose a folder that can be read and written" in output


@pytest.mark.parametrize("command", [DASHBOARD, ("demo",)], ids=["dashboard", "demo"])
def test_a_port_that_is_taken_is_not_the_exit_code_of_slower(refused, command):
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        output = refused("--port", str(port), command=command)
    assert output == f"error: --port {port} on {HOST}: Address already in use; choose a different one\n"
