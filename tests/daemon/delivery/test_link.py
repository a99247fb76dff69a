"""The service's connection to a real mosquitto: birth, will, commands, collectors, holding still, two of one id."""

import itertools
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing, contextmanager
from dataclasses import replace

import msgspec
import pytest
from broker import HOST, free_port, running_broker
from disks import failing_ext4
from links import Watcher, acknowledge, acknowledgement, add, counts, linked
from proxy import PUBACK, PUBLISH, SUBACK, forward, kind, proxying, refuse_5
from waiting import WAIT_S, wait_for

from benchd.daemon.delivery import link as link_module
from benchd.daemon.delivery import outbox as outbox_module
from benchd.daemon.delivery.broker import parse_url
from benchd.daemon.delivery.collectors import SILENT
from benchd.daemon.delivery.commands import MAX_BYTES
from benchd.daemon.delivery.disk_reserve import Reserve
from benchd.daemon.delivery.outbox import Outbox
from benchd.daemon.delivery.session import MAX_INCOMING_BYTES, QUOTA_EXCEEDED
from benchd.daemon.delivery.topics import Topics

RECEIVE_MAXIMUM = 20  # mosquitto's own choice


def test_birth_documents_results_and_goodbye(mosquitto, device_id, watcher, tmp_path):
    path = tmp_path / "outbox.db"
    add(path, device_id, "r1", "r2")
    with linked(mosquitto, device_id, path) as (link, _):
        link.retain(Topics(device_id).of("info"), b'{"schema":"benchd.info/1"}')
        assert watcher.until_status("online")["session"] == 1
        watcher.until(lambda topic, _: topic.endswith("/result/r2"))
        wait_for(lambda: counts(path)[0].sent == 2)
    assert watcher.until_status("offline")["boot_id"] == "boot-a"
    assert watcher.results() == ["r1", "r2"]
    late = Watcher(mosquitto, device_id)
    late.until(lambda topic, payload: topic.endswith("/info") and payload == b'{"schema":"benchd.info/1"}')
    late.close()


def test_what_is_added_later_is_sent_when_the_link_is_poked(mosquitto, device_id, watcher, tmp_path):
    path = tmp_path / "outbox.db"
    with linked(mosquitto, device_id, path) as (link, _):
        watcher.until_status("online")
        add(path, device_id, "r1")
        link.poke()
        watcher.until(lambda topic, _: topic.endswith("/result/r1"))


def test_while_it_is_held_nothing_but_health_and_telemetry_passes(mosquitto, device_id, watcher, tmp_path):
    path, topics = tmp_path / "outbox.db", Topics(device_id)
    with linked(mosquitto, device_id, path) as (link, _):
        watcher.until_status("online")
        link.hold()
        add(path, device_id, "r1")
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
        assert counts(path)[0].pending == 1
        link.release()
        held_back = {topics.result("r1"), topics.latest("c"), f"{topics.root}resp/me/1"}
        wait_for(lambda: watcher.until(lambda *_: True) and held_back <= {message.topic for message in watcher.all})


def test_a_command_reaches_the_service_with_everything_that_came_beside_it(mosquitto, device_id, watcher, tmp_path):
    topics = Topics(device_id)
    with linked(mosquitto, device_id, tmp_path / "outbox.db") as (link, wake):
        watcher.until_status("online")
        reply_to = f"{topics.root}resp/me/1"
        beside = {"ResponseTopic": reply_to, "CorrelationData": b"\0\xff", "MessageExpiryInterval": 600}
        watcher.say(f"{topics.root}cmd/run", b"x" * 70_000, **beside)
        assert wake.recv(100)
        arrived = link.seen.commands.popleft()
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
    with proxying(mosquitto, fault) as proxy, linked(proxy, device_id, tmp_path / "outbox.db") as (link, wake):
        watcher.until_status("online")
        watcher.say(topic, b"{}", retain=True)
        assert wake.recv(100)
        assert link.seen.commands.popleft().retained is is_shown
    watcher.say(topic, b"", retain=True)


