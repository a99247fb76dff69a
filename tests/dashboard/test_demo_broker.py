"""The demo's own broker against paho's client, as benchd's processes use it."""

import asyncio
import queue
import socket
import threading
from contextlib import contextmanager

import pytest
from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from waiting import WAIT_S

from benchd.dashboard.demo.broker import HOST, Broker


@pytest.fixture
def port():
    """The port of a broker that runs in a thread."""
    started, loop, broker = queue.Queue(), asyncio.new_event_loop(), Broker()

    async def serve():
        stop = asyncio.Event()
        started.put((await broker.start(), stop))
        await stop.wait()
        await broker.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    port, stop = started.get(timeout=WAIT_S)
    yield port
    loop.call_soon_threadsafe(stop.set)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    loop.close()


@contextmanager
def client(port, *topics, client_id="", will=None):
    """Yield a connected client and the queue of what it hears of `topics`."""
    heard, ready = queue.Queue(), threading.Event()
    version = {"protocol": MQTTProtocolVersion.MQTTv5, "reconnect_on_failure": False}
    connection = Client(CallbackAPIVersion.VERSION2, client_id, **version)
    connection.on_message = lambda client, data, message: heard.put(message)
    connection.on_connect = lambda *_: connection.subscribe([(topic, 1) for topic in topics]) if topics else ready.set()
    connection.on_subscribe = lambda *_: ready.set()
    if will:
        connection.will_set(*will)
    connection.connect(HOST, port)
    connection.loop_start()
    assert ready.wait(WAIT_S)
    try:
        yield connection, heard
    finally:
        connection.disconnect()
        connection.loop_stop()


def said(port, *message, **options):
    """Publish one message with QoS 1 and wait until the broker has acknowledged it."""
    with client(port) as (device, _):
        device.publish(*message, qos=1, **options).wait_for_publish(WAIT_S)


def test_a_message_reaches_those_whose_filter_takes_it(port):
    asking = Properties(PacketTypes.PUBLISH)
    asking.ResponseTopic, asking.CorrelationData = "a/resp", b"7"
    with client(port, "a/+/x", "a/#") as (_, both), client(port, "b/#", "$share/group/a/1/x") as (_, shared):
        said(port, "a/1/x", b"1" * 70_000, properties=asking)
        for heard in (both, shared):
            message = heard.get(timeout=WAIT_S)
            assert (message.topic, len(message.payload), message.qos, message.retain) == ("a/1/x", 70_000, 1, False)
            assert (message.properties.ResponseTopic, message.properties.CorrelationData) == ("a/resp", b"7")
        said(port, "b/1", b"2")
        assert shared.get(timeout=WAIT_S).payload == b"2"
        assert both.empty()


def test_what_is_retained_waits_for_whoever_comes_until_it_is_taken_away(port):
    for topic in ("a/1", "a/2"):
        said(port, topic, b"x", retain=True)
    said(port, "a/2", b"", retain=True)
    with client(port, "a/#") as (_, heard):
        message = heard.get(timeout=WAIT_S)
        assert (message.topic, message.retain) == ("a/1", True)
        said(port, "a/3", b"y")
        assert heard.get(timeout=WAIT_S).topic == "a/3"


def test_a_will_is_for_those_who_go_without_a_word(port):
    will = ("a/will", b"gone", 1, True)
    with client(port, "a/#") as (_, heard):
        with client(port, will=will):
            pass
        with client(port, client_id="one", will=will), client(port, client_id="one"):  # takes the session over
            assert heard.get(timeout=WAIT_S).payload == b"gone"
        assert heard.empty()


@pytest.mark.parametrize(
    "rubbish", [b"\x00\x00", b"\x10\x02\x00\x09", b"GET / HTTP/1.1\r\n\r\n", b"\x10\xff\xff\xff\x7f", b"\x30"]
)
def test_rubbish_ends_its_own_connection_and_no_other(port, rubbish):
    with client(port, "a/#") as (_, heard):
        with socket.create_connection((HOST, port), WAIT_S) as connection:
            connection.sendall(rubbish)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(100) == b""
        said(port, "a/1", b"x")
        assert heard.get(timeout=WAIT_S).topic == "a/1"
