"""What systemd hears, on a socket as it binds one."""

import socket
import time
from contextlib import closing

import pytest

from benchd.daemon.machine.systemd_notify import Notifier, log


@pytest.fixture(params=["path", "abstract"])
def heard(request, tmp_path, monkeypatch):
    """Bind NOTIFY_SOCKET and return a function that returns the next message."""
    name = (
        str(tmp_path / "notify") if request.param == "path" else f"@benchd-test-{tmp_path.name}-{time.monotonic_ns()}"
    )
    monkeypatch.setenv("NOTIFY_SOCKET", name)
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as server:
        server.bind(name.replace("@", "\0"))
        server.settimeout(5)
        yield lambda: server.recv(4096).decode()


def test_what_came_over_the_network_is_one_line_to_systemd_and_to_the_log(heard, capsys):
    text = "boot x\nWATCHDOG=trigger\0\x1b[2J\u2028\ud800" + "y" * 5000
    with closing(Notifier()) as notifier:
        notifier.status(text)
        message = heard()
        assert message.startswith("STATUS=boot x WATCHDOG=trigger  [2J  y")
        assert len(message) < 1100
    log(text)
    assert capsys.readouterr().err == f"{message.removeprefix('STATUS=')}\n"


def test_a_systemd_that_does_not_read_never_blocks_the_service(heard):
    with closing(Notifier()) as notifier:
        for _ in range(10_000):
            notifier.status("x" * 500)