def test_of_more_commands_than_the_inbox_holds_the_first_are_kept(mosquitto, device_id, watcher, tmp_path):
    topics = Topics(device_id)
    with linked(mosquitto, device_id, tmp_path / "outbox.db") as (link, _):
        watcher.until_status("online")
        for number in range(link_module.MAX_WAITING + 7):
            watcher.say(topics.command("list"), b"%d" % number)
        watcher.say(topics.of("status"), b"{}")  # no status of a device: the link says again that it is online
        watcher.until_status("online")
        assert [int(one.body) for one in link.seen.commands] == list(range(link_module.MAX_WAITING))


def test_a_broker_that_dies_gets_everything_again_when_it_is_back(device_id, tmp_path):
    path, port = tmp_path / "outbox.db", free_port()
    with linked(f"mqtt://{HOST}:{port}", device_id, path) as (link, _):
        link.retain(Topics(device_id).of("info"), b"{}")
        for session in (1, 2):
            with running_broker(tmp_path, port=port) as broker:
                watcher = Watcher(broker, device_id)
                add(path, device_id, f"r{session}")
                watcher.until(lambda topic, _: topic.endswith("/info"))
                link.poke()
                watcher.until(lambda topic, _, n=session: topic.endswith(f"/result/r{n}"))
                wait_for(lambda n=session: counts(path)[0].sent == n)
                watcher.close()
                broker.process.kill()
        wait_for(lambda: not link.seen.connected and link.seen.reason)
        assert link.is_alive()


def test_with_a_collector_only_what_it_has_stored_leaves_the_outbox(mosquitto, device_id, watcher, tmp_path):
    path, topics = tmp_path / "outbox.db", Topics(device_id)
    add(path, device_id, "r1", "r2")
    with linked(mosquitto, device_id, path, collectors=["store"]) as (link, _):
        wait_for(lambda: counts(path) == ((0, 2, 0), 2))
        acknowledge(watcher, topics, "r1", "unknown")
        wait_for(lambda: counts(path) == ((0, 1, 0), 1))
        watcher.say(f"{topics.root}ack/store", b"rubbish \xff")
        link.hold()
        acknowledge(watcher, topics, "r2")
        link.retain(topics.of("health"), b"{}")
        watcher.until(lambda topic, _: topic.endswith("/health"))
        assert counts(path)[1] == 1, "the outbox was written while a case is timed"
        link.release()
        wait_for(lambda: counts(path) == ((0, 0, 0), 0))


def test_a_subscriber_that_acknowledges_a_thousand_results_one_by_one_in_a_case_is_heard_each_time(
    mosquitto, device_id, watcher, tmp_path
):
    path, run_ids = tmp_path / "outbox.db", [f"r{number}" for number in range(1000)]
    add(path, device_id, *run_ids)
    with linked(mosquitto, device_id, path, collectors=["store"]) as (link, _):
        watcher.until(lambda topic, payload: topic.endswith("/result/r999"))
        link.hold()
        for run_id in run_ids:
            acknowledge(watcher, link.topics, run_id)
        watcher.until(lambda topic, payload: topic.endswith("/ack/store") and b"r999" in payload)
        link.release()
        wait_for(lambda: sum(counts(path)[0]) == 0, mosquitto.process)


def test_a_collector_that_acknowledges_once_is_awaited_from_then_on(mosquitto, device_id, watcher, tmp_path):
    path, topics = tmp_path / "outbox.db", Topics(device_id)
    add(path, device_id, "r1")
    with linked(mosquitto, device_id, path):
        wait_for(lambda: counts(path) == ((0, 1, 0), 0))
        acknowledge(watcher, topics, "r1")
        with Outbox(path) as outbox:
            wait_for(lambda: outbox.kept(SILENT) == b'{"store":0}')
    add(path, device_id, "r2")
    with linked(mosquitto, device_id, path):
        wait_for(lambda: counts(path) == ((0, 1, 0), 1))


