"""The service's connection to a real mosquitto: birth, will, commands, collectors, holding still, two of one id."""

import json
import subprocess
import sys
from contextlib import contextmanager

import msgspec
from broker import HOST, free_port, running_broker
from links import Watcher, acknowledge, add, counts, linked, wait_for

from benchd.daemon.delivery.outbox import Outbox
from benchd.daemon.delivery.topics import Topics


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
        watcher.say(f"{topics.root}cmd/run", b"x" * 70_000, ResponseTopic=reply_to, CorrelationData=b"\0\xff")
        assert wake.recv(100)
        arrived = link.seen.commands.popleft()
        assert (arrived.topic, arrived.retained) == (f"{topics.root}cmd/run", False)
        assert (arrived.response_topic, arrived.correlation) == (reply_to, b"\0\xff")
        assert len(arrived.body) == 65537, "what is too large is cut, and still known as too large"
        link.answer(reply_to, b'{"ok":1}', arrived.correlation)
        answer = watcher.until(lambda topic, _: topic == reply_to)
        assert answer.properties.CorrelationData == b"\0\xff"


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
        wait_for(lambda: not link.seen.connected)
        assert link.is_alive()
        assert link.seen.reason


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


def test_a_collector_that_acknowledges_once_is_awaited_from_then_on(mosquitto, device_id, watcher, tmp_path):
    path, topics = tmp_path / "outbox.db", Topics(device_id)
    add(path, device_id, "r1")
    with linked(mosquitto, device_id, path):
        wait_for(lambda: counts(path) == ((0, 1, 0), 0))
        acknowledge(watcher, topics, "other")
        with Outbox(path) as outbox:
            wait_for(lambda: outbox.kept("collectors") == b'["store"]')
    add(path, device_id, "r2")
    with linked(mosquitto, device_id, path):
        wait_for(lambda: counts(path) == ((0, 2, 0), 1))


def test_the_will_is_published_and_a_later_session_is_not_taken_for_gone(mosquitto, device_id, watcher, tmp_path):
    code = (
        "import sys, socket, time; from pathlib import Path\n"
        "from benchd.daemon.delivery.link import Identity, Link\n"
        "from benchd.daemon.delivery.mqtt import parse_url\n"
        "from benchd.daemon.delivery.topics import Topics\n"
        "link = Link(parse_url(sys.argv[1]), Topics(sys.argv[2]), Path(sys.argv[3]), Identity('boot-a', 'a' * 16), [],"
        " socket.socketpair()[0])\n"
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


def test_a_retained_status_of_a_machine_that_has_gone_is_no_conflict(mosquitto, device_id, watcher, tmp_path):
    gone = {"state": "online", "session": 9, "boot_id": "old", "instance": "0" * 16, "held_s": 9e9, "t_wall": ""}
    watcher.say(Topics(device_id).of("status"), msgspec.json.encode({"schema": "benchd.status/1", **gone}), retain=True)
    watcher.until_status("online", session=9)
    with linked(mosquitto, device_id, tmp_path / "outbox.db", "z") as (link, _):
        watcher.until_status("online", session=1)
        wait_for(lambda: link.seen.connected)
        assert link.seen.conflict is None


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
            yield
        finally:
            process.kill()


def test_results_survive_kills_of_everyone(device_id, tmp_path):
    """Kill the daemon's side and the broker at random moments; a collector that stores by key gets each result once."""
    path, port, wanted = tmp_path / "outbox.db", free_port(), {f"r{n}" for n in range(300)}
    code = (
        "import sys, socket, time; from pathlib import Path\n"
        "from benchd.daemon.delivery.link import Identity, Link\n"
        "from benchd.daemon.delivery.mqtt import parse_url\n"
        "from benchd.daemon.delivery.outbox import Outbox\n"
        "from benchd.daemon.delivery.topics import Topics\n"
        "url, device, path = sys.argv[1:4]\n"
        "link = Link(parse_url(url), Topics(device), Path(path), Identity('b', 'a' * 16), ['store'],"
        " socket.socketpair()[0])\n"
        "link.start()\n"
        "with Outbox(Path(path)) as outbox:\n"
        "    done = int(outbox.kept('done') or b'0')\n"
        "    for number in range(done, 300):\n"
        "        key, body = f'{device}:r{number}', b'x' * 800\n"
        "        outbox.add(key, Topics(device).result(f'r{number}'), 1, body, {'done': str(number + 1).encode()})\n"
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
                    acknowledge(collector, Topics(device_id), run_id)
                    if attempt < 5 and len(stored) >= 50 * (attempt + 1):
                        break
                if attempt == 5:
                    wait_for(lambda: counts(path) == ((0, 0, 0), 0))
            broker.process.kill()
            collector.close()
    assert stored == wanted
