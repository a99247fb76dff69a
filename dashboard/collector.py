"""A process that stores the devices' messages, and acknowledges them to the broker only after the commit.

Unacknowledged messages are sent again after a crash of this process, the broker or the database; their keys make that
harmless. If messages do not arrive at all, their numbers are missing, and the collector requests them from the device.
Several collectors with different names can share the work for one database.
"""

import math
import re
import signal
import socket
import sys
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import closing, suppress

import msgspec
from sqlalchemy.exc import DBAPIError, InterfaceError, InternalError, OperationalError

from benchd.daemon.delivery import topics
from benchd.daemon.delivery.broker import Broker, ConnectionEnded
from benchd.daemon.delivery.connection import IncomingMessage
from benchd.daemon.delivery.topics import Topics
from benchd.daemon.errors import UsageError
from benchd.daemon.machine import identity
from benchd.daemon.trigger import DAY_S
from benchd.dashboard import queries
from benchd.dashboard.feed import Feed
from benchd.dashboard.messages import READER, TableRow, quarantined, rows
from benchd.dashboard.notices import Settings, telling
from benchd.dashboard.queries import Gap
from benchd.dashboard.store import Store

SESSION_S = 7 * 86400  # for how long a broker queues messages for a disconnected collector
IDLE_S = 1.0
TIDY_S = 60.0
PRESENCE_S = 5.0
ASK_FIRST_S, ASK_LAST_S = 60.0, 86400.0
ASKS, ASK_LINES = 10, 5000  # maximum number of logs requested at once, and of lines from each
ASK_EXPIRY_S = 60
# a clock that is off by more than CLOCK_STEP_S is trusted only after BELIEVED_S
CLOCK_STEP_S, BELIEVED_S = 3600.0, 86400.0
DATABASE_S = 5.0
MAX_DELAY_S = 30.0
DAY_BYTES = 2 * 2**30  # limit per device; results beyond it are sent again when requested
AGAIN = 32  # number of quarantined messages that are read again at once
OUTAGES = (OperationalError, InterfaceError, InternalError)  # database outages; any other error is due to the message


def default_name() -> str:
    """Return this host's name as a valid topic level."""
    return re.sub(r"[^a-z0-9-]+", "-", socket.gethostname().lower()).strip("-") or "collector"


def run(broker: Broker, database: str, name: str, notify: Settings | None = None) -> None:
    """Collect until SIGTERM or SIGINT."""
    identity.checked(name, "collector name")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    collect(broker, database, name, stop, notify)


def collect(broker: Broker, database: str, name: str, stop: threading.Event, notify: Settings | None = None) -> None:
    """Collect until `stop` and, with `notify`, notify people of problems with devices.

    Retries if the database or the broker cannot be reached.
    """
    while not stop.is_set():
        try:
            store = Store(database)
        except UsageError as error:
            if not isinstance(error.__cause__, OUTAGES):
                raise
            sys.stderr.write(f"collector {name}: {error}; trying again\n")
            stop.wait(DATABASE_S)
            continue
        collector = Collector(store, broker, name)
        with closing(store), telling(store, notify, name, collector.listens_since_s):
            collector.run(stop)