def test_the_will_is_published_and_a_later_session_is_not_taken_for_gone(mosquitto, device_id, watcher, tmp_path):
    code = (
        "import sys, socket, time; from pathlib import Path\n"
        "from benchd.daemon.delivery.link import Identity, Link\n"
        "from benchd.daemon.delivery.broker import parse_url\n"
        "from benchd.daemon.delivery.disk_reserve import Reserve\n"
        "from benchd.daemon.delivery.topics import Topics\n"
        "link = Link(parse_url(sys.argv[1]), Topics(sys.argv[2]), Path(sys.argv[3]), Identity('boot-a', 'a' * 16), [],"
        " socket.socketpair()[0], Reserve(Path(sys.argv[3] + '.reserve')))\n"
        "link.start(); time.sleep(600)"
    )
    path = tmp_path / "outbox.db"
    command = [sys.executable, "-c", code, mosquitto.url, device_id, str(path)]
    with ended(subprocess.Popen(command)):
        watcher.until_status("online", session=1)
    will = watcher.until_status("offline")
    assert (will["session"], will["boot_id"]) == (1, "boot-a")
    with linked(mosquitto, device_id, path):
        watcher.until_status("online", session=2)
        watcher.say(Topics(device_id).of("status"), msgspec.json.encode(will), retain=True)
        watcher.until_status("offline", session=1)
        watcher.until_status("online", session=2)


def test_of_two_machines_with_one_id_the_later_one_goes_and_says_who_is_there(mosquitto, device_id, watcher, tmp_path):
    first_path, second_path = tmp_path / "1.db", tmp_path / "2.db"
    with linked(mosquitto, device_id, first_path, "b", "boot-1") as (first, _):
        watcher.until_status("online", boot_id="boot-1")
        add(second_path, device_id, "r1")
        with linked(mosquitto, device_id, second_path, "a", "boot-2") as (second, wake):
            assert wake.recv(100)
            event, detail = second.seen.events.popleft()
            assert event == "identity_conflict"
            assert "boot-1" in detail
            assert "boot-2" in detail
            assert "[device] id" in detail
            wait_for(lambda: not second.seen.connected)
            assert second.is_alive()
            assert first.seen.connected
            assert first.seen.conflict is None
    watcher.until_status("offline", boot_id="boot-1")
    births = [m.payload for m in watcher.all if m.topic.endswith("/status") and b'"online"' in m.payload]
    assert len(births) <= 4, "the two take turns"


def test_the_machine_that_yields_leaves_on_the_broker_what_the_other_one_says(
    mosquitto, device_id, watcher, tmp_path, monkeypatch
):
    monkeypatch.setattr(link_module, "CONFLICT_S", 0.2)
    monkeypatch.setattr(link_module, "CONTRADICTED_S", WAIT_S)
    monkeypatch.setattr(link_module, "ON_ITS_WAY_S", WAIT_S)  # the instances decide, however late a message comes
    info, status = Topics(device_id).of("info"), Topics(device_id).of("status")
    third = {"state": "online", "session": 1, "boot_id": "b", "instance": "0", "held_s": 0.0, "t_wall": ""}
    with linked(mosquitto, device_id, tmp_path / "1.db", "b", "boot-1") as (first, _):
        first.retain(info, b'"first"')
        watcher.until(lambda topic, body: (topic, body) == (info, b'"first"'))
        with linked(mosquitto, device_id, tmp_path / "2.db", "a", "boot-2") as (second, _):
            second.retain(info, b'"second"')
            watcher.until_status("online", boot_id="boot-2", session=4)
        monkeypatch.setattr(link_module, "CONTRADICTED_S", 0.0)  # all others have gone once one more is heard
        watcher.say(status, msgspec.json.encode(third))
        watcher.until(lambda topic, body: (topic, body) == (info, b'"first"'))
    assert [message.payload for message in watcher.all if message.topic == info].count(b'"second"') <= 1


def test_a_retained_status_of_a_machine_that_has_gone_is_no_conflict(mosquitto, device_id, watcher, tmp_path):
    gone = {"state": "online", "session": 9, "boot_id": "old", "instance": "0" * 16, "held_s": 9e9, "t_wall": ""}
    watcher.say(Topics(device_id).of("status"), msgspec.json.encode({"schema": "benchd.status/1", **gone}), retain=True)
    watcher.until_status("online", session=9)
    with linked(mosquitto, device_id, tmp_path / "outbox.db", "z") as (link, _):
        watcher.until_status("online", session=1)
        wait_for(lambda: link.seen.connected)
        assert link.seen.conflict is None


