"""Telemetry in PostgreSQL lies in partitions by time: what has expired is dropped with its partition.

Rows are deleted only from a partition that also has newer ones, or that cannot be dropped yet because somebody reads.

A partition is named after its table and its end in Unix time, `telemetry_minute_1767225600`. It is created by the first
row that needs it.
"""

import math
from collections.abc import Iterable, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, OperationalError

BATCH = 100  # partitions per transaction: each takes some of the server's locks
LOCK_WAIT_MS = 500  # who comes later waits behind it
SPANS_S = {"telemetry": 60, "telemetry_minute": 86400}  # of a partition: raw samples go a minute at a time
_COLUMNS = itemgetter("device_id", "metric", "t_s", "value")
_LOCK = 0x62636870  # of the advisory locks for creating partitions, one per table


class Partition(NamedTuple):
    """Part of a table: the rows of a span that ends at `end_s`."""

    name: str
    end_s: int


def ends(table: str, times_s: Iterable[float]) -> set[int]:
    """Return where the partitions end that hold these times."""
    return {_end_s(t_s, SPANS_S[table]) for t_s in times_s}


def create(connection: Connection, table: str, ends_s: Iterable[int]) -> None:
    """Create the partitions that end there and do not exist yet; who wants to do the same waits for the commit."""
    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK}, %s::regclass::oid::int)", (table,))
    known = {partition.end_s for partition in partitions(connection, table)}
    for end_s in sorted(set(ends_s) - known):
        name, bounds = f"{table}_{end_s}", f"FROM ({end_s - SPANS_S[table]}) TO ({end_s})"
        # created first and attached then, which neither waits for who reads and writes the table nor keeps them out
        connection.exec_driver_sql(f"CREATE TABLE {name} (LIKE {table} INCLUDING ALL)")
        connection.exec_driver_sql(f"ALTER TABLE {table} ATTACH PARTITION {name} FOR VALUES {bounds}")


def lock(connection: Connection, old: Sequence[Partition]) -> bool:
    """Keep writers, not readers, out of these partitions until the commit; return False if somebody is writing."""
    return _within_wait(connection, f"LOCK TABLE {_names(old)} IN SHARE ROW EXCLUSIVE MODE")


def drop(connection: Connection, old: Sequence[Partition]) -> bool:
    """Drop these partitions; return False, and leave them all, if somebody is still reading the table.

    Nobody else reads or writes the table until this is committed.
    """
    return not old or _within_wait(connection, f"DROP TABLE IF EXISTS {_names(old)}")


def partitions(connection: Connection, table: str) -> list[Partition]:
    """Return the partitions of a table, oldest first."""
    wanted = (
        "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = %s::regclass"
    )
    names = connection.exec_driver_sql(wanted, (table,)).scalars()
    return sorted((Partition(name, int(name.rpartition("_")[2])) for name in names), key=attrgetter("end_s"))


def is_missing(error: DBAPIError) -> bool:
    """Return whether a row was refused because there is no partition for it."""
    return getattr(error.orig, "sqlstate", None) == "23514"


def insert(connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
    """Insert raw samples in one statement; those with a known key change nothing."""
    connection.exec_driver_sql(
        "INSERT INTO telemetry(device_id, metric, t_s, value)"
        " SELECT * FROM unnest(%s::text[], %s::text[], %s::float8[], %s::float8[]) ON CONFLICT DO NOTHING",
        tuple(map(list, zip(*map(_COLUMNS, rows), strict=True))),
    )


def _within_wait(connection: Connection, statement: str) -> bool:
    try:
        with connection.begin_nested():
            connection.exec_driver_sql(f"SET LOCAL lock_timeout = {LOCK_WAIT_MS}")
            connection.exec_driver_sql(statement)
            connection.exec_driver_sql("SET LOCAL lock_timeout TO DEFAULT")
    except OperationalError as error:
        if getattr(error.orig, "sqlstate", None) != "55P03":
            raise
        return False
    return True


def _names(several: Iterable[Partition]) -> str:
    return ", ".join(one.name for one in several)


def _end_s(t_s: float, span_s: int) -> int:
    return math.floor(t_s / span_s) * span_s + span_s
