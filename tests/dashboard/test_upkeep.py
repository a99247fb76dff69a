"""A dashboard whose collector dies, with the real command, a real mosquitto and real kills."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing, suppress
from pathlib import Path

import pytest
from broker import free_port, running_broker
from browsing import get, opened, running_browser
from disks import use_up_space
from links import counts, linked
from waiting import WAIT_S, wait_for

pytest.importorskip("nicegui", reason="needs nicegui, of the extra dashboard")

from test_collector import SETTINGS, count, message, publish
from test_pages import serving

from benchd.daemon.delivery.broker import parse_url
from benchd.daemon.delivery.outbox import Outbox
from benchd.dashboard.collector import Collector
from benchd.dashboard.store import Store, Unusable
from benchd.dashboard.upkeep import ATTEMPTS


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/dashboard.db"


def collector_of(process):
    """Return the process id of the collector that a dashboard has started, None while there is none."""
    for children in Path(f"/proc/{process.pid}/task").glob("*/children"):
        for child in children.read_text().split():
            with suppress(OSError):  # it has just ended
                if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
    return None


def maps(pid):
    """Return what a process has mapped, its modules among them; nothing while it starts."""
    try:
        return Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return b""


def kill_collector(process):
    """Kill the collector once there is one, and return when it is gone."""
    seen = []
    wait_for(lambda: seen.append(collector_of(process)) or seen[-1], process)
    os.kill(seen[-1], signal.SIGKILL)
    wait_for(lambda: collector_of(process) != seen[-1])


def metric(port, name):
    """Return the value of a collector's metric, None while it is unknown."""
    lines = get(port, "/metrics")[2].decode().splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(f"benchd_collector_{name}{{")), None)


def test_a_collector_that_is_killed_is_started_again_and_stores_what_came_meanwhile(tmp_path, url):
    with (
        running_broker(tmp_path, SETTINGS.format(tmp_path)) as broker,
        serving(broker.url, url, "--collector", "site") as (port, process),
        closing(Store(url)) as store,
    ):
        wait_for(lambda: metric(port, "up") == 1.0)
        publish(broker.url, tmp_path, [1])
        wait_for(lambda: count(store, "result") == 1)
        assert metric(port, "restarts_total") == 0.0
        os.kill(collector_of(process), signal.SIGKILL)
        publish(broker.url, tmp_path, [2])
        wait_for(lambda: count(store, "result") == 2)
        assert metric(port, "restarts_total") == 1.0
        wait_for(lambda: metric(port, "last_message_age_seconds") < WAIT_S)


def test_a_collector_that_cannot_live_ends_the_dashboard_with_a_failure(tmp_path, url, mosquitto):
    with serving(mosquitto.url, url) as (_, process):
        for _ in range(ATTEMPTS):
            kill_collector(process)
        assert process.wait(WAIT_S) == 1


def test_a_database_that_is_replaced_is_never_acknowledged_and_the_new_one_gets_the_results(tmp_path, url):
    """First it is moved away, then another one is put in its place."""
    with (
        running_broker(tmp_path, SETTINGS.format(tmp_path)) as broker,
        serving(broker.url, url, "--collector", "site") as (port, _),
    ):
        wait_for(lambda: metric(port, "up") == 1.0)
        Store(f"sqlite:///{tmp_path}/another.db").close()
        for device, is_put_there, before in (("d1", False, 0), ("d2", True, 2)):
            (old_place := tmp_path / f"before-{device}").mkdir()
            for path in tmp_path.glob("dashboard.db*"):
                path.replace(old_place / path.name)
            if is_put_there:
                (tmp_path / "another.db").replace(tmp_path / "dashboard.db")
            publish(broker.url, tmp_path, [1, 2], device)
            with closing(Store(url)) as store:
                wait_for(lambda store=store: count(store, "result") == 2)
            wait_for(lambda device=device: device.encode() in get(port, "/metrics")[2])
            with closing(Store(f"sqlite:///{old_place}/dashboard.db")) as old:
                assert count(old, "result") == before


def test_a_database_that_is_damaged_ends_the_collector(tmp_path, url, mosquitto):
    store = Store(url)
    store.close()  # so that its next connection reads the file
    with (tmp_path / "dashboard.db").open("r+b") as file:
        file.write(b"rubbish" * 10_000)
    with closing(store), pytest.raises(Unusable, match=r"dashboard.db: file is not a database"):
        Collector(store, parse_url(mosquitto.url), "site").run(threading.Event())


def test_a_database_that_is_damaged_while_it_runs_acknowledges_nothing_and_ends_the_dashboard(tmp_path, url):
    path = tmp_path / "outbox.db"
    with Outbox(path) as outbox:
        outbox.add_all([message("d1", "r1")])
    with (
        running_broker(tmp_path, SETTINGS.format(tmp_path)) as broker,
        serving(broker.url, url, "--collector", "site") as (port, process),
    ):
        wait_for(lambda: metric(port, "up") == 1.0)
        with closing(sqlite3.connect(tmp_path / "dashboard.db")) as file:
            # what is still in the WAL would repair the file
            wait_for(lambda: file.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone() == (0, 0, 0))
        with (tmp_path / "dashboard.db").open("r+b") as file:
            file.write(b"rubbish" * 10_000)
        with linked(broker, "d1", path, collectors=["site"]):
            wait_for(lambda: not counts(path)[0].pending)
            assert process.wait(WAIT_S) == 1
    assert counts(path) == ((0, 1, 0), 1)


def test_a_full_disk_is_named_and_until_there_is_room_the_collector_is_down(small_disk, mosquitto):
    full = small_disk / "full"
    with serving(mosquitto.url, f"sqlite:///{small_disk}/dashboard.db") as (port, _), running_browser() as browser:
        wait_for(lambda: metric(port, "up") == 1.0)
        use_up_space(full)
        wait_for(lambda: metric(port, "up") == 0.0)
        with opened(browser, port) as page:
            page.get_by_text("nothing that arrives is stored: database or disk is full").wait_for()
        full.unlink()
        wait_for(lambda: metric(port, "up") == 1.0)


def test_ctrl_c_while_the_collector_still_starts_ends_without_a_trace(url, mosquitto):
    command = [sys.executable, "-m", "benchd.daemon.cli", "dashboard", "--mqtt", mosquitto.url, "--database", url]
    child = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    command += ["--port", str(free_port())]
    with subprocess.Popen(command, env=child, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        wait_for(lambda: b"msgspec" in maps(collector_of(process)), process)
        os.killpg(process.pid, signal.SIGINT)
        _, told = process.communicate(timeout=WAIT_S)
    assert "Traceback" not in told
    assert "the collector ended" not in told
