"""The service's connection to a real mosquitto: birth, will, commands, holding still, refusals, two of one id."""

import json
import random
import subprocess
import sys
import threading
from contextlib import closing, contextmanager
from dataclasses import replace

import msgspec
import pytest
from broker import HOST, free_port, running_broker
from links import Watcher, add, body, linked, progress
from proxy import PUBACK, PUBLISH, Cut, forward, kind, proxying, refuse_5
from waiting import wait_for

from benchd.daemon.delivery import link as link_module
from benchd.daemon.delivery.broker import parse_url
from benchd.daemon.delivery.delivery import CURSOR, HUNG_UP
from benchd.daemon.delivery.topics import Topics

RECEIVE_MAXIMUM = 20  # mosquitto's own choice


def test_birth_documents_results_and_goodbye(mosquitto, device_id, watcher, tmp_path):
    with linked(mosquitto, device_id, tmp_path) as (link, _):
        link.retain(Topics(device_id).of("info"), b'{"schema":"benchd.info/1"}')
        session = watcher.until_status("online")["session"]
        add(link, device_id, "r1", "r2")
        watcher.until(lambda topic, _: topic.endswith("/result/r2"))
        wait_for(lambda: progress(link) == (2, 0))
    gone = watcher.until_status("offline")
    assert (gone["boot_id"], gone["session"]) == ("boot-a", session)
    assert watcher.results() == ["r1", "r2"]
    assert msgspec.json.decode((tmp_path / CURSOR).read_bytes())["records"]["acknowledged"] == 2
    late = Watcher(mosquitto, device_id)
    late.until(lambda topic, payload: topic.endswith("/info") and payload == b'{"schema":"benchd.info/1"}')
    late.close()


def test_events_have_a_log_of_their_own(mosquitto, device_id, watcher, tmp_path):
    with linked(mosquitto, device_id, tmp_path) as (link, _):
        events = link.delivery.outgoing["events"]
        events.log.append(b'{"schema":"benchd.event/1","event":"a"}')
        message = watcher.until(lambda topic, _: topic == Topics(device_id).of("event"))
        assert json.loads(message.payload)["log"] == events.log.id != link.delivery.records.log.id
        wait_for(lambda: events.acknowledged == 1)


def test_while_it_is_held_nothing_but_health_and_telemetry_passes_and_nothing_is_written(
    mosquitto, device_id, watcher, tmp_path
):
    topics = Topics(device_id)
    with linked(mosquitto, device_id, tmp_path) as (link, _):
        watcher.until_status("online")
        wait_for((tmp_path / CURSOR).exists)
        before = (tmp_path / CURSOR).stat()
        link.is_held = True
        add(link, device_id, "r1")
        link.retain(topics.latest("c"), b"{}")
        link.answer(f"{topics.root}resp/me/1", b"{}", None)
        for number in range(3):
            link.telemetry(b'{"n":%d}' % number)
            watcher.until(
                lambda topic, body, n=number: topic == topics.of("telemetry") and json.loads(body) == {"n": n}
            )
            link.retain(topics.of("health"), b'{"n":%d}' % number)
            watcher.until(lambda topic, body, n=number: topic == topics.of("health") and json.loads(body) == {"n": n})
        assert {message.topic for message in watcher.all} == {topics.of(k) for k in ("status", "telemetry", "health")}
        assert progress(link) == (0, 0)
        assert (tmp_path / CURSOR).stat() == before
        link.is_held = False
        held_back = {topics.result("r1"), topics.latest("c"), f"{topics.root}resp/me/1"}
        wait_for(lambda: watcher.until(lambda *_: True) and held_back <= {message.topic for message in watcher.all})
        wait_for(lambda: (tmp_path / CURSOR).stat() != before)


