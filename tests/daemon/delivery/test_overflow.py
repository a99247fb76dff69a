"""A broker that keeps few messages for who is away: the collector's word heals the gap that the broker's leaves."""

import queue
import uuid
from contextlib import contextmanager

import msgspec
import paho.mqtt.client as paho
import pytest
from broker import running_broker
from links import add, counts, linked
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from waiting import WAIT_S, wait_for

from benchd.daemon.delivery.topics import Topics

QUEUED = 5
RESULTS = [f"r{number}" for number in range(40)]


@contextmanager
def collector(broker, topics):
    """Yield a function that stores the next result and says so; the session outlives the connection."""
    heard, subscribed = queue.Queue(), queue.Queue()
    client = paho.Client(CallbackAPIVersion.VERSION2, client_id="store", protocol=paho.MQTTv5)
    client.on_message = lambda client, data, message: heard.put(message.topic.rpartition("/")[2])
    client.on_connect = lambda client, *_: client.subscribe(f"{topics.root}result/+", 1)
    client.on_subscribe = lambda *_: subscribed.put(True)
    session = Properties(PacketTypes.CONNECT)
    session.SessionExpiryInterval = 3600
    client.connect(broker.host, broker.port, clean_start=False, properties=session)
    client.loop_start()
    assert subscribed.get(timeout=WAIT_S)

    def store():
        run_id = heard.get(timeout=WAIT_S)  # the second time comes a minute later
        body = {"schema": "benchd.ack/1", "keys": [f"{topics.device_id}:{run_id}"]}
        client.publish(f"{topics.root}ack/store", msgspec.json.encode(body), 1)
        return run_id

    yield store
    client.disconnect()
    client.loop_stop()


@pytest.mark.slow
def test_what_a_broker_has_dropped_after_its_acknowledgement_is_sent_again(tmp_path):
    path, topics = tmp_path / "outbox.db", Topics(f"d{uuid.uuid4().hex[:8]}")
    add(path, topics.device_id, *RESULTS)
    settings = f"allow_anonymous true\nmax_queued_messages {QUEUED}\nmax_inflight_messages {QUEUED}"
    with running_broker(tmp_path, settings) as broker:
        with collector(broker, topics):
            pass
        with linked(broker, topics.device_id, path, collectors=["store"]):
            wait_for(lambda: counts(path) == ((0, len(RESULTS), 0), len(RESULTS)))
            with collector(broker, topics) as store:
                stored = {store() for _ in range(QUEUED)}
                wait_for(lambda: counts(path)[0].sent == len(RESULTS) - QUEUED)
                while stored != set(RESULTS):
                    stored.add(store())
                wait_for(lambda: counts(path) == ((0, 0, 0), 0))
