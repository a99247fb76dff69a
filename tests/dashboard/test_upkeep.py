"""A dashboard whose collector dies, with the real command, a real mosquitto and real kills."""

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest
from broker import free_port, running_broker
from browsing import get, opened, running_browser
from disks import use_up_space
from records_made import made
from waiting import WAIT_S, wait_for

pytest.importorskip("nicegui", reason="needs nicegui, of the extra dashboard")

from test_collector import SETTINGS, count, publish
from test_pages import serving

from benchd.daemon.delivery.broker import parse_url
from benchd.daemon.records import encode
from benchd.dashboard.store import Store
from benchd.dashboard.upkeep import ATTEMPTS
from tests.soak.board import Board


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/dashboard.db"


def collector_of(process):
    """Return the process id of the collector that a dashboard has started, None while there is none."""
    for child in psutil.Process(process.pid).children():
        with suppress(psutil.Error):  # it has just ended
            if any("spawn_main" in part for part in child.cmdline()):
                return child.pid
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


@pytest.mark.slow
def test_a_database_that_is_replaced_gets_all_results_that_the_device_still_has(tmp_path, url):
    """First it is moved away, then another one is put in its place: either is a new one, which asks for everything."""
    with (
        running_broker(tmp_path, SETTINGS.format(tmp_path)) as broker,
        closing(Board(parse_url(broker.url), tmp_path / "device", "d1")) as board,
        serving(broker.url, url, "--collector", "site") as (port, _),
    ):
        wait_for(lambda: metric(port, "up") == 1.0)
        Store(f"sqlite:///{tmp_path}/another.db").close()
        for results, is_put_there in ((1, False), (2, True)):
            (old_place := tmp_path / f"before-{results}").mkdir()
            for path in tmp_path.glob("dashboard.db*"):
                path.replace(old_place / path.name)
            if is_put_there:
                (tmp_path / "another.db").replace(tmp_path / "dashboard.db")
            board.records.append(encode(made(device_id="d1", run_id=f"r{results}")))

            def has_all(store, results=results):
                board.attend()
                return count(store, "result") == results

            with closing(Store(url)) as store:
                wait_for(lambda store=store: has_all(store))


def test_a_database_that_is_damaged_while_it_runs_acknowledges_nothing_and_ends_the_dashboard(tmp_path, url):
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
        publish(broker.url, tmp_path, [1])
        assert process.wait(WAIT_S) == 1
        for path in tmp_path.glob("dashboard.db*"):
            path.unlink()
        with serving(broker.url, url, "--collector", "site"), closing(Store(url)) as store:
            wait_for(lambda: count(store, "collector") == 1)


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