class Collector:
    """Moves messages from a broker into a store; `name` identifies the session to the broker and the devices."""

    def __init__(self, store: Store, broker: Broker, name: str) -> None:
        self._store, self._broker, self._name = store, broker, name
        self._since_s = math.inf
        self._presence_due = self._tidy_due = 0.0
        self._asks: dict[tuple[str, str, int], tuple[float, float]] = {}  # when to request each gap, and the last delay
        self._clock_s, self._steady_due = time.time() - time.monotonic(), 0.0
        self._taken_bytes: Counter[str] = Counter()  # bytes since the start of the day
        self._day_ends = 0.0

    def listens_since_s(self) -> float:
        """Return the time since which messages can arrive, by the current wall clock; infinity while they cannot."""
        return time.time() - time.monotonic() + self._since_s

    def run(self, stop: threading.Event) -> None:
        """Collect until `stop`; retry failures at increasing intervals."""
        delay_s = 1.0
        while not stop.is_set():
            began = time.monotonic()
            try:
                self._read_again()
                site = self._store.site
                client_id = f"benchd-collector-{site}-{self._name}"
                with closing(Feed(self._broker, client_id, SESSION_S, site)) as feed:
                    self._say(None)
                    self._collect(feed, stop)
            except Exception as error:  # whatever failed, the next attempt may succeed
                self._report(error)
                delay_s = 1.0 if time.monotonic() - began > MAX_DELAY_S else min(2 * delay_s, MAX_DELAY_S)
                stop.wait(delay_s)

    def _collect(self, feed: Feed, stop: threading.Event) -> None:
        self._since_s = time.monotonic()
        try:
            while not stop.is_set():
                arrived = feed.batch(IDLE_S)
                if arrived:
                    self._keep(arrived)
                    feed.acknowledge(arrived)
                self._keep_house(feed)
        finally:
            self._since_s = math.inf

    def _keep(self, arrived: Sequence[IncomingMessage]) -> None:
        """Commit messages; if the database rejects one, only that one is quarantined."""
        self._commit([(message, self._beyond_day(message) or rows(message)) for message in arrived])

    def _commit(self, messages: Sequence[tuple[IncomingMessage, list[TableRow]]]) -> None:
        try:
            self._store.add(row for _, rows in messages for row in rows)
        except OUTAGES:
            raise
        except Exception as error:
            if len(messages) == 1:
                self._store.add([quarantined(messages[0][0], f"not stored: {_reason(error)}")])
                return
            for message in messages:
                self._commit([message])

    def _beyond_day(self, message: IncomingMessage) -> list[TableRow]:
        """Return the row to store in place of a message whose device has used up its share of the database."""
        if time.monotonic() >= self._day_ends:
            self._taken_bytes.clear()
            self._day_ends = time.monotonic() + DAY_S
        if (address := topics.parse(message.topic)) is None:
            return []
        self._taken_bytes[address.device_id] += len(message.body)
        if self._taken_bytes[address.device_id] <= DAY_BYTES:
            return []
        short = message._replace(topic=f"{topics.ROOT}/{address.device_id}", body=b"")
        return [quarantined(short, f"more than {DAY_BYTES >> 30} GiB in a day; further messages are not stored")]

    def _read_again(self) -> None:
        """Read messages that an earlier version of benchd could not read and quarantined."""
        while messages := self._store.quarantined(but=READER, limit=AGAIN):
            self._keep(list(messages.values()))
            self._store.release(messages, but=READER)

    def _keep_house(self, feed: Feed) -> None:
        now_s = time.monotonic()
        if now_s >= self._presence_due:
            self._presence_due = now_s + PRESENCE_S
            self._say(None)
        if now_s >= self._tidy_due:
            self._tidy_due = now_s + TIDY_S
            self._store.tidy(time.time(), expire=self._is_steady(now_s))
            self._ask_for_missing(feed, now_s)

    def _ask_for_missing(self, feed: Feed, now_s: float) -> None:
        """Request missing messages from devices, with a delay, because another collector may be storing them.

        A device gets one request at a time, for a range that spans its missing numbers, so that those in between are
        sent twice. Devices that have waited longest come first.
        """
        missing = {gap[:3]: gap for gap in queries.gaps(self._store, online=True)}  # the end of a gap may grow
        asks = {key: self._asks.get(key, (now_s + ASK_FIRST_S, ASK_FIRST_S)) for key in missing}
        due: dict[tuple[str, str], list[Gap]] = defaultdict(list)
        for key in sorted(asks, key=lambda key: asks[key][0]):
            if now_s >= asks[key][0]:
                due[key[:2]].append(missing[key])
        for (device_id, log), gaps in list(due.items())[:ASKS]:
            first = min(gap.first for gap in gaps)
            spanned = [gap for gap in gaps if gap.first < first + ASK_LINES]
            last = min(max(gap.last for gap in spanned), first + ASK_LINES - 1)
            for gap in spanned:
                delay_s = min(2 * asks[gap[:3]][1], ASK_LAST_S)
                asks[gap[:3]] = (now_s + delay_s, delay_s)
            body = {"id": uuid.uuid4().hex, "log": log, "from": first, "to": last}
            feed.publish(Topics(device_id).command("replay"), msgspec.json.encode(body), expire_s=ASK_EXPIRY_S)
        self._asks = asks

    def _is_steady(self, now_s: float) -> bool:
        """Return whether the clock has not been set for a day, or since the start: else data would expire wrongly."""
        clock_s = time.time() - now_s
        if abs(clock_s - self._clock_s) > CLOCK_STEP_S:
            self._clock_s, self._steady_due = clock_s, now_s + BELIEVED_S
        return now_s >= self._steady_due

    def _report(self, error: Exception) -> None:
        sys.stderr.write(f"collector {self._name}: {_reason(error)}; trying again\n")
        with suppress(Exception):  # the error may have come from the database
            self._say(_reason(error))

    def _say(self, problem: str | None) -> None:
        self._store.add([TableRow("collector", {"name": self._name, "seen_s": time.time(), "problem": problem})])


def _reason(error: Exception) -> str:
    """Return the error in one line; a database error would otherwise quote its statement and every value."""
    if isinstance(error, DBAPIError):
        return str(error.orig).strip().replace("\n", " ")
    return str(error) if isinstance(error, ConnectionEnded) else f"{type(error).__name__}: {error}"
