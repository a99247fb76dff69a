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
from benchd.daemon.delivery.disk_reserve import Reserve
from benchd.daemon.delivery.link import Identity, Link
from benchd.daemon.delivery.outbox import Outbox, body_digest
from benchd.daemon.delivery.topics import Topics


class Watcher:
    """A client that hears everything of a device and can say something."""

    def __init__(self, broker, device_id):
        self.heard = queue.Queue()
        self.all = []
        self._subscribed = threading.Event()
        self._client = paho.Client(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
        self._client.on_message = lambda client, data, message: self.heard.put(message)
        self._client.on_connect = lambda client, *_: client.subscribe(f"benchd/v1/{device_id}/#", 1)
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
        while True:
            message = self.heard.get(timeout=WAIT_S)
            self.all.append(message)
            if wanted(message.topic, message.payload):
                return message

    def until_status(self, state, **fields):
        def wanted(topic, payload):
            found = json.loads(payload) if topic.endswith("/status") and payload else {}
            return found.get("state") == state and all(found.get(name) == value for name, value in fields.items())

        return json.loads(self.until(wanted).payload)

    def results(self):
        return [message.topic.rpartition("/")[2] for message in self.all if "/result/" in message.topic]

    def close(self):
        self._client.disconnect()
        self._client.loop_stop()


@contextmanager
def linked(broker, device_id, path, instance="a", boot="boot-a", collectors=(), reserve=None):
    """Yield a link to a Broker, a URL or a running broker that has started, and the end on which it wakes its owner."""
    to = broker if isinstance(broker, Broker) else parse_url(broker if isinstance(broker, str) else broker.url)
    reader, writer = socket.socketpair()
    reader.settimeout(WAIT_S)
    writer.setblocking(False)
    reserve = reserve or Reserve(path.with_name("reserve"))
    link = Link(to, Topics(device_id), path, Identity(boot, instance * 16), collectors, writer, reserve)
    link.start()
    try:
        yield link, reader
    finally:
        link.stop()
        assert not link.is_alive()
        reader.close()
        writer.close()


@contextmanager
def unstarted(path, topics):
    """Yield a link that never starts: what it is told stays with it."""
    reader, writer = socket.socketpair()
    reserve, identity = Reserve(path.with_name("reserve")), Identity("b", "i" * 16)
    link = Link(parse_url(f"mqtt://{HOST}:{free_port()}"), topics, path, identity, [], writer, reserve)
    with closing(reader), closing(writer), closing(link.poked), closing(link._poke_end):
        yield link


def add(path, device_id, *run_ids):
    with Outbox(path) as outbox:
        for run_id in run_ids:
            outbox.add(f"{device_id}:{run_id}", Topics(device_id).result(run_id), 1, b"{}")


def counts(path):
    with Outbox(path) as outbox:
        return outbox.backlog()


def acknowledge(watcher, topics, *run_ids, body=b"{}"):
    watcher.say(f"{topics.root}ack/store", acknowledgement(topics, *run_ids, body=body))


def acknowledgement(topics, *run_ids, body=b"{}"):
    """Return what a collector says that has stored these results, each of which is `body`."""
    keys = [f"{topics.device_id}:{run_id}" for run_id in run_ids]
    return msgspec.json.encode(
        {"schema": "benchd.ack/1", "keys": keys, "digests": dict.fromkeys(keys, body_digest(body))}
    )