@pytest.mark.parametrize(
    "hostile", [{"boot_id": "x\nWATCHDOG=trigger\nX="}, {"boot_id": "x" * 70_000}, {"instance": "0\n"}, {"boot_id": ""}]
)
def test_a_status_of_no_machine_is_no_conflict(mosquitto, device_id, watcher, tmp_path, hostile):
    other = {"state": "online", "session": 1, "boot_id": "b", "instance": "0", "held_s": 1e9, "t_wall": ""} | hostile
    with linked(mosquitto, device_id, tmp_path / "outbox.db") as (link, _):
        watcher.until_status("online")
        watcher.say(Topics(device_id).of("status"), msgspec.json.encode(other))
        watcher.until_status("online", instance=other["instance"], boot_id=other["boot_id"])
        watcher.until_status("online", boot_id="boot-a")  # the answer to it
        assert (link.seen.connected, link.seen.conflict) == (True, None)


def test_a_status_that_answers_nothing_takes_no_device_off(mosquitto, device_id, watcher, tmp_path):
    forged = {"state": "online", "session": 1, "boot_id": "b", "instance": "0", "held_s": 1e9, "t_wall": ""}
    topic = Topics(device_id).of("status")
    with linked(mosquitto, device_id, tmp_path / "outbox.db") as (link, _):
        watcher.until_status("online", boot_id="boot-a")
        watcher.say(topic, msgspec.json.encode(forged | {"answers": "0" * 16, "nonce": "n"}))
        said = watcher.until_status("online", boot_id="boot-a", answers="n")
        assert (link.seen.connected, link.seen.conflict) == (True, None)
        watcher.say(topic, msgspec.json.encode(forged | {"session": 2, "answers": said["nonce"]}))
        wait_for(lambda: link.seen.conflict)


@pytest.mark.parametrize("is_refused", [False, True])
def test_after_a_change_of_the_id_the_results_of_the_old_one_are_acknowledged(tmp_path, is_refused):
    path, old = tmp_path / "outbox.db", Topics("old")
    add(path, "old", "r1")
    add(path, "new", "r2")

    def refuse(wire, packet, up):
        is_second = kind(packet) == SUBACK and next(answers) == 2
        forward(wire, packet[:-1] + b"\x87" if is_second and is_refused else packet, up)

    answers = itertools.count(1)
    with (
        running_broker(tmp_path) as broker,
        proxying(broker, refuse) as proxy,
        closing(Watcher(broker, "old")) as watcher,
        linked(proxy, "new", path, collectors=["store"]) as (link, _),
    ):
        watcher.until(lambda topic, _: topic == old.result("r1"))
        wait_for(lambda: counts(path)[0].sent == 2)
        watcher.say(old.command("run"), b"{}")
        acknowledge(watcher, old, "r1")
        acknowledge(watcher, link.topics, "r2")
        wait_for(lambda: sum(counts(path)[0]) == 0, broker.process)
        assert not link.seen.commands
        assert link.seen.session == 1, "the refusal ended the connection"


def test_an_acknowledgement_that_stands_on_the_broker_makes_nobody_known(mosquitto, device_id, watcher, tmp_path):
    path, topics = tmp_path / "outbox.db", Topics(device_id)
    add(path, device_id, "r1")
    watcher.say(f"{topics.root}ack/gone", acknowledgement(topics, "r1"), retain=True)
    watcher.until(lambda topic, _: topic.endswith("/ack/gone"))
    with linked(mosquitto, device_id, path):
        wait_for(lambda: counts(path) == ((0, 1, 0), 0))
        acknowledge(watcher, topics, "r1")
        with Outbox(path) as outbox:
            wait_for(lambda: outbox.kept(SILENT))
            assert outbox.kept(SILENT) == b'{"store":0}'
    watcher.say(f"{topics.root}ack/gone", b"", retain=True)


def test_a_broker_of_small_packets_gets_what_fits_and_the_service_is_told_once_of_the_rest(device_id, tmp_path):
    topics = Topics(device_id)
    with running_broker(tmp_path, "allow_anonymous true\nmax_packet_size 2000") as broker:
        watcher = Watcher(broker, device_id)
        with linked(broker, device_id, tmp_path / "outbox.db") as (link, _):
            watcher.until_status("online")
            for number in range(3):
                link.telemetry(b"x" * 3000)
                link.retain(topics.of("health"), b"x" * 3000)
                wait_for(lambda n=number: link.seen.telemetry_dropped == n + 1)
                link.retain(topics.of("info"), b"%d" % number)
                watcher.until(lambda topic, body, n=number: topic == topics.of("info") and body == b"%d" % n)
            told = sorted(detail.split(":")[0] for _, detail in link.seen.events)
            assert told == [topics.of("health"), topics.of("telemetry")]
            assert link.seen.connected
        watcher.close()


