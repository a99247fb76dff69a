"""Delivery to a real mosquitto, read back by the real mosquitto_sub, through everything that goes wrong on the way."""

import itertools
import socket
import subprocess
import threading
import time
import uuid
from contextlib import closing, contextmanager
from dataclasses import dataclass

import pytest
from broker import HOST, RunningBroker, free_port, program, running_broker
from proxy import PUBACK, Cut, cut_5, forward, kind, proxying, refuse_5
from waiting import WAIT_S

from benchd.daemon.delivery import sender
from benchd.daemon.delivery.broker import parse_url
from benchd.daemon.delivery.messages import RESULT_BYTES
from benchd.daemon.delivery.outbox import STREAM, Outbox
from benchd.daemon.delivery.sender import Sender, drain
from benchd.daemon.delivery.session import connect
from benchd.daemon.delivery.topics import Topics

BODY = b'{"schema":"benchd.record/1","n":%d}'


@pytest.fixture
def outbox(tmp_path):
    with Outbox(tmp_path / "out" / "outbox.db") as outbox:
        yield outbox


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


def fresh_device():
    return f"d{uuid.uuid4().hex[:8]}"


def fill(outbox, device_id, count, start=0):
    """Add results r<start>.. of the device; return the lines in which a listener hears them."""
    topics = Topics(device_id)
    for number in range(start, start + count):
        outbox.add(f"{device_id}:r{number}", topics.result(f"r{number}"), 1, BODY % number)
    return [f"{topics.result(f'r{n}')} {(BODY % n).decode()}" for n in range(start, start + count)]


def send(outbox, broker, timeout_s=WAIT_S):
    url = broker if isinstance(broker, str) else broker.url
    return drain(outbox, parse_url(url), f"benchd-{uuid.uuid4().hex[:8]}", timeout_s)


def test_results_arrive_once_and_in_order(mosquitto, outbox):
    device_id = fresh_device()
    listener = Listener(mosquitto, device_id).subscribe()
    wanted = fill(outbox, device_id, 200)
    assert send(outbox, mosquitto) == (200, 0, 0, None)
    wanted += fill(outbox, device_id, 1, start=200)
    assert send(outbox, mosquitto) == (1, 0, 0, None)
    assert listener.heard(201) == wanted
    assert outbox.counts() == (0, 201, 0)


def test_an_empty_outbox_asks_for_no_broker(outbox):
    assert send(outbox, f"mqtt://{HOST}:{free_port()}") == (0, 0, 0, None)


def test_content_type_and_schema_stand_beside_the_body(mosquitto, outbox):
    device_id = fresh_device()
    listener = Listener(mosquitto, device_id).subscribe()
    topic = Topics(device_id).result("r")
    body, stream = b'{"schema":"benchd.record/1.7"}', outbox.kept(STREAM).decode()
    outbox.add("1", topic, 1, body)
    outbox.add("2", topic, 1, b"\xff")
    assert send(outbox, mosquitto).sent == 2
    assert listener.heard(2, "%C|%P|%q|%r|%x") == [
        f"application/json|schema:benchd.record/1.7 stream:{stream} seq:1|1|0|{body.hex()}",
        f"application/json|stream:{stream} seq:2|1|0|ff",
    ]


def test_a_broker_that_is_down_gets_everything_once_it_is_up(tmp_path, outbox):
    device_id, port = fresh_device(), free_port()
    wanted = fill(outbox, device_id, 5)
    sent, refused, left, reason = send(outbox, f"mqtt://{HOST}:{port}")
    assert (sent, refused, left) == (0, 0, 5)
    assert reason == f"cannot reach {HOST}:{port}: Connection refused"
    with running_broker(tmp_path, port=port) as broker:
        listener = Listener(broker, device_id).subscribe()
        assert send(outbox, broker) == (5, 0, 0, None)
        wanted += fill(outbox, device_id, 1, start=5)
        assert send(outbox, broker).sent == 1
        assert listener.heard(6) == wanted