def test_a_command_reaches_the_service_with_everything_that_came_beside_it(mosquitto, device_id, watcher, tmp_path):
    topics = Topics(device_id)
    with linked(mosquitto, device_id, tmp_path) as (link, wake):
        watcher.until_status("online")
        reply_to = f"{topics.root}resp/me/1"
        beside = {"ResponseTopic": reply_to, "CorrelationData": b"\0\xff", "MessageExpiryInterval": 600}
        watcher.say(f"{topics.root}cmd/run", b"x" * 70_000, **beside)
        assert wake.recv(100)
        arrived = link.state.commands.popleft()
        assert (arrived.topic, arrived.retained) == (f"{topics.root}cmd/run", False)
        assert (arrived.response_topic, arrived.correlation) == (reply_to, b"\0\xff")
        assert 0 < arrived.expire_s <= 600
        assert len(arrived.body) == 70_000
        link.answer(reply_to, b'{"ok":1}', arrived.correlation)
        answer = watcher.until(lambda topic, _: topic == reply_to)
        assert answer.properties.CorrelationData == b"\0\xff"


@pytest.mark.parametrize(("fault", "is_shown"), [(forward, True), (refuse_5, False)], ids=["MQTT 5", "MQTT 3.1.1"])
def test_a_command_published_with_retain_shows_it_at_once(mosquitto, device_id, watcher, tmp_path, fault, is_shown):
    topic = Topics(device_id).command("run")
    with proxying(mosquitto, fault) as proxy, linked(proxy, device_id, tmp_path) as (link, wake):
        watcher.until_status("online")
        watcher.say(topic, b"{}", retain=True)
        assert wake.recv(100)
        assert link.state.commands.popleft().retained is is_shown
    watcher.say(topic, b"", retain=True)


def test_of_more_commands_than_may_wait_the_first_are_kept(mosquitto, device_id, watcher, tmp_path):
    topics = Topics(device_id)
    with linked(mosquitto, device_id, tmp_path) as (link, _):
        watcher.until_status("online")
        for number in range(link_module.MAX_WAITING + 7):
            watcher.say(topics.command("list"), b"%d" % number)
        watcher.say(topics.of("status"), b"{}")  # no status of a device: the link says again that it is online
        watcher.until_status("online")
        assert [int(command.body) for command in link.state.commands] == list(range(link_module.MAX_WAITING))


def test_a_restarted_broker_gets_everything_again(device_id, tmp_path):
    port = free_port()
    with linked(f"mqtt://{HOST}:{port}", device_id, tmp_path) as (link, _):
        link.retain(Topics(device_id).of("info"), b"{}")
        for number in (1, 2):
            with running_broker(tmp_path, port=port) as broker:
                watcher = Watcher(broker, device_id)
                add(link, device_id, f"r{number}")
                watcher.until(lambda topic, _: topic.endswith("/info"))
                watcher.until(lambda topic, _, n=number: topic.endswith(f"/result/r{n}"))
                wait_for(lambda n=number: progress(link) == (n, 0))
                watcher.close()
                broker.process.kill()
        wait_for(lambda: not link.state.connected and link.state.reason)
        assert link.is_alive()


def test_no_message_from_the_network_makes_a_device_lose_data(mosquitto, device_id, watcher, tmp_path):
    topics = Topics(device_id)
    with linked(mosquitto, device_id, tmp_path) as (link, _):
        watcher.until_status("online")
        link.is_held = True
        add(link, device_id, "r1")
        forged = b'{"schema":"benchd.ack/1","keys":["%s:r1"]}' % device_id.encode()
        for topic in (f"{topics.root}ack/store", topics.result("r1"), topics.command("forget"), topics.of("status")):
            watcher.say(topic, forged)
        watcher.until_status("online")  # the answer to the last one
        link.is_held = False
        watcher.until(lambda topic, body: topic == topics.result("r1") and body.startswith(b'{"log"'))
        wait_for(lambda: progress(link) == (1, 0))
        assert link.delivery.replay(link.delivery.records.log.id, 1, 1) == 1
        watcher.until(lambda topic, body: topic == topics.result("r1") and body.startswith(b'{"log"'))


PROCESS = """
import socket, sys, time
from pathlib import Path
from benchd.daemon.delivery.broker import parse_url
from benchd.daemon.delivery.delivery import Delivery
from benchd.daemon.delivery.link import Link
from benchd.daemon.delivery.log import Log
from benchd.daemon.delivery.topics import Topics
url, device, folder = sys.argv[1:4]
log = Log(Path(folder, "records.jsonl"))
link = Link(parse_url(url), Topics(device), Delivery(Path(folder), log), "boot-a", socket.socketpair()[0])
link.start()
"""


