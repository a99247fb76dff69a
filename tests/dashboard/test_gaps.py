"""A result that does not arrive is noticed by its number, counted, asked for and stored, over a real mosquitto."""

import threading
import time
from contextlib import closing, contextmanager

import msgspec
import pytest
from broker import running_broker
from links import linked
from records_made import made
from waiting import WAIT_S, wait_for

pytest.importorskip("nicegui", reason="needs nicegui, of the extra dashboard")

from test_collector import count

from benchd.daemon.delivery.broker import parse_url
from benchd.daemon.delivery.commands import ReplayParameters
from benchd.daemon.delivery.outbox import STREAM, Outbox
from benchd.daemon.delivery.sender import drain
from benchd.daemon.delivery.session import Arrived, Numbered, connect
from benchd.daemon.delivery.topics import Topics
from benchd.daemon.records import encode
from benchd.dashboard import collector, queries
from benchd.dashboard.messages import Row, rows
from benchd.dashboard.metrics import Fleet
from benchd.dashboard.store import STREAMS, Store

TOPICS = Topics("d1")


@contextmanager
def collecting(broker, url, monkeypatch):
    """Run a collector that tidies and asks without the usual delays."""
    for name in ("TIDY_S", "ASK_FIRST_S", "PRESENCE_S"):
        monkeypatch.setattr(collector, name, 0.1)
    stop = threading.Event()
    with closing(Store(url)) as store:
        thread = threading.Thread(target=collector.Collector(store, parse_url(broker.url), "site").run, args=(stop,))
        thread.start()
        try:
            wait_for(lambda: queries.collectors(store, time.time()))
            yield store
        finally:
            stop.set()
            thread.join(WAIT_S)


def missing(store):
    (found,) = [family for family in Fleet(store, 0.0).collect() if family.name == "benchd_results_missing"]
    return {sample.labels["device_id"]: sample.value for sample in found.samples}


def test_a_missing_result_is_counted_asked_for_and_stored(tmp_path, url, monkeypatch):
    with (
        running_broker(tmp_path) as broker,
        collecting(broker, url, monkeypatch) as store,
        Outbox(tmp_path / "outbox.db") as outbox,
        closing(connect(parse_url(broker.url), "device", time.monotonic() + WAIT_S)) as device,
    ):
        device.subscribe([(TOPICS.command("replay"), 1)])
        for number in range(1, 6):
            record = made(device_id="d1", run_id=f"r{number}")
            outbox.add(record.key, TOPICS.result(record.run_id), 1, encode(record))
        for lost in (3, 4):
            outbox.mark_refused(lost, "lost")
        drain(outbox, parse_url(broker.url), "sender", WAIT_S)
        stream = outbox.kept(STREAM).decode()
        wait_for(lambda: queries.gaps(store) == [("d1", stream, 3, 4)])
        assert missing(store) == {"d1": 2}
        while not (arrived := device.take_received()):
            device.step()
        asked = msgspec.json.decode(arrived[0].body, type=ReplayParameters)
        assert (asked.stream, asked.since_seq, asked.until_seq) == (stream, 3, 4)
        assert outbox.send_again(asked.since_seq, asked.until_seq) == 2
        drain(outbox, parse_url(broker.url), "sender", WAIT_S)
        wait_for(lambda: not queries.gaps(store))
        assert missing(store) == {}
        assert queries.results(store, queries.Filter(), "key", False, 0, 10).total == 5


def test_a_result_in_quarantine_has_arrived_and_is_not_asked_for(url):
    with closing(Store(url)) as store:
        for number in (1, 2, 3, 5):
            body = b"{" if number == 2 else encode(made(device_id="d1", run_id=f"r{number}"))
            store.add(rows(Arrived(TOPICS.result(f"r{number}"), body, 1.0, numbered=Numbered("s", number))))
        store.tidy(2.0)
        assert queries.gaps(store) == [("d1", "s", 4, 4)]


def arrived(device_id, stream, *numbers):
    return [Row("arrived", {"device_id": device_id, "stream": stream, "seq": number}) for number in numbers]


def test_of_the_streams_that_a_device_makes_up_the_last_ones_stay(url):
    with closing(Store(url)) as store:
        store.add(arrived("d1", "old", 1, 3) + arrived("d2", "old", 1, 3))
        store.tidy(1.0)
        for number in range(2 * STREAMS):
            store.add(arrived("d1", f"s{number}", 1, 3))
            store.tidy(2.0 + number)
        newest = sorted(f"s{number}" for number in range(STREAMS, 2 * STREAMS))
        assert queries.gaps(store) == [*(("d1", stream, 2, 2) for stream in newest), ("d2", "old", 2, 2)]


def test_a_device_with_many_gaps_keeps_no_other_waiting(tmp_path):
    class Said:
        def publish(self, topic, body, **options):
            asked.append((topic, msgspec.json.decode(body, type=ReplayParameters).since_seq))

    asked = []
    with closing(Store(f"sqlite:///{tmp_path}/dashboard.db")) as store:
        store.add(arrived("d1", "s", *range(1, 100, 2)) + arrived("d2", "s", 1, 3))
        store.tidy(1.0)
        asking = collector.Collector(store, parse_url("mqtt://b"), "site")
        for now_s in (0.0, collector.ASK_FIRST_S, collector.ASK_FIRST_S + 1.0):
            asking._ask_for_missing(Said(), now_s)
    assert asked == [(TOPICS.command("replay"), 2), (Topics("d2").command("replay"), 2), (TOPICS.command("replay"), 4)]


def test_results_of_before_the_first_collector_are_asked_for(tmp_path, url, monkeypatch):
    path = tmp_path / "outbox.db"
    with running_broker(tmp_path) as broker, Outbox(path) as outbox:
        for number in (1, 2):
            record = made(device_id="d1", run_id=f"r{number}")
            outbox.add(record.key, TOPICS.result(record.run_id), 1, encode(record))
        with linked(broker, "d1", path) as (link, wake):
            wait_for(lambda: outbox.counts().sent == 2)
            with collecting(broker, url, monkeypatch) as store:
                assert wake.recv(1)
                asked = msgspec.json.decode(link.seen.commands.popleft().body, type=ReplayParameters)
                assert (asked.stream, asked.since_seq) == (None, 1)
                assert outbox.send_again(asked.since_seq, asked.until_seq) == 2
                link.replay()
                wait_for(lambda: count(store, "result") == 2)
                assert queries.unheard(store) == []
