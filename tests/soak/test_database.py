"""The soaks' PostgreSQL is used once it accepts connections."""

import threading
from socketserver import BaseRequestHandler, TCPServer

import pytest

pytest.importorskip("sqlalchemy", reason="needs sqlalchemy, of the extra dashboard")
pytest.importorskip("psycopg", reason="needs psycopg, of the extra postgres")

from tests.soak.database import accepts
from tests.support.ports import HOST, answers


def test_a_port_that_only_listens_is_not_ready():
    with TCPServer((HOST, 0), BaseRequestHandler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            port = listening.server_address[1]
            assert answers(port)
            assert not accepts(f"postgresql://benchd@{HOST}:{port}/postgres")
        finally:
            listening.shutdown()
            thread.join()
