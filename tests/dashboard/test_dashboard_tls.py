"""Collector, terminal view and pages over TLS: one's own authority, a client certificate, a password in a file."""

import math
import os
from contextlib import closing, contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
from broker import HOST
from certificates import Authority, serving
from forked import BENCHD, PAGES, Program
from sqlalchemy import select
from test_collector import publish_to, value
from waiting import WAIT_S, wait_for

from benchd.daemon.delivery.broker import CREDENTIAL, parse_url
from benchd.daemon.delivery.connection import Connection
from benchd.dashboard import commands
from benchd.dashboard.commands import run_suite
from benchd.dashboard.store import Store


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def files(authority):
    certificate, key = authority.issue("client")
    return {"ca_file": str(authority.certificate), "certificate_file": str(certificate), "key_file": str(key)}


@pytest.fixture
def site(tmp_path, authority):
    with serving(tmp_path, authority, authority.issue("broker")) as broker:
        yield broker


@pytest.fixture
def trusted(site, files):
    return replace(parse_url(f"mqtts://me:right@{HOST}:{site.port}"), **files)


@contextmanager
def collecting(folder, broker, database):
    """Start `benchd dashboard --only collector`; the password lies where systemd would put it."""
    (folder / CREDENTIAL).write_text("right\n")
    files = {name: getattr(broker, name) for name in ("ca_file", "certificate_file", "key_file")}
    given = [f"--{name.replace('_', '-')}={path}" for name, path in files.items()]
    given += ["--mqtt", f"mqtts://me@{broker.address}", "--database", database, "--collector", "site"]
    arguments = ["benchd", "dashboard", "--only", "collector", *given]
    environment = os.environ | {"CREDENTIALS_DIRECTORY": str(folder)}
    with Program(BENCHD, arguments, folder, environment, 2, PAGES) as process:
        yield
        process.terminate()


def test_a_collector_takes_results_over_tls_with_a_certificate_and_a_password_file(trusted, tmp_path):
    database = f"sqlite:///{tmp_path}/dashboard.db"
    with closing(Store(database)) as store:
        columns = store.tables["collector"].c.problem, store.tables["result"].c.run_id
        with collecting(tmp_path, trusted, database):
            wait_for(lambda: value(store, select(store.tables["collector"].c.name)) == "site")
            publish_to(trusted, tmp_path, [1])
            wait_for(lambda: value(store, select(columns[1])) == "r1")
        assert value(store, select(columns[0])) is None


def test_a_page_asks_over_tls_and_says_why_it_cannot(trusted, monkeypatch):
    """It may take its time to ask; then the time to answer is over."""
    publish = Connection.publish
    with monkeypatch.context() as patched:

        def asked(*given, **more):
            packet_id = publish(*given, **more)
            patched.setattr(commands, "time", SimpleNamespace(monotonic=lambda: math.inf))
            return packet_id

        patched.setattr(Connection, "publish", asked)
        assert run_suite(trusted, "d1", "nightly", WAIT_S).startswith(f"no answer within {WAIT_S:g} s;")
    assert "does not trust" in run_suite(replace(trusted, ca_file=None), "d1", "nightly", WAIT_S)
