"""A fleet whose database or broker fails: 300 devices, two collectors of the real command, nothing lost or doubled."""

import json
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from broker import free_port, running_broker
from postgres import running_postgres
from records_made import made
from sqlalchemy import func, select
from test_collector import SETTINGS, count, value
from waiting import WAIT_S, wait_for

from benchd.daemon.delivery.broker import parse_url
from benchd.daemon.delivery.connection import connect
from benchd.daemon.delivery.delivery import CURSOR
from benchd.daemon.delivery.topics import Topics
from benchd.daemon.records import encode
from benchd.dashboard.store import Store

DEVICES, RESULTS = 300, 10


@contextmanager
def collecting(broker, url, *names):
    """Yield the processes of these collectors, which may wait for their database."""
    with ExitStack() as stack:
        processes = []
        for name in names:
            options = ["--only", "collector", "--collector", name, "--mqtt", broker.url, "--database", url]
            command = [sys.executable, "-m", "benchd.daemon.cli", "dashboard", *options]
            processes.append(stack.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True)))
            stack.callback(processes[-1].kill)
        yield processes


def publish(broker, devices, numbers):
    """Publish results of these devices, and return once the broker has them all."""
    with closing(connect(parse_url(broker.url), "fleet", time.monotonic() + WAIT_S)) as session:
        for number in numbers:
            for device in devices:
                body = encode(made(run_id=f"r{number}", device_id=device))
                session.publish(Topics(device).result(f"r{number}"), body, 1)
                while session.free == 0:
                    session.turn(1.0)
        while session.free < session.window:
            session.turn(1.0)


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


@contextmanager
def device(folder, url, child_environment, **environment):
    """Yield the folder of a device d0, which delivers what `measure` puts there and answers a replay."""
    (folder / "device").mkdir()
    command = [sys.executable, "-m", "tests.soak.board", url, folder / "device", "d0", folder / "device/results"]
    environment = child_environment | environment | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            yield folder / "device"
        finally:
            process.terminate()


def measure(folder, *numbers):
    """Give the device results to deliver."""
    with (folder / "results").open("ab") as file:
        file.writelines(encode(made(run_id=f"r{number}", device_id="d0")) + b"\n" for number in numbers)


def acknowledged(folder):
    """Return how many results a broker has taken."""
    cursor = folder / CURSOR
    return json.loads(cursor.read_bytes())["records"]["acknowledged"] if cursor.exists() else 0


@pytest.mark.slow
def test_no_result_is_lost_if_the_broker_loses_its_disk(tmp_path, child_environment):
    url, port, settings = f"sqlite:///{tmp_path}/dashboard.db", free_port(), SETTINGS.format(tmp_path)
    with ExitStack() as stack:
        store = stack.enter_context(closing(Store(url)))
        with running_broker(tmp_path, settings, port) as first:
            folder = stack.enter_context(device(tmp_path, first.url, child_environment))
            with collecting(first, url, "site"):
                wait_for(lambda: connected(store) == 1)
                measure(folder, 0)
                wait_for(lambda: count(store, "result") == 1)
            measure(folder, *range(1, 200))
            wait_for(lambda: acknowledged(folder) == 200)  # the broker keeps them for its collector
            first.process.kill()
            first.process.wait(WAIT_S)
        (tmp_path / "mosquitto.db").unlink()
        with running_broker(tmp_path, settings, port) as second, collecting(second, url, "site"):
            wait_for(lambda: count(store, "result") == 200)
            assert count(store, "body") == 200


@pytest.mark.slow
def test_no_result_is_lost_if_the_broker_drops_messages_for_a_slow_collector(tmp_path, child_environment):
    url = f"sqlite:///{tmp_path}/dashboard.db"
    settings = "allow_anonymous true\nmax_queued_messages 100\nmax_inflight_messages 20"
    with (
        running_broker(tmp_path, settings) as broker,
        closing(Store(url)) as store,
        device(tmp_path, broker.url, child_environment) as folder,
        collecting(broker, url, "site") as (slow,),
    ):
        wait_for(lambda: connected(store) == 1)
        measure(folder, 0)
        wait_for(lambda: count(store, "result") == 1)
        slow.send_signal(signal.SIGSTOP)
        measure(folder, *range(1, 1000))
        wait_for(lambda: acknowledged(folder) == 1000)
        slow.send_signal(signal.SIGCONT)
        wait_for(lambda: count(store, "result") == 1000)
        assert count(store, "body") == 1000
