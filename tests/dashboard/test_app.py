"""The dashboard's process: its collector waits for a full disk, and ends without a trace."""

import signal
from contextlib import closing

from broker import running_broker
from browsing import get
from disks import use_up_space
from test_collector import SETTINGS, count, publish
from test_pages import serving
from waiting import WAIT_S, wait_for

from benchd.dashboard.store import Store


def metric(port, name):
    """Return the value of a collector's metric, None while it is unknown."""
    lines = get(port, "/metrics")[2].decode().splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(f"benchd_collector_{name}{{")), None)


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