def test_the_will_is_published_and_a_later_connection_is_not_taken_for_gone(mosquitto, device_id, watcher, tmp_path):
    command = [sys.executable, "-c", PROCESS + "time.sleep(600)", mosquitto.url, device_id, str(tmp_path)]
    with ended(subprocess.Popen(command)):
        session = watcher.until_status("online")["session"]
    will = watcher.until_status("offline")
    assert (will["session"], will["boot_id"]) == (session, "boot-a")
    with linked(mosquitto, device_id, tmp_path):
        now = watcher.until_status("online")["session"]
        assert now != session
        watcher.say(Topics(device_id).of("status"), msgspec.json.encode(will), retain=True)
        watcher.until_status("offline", session=session)
        watcher.until_status("online", session=now)


def test_two_machines_with_the_same_id_both_report_it_and_continue(mosquitto, device_id, watcher, tmp_path):
    with (
        linked(mosquitto, device_id, tmp_path / "1", "boot-1") as (first, first_wake),
        linked(mosquitto, device_id, tmp_path / "2", "boot-2") as (second, second_wake),
    ):
        for link, wake, other in ((first, first_wake, "boot-2"), (second, second_wake, "boot-1")):
            assert wake.recv(100)
            event, detail = link.state.events.popleft()
            assert event == "identity_conflict"
            assert f"in use by another machine (boot {other}," in detail
            assert "[device] id" in detail
            assert detail in link.problem()
        add(first, device_id, "r1")
        add(second, device_id, "r2")
        wait_for(lambda: progress(first) == progress(second) == (1, 0))
        births = [m.payload for m in watcher.all if m.topic.endswith("/status") and b'"online"' in m.payload]
        assert len(births) <= 4, "the two take turns"


def test_a_retained_status_of_a_machine_that_has_gone_is_no_conflict(mosquitto, device_id, watcher, tmp_path):
    gone = {"schema": "benchd.status/1", "state": "online", "session": "old", "boot_id": "old", "t_wall": ""}
    watcher.say(Topics(device_id).of("status"), msgspec.json.encode(gone), retain=True)
    watcher.until_status("online", session="old")
    with linked(mosquitto, device_id, tmp_path) as (link, _):
        watcher.until_status("online", boot_id="boot-a")
        wait_for(lambda: link.state.connected)
        assert link.state.conflict is None


@pytest.mark.parametrize("settings", ["", "max_queued_messages 0\n"], ids=["kept", "closed at a refusal"])
def test_a_user_without_permission_to_publish_is_reported_in_one_sentence(device_id, tmp_path, settings, capsys):
    """As one whose name is not the device's id, with the project's own rules."""
    acl = tmp_path / "acl"
    acl.write_text(f"topic readwrite benchd/v1/other/#\ntopic readwrite benchd/v1/{device_id}/result/#\n")
    with (
        running_broker(tmp_path, f"allow_anonymous true\n{settings}acl_file {acl}") as broker,
        linked(broker, device_id, tmp_path) as (link, wake),
    ):
        assert wake.recv(100)
        event, detail = link.state.events.popleft()
        assert event == "not_sent"
        denied = f"benchd/v1/{device_id}/status: {HOST}:{broker.port} refused it: Not authorized"
        assert detail == f"{denied}; check the broker's access rules and limits"
        link.retain(Topics(device_id).of("info"), b"{}")
        add(link, device_id, "r1")
        wait_for(lambda: progress(link) == (1, 0))
        wait_for(lambda: link.state.connected)
        assert link.problem() == detail
        assert not link.state.events


