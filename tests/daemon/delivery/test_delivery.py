"""Delivery to a real mosquitto, read back by the real mosquitto_sub, through everything that goes wrong on the way."""

import itertools
import socket
import subprocess
import sys
import threading
import time
import uuid
from contextlib import closing, contextmanager
from dataclasses import dataclass

import msgspec
import pytest
from broker import HOST, RunningBroker, free_port, program, running_broker
from links import add, body
from proxy import PUBLISH, Cut, cut_5, forward, kind, proxying, refuse_5
from waiting import WAIT_S

from benchd.daemon.delivery import delivery as module
from benchd.daemon.delivery.broker import parse_url
from benchd.daemon.delivery.connection import connect
from benchd.daemon.delivery.delivery import CURSOR, MOST_TRIES, Cursor, Delivery
from benchd.daemon.delivery.log import Log
from benchd.daemon.delivery.messages import RESULT_BYTES
from benchd.daemon.delivery.topics import Topics


@pytest.fixture
def log(tmp_path):
    with closing(Log(tmp_path / "out" / "records.jsonl", pytest.fail)) as log:
        yield log


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


@dataclass
class Listener:
    """A subscription that the broker keeps while nobody is connected, so that nothing is missed."""

    broker: RunningBroker
    device_id: str
    options: tuple[str, ...] = ("-V", "5")

    def run(self, *more):
        command = [program("mosquitto_sub"), "-h", self.broker.host, "-p", str(self.broker.port), "-c", "-q", "1"]
        command += ["-i", f"listener-{self.device_id}", "-t", f"benchd/v1/{self.device_id}/#", "-W", f"{WAIT_S:g}"]
        return subprocess.run([*command, *self.options, *more], check=True, capture_output=True, text=True).stdout

    def subscribe(self):
        self.run("-E")
        return self

    def heard(self, count, form="%t %p"):
        return self.run("-C", str(count), "-F", form).splitlines()

    def heard_until(self, last, count):
        """Return at least `count` lines, up to the last one; some may have come twice."""
        lines = self.heard(count)
        while last not in lines:
            lines += self.heard(1)
        return list(dict.fromkeys(lines))


def fresh_device():
    return f"d{uuid.uuid4().hex[:8]}"


def fill(log, device_id, count, start=0):
    """Append results r<start>.. of the device; return the lines in which a listener hears them."""
    add(log, device_id, *(f"r{number}" for number in range(start, start + count)))
    entries = list(log.entries(log.last_seq - count))
    topic = Topics(device_id).result
    return [f"{topic(f'r{n}')} {entry.body.decode()}" for n, entry in enumerate(entries, start)]


def send(log, broker, timeout_s=WAIT_S):
    """Send what is pending, as a new process does; return how far it came, how many are refused, and why."""
    url = broker if isinstance(broker, str) else broker.url
    delivery = Delivery(log.path.parent, log)
    reason = delivery.drain(parse_url(url), f"benchd-{uuid.uuid4().hex[:8]}", timeout_s)
    return delivery.records.acknowledged, len(delivery.refused), reason


def test_results_arrive_once_and_in_order(mosquitto, log):
    device_id = fresh_device()
    listener = Listener(mosquitto, device_id).subscribe()
    wanted = fill(log, device_id, 200)
    assert send(log, mosquitto) == (200, 0, None)
    wanted += fill(log, device_id, 1, start=200)
    assert send(log, mosquitto) == (201, 0, None)
    assert listener.heard(201) == wanted


def test_an_empty_log_asks_for_no_broker(log):
    assert send(log, f"mqtt://{HOST}:{free_port()}") == (0, 0, None)


def test_the_content_type_stands_beside_the_body(mosquitto, log):
    device_id = fresh_device()
    listener = Listener(mosquitto, device_id).subscribe()
    (line,) = fill(log, device_id, 1)
    assert send(log, mosquitto)[0] == 1
    assert listener.heard(1, "%C|%q|%r|%p") == [f"application/json|1|0|{line.partition(' ')[2]}"]


CURSORS = {
    "lost": lambda log: None,
    "damaged": lambda log: b'{"records": {"log": "',
    "of another log": lambda log: {"records": Cursor("0" * 16, 2)},
    "ahead of the log": lambda log: {"records": Cursor(log.id, 7)},
}


@pytest.mark.parametrize("kind_", CURSORS)
def test_a_missing_or_invalid_cursor_resends_the_log_from_its_first_line(mosquitto, log, kind_, capsys):
    device_id = fresh_device()
    listener = Listener(mosquitto, device_id).subscribe()
    wanted = fill(log, device_id, 3)
    assert send(log, mosquitto)[0] == 3
    path, cursor = log.path.with_name(CURSOR), CURSORS[kind_](log)
    path.unlink() if cursor is None else path.write_bytes(
        cursor if isinstance(cursor, bytes) else msgspec.json.encode(cursor)
    )
    assert send(log, mosquitto)[::2] == (log.last_seq, None)
    assert listener.heard(6) == wanted * 2
    assert log.append(body(device_id, "next")) == (8 if kind_ == "ahead of the log" else 4), "a number is used twice"
    assert ("cannot be read" in capsys.readouterr().err) == (kind_ == "damaged")


