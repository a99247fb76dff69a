"""A real PostgreSQL for tests: a cluster of its own in a temporary folder, on a free loopback port, ended here."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from broker import HOST, free_port, program
from waiting import WAIT_S

USER = "postgres" if os.geteuid() == 0 else None  # the server refuses to run as root


def _program(name: str) -> str:
    return program(name, *sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True))  # Debian's, the newest first


class Postgres:
    """An empty cluster at `url`; it trusts everybody on this machine and does not wait for its disk."""

    def __init__(self, folder: Path) -> None:
        port = free_port()
        self.url = f"postgresql://benchd@{HOST}:{port}/postgres"
        self._folder = folder
        make = [_program("initdb"), "-D", folder / "data", "-U", "benchd", "-A", "trust", "--no-sync", "-E", "UTF8"]
        if USER:
            shutil.chown(folder, USER)
        subprocess.run([*make, "--locale=C"], check=True, stdout=subprocess.DEVNULL, user=USER, cwd=folder)
        settings = ["-k", str(folder), "-h", HOST, "-p", str(port), "-F"]
        self._command = [_program("postgres"), "-D", str(folder / "data"), *settings]

    def start(self) -> None:
        """Start the server and wait until it answers."""
        self._server = subprocess.Popen(self._command, stderr=subprocess.DEVNULL, user=USER, cwd=self._folder)
        _wait_until_it_answers(self.url, self._server)

    def stop(self) -> None:
        """End the server; SIGTERM would wait for whoever is still connected."""
        self._server.send_signal(signal.SIGINT)
        self._server.wait(WAIT_S)


@contextmanager
def running_postgres() -> Iterator[Postgres]:
    folder = Path(tempfile.mkdtemp(prefix="benchd-postgres-"))  # pytest's own folders are closed to other users
    try:
        server = Postgres(folder)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder)


def _wait_until_it_answers(url: str, server: "subprocess.Popen[bytes]") -> None:
    psycopg = pytest.importorskip("psycopg", reason="needs psycopg, of the extra postgres")
    while server.poll() is None:
        try:
            psycopg.connect(url, connect_timeout=5).close()
        except psycopg.OperationalError:
            continue
        return
    pytest.fail(f"postgres ended with exit status {server.returncode}")
