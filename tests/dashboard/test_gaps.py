"""What does not arrive is noticed by its number, counted, asked for and stored, over a real mosquitto."""

import threading
import time
from contextlib import closing, contextmanager
from itertools import pairwise

import msgspec
import pytest
from broker import running_broker
from messages_made import add, message
from records_made import made
from test_collector import count
from waiting import WAIT_S, wait_for

from benchd.daemon.delivery.broker import parse_url
from benchd.daemon.delivery.commands import ReplayParameters
from benchd.daemon.records import encode
from benchd.dashboard import collector, queries
from benchd.dashboard.messages import TableRow, rows
from benchd.dashboard.metrics import Fleet
from benchd.dashboard.store import LOGS, Store
from tests.soak.board import Board

LOG = "0123456789abcdef"
ONLINE = {"state": "online", "session": "s"}


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
    (gauge,) = [family for family in Fleet(store, 0.0).collect() if family.name == "benchd_results_missing"]
    return {sample.labels["device_id"]: sample.value for sample in gauge.samples}


def test_messages_sent_before_the_collector_or_lost_by_the_broker_are_requested_and_stored(tmp_path, url, monkeypatch):
    """Results and events alike, of the beginning, of the middle and of the end."""
    with running_broker(tmp_path) as broker, closing(Board(parse_url(broker.url), tmp_path, "d1")) as board:

        def both_delivered():
            board.attend()
            return board.delivery.is_done

        for number in range(1, 6):
            board.records.append(encode(made(device_id="d1", run_id=f"r{number}")))
            board.events.append(b'{"event":"e%d"}' % number)
        wait_for(both_delivered)  # nobody has heard them
        with collecting(broker, url, monkeypatch) as store:

            def all_stored(of_each):
                board.attend()
                return count(store, "result") == count(store, "event") == of_each

            wait_for(lambda: all_stored(5))
            wait_for(lambda: not queries.gaps(store))
            assert missing(store) == {}


def health(first=1, last=9, **more):
    return rows(message("d1", "health", {"log": LOG, "first_seq": first, "last_seq": last} | more, 1.0))


def arrived(device_id, log, *numbers):
    return [
        TableRow("span", {"device_id": device_id, "log": log, "first": number, "last": number}) for number in numbers
    ]


def gaps(store, **more):
    return [(gap.first, gap.last) for gap in queries.gaps(store, **more)]


def test_a_gap_is_what_the_device_has_sent_and_has_not_arrived(url):
    with closing(Store(url)) as store:
        store.add(health() + arrived("d1", LOG, 2, 3, 5) + arrived("d1", "f" * 16, 1, 9))
        assert gaps(store) == [(1, 1), (4, 4), (6, 9)]
        store.tidy(2.0)
        store.add(arrived("d1", LOG, 1, 4))
        assert gaps(store) == [(6, 9)]
        assert gaps(store, online=True) == []
        assert missing(store) == {"d1": 4}
        add(store, message("d1", "status", ONLINE, 1.0))
        assert gaps(store, online=True) == [(6, 9)]


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ({"pending": 2}, [(2, 2)]),  # the device has still to send the rest
        ({"pending": 2, "refused": 2}, [(2, 2), (4, 9)]),
        ({"first": 3}, [(4, 9)]),  # what it no longer has
        ({"last": 10**15}, [(2, 2)]),  # what somebody must have made up
        ({"last": 2}, [(2, 2)]),  # an older health
        ({"last": 0, "first": 1}, []),
    ],
)
def test_what_cannot_come_is_no_gap(url, told, found):
    with closing(Store(url)) as store:
        store.add(health(**told) + arrived("d1", LOG, 1, 3))
        assert gaps(store) == found


def test_what_is_in_quarantine_has_arrived_and_is_not_asked_for(url):
    with closing(Store(url)) as store:
        head = b'{"log":"%s","seq":%d,'
        for number, body in ((1, encode(made(device_id="d1", run_id="r1"))), (2, b'{"schema": "benchd.record/9"}')):
            add(store, message("d1", f"result/r{number}", head % (LOG.encode(), number) + body[1:], 1.0))
        store.add(health(last=3))
        assert gaps(store) == [(3, 3)]


def test_of_the_logs_that_a_device_makes_up_the_last_ones_stay(url):
    with closing(Store(url)) as store:
        for number in range(2 * LOGS):
            store.add(arrived("d1", f"s{number:03}", 1, 3) + arrived("d2", "old", 1))
            store.tidy(2.0 + number)
        span = store.tables["span"]
        logs = {(row.device_id, row.log) for row in store.read(span.select())}
        assert logs == {("d2", "old"), *(("d1", f"s{number:03}") for number in range(LOGS, 2 * LOGS))}


def test_each_device_is_asked_for_the_range_of_its_gaps_up_to_a_bound_less_and_less_often(tmp_path):
    class Said:
        def publish(self, topic, body, **options):
            given = msgspec.json.decode(body, type=ReplayParameters)
            requests.append((topic.split("/")[2], given.log, given.first, given.last))

    requests = []
    with closing(Store(f"sqlite:///{tmp_path}/dashboard.db")) as store:
        for device in ("d1", "d2"):
            health_body = {"log": LOG, "last_seq": 20_000 if device == "d2" else 6}
            add(store, message(device, "health", health_body, 1.0), message(device, "status", ONLINE, 1.0))
        store.add(arrived("d1", LOG, 1, 3, 5))
        asking = collector.Collector(store, parse_url("mqtt://b"), "site")
        first_s = collector.ASK_FIRST_S
        for now_s in (0.0, first_s, first_s + 1.0):
            asking._ask_for_missing(Said(), now_s)
        assert requests == [
            ("d1", LOG, 2, 6),
            ("d2", LOG, 1, collector.ASK_LINES),
        ]
        requests.clear()
        times_s = [step for step in range(int(first_s), int(40 * first_s)) if asks_once(asking, step, requests, Said())]
        between_s = [later - earlier for earlier, later in pairwise(times_s)]
        assert between_s == sorted(between_s)
        assert between_s[-1] > between_s[0]


def asks_once(asking, now_s, asked, said):
    """Return whether it asks the second device at this time."""
    asked.clear()
    asking._ask_for_missing(said, now_s)
    return any(device == "d2" for device, *_ in asked)
