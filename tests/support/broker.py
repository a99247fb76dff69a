"""A real MQTT broker for tests: mosquitto on a free loopback port, configured and ended here."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from ports import HOST, answers, free_port
from waiting import WAIT_S


@dataclass(frozen=True)
class RunningBroker:
    """A broker that answers at `host`:`port`; `process` is the test's to kill."""

    host: str
    port: int
    process: "subprocess.Popen[bytes]"

    @property
    def url(self) -> str:
        return f"mqtt://{self.host}:{self.port}"


def program(name: str, *places: Path) -> str:
    """Return the path of a system program, also in places; without it a test is skipped, or fails where CI is set."""
    executable = shutil.which(name, path=":".join([os.environ["PATH"], "/usr/sbin", *map(str, places)]))
    if executable is None:
        stop = pytest.fail if os.environ.get("CI") else pytest.skip
        stop(f"needs the program {name}; `make test` installs it where it may")
    return executable


@contextmanager
def running_broker(
    folder: Path, settings: str = "allow_anonymous true", port: int | None = None
) -> Iterator[RunningBroker]:
    """Yield a broker that keeps its files in `folder`; `settings` are further lines of mosquitto.conf.

    A test that needs the broker back on the same port after its death gives that port.
    """
    port = port or free_port()
    lines = [f"listener {port} {HOST}", f"log_dest file {folder}/mosquitto.log", settings]
    if os.geteuid() == 0:
        lines.append("user root")  # its own user cannot enter the test's folder
    config = folder / "mosquitto.conf"
    config.write_text("\n".join(lines) + "\n")
    with subprocess.Popen([program("mosquitto"), "-c", str(config)]) as process:
        try:
            _wait_until_it_answers(process, port)
            yield RunningBroker(HOST, port, process)
        finally:
            _end(process)


def _wait_until_it_answers(process: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while process.poll() is None and time.monotonic() < deadline:
        if answers(port):
            return
        time.sleep(0.01)
    pytest.fail(f"mosquitto does not answer on port {port}; exit status {process.poll()}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
