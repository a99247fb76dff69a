"""The dashboard's process: its collector dies with it, waits for a full disk, and ends without a trace."""

import os
import signal
from contextlib import closing

import pytest
from broker import running_broker
from browsing import get
from disks import use_up_space
from waiting import WAIT_S, wait_for

pytest.importorskip("nicegui", reason="needs nicegui, of the extra dashboard")

from test_collector import SETTINGS, count, publish
from test_pages import serving

from benchd.dashboard.store import Store


def metric(port, name):
    """Return the value of a collector's metric, None while it is unknown."""
    lines = get(port, "/metrics")[2].decode().splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(f"benchd_collector_{name}{{")), None)


def test_a_dashboard_that_is_killed_stores_what_came_meanwhile_when_it_is_started_again(tmp_path):
    url = f"sqlite:///{tmp_path}/dashboard.db"
    with running_broker(tmp_path, SETTINGS.format(tmp_path)) as broker, closing(Store(url)) as store:
        with serving(broker.url, url, "--collector", "site") as (port, process):
            wait_for(lambda: metric(port, "up") == 1.0)
            publish(broker.url, tmp_path, [1])
            wait_for(lambda: count(store, "result") == 1)
            os.kill(process.pid, signal.SIGKILL)
        publish(broker.url, tmp_path, [2])
        with serving(broker.url, url, "--collector", "site"):
            wait_for(lambda: count(store, "result") == 2)


def test_a_full_disk_costs_nothing_once_there_is_room(small_disk, tmp_path):
    full, url = small_disk / "full", f"sqlite:///{small_disk}/dashboard.db"
    with (
        running_broker(tmp_path, SETTINGS.format(tmp_path)) as broker,
        serving(broker.url, url, "--collector", "site", stderr=tmp_path / "log") as (port, _),
    ):
        wait_for(lambda: metric(port, "up") == 1.0)
        use_up_space(full)
        publish(broker.url, tmp_path, [1])
        wait_for(lambda: "disk is full; trying again" in (tmp_path / "log").read_text())
        full.unlink()
        with closing(Store(url)) as store:
            wait_for(lambda: count(store, "result") == 1)


def test_ctrl_c_ends_without_a_trace(tmp_path, mosquitto):
    url, log = f"sqlite:///{tmp_path}/dashboard.db", tmp_path / "log"
    with serving(mosquitto.url, url, stderr=log) as (_, process):
        process.send_signal(signal.SIGINT)
        process.wait(WAIT_S)
    assert "Traceback" not in log.read_text()