def test_health_that_finds_no_room_is_said_later(mosquitto, device_id, watcher, tmp_path):
    topics = Topics(device_id)

    def unanswered(wire, packet, up):
        if up or kind(packet) != PUBACK or not stopped.is_set():
            forward(wire, packet, up)
        else:
            held_back.append((wire, packet))

    stopped, held_back = threading.Event(), []
    with proxying(mosquitto, unanswered) as proxy, linked(proxy, device_id, tmp_path / "outbox.db") as (link, _):
        watcher.until_status("online")
        stopped.set()
        for number in range(2 * RECEIVE_MAXIMUM):
            link.retain(topics.latest(f"c{number}"), b"{}")
        wait_for(lambda: len(held_back) == RECEIVE_MAXIMUM)
        link.hold()
        link.retain(topics.of("health"), b'"now"')
        link.telemetry(b"{}")
        watcher.until(lambda topic, _: topic == topics.of("telemetry"))
        stopped.clear()
        for wire, packet in held_back:
            forward(wire, packet, False)
        watcher.until(lambda topic, body: topic == topics.of("health") and body == b'"now"')


def test_a_failure_that_nobody_thought_of_ends_a_connection_and_not_the_link(mosquitto, device_id, watcher, tmp_path):
    def fail(*_):
        raise KeyError("nobody thought of it")

    patched = pytest.MonkeyPatch()
    patched.setattr(link_module, "Collectors", fail)
    with linked(mosquitto, device_id, tmp_path / "outbox.db") as (link, _):
        wait_for(lambda: link.seen.reason.startswith("KeyError: "))
        assert link.is_alive()
        patched.undo()
        watcher.until_status("online")


def test_a_keep_alive_that_paho_refuses_is_a_reason_and_not_the_end_of_the_link(mosquitto, device_id, tmp_path):
    with linked(replace(parse_url(mosquitto.url), keep_alive_s=-1), device_id, tmp_path / "outbox.db") as (link, _):
        wait_for(lambda: "ValueError: " in link.seen.reason)
        assert link.is_alive()


def forget_acknowledgements(wire, packet, up):
    if up or kind(packet) != PUBACK:
        forward(wire, packet, up)


def forget_health(wire, packet, up):
    if not up or kind(packet) != PUBLISH or b"/health" not in packet:
        forward(wire, packet, up)


@pytest.mark.parametrize(
    ("fault", "run_ids"),
    [(forget_acknowledgements, ["r1", "r2"]), (forget_acknowledgements, []), (forget_health, [])],
    ids=["of results", "of an idle device", "of its health"],
)
def test_a_broker_that_acknowledges_nothing_is_left_and_tried_again(
    mosquitto, device_id, tmp_path, monkeypatch, fault, run_ids
):
    monkeypatch.setattr(link_module, "SILENT_S", 1.0)
    path = tmp_path / "outbox.db"
    add(path, device_id, *run_ids)
    with proxying(mosquitto, fault) as proxy, linked(proxy, device_id, path) as (link, _):
        link.retain(Topics(device_id).of("health"), b"{}")
        wait_for(lambda: "acknowledges nothing" in (link.seen.reason or ""))
        proxy.fault = forward
        add(path, device_id, "later")
        wait_for(lambda: counts(path)[0].sent == len(run_ids) + 1)


def test_a_broker_that_takes_nothing_is_tried_later_and_later(mosquitto, device_id, watcher, tmp_path, capsys):
    path = tmp_path / "outbox.db"
    add(path, device_id, "r1")

    def no_quota(wire, packet, up):
        refused = kind(packet) == PUBACK and not up
        forward(wire, b"\x40\x03" + packet[2:4] + bytes([QUOTA_EXCEEDED]) if refused else packet, up)

    with proxying(mosquitto, no_quota) as proxy, linked(proxy, device_id, path) as (link, _):
        watcher.until_status("online", session=3)
        assert link._back_off_s >= 4.0
        assert "accepts no more messages for now" in capsys.readouterr().err
        assert counts(path)[0] == (1, 0, 0)


