"""Telemetry in PostgreSQL: its partitions appear with the first row, and go with what has expired."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

pytest.importorskip("sqlalchemy", reason="needs sqlalchemy, of the extra dashboard")

from test_store import add, content, power

from benchd.dashboard import partitions
from benchd.dashboard import store as store_of
from benchd.dashboard.store import Store

DAY_S = 86400
NOON_S = 20_000 * DAY_S + DAY_S // 2


def names(store, table):
    with store.reading() as connection:
        return sorted(one.name for one in partitions.partitions(connection, table))


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


def test_a_database_without_partitions_keeps_its_telemetry(empty_postgres, monkeypatch):
    with monkeypatch.context() as before:
        before.setattr(store_of, "_MIGRATIONS", store_of._MIGRATIONS[:-1])
        with closing(Store(empty_postgres)) as store, store._writing() as connection:
            for t_s in (NOON_S, NOON_S + 90):
                connection.exec_driver_sql("INSERT INTO telemetry VALUES ('d1', 'power_w', %s, 2)", (t_s,))
            minute = (NOON_S - 20 * DAY_S,)
            connection.exec_driver_sql("INSERT INTO telemetry_minute VALUES ('d1', 'power_w', %s, 1, 2, 2, 2)", minute)
    with closing(Store(empty_postgres)) as store:
        add(store, power([4.0], NOON_S + 30), power([4.0], NOON_S + 600))
        assert len(content(store, "telemetry")["telemetry"]) == 4
        store.tidy(NOON_S + 3660)
        assert len(content(store, "telemetry")["telemetry"]) == 2
        store.tidy(NOON_S + 3660)  # nothing is aggregated twice
        assert (
            f"('d1', 'power_w', {NOON_S}, 2, 6.0, 2.0, 4.0)" in content(store, "telemetry_minute")["telemetry_minute"]
        )
        store.tidy(NOON_S + 60 * DAY_S)
        assert len(content(store, "telemetry_minute")["telemetry_minute"]) == 4
        store.tidy(NOON_S + 92 * DAY_S)
        assert content(store, "telemetry", "telemetry_minute") == {"telemetry": [], "telemetry_minute": []}
        assert names(store, "telemetry") == names(store, "telemetry_minute") == []


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
