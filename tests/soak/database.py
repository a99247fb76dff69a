"""A PostgreSQL of a soak's own, empty, on loopback, ended with it."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psycopg

from tests.soak.delivery_site import POSTGRES, postgres_in
from tests.soak.nodes import wait_until


class Database(NamedTuple):
    """Where it is, and the id of its first process."""

    url: str
    pid: int


@contextmanager
def postgres(folder: Path) -> Iterator[Database]:
    """Yield a server that keeps its files in `folder` and does not wait for its disk."""
    if POSTGRES:
        folder.chmod(0o711)  # its user passes through
    command, url = postgres_in(folder / "database")
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, user=POSTGRES, cwd=folder / "database") as server:
        try:
            wait_until(lambda: accepts(url), "the start of PostgreSQL")
            yield Database(url, server.pid)
        finally:
            server.send_signal(2)  # which does not wait for who is connected


def accepts(url: str) -> bool:
    """Return whether a server accepts a connection there: it listens sooner than that."""
    try:
        psycopg.connect(url, connect_timeout=5).close()
    except psycopg.OperationalError:
        return False
    return True
