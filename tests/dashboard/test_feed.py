"""The dashboard's feed and commands on a broker that knows MQTT 3.1.1 only, and what is too large for anyone."""

import subprocess
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from broker import program, running_broker
from links import linked
from proxy import forward, proxying, refuse_5, share_nothing
from waiting import WAIT_S, wait_for

from benchd.daemon.delivery.broker import ConnectionEnded, parse_url
from benchd.daemon.delivery.commands import Command, Gate
from benchd.daemon.delivery.connection import connect
from benchd.daemon.delivery.topics import Topics
from benchd.dashboard.commands import run_suite
from benchd.dashboard.feed import MAX_PACKET_BYTES, PAUSE_S, Feed


@pytest.fixture
def topics():
    return Topics(f"d{uuid.uuid4().hex[:8]}")


@pytest.fixture
def say(mosquitto, topics):
    def publish(run_id, body):
        command = [program("mosquitto_pub"), "-h", mosquitto.host, "-p", str(mosquitto.port), "-q", "1", "-s"]
        subprocess.run([*command, "-t", topics.result(run_id)], input=body, check=True)

    return publish


def heard(feed, topics, last):
    """Return the size of each result of the device by its topic, acknowledged, up to the last one."""
    sizes = {}
    while topics.result(last) not in sizes:
        arrived = feed.batch(WAIT_S)
        feed.acknowledge(arrived)
        sizes |= {message.topic: len(message.body) for message in arrived if message.topic.startswith(topics.root)}
    return [sizes[topic] for topic in sorted(sizes)]


def test_with_3_1_1_too_a_session_keeps_what_comes_while_nobody_is_connected(mosquitto, topics, say):
    with proxying(mosquitto, refuse_5) as proxy:
        with closing(Feed(parse_url(proxy.url), topics.device_id, 60)):
            pass
        say("r1", b"{}")
        with closing(Feed(parse_url(proxy.url), topics.device_id, 60)) as feed:
            assert heard(feed, topics, "r1") == [2]


@pytest.mark.parametrize("fault", [forward, refuse_5], ids=["MQTT 5", "MQTT 3.1.1"])
def test_what_is_too_large_is_bounded_and_the_feed_goes_on(mosquitto, topics, say, fault):
    with proxying(mosquitto, fault) as proxy, closing(Feed(parse_url(proxy.url), topics.device_id, 0)) as feed:
        say("r1", b"x" * (4 * MAX_PACKET_BYTES))
        say("r2", b"{}")
        *larger, last = heard(feed, topics, "r2")
        assert last == 2
        assert len(larger) == (fault is refuse_5)  # a broker of version 5 keeps it from us


@pytest.mark.parametrize("fault", [share_nothing, refuse_5], ids=["MQTT 5", "MQTT 3.1.1"])
def test_without_shared_subscriptions_each_collector_gets_everything(mosquitto, topics, say, fault):
    with (
        proxying(mosquitto, fault) as proxy,
        closing(Feed(parse_url(proxy.url), topics.device_id, 60, topics.device_id)) as first,
        closing(Feed(parse_url(proxy.url), f"{topics.device_id}-2", 60, topics.device_id)) as second,
    ):
        say("r1", b"{}")
        assert heard(first, topics, "r1") == heard(second, topics, "r1") == [2]


def test_a_group_splits_the_work_and_takes_nothing_from_another(mosquitto, topics, say):
    def feed(name, group):
        return closing(Feed(parse_url(mosquitto.url), f"{topics.device_id}-{name}", 60, f"{topics.device_id}{group}"))

    with feed("one", "a") as first, feed("two", "a") as second, feed("guest", "b") as guest:
        for number in range(10):
            say(f"r{number}", b"{}")
        assert len(heard(guest, topics, "r9")) == 10
        shared = []
        while len(shared) < 10:
            for each in (first, second):
                arrived = each.batch(0.1)
                each.acknowledge(arrived)
                shared += [message.topic for message in arrived if message.topic.startswith(f"{topics.root}result")]
        assert sorted(set(shared)) == sorted(shared)


def test_a_broker_that_sends_one_message_at_a_time_is_not_made_to_wait(topics, tmp_path, monkeypatch):
    one_at_a_time = "allow_anonymous true\nmax_inflight_messages 1"  # for clients of 3.1.1, who cannot ask for more
    with running_broker(tmp_path, one_at_a_time) as broker, proxying(broker, refuse_5) as proxy:
        address = parse_url(proxy.url)
        with closing(Feed(address, "c", 60)):
            pass
        with closing(connect(address, "d", time.monotonic() + WAIT_S)) as connection:
            for number in range(5):
                connection.publish(topics.result(f"r{number}"), b"{}", 1)
            while connection.free < connection.window:
                connection.turn(1.0)
        with closing(Feed(address, "c", 60)) as feed:
            waits, more = [], feed._more
            monkeypatch.setattr(feed, "_more", lambda wait_s: waits.append(wait_s) or more(wait_s))
            heard(feed, topics, "r4")
    assert waits.count(PAUSE_S) == 1


def test_what_the_broker_never_takes_is_the_reason(topics, tmp_path):
    with running_broker(tmp_path, "allow_anonymous true\nmax_packet_size 200") as broker:
        with (
            closing(Feed(parse_url(broker.url), "c", 0)) as feed,
            pytest.raises(ConnectionEnded, match="packets of at most 200"),
        ):
            feed.publish(topics.command("replay"), b"x" * 200)
        assert "packets of at most 200" in run_suite(parse_url(broker.url), topics.device_id, "x" * 200)


@pytest.mark.parametrize("fault", [forward, refuse_5], ids=["MQTT 5", "MQTT 3.1.1"])
def test_a_device_is_asked_and_answers(mosquitto, topics, tmp_path, fault):
    with (
        proxying(mosquitto, fault) as proxy,
        linked(proxy.url, topics.device_id, tmp_path) as (link, wake),
        ThreadPoolExecutor(1) as pool,
    ):
        wait_for(lambda: link.state.connected)
        future = pool.submit(run_suite, parse_url(proxy.url), topics.device_id, "nightly", WAIT_S)
        assert wake.recv(1)
        command = Gate(topics).take(link.state.commands.popleft(), 0.0, time.time())
        assert isinstance(command, Command)
        link.answer(command.answer_to, b'{"accepted":true}', command.correlation)
        assert future.result(WAIT_S) == "accepted: 0 cases"