def test_on_a_full_disk_the_reserve_keeps_the_link_up(mosquitto, device_id, watcher, small_disk):
    path, reserve = small_disk / "outbox.db", Reserve(small_disk / "reserve", 2**20)
    add(path, device_id, "r1")
    assert reserve.hold() is None
    with (small_disk / "filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(small_disk).free)
    with linked(mosquitto, device_id, path, reserve=reserve):
        watcher.until(lambda topic, _: topic.endswith("/result/r1"))
        wait_for(lambda: counts(path)[0].sent == 1)
    assert not (small_disk / "reserve").exists()


def test_a_link_on_a_read_only_disk_stays_connected_to_say_so(mosquitto, device_id, watcher, tmp_path, monkeypatch):
    monkeypatch.setattr(link_module, "WRITE_AGAIN_S", 0.0)
    path, health = tmp_path / "disk/outbox.db", Topics(device_id).of("health")
    with failing_ext4(tmp_path / "image", tmp_path / "disk") as fail, Outbox(path):
        with linked(mosquitto, device_id, path) as (link, _):
            watcher.until_status("online", session=1)
            link.hold()
            add(path, device_id, "r1")
            fail("an error of the test")
            link.release()  # r1 is sent, and its acknowledgement cannot be recorded
            watcher.until_status("online", session=2)
            for number in range(3):
                link.retain(health, b'{"n":%d}' % number)
                watcher.until(lambda topic, body, n=number: topic == health and json.loads(body) == {"n": n})
            assert "attempt to write a readonly database" in link.seen.unwritable
        assert watcher.until_status("offline")["session"] == 2
    assert watcher.results() == ["r1"]


def test_what_a_locked_outbox_kept_back_is_delivered_when_it_is_free(
    mosquitto, device_id, watcher, tmp_path, monkeypatch
):
    monkeypatch.setattr(outbox_module, "BUSY_S", 0.1)
    monkeypatch.setattr(link_module, "WRITE_AGAIN_S", 0.0)
    path, topics = tmp_path / "outbox.db", Topics(device_id)
    add(path, device_id, "r1", "r2")
    with linked(mosquitto, device_id, path) as (link, _), closing(sqlite3.connect(path, isolation_level=None)) as other:
        wait_for(lambda: counts(path)[0].sent == 2)
        other.execute("UPDATE outbox SET state = 'pending'")
        other.execute("BEGIN IMMEDIATE")
        link.replay()
        wait_for(lambda: link.seen.unwritable)
        assert "locked" in link.seen.unwritable
        link.retain(topics.of("info"), b"{}")
        link.answer(f"{topics.root}resp/me/1", b"{}", None)
        heard = {topics.of("info"), f"{topics.root}resp/me/1"}
        wait_for(lambda: watcher.until(lambda *_: True) and heard <= {message.topic for message in watcher.all})
        other.execute("COMMIT")
        wait_for(lambda: counts(path)[0].sent == 2)
        wait_for(lambda: not link.seen.unwritable)


def test_a_broker_that_is_away_costs_no_write(device_id, tmp_path):
    path = tmp_path / "outbox.db"
    with linked(f"mqtt://{HOST}:{free_port()}", device_id, path) as (link, _), Outbox(path) as outbox:
        wait_for(lambda: "cannot reach" in link.seen.reason)
        assert outbox.kept("session") is None


def test_a_broker_that_is_away_for_days_is_still_tried(device_id, tmp_path):
    with linked(f"mqtt://{HOST}:{free_port()}", device_id, tmp_path / "outbox.db") as (link, _):
        wait_for(lambda: "cannot reach" in link.seen.reason)
        link.stopping.set()  # each wait is over at once
        for _ in range(5000):
            link._end("cannot reach it")
        assert link._back_off_s == 60.0


def test_a_thread_that_hangs_is_not_alive(mosquitto, device_id, watcher, tmp_path, monkeypatch):
    monkeypatch.setattr(link_module, "STUCK_S", 3.0)
    with linked(mosquitto, device_id, tmp_path / "outbox.db") as (link, _):
        watcher.until_status("online")
        with link._lock:
            wait_for(lambda: not link.is_alive())
        wait_for(link.is_alive)


FLOOD = """
import re, socket, sys
from pathlib import Path
from benchd.daemon.delivery.link import Identity, Link
from benchd.daemon.delivery.broker import parse_url
from benchd.daemon.delivery.disk_reserve import Reserve
from benchd.daemon.delivery.topics import Topics

reader, writer = socket.socketpair()
identity, reserve = Identity("b", "a" * 16), Reserve(Path(sys.argv[3] + ".reserve"))
link = Link(parse_url(sys.argv[1]), Topics(sys.argv[2]), Path(sys.argv[3]), identity, [], writer, reserve)
link.start()
while True:
    reader.recv(1)
    arrived = link.seen.commands.popleft()
    most_kb = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]
    print(len(arrived.body), most_kb, flush=True)
"""


@pytest.mark.parametrize("fault", [forward, refuse_5], ids=["MQTT 5", "MQTT 3.1.1"])
def test_a_command_of_10_mb_takes_no_memory_and_the_link_goes_on(mosquitto, device_id, watcher, tmp_path, fault):
    topic = f"{Topics(device_id).root}cmd/run"
    with proxying(mosquitto, fault) as proxy:
        command = [sys.executable, "-c", FLOOD, proxy.url, device_id, str(tmp_path / "outbox.db")]
        with ended(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)) as process:
            watcher.until_status("online")
            watcher.say(topic, b"first")
            _, before_kb = map(int, process.stdout.readline().split())
            watcher.say(topic, b"x" * 10_000_000)
            watcher.say(topic, b"second")
            if fault is refuse_5:  # a broker of version 5 keeps it from us
                assert MAX_BYTES < int(process.stdout.readline().split()[0]) <= MAX_INCOMING_BYTES
            size, after_kb = map(int, process.stdout.readline().split())
            assert size == len(b"second")
            assert after_kb - before_kb < 4000


