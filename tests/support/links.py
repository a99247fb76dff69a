"""A link, and a client that hears what it says and may answer."""

import json
import queue
import socket
import threading
from contextlib import closing, contextmanager

import msgspec
import paho.mqtt.client as paho
from broker import HOST, free_port
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from waiting import WAIT_S

from benchd.daemon.delivery.broker import Broker, parse_url
from benchd.daemon.delivery.delivery import Delivery
from benchd.daemon.delivery.link import Link
from benchd.daemon.delivery.log import Log
from benchd.daemon.delivery.topics import Topics


class Watcher:
    """A client that hears everything of a device and can say something."""

    def __init__(self, broker, device_id, *topics):
        self._queue, self.all = queue.Queue(), []
        subscriptions = [(topic, 1) for topic in (f"benchd/v1/{device_id}/#", *topics)]
        self._subscribed = threading.Event()
        self._client = paho.Client(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
        self._client.on_message = lambda client, data, message: self._queue.put(message)
        self._client.on_connect = lambda client, *_: client.subscribe(subscriptions)
        self._client.on_subscribe = lambda *_: self._subscribed.set()
        self._client.connect(broker.host, broker.port)
        self._client.loop_start()
        assert self._subscribed.wait(WAIT_S)

    def say(self, topic, body, *, retain=False, **properties):
        given = Properties(PacketTypes.PUBLISH)
        for name, value in properties.items():
            setattr(given, name, value)
        self._client.publish(topic, body, 1, retain, given)

    def until(self, wanted):
        """Return the first message from now on for which `wanted(topic, payload)` holds."""
        while not wanted((message := self.hear(WAIT_S)).topic, message.payload):
            pass
        return message

    def hear(self, wait_s):
        """Return the next message; raise queue.Empty if none comes in time."""
        self.all.append(self._queue.get(timeout=wait_s))
        return self.all[-1]

    def until_status(self, state, **fields):
        def wanted(topic, payload):
            status = json.loads(payload) if topic.endswith("/status") and payload else {}
            return status.get("state") == state and all(status.get(name) == value for name, value in fields.items())

        return json.loads(self.until(wanted).payload)

    def results(self):
        return [message.topic.rpartition("/")[2] for message in self.all if "/result/" in message.topic]

    def close(self):
        self._client.disconnect()
        self._client.loop_stop()


@contextmanager
def linked(broker, device_id, folder, boot="boot-a"):
    """Yield a link to a Broker, a URL or a running broker that has started, and the end on which it wakes its owner."""
    to = broker if isinstance(broker, Broker) else parse_url(broker if isinstance(broker, str) else broker.url)
    with unstarted(folder, Topics(device_id), to, boot) as (link, reader):
        link.start()
        yield link, reader
        link.stop()
        assert not link.is_alive()


@contextmanager
def unstarted(folder, topics, broker=None, boot="boot-a"):
    """Yield a link that has not started: what it is told stays with it."""
    reader, writer = socket.socketpair()
    reader.settimeout(WAIT_S)
    writer.setblocking(False)
    records, events = Log(folder / "records.jsonl"), Log(folder / "events.jsonl")
    delivery = Delivery(folder, records, events, topics.device_id)
    link = Link(broker or parse_url(f"mqtt://{HOST}:{free_port()}"), topics, delivery, boot, writer)
    with closing(reader), closing(writer), closing(records), closing(events):
        yield link, reader


def body(device_id, run_id, more=""):
    """Return what delivery reads of a record."""
    return msgspec.json.encode({"schema": "benchd.record/1", "device_id": device_id, "run_id": run_id, "more": more})


def add(log, device_id, *run_ids):
    """Append records to a log, or to that of a link."""
    log = log.delivery.records.log if isinstance(log, Link) else log
    for run_id in run_ids:
        log.append(body(device_id, run_id))


def progress(link):
    """Return how far the records of a link have come, and how many of them are refused."""
    return link.delivery.records.acknowledged, len(link.delivery.records.refused)