def test_a_refused_message_does_not_block_others_and_is_retried_after_the_next_start(tmp_path, log):
    acl = tmp_path / "acl"
    acl.write_text("topic readwrite benchd/v1/mine/#\n")
    with running_broker(tmp_path, f"allow_anonymous true\nacl_file {acl}") as broker:
        listener = Listener(broker, "mine").subscribe()
        wanted = fill(log, "mine", 2)
        denied = fill(log, "theirs", 1)
        wanted += fill(log, "mine", 1, start=2)
        reason = f"{HOST}:{broker.port} refused it: Not authorized"
        assert send(log, broker) == send(log, broker) == (4, 1, reason)
        cursor = msgspec.json.decode(log.path.with_name(CURSOR).read_bytes())["records"]
        assert cursor["refused"] == {"3": reason}
        assert listener.heard(3) == wanted
    with running_broker(tmp_path) as broker:
        other = Listener(broker, "theirs").subscribe()
        assert send(log, broker) == (4, 0, None)
        assert other.heard(1) == denied


def test_a_broker_with_our_settings_disconnects_at_a_refusal_and_the_rest_is_delivered(tmp_path, log):
    """With `max_queued_messages 0` mosquitto ends the connection after each acknowledgement that refuses."""
    acl = tmp_path / "acl"
    acl.write_text("topic readwrite benchd/v1/mine/#\n")
    with running_broker(tmp_path, f"allow_anonymous true\nmax_queued_messages 0\nacl_file {acl}") as broker:
        for device_id in ("mine", "theirs", "mine", "theirs", "mine"):
            fill(log, device_id, 1)
        acknowledged, refused, reason = send(log, broker)
        assert (acknowledged, refused) == (5, 2)
        assert "Not authorized" in reason


def test_a_lock_that_somebody_holds_on_the_files_keeps_nothing_waiting(mosquitto, log):
    """They are appended to or replaced: the service goes on, and with it its watchdog."""
    device_id = fresh_device()
    fill(log, device_id, 1)
    assert send(log, mosquitto) == (1, 0, None)
    locks = (
        "files = [open(path, 'rb+') for path in sys.argv[1:]]; [f(file, 2) for file in files for f in (flock, lockf)]"
    )
    code = f"import sys; from fcntl import flock, lockf; {locks}; print(flush=True); input()"
    command = [sys.executable, "-c", code, log.path, log.path.with_name(CURSOR)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"\n"
        fill(log, device_id, 1, start=1)
        assert send(log, mosquitto) == (2, 0, None)
        holder.communicate(b"\n")


def test_a_message_at_which_the_broker_hangs_up_is_skipped_and_reported(tmp_path, log):
    """As mosquitto does without a word at one beyond `message_size_limit`."""
    with running_broker(tmp_path, "allow_anonymous true\nmessage_size_limit 5000") as broker:
        listener = Listener(broker, "d").subscribe()
        wanted = fill(log, "d", 3)
        log.append(body("d", "large", "x" * 5000))
        wanted += fill(log, "d", 3, start=3)
        acknowledged, refused, reason = send(log, broker)
        assert (acknowledged, refused) == (7, 1)
        assert f"ended {MOST_TRIES} times" in reason or "refused it" in reason
        assert listener.heard_until(wanted[-1], 6) == wanted


def test_a_record_that_names_no_topic_and_one_that_no_collector_accepts_are_skipped_and_named(mosquitto, log):
    device_id = fresh_device()
    listener = Listener(mosquitto, device_id).subscribe()
    log.append(body(device_id, "#"))
    log.append(body(device_id, "large", "x" * RESULT_BYTES))
    wanted = fill(log, device_id, 1)
    assert send(log, mosquitto)[:2] == (3, 2)
    cursor = msgspec.json.decode(log.path.with_name(CURSOR).read_bytes())["records"]
    assert cursor["refused"]["1"].startswith("run id '#'")
    assert cursor["refused"]["2"].endswith(f"bytes; at most {RESULT_BYTES} are accepted")
    assert listener.heard(1) == wanted


def test_a_damaged_line_is_left_out_and_the_cursor_goes_over_it(mosquitto, tmp_path):
    reports = []
    with closing(Log(tmp_path / "records.jsonl", reports.append)) as log:
        fill(log, "d", 2)
        with log.path.open("ab") as file:
            file.write(b"rubbish\n")
        assert send(log, mosquitto) == (2, 0, None)
    with closing(Log(tmp_path / "records.jsonl", reports.append)) as log:
        assert send(log, mosquitto) == (2, 0, None)
        fill(log, "d", 1)
        assert send(log, mosquitto) == (3, 0, None)
    assert all("a damaged line is skipped" in line for line in reports)


class Taken:
    """A connection that takes everything at once; `topics` are those of what was published."""

    window = free = 64
    address = "broker"

    def __init__(self):
        self.topics = []

    def publish(self, topic, body, qos, of):
        self.topics.append(topic.rpartition("/")[2])


def test_a_replay_sends_the_requested_lines_slowly_and_after_new_ones(log, monkeypatch):
    now_s = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s)
    fill(log, "d", 5)
    delivery, connection = Delivery(log.path.parent, log), Taken()
    delivery.fill(connection)
    for seq in range(1, 6):
        delivery.records.settle(seq, None)
    assert delivery.replay("another", 1, 9) is None
    assert (delivery.replay(log.id, 4, 5), delivery.replay(log.id, 1, 2)) == (2, 2)
    fill(log, "d", 1, start=5)
    sent = []
    for _ in range(200):
        connection.topics.clear()
        delivery.fill(connection)
        sent.append(list(connection.topics))
        now_s += 1 / module.REPLAYED_PER_S
    assert list(itertools.chain(*sent)) == ["r5", "r3", "r4", "r0", "r1"]
    assert delivery.records.acknowledged == 5