def test_telemetry_that_nobody_takes_is_dropped_and_counted(tmp_path):
    with linked(f"mqtt://{HOST}:{free_port()}", "d", tmp_path / "outbox.db") as (link, _):
        for _ in range(10):
            link.telemetry(b"{}")
        assert link.seen.telemetry_dropped == 9
        assert link.seen.reason


@contextmanager
def ended(process):
    """Kill the process at the end of the block, however that comes."""
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_results_survive_kills_of_everyone(device_id, tmp_path):
    """Kill the daemon's side and the broker at random moments; a collector unknown so far gets each result."""
    path, port, wanted = tmp_path / "outbox.db", free_port(), {f"r{n}" for n in range(300)}
    code = (
        "import sys, socket, time; from pathlib import Path\n"
        "from benchd.daemon.delivery.link import Identity, Link\n"
        "from benchd.daemon.delivery.broker import parse_url\n"
        "from benchd.daemon.delivery.disk_reserve import Reserve\n"
        "from benchd.daemon.delivery.outbox import Message, Outbox\n"
        "from benchd.daemon.delivery.topics import Topics\n"
        "url, device, path = sys.argv[1:4]\n"
        "link = Link(parse_url(url), Topics(device), Path(path), Identity('b', 'a' * 16), [],"
        " socket.socketpair()[0], Reserve(Path(path + '.reserve')))\n"
        "link.start()\n"
        "with Outbox(Path(path)) as outbox:\n"
        "    done = int(outbox.kept('done') or b'0')\n"
        "    for number in range(done, 300):\n"
        "        key, body = f'{device}:r{number}', b'x' * 800\n"
        "        message = Message(key, Topics(device).result(f'r{number}'), 1, body)\n"
        "        outbox.add_all([message], {'done': str(number + 1).encode()})\n"
        "        link.poke(); time.sleep(0.002)\n"
        "time.sleep(600)"
    )
    stored = set()
    for attempt in range(6):
        with running_broker(tmp_path, port=port) as broker:
            collector = Watcher(broker, device_id)
            command = [sys.executable, "-c", code, broker.url, device_id, str(path)]
            with ended(subprocess.Popen(command)):
                while not (attempt == 5 and stored == wanted):
                    message = collector.until(lambda topic, _: "/result/" in topic)
                    run_id = message.topic.rpartition("/")[2]
                    stored.add(run_id)
                    acknowledge(collector, Topics(device_id), run_id, body=message.payload)
                    if attempt < 5 and len(stored) >= 50 * (attempt + 1):
                        break
                if attempt == 5:
                    wait_for(lambda: counts(path) == ((0, 0, 0), 0))
            broker.process.kill()
            collector.close()
    assert stored == wanted