def test_what_the_broker_refuses_is_never_sent(tmp_path, outbox):
    acl = tmp_path / "acl"
    acl.write_text("topic readwrite benchd/v1/mine/#\n")
    with running_broker(tmp_path, f"allow_anonymous true\nacl_file {acl}") as broker:
        listener = Listener(broker, "mine").subscribe()
        wanted = fill(outbox, "mine", 2)
        fill(outbox, "theirs", 1)
        wanted += fill(outbox, "mine", 1, start=2)
        sent, refused, left, reason = send(outbox, broker)
        assert (sent, refused, left) == (3, 1, 0)
        assert reason == f"{HOST}:{broker.port} refused it: Not authorized"
        assert outbox.refused() == [("theirs:r0", reason)]
        assert listener.heard(3) == wanted


def test_a_wrong_password_is_the_reason(tmp_path, outbox):
    passwords = tmp_path / "passwords"
    subprocess.run([program("mosquitto_passwd"), "-b", "-c", str(passwords), "me", "right / word"], check=True)
    fill(outbox, "d", 1)
    with running_broker(tmp_path, f"allow_anonymous false\npassword_file {passwords}") as broker:
        for login in ("me:wrong@", "other:right@", ""):
            sent, refused, left, reason = send(outbox, f"mqtt://{login}{HOST}:{broker.port}")
            assert (sent, refused, left) == (0, 0, 1)
            assert reason.startswith(f"{HOST}:{broker.port} refused the connection: Not authorized; check the user")
            assert "wrong" not in reason
        with proxying(broker, refuse_5) as old:
            assert send(outbox, old).reason.startswith(f"{HOST}:{old.port} refused the connection: ")
        assert send(outbox, f"mqtt://me:right%20%2F%20word@{HOST}:{broker.port}").sent == 1


def test_a_message_may_be_as_large_as_the_broker_says_and_no_larger(tmp_path, outbox):
    topic = Topics("d").result("r")
    with running_broker(tmp_path, "allow_anonymous true\nmax_packet_size 5000") as broker:
        outbox.add("over", topic, 1, b"x" * 5000)
        _, refused, left, reason = send(outbox, broker)
        assert (refused, left) == (1, 0)
        assert reason.endswith(f"bytes, but {HOST}:{broker.port} accepts packets of at most 5000")
        over = int(reason.split()[0]) - 5000
        listener = Listener(broker, "d").subscribe()
        outbox.add("one too many", topic, 1, b"y" * (5000 - over + 1))
        outbox.add("exact", topic, 1, b"z" * (5000 - over))
        assert send(outbox, broker)[:3] == (1, 1, 0)
        # the broker sends on to us without regard to what it takes from us
        assert listener.heard(1, "%l") == [str(5000 - over)]


def test_a_topic_that_is_none_is_refused_here(mosquitto, outbox):
    device_id = fresh_device()
    outbox.add("wild", "benchd/v1/#", 1, b"{}")
    fill(outbox, device_id, 1)
    sent, refused, left, reason = send(outbox, mosquitto)
    assert (sent, refused, left) == (1, 1, 0)
    assert reason.startswith("not an MQTT message: ")


