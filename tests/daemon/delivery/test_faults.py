"""A network between a device and a real mosquitto that cuts, stalls and repeats: nothing is lost, nobody misled."""

import gc
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from links import add, linked, progress
from proxy import PUBACK, PUBLISH, Cut, forward, kind, proxying
from waiting import wait_for

from benchd.daemon.delivery.broker import ConnectionEnded, parse_url
from benchd.daemon.delivery.connection import connect

RUNS = [f"r{number}" for number in range(150)]
CUT = 40


def cutting(of_kind, of_up, share):
    """Return a fault that ends the connection with a packet of this kind, of which it passes on a share."""
    seen = 0

    def fault(wire, packet, up):
        nonlocal seen
        if (kind(packet), up) != (of_kind, of_up):
            return forward(wire, packet, up)
        seen += 1
        if seen == CUT:
            forward(wire, packet[: int(share * len(packet))], up)
            raise Cut
        return forward(wire, packet, up)

    return fault


def repeating(of_kind, of_up):
    """Return a fault by which every packet of this kind comes three times."""

    def fault(wire, packet, up):
        forward(wire, packet * (3 if (kind(packet), up) == (of_kind, of_up) else 1), up)

    return fault


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(cutting(PUBLISH, True, 0.5), id="cut in the middle of a publish"),
        pytest.param(cutting(PUBLISH, True, 1.0), id="cut behind a publish"),
        pytest.param(cutting(PUBACK, False, 0.0), id="cut before an acknowledgement"),
        pytest.param(repeating(PUBLISH, True), id="every publish repeated"),
        pytest.param(repeating(PUBACK, False), id="every acknowledgement repeated"),
        pytest.param(repeating(PUBLISH, False), id="everything heard is repeated"),
    ],
)
def test_every_result_arrives_whatever_the_network_does(mosquitto, device_id, watcher, tmp_path, fault):
    with proxying(mosquitto, fault) as proxy, linked(proxy, device_id, tmp_path) as (link, _):
        add(link, device_id, *RUNS)
        wait_for(lambda: progress(link) == (len(RUNS), 0))
        assert link.state.conflict is None
    while set(watcher.results()) != set(RUNS):
        watcher.until(lambda topic, _: "/result/" in topic)


def test_both_sides_notice_a_half_open_connection_and_pending_messages_go_out(mosquitto, device_id, watcher, tmp_path):
    with proxying(mosquitto) as proxy:
        broker = replace(parse_url(proxy.url), keep_alive_s=1)
        with linked(broker, device_id, tmp_path) as (link, _):
            session = watcher.until_status("online")["session"]
            proxy.stall()
            add(link, device_id, *RUNS)
            watcher.until_status("offline", session=session)
            wait_for(lambda: not link.state.connected)
            assert progress(link)[0] < len(RUNS)
            proxy.heal()
            wait_for(lambda: progress(link) == (len(RUNS), 0))
            wait_for(lambda: link.state.connected)
    watcher.until_status("offline")
    assert sorted(set(watcher.results())) == sorted(RUNS)


def test_connections_that_fail_leave_no_descriptor_to_the_garbage_collector():
    def hang_up():
        for _ in range(6):
            server.accept()[0].close()

    gc.disable()
    with socket.create_server(("127.0.0.1", 0)) as server:
        broker = parse_url(f"mqtt://127.0.0.1:{server.getsockname()[1]}")
        hanging_up = threading.Thread(target=hang_up)
        hanging_up.start()
        left = []
        for _ in range(3):
            with pytest.raises(ConnectionEnded):
                connect(broker, "d1", time.monotonic() + 60)
            left.append(len(list(Path("/proc/self/fd").iterdir())))
        hanging_up.join()
    gc.enable()
    assert left[1:] == left[:-1]
