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
from broker import HOST, free_port

USER = "postgres" if os.geteuid() == 0 else None  # the server refuses to run as root


def _program(name: str) -> str:
    places = [os.environ["PATH"], *map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True))]
    found = shutil.which(name, path=":".join(places))
    if found is None:
        pytest.skip(f"needs the program {name}, of Debian's package postgresql")
    return found


@contextmanager
def running_postgres() -> Iterator[str]:
    """Yield the URL of an empty server; it trusts everybody on this machine and does not wait for its disk."""
    initdb, postgres = _program("initdb"), _program("postgres")
    folder = Path(tempfile.mkdtemp(prefix="benchd-postgres-"))  # pytest's own folders are closed to other users
    try:
        if USER:
            shutil.chown(folder, USER)
        command = [initdb, "-D", str(folder / "data"), "-U", "benchd", "-A", "trust", "--no-sync", "-E", "UTF8"]
        subprocess.run([*command, "--locale=C"], check=True, stdout=subprocess.DEVNULL, user=USER, cwd=folder)
        port = free_port()
        settings = ["-k", str(folder), "-h", HOST, "-p", str(port), "-F"]
        with subprocess.Popen(
            [postgres, "-D", str(folder / "data"), *settings],
            stderr=subprocess.DEVNULL,
            user=USER,
            cwd=folder,
        ) as server:
            try:
                _wait_until_it_answers(f"postgresql://benchd@{HOST}:{port}/postgres", server)
                yield f"postgresql://benchd@{HOST}:{port}/postgres"
            finally:
                server.send_signal(signal.SIGINT)  # SIGTERM would wait for whoever is still connected
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
