"""Telemetry in PostgreSQL: its partitions appear with the first row, and go with what has expired."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest

pytest.importorskip("sqlalchemy", reason="needs sqlalchemy, of the extra dashboard")

from sqlalchemy import event
from test_store import add, content, power

from benchd.dashboard import partitions
from benchd.dashboard.store import Store

psycopg = pytest.importorskip("psycopg", reason="needs psycopg, of the extra postgres")

DAY_S = 86400
NOON_S = 20_000 * DAY_S + DAY_S // 2


def names(store, table):
    with store.reading() as connection:
        return sorted(one.name for one in partitions.partitions(connection, table))


def samples(store):
    """Return how many samples the minutes count."""
    with store.reading() as connection:
        return connection.exec_driver_sql("SELECT coalesce(sum(samples), 0) FROM telemetry_minute").scalar()


@contextmanager
def statements(store):
    """Yield a list that takes up what is executed."""
    found = []

    def note(connection, cursor, statement, *_):
        found.append(statement)

    event.listen(store._engine, "before_cursor_execute", note)
    yield found
    event.remove(store._engine, "before_cursor_execute", note)


def test_raw_telemetry_has_a_partition_per_minute_and_the_aggregated_one_per_day(empty_postgres):
    with closing(Store(empty_postgres)) as store:
        add(store, power([1.0], NOON_S), power([2.0], NOON_S + 60), power([3.0], NOON_S + 3 * DAY_S))
        assert [name.removeprefix("telemetry_") for name in names(store, "telemetry")] == [
            str(NOON_S + 60),
            str(NOON_S + 120),
            str(NOON_S + 3 * DAY_S + 60),
        ]
        store.tidy(NOON_S + 4 * DAY_S)
        assert names(store, "telemetry") == []
        days = [NOON_S + DAY_S // 2, NOON_S + 3 * DAY_S + DAY_S // 2]
        assert names(store, "telemetry_minute") == [f"telemetry_minute_{end_s}" for end_s in days]
        store.tidy(days[0] + 90 * DAY_S)
        assert names(store, "telemetry_minute") == [f"telemetry_minute_{days[1]}"]
        assert len(content(store, "telemetry_minute")["telemetry_minute"]) == 1


def test_two_collectors_may_need_the_same_partition_at_once(empty_postgres):
    with closing(Store(empty_postgres)) as one, closing(Store(empty_postgres)) as other, ThreadPoolExecutor(2) as pool:
        for minute in range(20):
            both = [
                pool.submit(add, store, power([1.0], NOON_S + 60 * minute, device))
                for store, device in ((one, "d1"), (other, "d2"))
            ]
            for done in both:
                done.result()
        assert len(names(one, "telemetry")) == 20
        assert len(content(one, "telemetry")["telemetry"]) == 40


def test_who_reads_telemetry_for_long_stops_no_collector(empty_postgres):
    bounded = f"{empty_postgres}?options=-c%20statement_timeout%3D30s"
    with closing(Store(bounded)) as store, psycopg.connect(empty_postgres) as reader:
        add(store, power([1.0], NOON_S))
        reader.execute("LOCK TABLE telemetry IN ACCESS SHARE MODE")
        store.tidy(NOON_S + 3660)
        store.tidy(NOON_S + 3660)
        add(store, power([3.0], NOON_S + 120))
        assert len(names(store, "telemetry")) == 2
        assert samples(store) == 1
        reader.rollback()
        store.tidy(NOON_S + 3660)
        assert len(names(store, "telemetry")) == 1
        assert samples(store) == 1


def test_a_sample_that_comes_during_the_aggregation_is_not_lost(empty_postgres):
    with closing(Store(empty_postgres)) as store, psycopg.connect(empty_postgres, autocommit=True) as late:
        late.execute("SET lock_timeout = '200ms'")
        add(store, power([1.0], NOON_S))
        refused = []

        def insert(connection, cursor, statement, *_):
            if statement.startswith("INSERT INTO telemetry_minute"):
                try:
                    late.execute("INSERT INTO telemetry VALUES ('d2', 'power_w', %s, 2)", (NOON_S,))
                except psycopg.errors.LockNotAvailable as error:
                    refused.append(error)

        event.listen(store._engine, "after_cursor_execute", insert)
        store.tidy(NOON_S + 3660)
        assert samples(store) + len(refused) == 2


def test_samples_go_with_their_partition_and_are_not_deleted_one_by_one(empty_postgres):
    with closing(Store(empty_postgres)) as store:
        add(store, power([1.0], NOON_S), power([2.0], NOON_S + 60))
        with statements(store) as executed:
            store.tidy(NOON_S + 3720)
        assert not [one for one in executed if one.startswith("DELETE FROM telemetry")]
        assert (names(store, "telemetry"), samples(store)) == ([], 2)


def test_many_partitions_go_in_several_transactions_the_oldest_first(empty_postgres, monkeypatch):
    monkeypatch.setattr(partitions, "BATCH", 2)
    with closing(Store(empty_postgres)) as store:
        for minute in (4, 2, 0, 3, 1):
            add(store, power([1.0], NOON_S + 60 * minute))
        created = names(store, "telemetry")
        with statements(store) as executed:
            store.tidy(NOON_S + 2 * 3600)
        dropped = [one.rpartition("EXISTS ")[2].split(", ") for one in executed if one.startswith("DROP TABLE")]
        assert dropped == [created[:2], created[2:4], created[4:]]
        assert samples(store) == 5


def test_a_partition_that_another_collector_dropped_is_created_again(empty_postgres):
    with closing(Store(empty_postgres)) as store, closing(Store(empty_postgres)) as ahead:
        add(store, power([1.0], NOON_S))
        ahead.tidy(NOON_S + 2 * 3600)
        add(store, power([2.0], NOON_S + 1))
        assert len(content(store, "telemetry")["telemetry"]) == 1
