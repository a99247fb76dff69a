"""Collectors against a real mosquitto, as processes of their own that are killed in the middle of their work."""

import multiprocessing
import time
import uuid
from contextlib import ExitStack, closing, contextmanager

import pytest
from broker import free_port, running_broker
from records_made import made
from sqlalchemy import func, select
from waiting import WAIT_S, wait_for

from benchd.daemon.delivery.broker import parse_url
from benchd.daemon.delivery.connection import IncomingMessage
from benchd.daemon.delivery.delivery import Delivery
from benchd.daemon.delivery.log import Log
from benchd.daemon.delivery.topics import Topics
from benchd.daemon.errors import UsageError
from benchd.daemon.records import encode
from benchd.dashboard import collector, messages
from benchd.dashboard.collector import Collector
from benchd.dashboard.feed import Feed
from benchd.dashboard.messages import READER, quarantined
from benchd.dashboard.store import Store

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["benchd.dashboard.collector"])  # whose imports take a second
SETTINGS = (
    "allow_anonymous true\nmax_queued_messages 0\npersistence true\npersistence_location {}/\nautosave_interval 1"
)


@pytest.fixture
def broker(tmp_path):
    """A broker of the test's own: sessions of collectors outlive them."""
    with running_broker(tmp_path, SETTINGS.format(tmp_path)) as running:
        yield running


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/dashboard.db"


@contextmanager
def collecting(url, database, name="site"):
    """Yield the process of a collector whose session the broker knows."""
    process = PROCESSES.Process(target=collector.run, args=(parse_url(url), database, name))
    began_s = time.time()
    process.start()
    try:
        with closing(Store(database)) as store:
            seen_s = select(store.tables["collector"].c.seen_s).where(store.tables["collector"].c.name == name)
            wait_for(lambda: (value(store, seen_s) or 0.0) > began_s)
        yield process
    finally:
        process.terminate()
        process.join(WAIT_S)
        assert process.exitcode is not None
        process.close()


def value(store, query):
    with store.reading() as connection:
        return connection.execute(query).scalar()


def count(store, table):
    return value(store, select(func.count()).select_from(store.tables[table]))


def publish(url, folder, numbers, device="d1"):
    """Send results r<number> from a folder of their own, as bench-once does."""
    publish_to(parse_url(url), folder, numbers, device)


def publish_to(broker, folder, numbers, device="d1"):
    """Send results as `publish` does to a broker that is more than its URL."""
    folder = folder / uuid.uuid4().hex
    with closing(Log(folder / "records.jsonl")) as log:
        for number in numbers:
            log.append(encode(made(run_id=f"r{number}", device_id=device)))
        assert Delivery(folder, log).drain(broker, f"device-{uuid.uuid4().hex[:8]}", WAIT_S) is None


def test_a_second_dashboard_gets_everything_even_with_the_same_name(broker, tmp_path):
    """Neither another database nor a guest with the same name takes anything away from the first."""
    urls = [f"sqlite:///{tmp_path}/{number}.db" for number in (1, 2)]
    with ExitStack() as stack:
        for database in urls:
            stack.enter_context(collecting(broker.url, database))
        publish(broker.url, tmp_path, range(50))
        for database in urls:
            with closing(Store(database)) as store:
                wait_for(lambda store=store: count(store, "result") == 50)


def test_messages_unreadable_to_an_earlier_version_are_read_again(broker, url):
    topic = Topics("d1").result("r1")
    arrivals = [IncomingMessage(topic, encode(made(device_id="d1")), 5.0), IncomingMessage(topic, b"{", 6.0)]
    with closing(Store(url)) as store:
        rows = [quarantined(arrival, "record of a later schema") for arrival in arrivals]
        store.add(row._replace(values=row.values | {"reader": "0.0"}) for row in rows)
        with collecting(broker.url, url):
            pass
        assert (count(store, "result"), count(store, "body"), count(store, "quarantine")) == (1, 1, 1)
        assert value(store, select(store.tables["result"].c.arrived_s)) == 5.0
        assert value(store, select(store.tables["quarantine"].c.reader)) == READER


def test_a_message_rejected_by_the_database_affects_no_other_and_counts_once_for_its_board(url, monkeypatch):
    bodies = {run_id: encode(made(run_id=run_id, device_id="b")) for run_id in ("r0", "r1", "r2", "r3")}
    arrived = [IncomingMessage(Topics("b").result(run_id), body, 0.0) for run_id, body in bodies.items()]
    monkeypatch.setattr(collector, "DAY_BYTES", sum(map(len, bodies.values())))
    with closing(Store(url)) as store:
        with store._writing() as connection:
            wrong = "WHEN new.run_id = 'r1' BEGIN SELECT RAISE(ABORT, 'no'); END"
            connection.exec_driver_sql(f"CREATE TRIGGER fault BEFORE INSERT ON result {wrong}")
        Collector(store, parse_url("mqtt://b"), "site")._keep(arrived)
        assert (count(store, "result"), value(store, select(store.tables["quarantine"].c.reason))) == (
            3,
            "not stored: no",
        )


def test_an_unforeseen_exception_affects_only_one_message(url, monkeypatch):
    def fail(address, message):
        raise KeyError("planted")

    monkeypatch.setitem(messages._READERS, "event", fail)
    arrived = [
        IncomingMessage("benchd/v1/d1/event", b"{}", 0.0),
        IncomingMessage(Topics("d1").result("r1"), encode(made(device_id="d1")), 0.0),
    ]
    with closing(Store(url)) as store:
        Collector(store, parse_url("mqtt://b"), "site")._keep(arrived)
        assert count(store, "result") == 1
        assert value(store, select(store.tables["quarantine"].c.reason)) == "KeyError: 'planted'"