@pytest.fixture
def certificate(tmp_path):
    files = [str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")]
    command = [program("openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test"]
    command += ["-addext", f"subjectAltName=IP:{HOST}", "-keyout", files[0], "-out", files[1]]
    subprocess.run(command, check=True, capture_output=True)
    return files


def test_tls_trusts_the_system_and_only_the_name_in_the_url(tmp_path, outbox, certificate, monkeypatch):
    key, trusted = certificate
    fill(outbox, "d", 2)
    with running_broker(tmp_path, f"allow_anonymous true\ncertfile {trusted}\nkeyfile {key}") as broker:
        url = f"mqtts://{HOST}:{broker.port}"
        assert send(outbox, url) == (
            0,
            0,
            2,
            f"this system does not trust the certificate of {HOST}:{broker.port}: self-signed certificate",
        )
        monkeypatch.setenv("SSL_CERT_FILE", trusted)
        other_name = send(outbox, f"mqtts://localhost:{broker.port}")
        assert other_name[:3] == (0, 0, 2)
        assert "Hostname mismatch" in other_name.reason
        plain = send(outbox, broker)
        assert plain[:3] == (0, 0, 2)
        assert plain.reason
        assert send(outbox, url) == (2, 0, 0, None)


def test_tls_with_a_broker_that_has_none_is_the_reason(mosquitto, outbox):
    fill(outbox, "d", 1)
    sent, refused, left, reason = send(outbox, f"mqtts://{HOST}:{mosquitto.port}", timeout_s=2.0)
    assert (sent, refused, left) == (0, 0, 1)
    assert reason


@pytest.mark.parametrize("fault", [refuse_5, cut_5])
def test_a_broker_that_knows_3_1_1_only(mosquitto, outbox, fault):
    device_id = fresh_device()
    listener = Listener(mosquitto, device_id, ("-V", "311")).subscribe()
    wanted = fill(outbox, device_id, 70)
    with proxying(mosquitto, fault) as old:
        assert send(outbox, old) == (70, 0, 0, None)
    assert listener.heard(70) == wanted


def test_a_broker_that_dies_in_the_middle_leaves_the_rest_pending(tmp_path, outbox):
    device_id = fresh_device()
    wanted = fill(outbox, device_id, 300)
    answers = itertools.count()

    def kill_after_some(wire, packet, up):
        if kind(packet) == PUBACK and next(answers) == 100:
            broker.process.kill()
            raise Cut
        forward(wire, packet, up)

    with running_broker(tmp_path) as broker, proxying(broker, kill_after_some) as proxy:
        sent, refused, left, reason = send(outbox, proxy)
    assert sent > 0
    assert left > 0
    assert (sent + left, refused) == (300, 0)
    assert reason == f"the connection to {HOST}:{proxy.port} ended"
    assert len(outbox.pending(1000)) == left
    with running_broker(tmp_path) as broker:
        listener = Listener(broker, device_id).subscribe()
        assert send(outbox, broker) == (left, 0, 0, None)
        assert listener.heard(left) == wanted[sent:]


@contextmanager
def answering(*answers, connections=1):
    """Accept so many connections and give one answer to each packet that comes; yield the port and what came."""
    came = []

    def serve(server):
        for _ in range(connections):
            client, _ = server.accept()
            with closing(client):
                client.settimeout(WAIT_S)
                for answer in answers:
                    came.append(client.recv(65536))
                    client.sendall(answer)
                while data := client.recv(65536):
                    came.append(data)

    with closing(socket.create_server((HOST, 0))) as server:
        thread = threading.Thread(target=serve, args=(server,))
        thread.start()
        try:
            yield server.getsockname()[1], came
        finally:
            thread.join(WAIT_S)


CONNACK_ONE_AT_A_TIME = bytes.fromhex("20 06 00 00 03 21 00 01")
PUBACK_QUOTA_EXCEEDED = bytes.fromhex("40 03 00 01 97")


def test_a_quota_leaves_the_rest_for_later(outbox):
    fill(outbox, "d", 3)
    with answering(CONNACK_ONE_AT_A_TIME, PUBACK_QUOTA_EXCEEDED) as (port, came):
        sent, refused, left, reason = send(outbox, f"mqtt://{HOST}:{port}")
    assert (sent, refused, left) == (0, 0, 3)
    assert reason == f"{HOST}:{port} accepts no more messages for now: Quota exceeded"
    connect, first, goodbye = came
    assert connect[0] == 0x10
    assert first.count(b"benchd/v1/d/result/") == 1, "more on the way than the Receive Maximum"
    assert goodbye[0] == 0xE0


@pytest.mark.parametrize(
    "answer",
    ["20 00", "20 03 00 ff 00", "20 06 00 00 03 21 00 00", "20 05 00 00 02 ff ff", "ff ff ff ff ff ff", "d0 01 00"],
)
def test_a_broker_that_speaks_nonsense_is_a_reason(outbox, answer):
    fill(outbox, "d", 1)
    with answering(bytes.fromhex(answer), connections=2) as (port, _):  # the second one is tried with MQTT 3.1.1
        sent, refused, left, reason = send(outbox, f"mqtt://{HOST}:{port}")
    assert (sent, refused, left) == (0, 0, 1)
    # paho 2.1 raises at what later ones take for a protocol error
    assert reason.startswith((f"the connection to {HOST}:{port} ended", f"{HOST}:{port} does not speak MQTT: "))


@pytest.mark.parametrize("scheme", ["mqtt", "mqtts"])
def test_a_broker_that_falls_silent_is_left_in_time(outbox, scheme):
    fill(outbox, "d", 1)
    with closing(socket.create_server((HOST, 0))) as server:  # the kernel takes the connection, and nobody answers
        address = f"{HOST}:{server.getsockname()[1]}"
        report = send(outbox, f"{scheme}://{address}", timeout_s=0.3)
    assert report == (0, 0, 1, f"{address} did not answer in time")


def test_a_broker_that_falls_silent_after_its_greeting_is_left_in_time(outbox, monkeypatch):
    """It may take its time to greet; then the time is over."""

    def greeted(broker, client_id, deadline):
        session = connect(broker, client_id, time.monotonic() + WAIT_S)
        session._deadline = deadline
        return session

    monkeypatch.setattr(sender, "connect", greeted)
    fill(outbox, "d", 1)
    with answering(bytes.fromhex("20 03 00 00 00")) as (port, _):
        report = send(outbox, f"mqtt://{HOST}:{port}", timeout_s=0.0)
    assert report == (0, 0, 1, f"timed out before {HOST}:{port} had acknowledged everything")


def test_a_broker_that_stops_reading_is_let_go(outbox):
    outbox.add("large", Topics("d").result("r"), 1, b"x" * 30_000_000)
    with closing(socket.create_server((HOST, 0))) as server:
        hello = threading.Thread(target=_greet_and_hold, args=(server, held := []))
        hello.start()
        report = send(outbox, f"mqtt://{HOST}:{server.getsockname()[1]}", timeout_s=0.5)
        hello.join(WAIT_S)
    assert report[:3] == (0, 0, 1)
    (client,) = held
    with closing(client):
        client.settimeout(WAIT_S)
        while client.recv(2**20):  # ends, because the other side has closed
            pass


def _greet_and_hold(server, held):
    client, _ = server.accept()
    client.recv(65536)
    client.sendall(bytes.fromhex("20 03 00 00 00"))
    held.append(client)


def test_a_host_that_nobody_knows_is_a_reason(outbox):
    fill(outbox, "d", 1)
    sent, refused, left, reason = send(outbox, "mqtt://no-such-host.invalid")
    assert (sent, refused, left) == (0, 0, 1)
    assert reason.startswith(("cannot reach no-such-host.invalid:1883: ", "no-such-host.invalid:1883 did not answer"))


def test_a_record_that_no_collector_accepts_is_refused_with_the_reason(mosquitto, outbox):
    device_id = fresh_device()
    for number, size in enumerate((RESULT_BYTES, RESULT_BYTES + 1)):
        outbox.add(f"r{number}", Topics(device_id).result(f"r{number}"), 1, b"x" * size)
    with closing(connect(parse_url(mosquitto.url), device_id, time.monotonic() + WAIT_S)) as session:
        Sender(outbox, lambda row: True).send_all(session)
    assert outbox.backlog() == ((0, 1, 1), 1)
    assert outbox.refused() == [
        ("r1", "2000001 bytes, but a collector accepts records of at most 2000000"),
    ]