@pytest.mark.parametrize("fault", [refuse_5, cut_5])
def test_a_broker_that_knows_3_1_1_only(mosquitto, log, fault):
    device_id = fresh_device()
    listener = Listener(mosquitto, device_id, ("-V", "311")).subscribe()
    wanted = fill(log, device_id, 70)
    with proxying(mosquitto, fault) as old:
        assert send(log, old) == (70, 0, None)
    assert listener.heard(70) == wanted


def test_a_message_that_repeatedly_ends_the_connection_is_skipped(mosquitto, log):
    device_id = fresh_device()
    listener = Listener(mosquitto, device_id).subscribe()
    wanted = fill(log, device_id, 100)

    def cut_at_one(wire, packet, up):
        if up and kind(packet) == PUBLISH and b"/result/r40" in packet:
            raise Cut
        forward(wire, packet, up)

    with proxying(mosquitto, cut_at_one) as proxy:
        acknowledged, refused, reason = send(log, proxy)
    assert (acknowledged, refused) == (100, 1)
    assert reason == f"the connection ended {MOST_TRIES} times while sending it; it may be too large"
    del wanted[40]
    assert listener.heard_until(wanted[-1], 99) == wanted


@contextmanager
def answering(*answers, connections=1):
    """Accept so many connections and give one answer to each packet that comes; yield the port."""

    def serve(server):
        for _ in range(connections):
            client, _ = server.accept()
            with closing(client):
                client.settimeout(WAIT_S)
                for answer in answers:
                    client.recv(65536)
                    client.sendall(answer)
                while client.recv(65536):
                    pass

    with closing(socket.create_server((HOST, 0))) as server:
        thread = threading.Thread(target=serve, args=(server,))
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            thread.join(WAIT_S)


@pytest.mark.parametrize(
    "answer",
    ["20 00", "20 06 00 00 03 21 00 00", "ff ff ff ff ff ff"],
)
def test_a_broker_that_speaks_nonsense_is_a_reason(log, answer):
    fill(log, "d", 1)
    with answering(bytes.fromhex(answer), connections=2) as port:  # the second one is tried with MQTT 3.1.1
        acknowledged, refused, reason = send(log, f"mqtt://{HOST}:{port}", timeout_s=4.0)
    assert (acknowledged, refused) == (0, 0)
    assert reason.startswith((f"the connection to {HOST}:{port} ended", f"{HOST}:{port} does not speak MQTT: "))


@pytest.mark.parametrize("scheme", ["mqtt", "mqtts"])
def test_a_broker_that_falls_silent_is_left_in_time(log, scheme):
    fill(log, "d", 1)
    with closing(socket.create_server((HOST, 0))) as server:  # the kernel takes the connection, and nobody answers
        address = f"{HOST}:{server.getsockname()[1]}"
        report = send(log, f"{scheme}://{address}", timeout_s=0.3)
    assert report == (0, 0, f"{address} did not answer in time")


def test_a_broker_that_falls_silent_after_its_greeting_is_left_in_time(log, monkeypatch):
    """It may take its time to greet; then the time is over."""
    monkeypatch.setattr(
        module, "connect", lambda broker, name, deadline: connect(broker, name, time.monotonic() + WAIT_S)
    )
    fill(log, "d", 1)
    with answering(bytes.fromhex("20 03 00 00 00")) as port:
        report = send(log, f"mqtt://{HOST}:{port}", timeout_s=0.0)
    assert report == (0, 0, f"timed out before {HOST}:{port} had acknowledged everything")
