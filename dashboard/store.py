"""The collectors' store, in SQLite or PostgreSQL: records, devices, telemetry, events, quarantine.

Duplicate deliveries have no effect, because every row has a unique key (`schema`). Records are kept forever, with their
original bytes; telemetry is reduced to one message per minute after an hour, and expires later.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

from sqlalchemy import (
    Connection,
    Select,
    Table,
    create_engine,
    delete,
    event,
    exists,
    func,
    insert,
    select,
    tuple_,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, Engine, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from benchd.daemon.delivery.connection import IncomingMessage
from benchd.daemon.errors import UsageError, needing
from benchd.daemon.journal import explaining
from benchd.daemon.machine import folders
from benchd.daemon.verdicts.when import AHEAD_S
from benchd.dashboard import schema
from benchd.dashboard.messages import TableRow
from benchd.dashboard.schema import COLLECTOR, EVENT, NOTICE, QUARANTINE, RESULT, SPAN, TELEMETRY

BUSY_S = 30  # time to wait for other processes, whose transactions take milliseconds
RAW_S = 3600.0  # for how long every telemetry message is kept
KEEP_S = 90 * 86400.0  # for how long one telemetry message per minute, and events, are kept
QUARANTINE_ROWS, QUARANTINE_BYTES = 10_000, 256 * 2**20  # limits for results, and again for everything else
SPANS = 1000  # maximum number of ranges per log
LOGS = 64  # maximum number per device, which may invent any number of logs

_ORDER_LOCK = 0x62636865  # PostgreSQL's advisory lock for inserting into the tables that are read from the last id on
_READ_ON = {"result", "event"}

_LATEST = {COLLECTOR: ("seen_s", "problem"), QUARANTINE: ("reason", "reader")}  # columns that change in an existing row
_EXPIRING = ((TELEMETRY, TELEMETRY.c.t_s), (EVENT, EVENT.c.arrived_s))
# prefix of the keys of notices that are kept, because their reports may stay true for longer
_LASTING = "failed check:"


def default_url() -> str:
    """Return the default database URL, a file in the state folder, which is created; raise UsageError on failure."""
    folder = folders.state()
    with explaining(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder.absolute()}/dashboard.db"


class Store:
    """The database at `url`, `sqlite:///PATH` or `postgresql://[USER@]HOST/NAME`, created if empty.

    Raises UsageError for an invalid URL or a database with a different schema or from a different program, NotAvailable
    if the driver is missing. Later database failures raise SQLAlchemy's DBAPIError.
    """

    def __init__(self, url: str) -> None:
        address = _address(url)
        self._engine = _engine(address)
        self.tables = schema.METADATA.tables
        try:
            with self._writing() as connection:
                self.site = schema.create(connection)
        except (DBAPIError, UsageError) as error:
            self.close()
            raise UsageError(f"database {address}: {str(getattr(error, 'orig', error)).strip()}") from error

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Yield a connection that reads a single state of the database."""
        with self._engine.connect() as connection:
            yield connection

    def read(self, wanted: Select[Any]) -> Sequence[Any]:
        """Return the rows of one query."""
        with self.reading() as connection:
            return connection.execute(wanted).all()

    def add(self, rows: Iterable[TableRow]) -> None:
        """Commit rows in one transaction; a row with a known key only changes tables that store the latest one."""
        by_table: dict[str, list[dict[str, Any]]] = {}
        for table, values in rows:
            by_table.setdefault(table, []).append(values)
        with self._writing() as connection:
            if connection.dialect.name == "postgresql" and by_table.keys() & _READ_ON:
                # PostgreSQL assigns ids on insertion: without the lock, a lower id could be committed after a higher
                # one was read
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_ORDER_LOCK})")
            for name, entries in sorted(by_table.items()):
                # in key order, so that two collectors cannot deadlock
                entries.sort(key=itemgetter(*_keys(self.tables[name])))
                connection.execute(_insertion(connection, self.tables[name]), entries)

    def quarantined(self, but: str, limit: int) -> dict[str, IncomingMessage]:
        """Return, by key, the oldest quarantined messages that the version `but` has not read yet."""
        conditions = (QUARANTINE.c.reader != but, func.length(QUARANTINE.c.body) > 0)
        wanted = select(QUARANTINE).where(*conditions).order_by(QUARANTINE.c.id).limit(limit)
        # marked as retained, because what a message in quarantine says about the device's presence is outdated
        return {
            row.key: IncomingMessage(row.topic, bytes(row.body), row.arrived_s, retained=True)
            for row in self.read(wanted)
        }

    def release(self, keys: Iterable[str], but: str) -> None:
        """Delete these messages from the quarantine, except those that the version `but` cannot read either."""
        with self._writing() as connection:
            connection.execute(delete(QUARANTINE).where(QUARANTINE.c.key.in_(list(keys)), QUARANTINE.c.reader != but))

    def claim(self, channel: str, keys: Sequence[str], now_s: float, every_s: float) -> list[str]:
        """Return those of these notices that this caller, and no other collector, must send now.

        Returns None if the channel's last message is more recent than `every_s`.
        """
        with self._writing() as connection:
            connection.execute(update(schema.version).values(number=schema.VERSION))  # blocks other collectors
            last_s = connection.execute(select(func.max(NOTICE.c.told_s)).where(NOTICE.c.channel == channel)).scalar()
            if last_s is not None and 0 <= now_s - last_s < every_s:
                return []
            known = set(connection.execute(select(NOTICE.c.key).where(NOTICE.c.channel == channel)).scalars())
            new = [key for key in keys if key not in known]
            if new:
                connection.execute(insert(NOTICE), [{"channel": channel, "key": key, "told_s": now_s} for key in new])
            return new

    def unclaim(self, channel: str, keys: Iterable[str]) -> None:
        """Forget that these notices were sent."""
        with self._writing() as connection:
            connection.execute(delete(NOTICE).where(NOTICE.c.channel == channel, NOTICE.c.key.in_(list(keys))))

    def tidy(self, now_s: float, *, expire: bool = True) -> None:
        """Reduce telemetry older than an hour to one message per minute and, if `expire`, delete expired data."""
        with self._writing() as connection:
            last_s = connection.execute(select(schema.version.c.tidied_s)).scalar() or 0.0
            # the first writer here blocks other collectors
            connection.execute(update(schema.version).values(tidied_s=now_s))
            self._thin_out(connection, min(last_s, now_s) - RAW_S - 60, now_s - RAW_S)
            self._join(connection, now_s)
            for table, column in _EXPIRING if expire else ():
                connection.execute(delete(table).where(column < now_s - KEEP_S))
            if expire:
                old = NOTICE.c.told_s < now_s - KEEP_S
                connection.execute(delete(NOTICE).where(old, ~NOTICE.c.key.startswith(_LASTING)))
            is_result = QUARANTINE.c.topic.like("%/result/%")
            for mine in (is_result, ~is_result):  # separately, so that rubbish never displaces results
                newest = QUARANTINE.c.id.desc()
                size = func.sum(func.length(QUARANTINE.c.body)).over(order_by=newest).label("bytes")
                place = func.row_number().over(order_by=newest).label("rows")
                totals = select(QUARANTINE.c.id, size, place).where(mine).subquery()
                beyond = (totals.c.bytes > QUARANTINE_BYTES) | (totals.c.rows > QUARANTINE_ROWS)
                connection.execute(delete(QUARANTINE).where(QUARANTINE.c.id.in_(select(totals.c.id).where(beyond))))

    def forget(self, before_s: float, results: int) -> None:
        """Delete telemetry older than `before_s` and all except the newest `results` results, keeping all bodies."""
        order = (RESULT.c.measured_s.desc(), RESULT.c.arrived_s.desc(), RESULT.c.id.desc())
        newest = select(RESULT.c.id).order_by(*order).limit(results)
        with self._writing() as connection:
            connection.execute(delete(TELEMETRY).where(TELEMETRY.c.t_s < before_s))
            connection.execute(delete(RESULT).where(RESULT.c.id.not_in(newest)))

    def close(self) -> None:
        """Close the database."""
        self._engine.dispose()

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        with self._engine.execution_options(begin="BEGIN IMMEDIATE").begin() as connection:
            yield connection

    def _join(self, connection: Connection, now_s: float) -> None:
        """Join the numbers that have arrived with the ranges of their logs, keeping the last SPANS ranges.

        For each device, the LOGS with the most recent arrivals are kept.
        """
        for log in connection.execute(
            select(SPAN.c.device_id, SPAN.c.log).where(SPAN.c.joined_s.is_(None)).distinct()
        ).all():
            mine = (SPAN.c.device_id == log.device_id) & (SPAN.c.log == log.log)
            ranges = connection.execute(delete(SPAN).where(mine).returning(SPAN.c.first, SPAN.c.last))
            last_ones = joined(ranges)[-SPANS:]
            values = [{"first": first, "last": last, "joined_s": now_s, **log._mapping} for first, last in last_ones]
            connection.execute(insert(SPAN), values)
        newest = (func.max(SPAN.c.joined_s).desc(), SPAN.c.log)
        place = func.row_number().over(partition_by=SPAN.c.device_id, order_by=newest).label("place")
        logs = select(SPAN.c.device_id, SPAN.c.log, place).group_by(SPAN.c.device_id, SPAN.c.log).subquery()
        beyond = select(logs.c.device_id, logs.c.log).where(logs.c.place > LOGS)
        connection.execute(delete(SPAN).where(tuple_(SPAN.c.device_id, SPAN.c.log).in_(beyond)))

    def _thin_out(self, connection: Connection, since_s: float, before_s: float) -> None:
        """Delete telemetry between these times, except each device's first message in each minute."""
        first, t_s = TELEMETRY.alias(), TELEMETRY.c.t_s
        has_earlier = exists().where(
            first.c.device_id == TELEMETRY.c.device_id, first.c.t_s >= func.floor(t_s / 60) * 60, first.c.t_s < t_s
        )
        connection.execute(delete(TELEMETRY).where(t_s >= since_s, t_s < before_s // 60 * 60, has_earlier))


def joined(ranges: Iterable[Any]) -> list[tuple[int, int]]:
    """Return the same numbers in the fewest ranges, in order."""
    spans: list[tuple[int, int]] = []
    for first, last in sorted(map(tuple, ranges)):
        if spans and first <= spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], max(last, spans[-1][1]))
        else:
            spans.append((first, last))
    return spans