def test_a_board_that_publishes_endlessly_fills_only_its_share_of_the_database(url, monkeypatch):
    """What is not stored has not arrived: the board is asked for it the next day."""
    monkeypatch.setattr(collector, "DAY_BYTES", 400_000)
    with closing(Store(url)) as store:
        own_collector = Collector(store, parse_url("mqtt://b"), "site")
        for seq in range(1, 101):
            for device, filling in (("greedy", "x" * 4000), ("orin", "x")):
                body = encode(made(run_id=f"r{seq}", device_id=device, status="failed", reason=filling))
                own_collector._keep([IncomingMessage(Topics(device).result(f"r{seq}"), numbered(seq, body), 0.0)])
        greedy = 400_000 // (len(numbered(100, body)) + 4001)
        for table in ("result", "span"):
            column = store.tables[table].c.device_id
            counts = store.read(select(column, func.count()).group_by(column))
            assert sorted(map(tuple, counts)) == [("greedy", pytest.approx(greedy, abs=1)), ("orin", 100)]
        ((topic, reason),) = store.read(select(*(store.tables["quarantine"].c[name] for name in ("topic", "reason"))))
        assert (topic, reason[:10]) == ("benchd/v1/greedy", "more than ")
        own_collector._day_ends = 0.0
        own_collector._keep(
            [IncomingMessage(Topics("greedy").result("next"), encode(made(run_id="next", device_id="greedy")), 0.0)]
        )
        assert (
            value(store, select(store.tables["result"].c.run_id).order_by(store.tables["result"].c.id.desc())) == "next"
        )


def numbered(seq, body):
    """Return a record as a line of a log."""
    return b'{"log":"%s","seq":%d,%s' % (b"a" * 16, seq, body[1:])


def test_a_killed_collector_neither_loses_nor_duplicates_results(broker, url, tmp_path):
    total = 800
    with closing(Store(url)) as store:
        with collecting(broker.url, url):
            pass
        publish(broker.url, tmp_path, range(total))
        publish(broker.url, tmp_path, range(0, total, 10))  # a device that never heard of the first delivery
        for _ in range(3):
            before = count(store, "result")
            with collecting(broker.url, url) as process:
                wait_for(lambda before=before: count(store, "result") > before or before == total)
                process.kill()
        with collecting(broker.url, url):
            wait_for(lambda: count(store, "result") == total)
        assert count(store, "body") == total


def test_two_collectors_share_the_work_and_the_death_of_one_loses_nothing(broker, empty_postgres, tmp_path):
    total, url = 400, empty_postgres
    with closing(Store(url)) as store:
        with collecting(broker.url, url, "one") as first, collecting(broker.url, url, "two"):
            publish(broker.url, tmp_path, range(total // 2))
            first.kill()
            publish(broker.url, tmp_path, range(total // 2, total))
        assert count(store, "result") < total  # the broker keeps the share of the dead one
        with collecting(broker.url, url, "one"), collecting(broker.url, url, "two"):
            wait_for(lambda: count(store, "result") == total)


def test_a_broker_that_dies_and_comes_back_is_found_again(tmp_path, url):
    port = free_port()
    settings = SETTINGS.format(tmp_path)
    with (
        closing(Store(url)) as store,
        running_broker(tmp_path, settings, port=port) as first,
        collecting(first.url, url) as process,
    ):
        first.process.kill()
        problem = select(store.tables["collector"].c.problem)
        wait_for(lambda: value(store, problem) is not None)
        with running_broker(tmp_path, settings, port=port) as second:
            wait_for(lambda: value(store, problem) is None)
            publish(second.url, tmp_path, range(5))
            wait_for(lambda: count(store, "result") == 5)
        assert process.is_alive()


def test_setting_the_clock_neither_expires_data_nor_silences_the_collector(broker, url, monkeypatch):
    wall, uptime, year_s = time.time, time.monotonic, 365 * 86400.0
    to = parse_url(broker.url)
    with closing(Store(url)) as store, closing(Feed(to, "collector", 0)) as feed:
        own_collector = Collector(store, to, "site")
        store.add(messages.rows(IncomingMessage("benchd/v1/d1/event", b'{"event":"a"}', wall())))
        seen_s = select(store.tables["collector"].c.seen_s)
        # set ahead, set back, set ahead for good and then left alone for two days
        for hours, set_s, events in ((0, 0, 1), (1, year_s, 1), (2, -year_s, 1), (3, year_s, 1), (51, year_s, 0)):
            monkeypatch.setattr(time, "monotonic", lambda hours=hours: uptime() + 3600 * hours)
            monkeypatch.setattr(time, "time", lambda hours=hours, set_s=set_s: wall() + 3600 * hours + set_s)
            own_collector._keep_house(feed)
            assert count(store, "event") == events
            assert abs(value(store, seen_s) - time.time()) < 60


@pytest.mark.parametrize("name", ["", "a/b", "+", "#", "A"])
def test_a_name_that_is_no_topic_level_is_refused(name):
    with pytest.raises(UsageError, match="collector name"):
        collector.run(parse_url("mqtt://127.0.0.1"), "sqlite://", name)