def test_a_broker_of_small_packets_gets_what_fits_and_the_rest_is_named_once(device_id, tmp_path):
    topics = Topics(device_id)
    with running_broker(tmp_path, "allow_anonymous true\nmax_packet_size 2000") as broker:
        watcher = Watcher(broker, device_id)
        with linked(broker, device_id, tmp_path) as (link, _):
            watcher.until_status("online")
            for number in range(3):
                link.retain(topics.of("health"), b"x" * 3000)
                link.retain(topics.of("info"), b"%d" % number)
                watcher.until(lambda topic, body, n=number: topic == topics.of("info") and body == b"%d" % n)
            ((event, detail),) = link.state.events
            assert event == "not_sent"
            assert detail.startswith(f"{topics.of('health')}: 3")
            assert link.state.connected
        watcher.close()


@pytest.mark.parametrize("setting", ["max_packet_size", "message_size_limit"])
def test_a_result_that_is_too_large_is_named_once(device_id, tmp_path, monkeypatch, setting):
    """The broker says its limit, or hangs up without a word."""
    monkeypatch.setattr(random, "uniform", lambda *_: 0.0)
    with (
        running_broker(tmp_path, f"allow_anonymous true\n{setting} 2000") as broker,
        linked(broker, device_id, tmp_path) as (link, wake),
    ):
        for run_id, more in (("r1", ""), ("r2", "x" * 3000), ("r3", "x" * 3000)):
            link.delivery.records.log.append(body(device_id, run_id, more))
        assert wake.recv(100)
        ((event, detail),) = link.state.events
        assert event == "not_sent"
        assert detail.startswith("line 2 of records.jsonl: ")
        wait_for(lambda: progress(link) == (3, 2))
        assert "2 not delivered" in link.problem()
        assert len(link.state.events) == 1


def test_a_document_at_which_the_broker_hangs_up_is_reported_and_does_not_block_others(
    mosquitto, device_id, watcher, tmp_path, monkeypatch
):
    """As a broker without MQTT 5 does at one that is too large; no line of a log is taken for the cause."""
    monkeypatch.setattr(random, "uniform", lambda *_: 0.0)
    topics, wanted = Topics(device_id), [f"r{number}" for number in range(20)]

    def hang_up(wire, packet, up):
        if up and kind(packet) == PUBLISH and f"{device_id}/health".encode() in packet:
            raise Cut
        forward(wire, packet, up)

    with proxying(mosquitto, hang_up) as proxy, linked(proxy, device_id, tmp_path) as (link, _):
        for topic in (topics.of("info"), topics.of("health"), topics.latest("c")):
            link.retain(topic, b"{}")
        add(link, device_id, *wanted)
        wait_for(lambda: progress(link) == (20, 0))
        wait_for(link.problem)
        link.retain(topics.latest("d"), b"{}")
        watcher.until(lambda topic, _: topic == topics.latest("d"))
        assert link.problem() == f"{topics.of('health')}: {HUNG_UP}; check the broker's access rules and limits"
    assert set(watcher.results()) == set(wanted)


def test_health_that_finds_no_room_is_said_later(mosquitto, device_id, watcher, tmp_path):
    topics = Topics(device_id)

    def unanswered(wire, packet, up):
        if up or kind(packet) != PUBACK or not stopped.is_set():
            forward(wire, packet, up)
        else:
            held_back.append((wire, packet))

    stopped, held_back = threading.Event(), []
    with proxying(mosquitto, unanswered) as proxy, linked(proxy, device_id, tmp_path) as (link, _):
        watcher.until_status("online")
        wait_for(lambda: link.state.connected)
        stopped.set()
        for number in range(2 * RECEIVE_MAXIMUM):
            link.retain(topics.latest(f"c{number}"), b"{}")
        wait_for(lambda: len(held_back) == RECEIVE_MAXIMUM)
        link.is_held = True
        link.retain(topics.of("health"), b'"now"')
        link.telemetry(b"{}")
        watcher.until(lambda topic, _: topic == topics.of("telemetry"))
        stopped.clear()
        for wire, packet in held_back:
            forward(wire, packet, False)
        watcher.until(lambda topic, body: topic == topics.of("health") and body == b'"now"')


def test_a_keep_alive_that_paho_refuses_is_a_reason_and_not_the_end_of_the_link(mosquitto, device_id, tmp_path):
    with linked(replace(parse_url(mosquitto.url), keep_alive_s=-1), device_id, tmp_path) as (link, _):
        wait_for(lambda: "ValueError: " in link.state.reason)
        assert link.is_alive()