def _address(url: str) -> URL:
    try:
        address = make_url(url)
    except (ArgumentError, ValueError):  # ValueError for a port
        address = None
    if address is None or address.drivername not in ("sqlite", "postgresql"):
        raise UsageError("database URL: expected sqlite:///PATH or postgresql://[USER[:PASSWORD]@]HOST[:PORT]/NAME")
    if address.drivername == "sqlite" and address.database:
        folder = Path(address.database).absolute().parent
        if not folder.is_dir():
            raise UsageError(f"database {address}: no such folder {folder}; correct the path or create it")
    return address.set(drivername="postgresql+psycopg") if address.drivername == "postgresql" else address


def _engine(address: URL) -> Engine:
    if address.drivername != "sqlite":
        with needing("postgres"):
            return create_engine(address, pool_pre_ping=True)  # a restarted server has closed the other connections
    engine = create_engine(address, connect_args={"timeout": BUSY_S})

    @event.listens_for(engine, "connect")
    def _set_up(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # because SQLAlchemy begins transactions itself
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql(connection.get_execution_options().get("begin", "BEGIN"))

    return engine


def _keys(table: Table) -> list[str]:
    """Return the columns that identify a table's rows, without its numbers."""
    return ["key"] if "key" in table.c else [column.name for column in table.primary_key]


def _insertion(connection: Connection, table: Table) -> Any:
    """Return the INSERT for rows of `table`: the first row of a key stays or, in devices and documents, the latest.

    A time stamp in the future is from a collector whose clock was ahead; the next message is then considered later.
    """
    # dialects whose INSERT supports ON CONFLICT
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    insertion, keys = dialect.insert(table), _keys(table)
    new, stored, future_s = insertion.excluded, table.c, time.time() + AHEAD_S
    if table.name == "device":
        later = stored.seen_s.is_(None) | (new.seen_s > stored.seen_s)
        later |= (stored.seen_s > future_s) & new.seen_s.is_not(None)
        return insertion.on_conflict_do_update(index_elements=keys, set_={"seen_s": new.seen_s}, where=later)
    if table in _LATEST:
        changed = {name: new[name] for name in _LATEST[table]}
        return insertion.on_conflict_do_update(index_elements=keys, set_=changed)
    if table.name == "document":
        # a broker may send a session's will after the next session has begun
        late_will = (new.state == "offline") & (new.session != "") & (stored.session != "")
        late_will &= new.session != stored.session
        later = ((new.arrived_s >= stored.arrived_s) | (stored.arrived_s > future_s)) & ~func.coalesce(late_will, False)
        changed = {name: new[name] for name in ("body", "arrived_s", "state", "session")}
        return insertion.on_conflict_do_update(index_elements=keys, set_=changed, where=later)
    return insertion.on_conflict_do_nothing(index_elements=keys)
