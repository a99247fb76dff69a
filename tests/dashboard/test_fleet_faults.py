"""A fleet whose database or broker fails: 300 devices, two collectors of the real command, nothing lost or doubled."""

import subprocess
import sys
import time
from contextlib import ExitStack, closing, contextmanager

import pytest
from broker import running_broker
from postgres import running_postgres
from waiting import WAIT_S, wait_for

pytest.importorskip("sqlalchemy", reason="needs sqlalchemy, of the extra dashboard")

from records_made import made
from sqlalchemy import func, select
from test_collector import SETTINGS, count, value

from benchd.daemon.delivery.broker import parse_url
from benchd.daemon.delivery.session import connect
from benchd.daemon.delivery.topics import Topics
from benchd.daemon.records import encode
from benchd.dashboard.store import Store

DEVICES, RESULTS = 300, 10


@contextmanager
def collecting(broker, url, *names):
    """Yield the processes of these collectors, which may wait for their database."""
    with ExitStack() as stack:
        found = []
        for name in names:
            options = ["--only", "collector", "--collector", name, "--mqtt", broker.url, "--database", url]
            command = [sys.executable, "-m", "benchd.daemon.cli", "dashboard", *options]
            found.append(stack.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True)))
            stack.callback(found[-1].kill)
        yield found


def publish(broker, devices, numbers):
    """Publish results of these devices, and return once the broker has them all."""
    with closing(connect(parse_url(broker.url), "fleet", time.monotonic() + WAIT_S)) as session:
        for number in numbers:
            for device in devices:
                body = encode(made(run_id=f"r{number}", device_id=device))
                session.publish(Topics(device).result(f"r{number}"), body, 1)
                while session.free == 0:
                    session.step()
        while session.free < session.window:
            session.step()


def connected(store):
    """Return how many collectors have a connection now."""
    table = store.tables["collector"]
    return value(store, select(func.count()).where(table.c.problem.is_(None), table.c.seen_s > time.time() - 10.0))


@pytest.mark.slow
def test_two_collectors_of_300_devices_lose_nothing_while_their_postgresql_is_started_again(tmp_path):
    devices = [f"d{number}" for number in range(DEVICES)]
    with (
        running_broker(tmp_path, SETTINGS.format(tmp_path)) as broker,
        running_postgres() as server,
        closing(Store(server.url)) as store,
        collecting(broker, server.url, "one", "two") as (first, second),
    ):
        wait_for(lambda: connected(store) == 2)
        publish(broker, devices, range(RESULTS // 2))
        server.stop()
        publish(broker, devices, range(RESULTS // 2, RESULTS))
        second.kill()
        with collecting(broker, server.url, "two") as (again,):
            while "trying again" not in again.stderr.readline():
                assert again.poll() is None
            server.start()
            wait_for(lambda: count(store, "result") == DEVICES * RESULTS)
        assert count(store, "body") == DEVICES * RESULTS
        assert first.poll() is None