def forget_acknowledgements(wire, packet, up):
    if up or kind(packet) != PUBACK:
        forward(wire, packet, up)


def test_a_broker_that_acknowledges_nothing_is_left_and_tried_again(mosquitto, device_id, tmp_path, monkeypatch):
    monkeypatch.setattr(link_module, "SILENT_S", 1.0)
    with proxying(mosquitto, forget_acknowledgements) as proxy, linked(proxy, device_id, tmp_path) as (link, _):
        add(link, device_id, "r1", "r2")
        wait_for(lambda: "does not acknowledge anything" in (link.state.reason or ""))
        proxy.fault = forward
        add(link, device_id, "later")
        wait_for(lambda: progress(link) == (3, 0))


def test_the_first_refusal_of_a_connection_is_logged_once(device_id, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(random, "uniform", lambda *_: 0.0)
    attempts = []
    monkeypatch.setattr(link_module, "connect", lambda *given: attempts.append(given) or link_module_connect(*given))
    with linked(f"mqtt://{HOST}:{free_port()}", device_id, tmp_path) as (link, _):
        wait_for(lambda: len(attempts) > 5)
        assert link.is_alive()
        assert "Connection refused" in link.state.reason
    assert capsys.readouterr().err.count("mqtt down: cannot reach ") == 1


link_module_connect = link_module.connect


def test_a_cursor_that_cannot_be_written_costs_no_delivery_and_is_said_once(
    mosquitto, device_id, watcher, tmp_path, capsys
):
    (tmp_path / f"{CURSOR}.part").mkdir()
    with linked(mosquitto, device_id, tmp_path) as (link, _):
        for number in range(1, 4):
            add(link, device_id, f"r{number}")
            wait_for(lambda n=number: progress(link) == (n, 0))
        assert link.state.connected
    assert capsys.readouterr().err.count("not kept: ") == 1


def test_telemetry_that_nobody_takes_is_dropped_and_counted(tmp_path):
    with linked(f"mqtt://{HOST}:{free_port()}", "d", tmp_path) as (link, _):
        for _ in range(10):
            link.telemetry(b"{}")
        assert link.state.telemetry_dropped == 9
        assert link.state.reason


@contextmanager
def ended(process):
    """Kill the process at the end of the block, however that comes."""
    with process:
        try:
            yield process
        finally:
            process.kill()


WRITING = """
for number in range(log.last_seq, 300):
    body = b'{"schema":"benchd.record/1","device_id":"%s","run_id":"r%d","more":"%s"}'
    log.append(body % (device.encode(), number + 1, b"x" * 800))
    time.sleep(0.002)
time.sleep(600)
"""


def test_results_survive_kills_of_every_part(device_id, tmp_path):
    """Kill the daemon's side and the broker in the middle; what nobody has heard is there to be asked for."""
    port, heard = free_port(), set()

    def hear(watcher):
        message = watcher.until(lambda topic, _: "/result/" in topic)
        record = json.loads(message.payload)
        assert record["run_id"] == f"r{record['seq']}"
        heard.add(record["seq"])

    for attempt in range(1, 6):
        with running_broker(tmp_path, port=port) as broker, closing(Watcher(broker, device_id)) as watcher:
            command = [sys.executable, "-c", PROCESS + WRITING, broker.url, device_id, str(tmp_path)]
            with ended(subprocess.Popen(command)):
                while len(heard) < 30 * attempt:
                    hear(watcher)
            broker.process.kill()
    with (
        running_broker(tmp_path, port=port) as broker,
        closing(Watcher(broker, device_id)) as watcher,
        linked(broker, device_id, tmp_path) as (link, _),
    ):
        log = link.delivery.records.log
        add(link, device_id, *(f"r{number}" for number in range(log.last_seq + 1, 301)))
        while 300 not in heard:
            hear(watcher)
        missing = set(range(1, 301)) - heard
        for seq in missing:
            link.delivery.replay(log.id, seq, seq)
            while seq not in heard:
                hear(watcher)
        wait_for(lambda: progress(link) == (300, 0))
    assert heard == set(range(1, 301))
