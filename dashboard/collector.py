"""A process that stores what devices publish: first the commit, then the acknowledgements.

Unacknowledged messages come again after a crash of this process, the broker or the database; their keys make that
harmless. Several collectors can share the work: each has its own name.
"""

import math
import re
import signal
import socket
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing, suppress
from multiprocessing import parent_process

import msgspec
from msgspec import Struct
from sqlalchemy.exc import DBAPIError, InterfaceError, InternalError, OperationalError

from benchd.daemon.delivery.broker import Broker, Ended
from benchd.daemon.delivery.outbox import body_digest
from benchd.daemon.delivery.session import Arrived
from benchd.daemon.delivery.topics import Topics
from benchd.daemon.errors import UsageError
from benchd.daemon.machine import identity
from benchd.dashboard import queries
from benchd.dashboard.feed import Feed
from benchd.dashboard.messages import READER, TEXT_LIMIT, Row, delivery_key, quarantined, rows
from benchd.dashboard.notices import Settings, telling
from benchd.dashboard.queries import Gap
from benchd.dashboard.store import Store, Unusable

SESSION_S = 7 * 86400  # how long a broker queues messages for an absent collector
IDLE_S = 1.0
TIDY_S = 60.0
PRESENCE_S = 5.0
ASK_FIRST_S, ASK_LAST_S = 60.0, 86400.0
ASKS = 10  # devices at once
ASK_EXPIRY_S = 60
CLOCK_STEP_S, BELIEVED_S = 3600.0, 86400.0  # a clock that was set by more is believed after a day
DATABASE_S = 5.0
MAX_DELAY_S = 30.0
REASON_CHARS = 100  # of why a result cannot be read; a device takes 128 KiB
AGAIN = 32  # messages of the quarantine that are read again at once
OUTAGES = (OperationalError, InterfaceError, InternalError)  # of the database; any other error is the message's


def default_name() -> str:
    """Return this host's name as a valid topic level."""
    return re.sub(r"[^a-z0-9-]+", "-", socket.gethostname().lower()).strip("-") or "collector"


def run(broker: Broker, database: str, name: str, notify: Settings | None = None) -> None:
    """Collect until SIGTERM or SIGINT, or until the process that started this one has ended.

    With `notify` people are told what is wrong with a device. A database that cannot be reached is tried again, as a
    broker is.
    """
    identity.checked(name, "collector name")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    while not _ended(stop):
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


class _Ack(Struct):
    schema: str = "benchd.ack/1"
    keys: list[str] = []
    unread: dict[str, str] = {}
    digests: dict[str, str] = {}


class Collector:
    """Moves messages from a broker into a store; `name` identifies the session to the broker and the devices."""

    def __init__(self, store: Store, broker: Broker, name: str) -> None:
        self._store, self._broker, self._name = store, broker, name
        self._since_s = math.inf
        self._presence_due = self._tidy_due = 0.0
        self._message_s: float | None = None
        self._asks: dict[Gap, tuple[float, float]] = {}  # when to ask for it next, and the last delay
        self._clock_s, self._steady_due = time.time() - time.monotonic(), 0.0

    def listens_since_s(self) -> float:
        """Return since when messages can arrive, by the clock as it is set now; infinity while they cannot."""
        return time.time() - time.monotonic() + self._since_s

    def run(self, stop: threading.Event) -> None:
        """Collect until `stop`; lost connections are retried at growing intervals. Raises Unusable for the database."""
        delay_s, starts = 1.0, 1
        while not _ended(stop):
            began = time.monotonic()
            try:
                self._read_again()
                with closing(Feed(self._broker, f"benchd-collector-{self._name}", SESSION_S)) as feed:
                    self._say(None, starts)
                    starts = 0
                    self._collect(feed, stop)
            except Unusable:
                raise
            except Exception as error:  # whatever it is, the next attempt may succeed
                self._report(error)
                delay_s = 1.0 if time.monotonic() - began > MAX_DELAY_S else min(2 * delay_s, MAX_DELAY_S)
                stop.wait(delay_s)

    def _collect(self, feed: Feed, stop: threading.Event) -> None:
        self._since_s = time.monotonic()
        try:
            while not _ended(stop):
                arrived = feed.batch(IDLE_S)
                if arrived:
                    found = self._keep(arrived)
                    feed.acknowledge(arrived)
                    self._confirm(feed, arrived, found)
                    self._message_s = arrived[-1].arrived_s
                self._keep_house(feed)
        finally:
            self._since_s = math.inf

    def _keep(self, arrived: Sequence[Arrived]) -> list[list[Row]]:
        """Commit messages and return the rows of each; one that the database refuses goes to quarantine alone."""
        found = [rows(one) for one in arrived]
        try:
            self._store.add(row for each in found for row in each)
        except (*OUTAGES, Unusable):
            raise
        except Exception as error:
            if len(arrived) > 1:
                return [self._keep([one])[0] for one in arrived]
            found = [[quarantined(arrived[0], f"not stored: {_reason(error)}")]]
            self._store.add(found[0])
        return found

    def _read_again(self) -> None:
        """Read what an earlier version of benchd had to put in quarantine."""
        while held := self._store.quarantined(but=READER, limit=AGAIN):
            found = zip(held, self._keep(list(held.values())), strict=True)
            self._store.release(key for key, each in found if key not in [row.values.get("key") for row in each])

    def _confirm(self, feed: Feed, arrived: Sequence[Arrived], found: Sequence[list[Row]]) -> None:
        """Inform each device which of its results are stored: the broker's acknowledgement does not show that.

        Those in quarantine are not: the device keeps them for a collector that can read them.
        """
        acks: dict[str, _Ack] = defaultdict(_Ack)
        for one, (row, *_) in zip(arrived, found, strict=True):
            device_id, key = delivery_key(one.topic) or ("", "")
            if row.table == "result":
                acks[device_id].keys.append(key)
            elif key and len(key) <= TEXT_LIMIT:
                acks[device_id].unread[key] = row.values["reason"][:REASON_CHARS]
            else:
                continue
            acks[device_id].digests[key] = body_digest(one.body)
        for device_id, ack in acks.items():
            feed.publish(Topics(device_id).ack(self._name), msgspec.json.encode(ack))

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
        """Ask devices for results that have not arrived: not at once, as another collector may have one.

        What has waited longest comes first, one gap per device, so that one with many keeps no other waiting.
        """
        missing = [*queries.gaps(self._store), *queries.unheard(self._store)]
        asks = {gap: self._asks.get(gap, (now_s + ASK_FIRST_S, ASK_FIRST_S)) for gap in missing}
        first_of_each: dict[str, Gap] = {}
        for gap in sorted(asks, key=lambda gap: asks[gap][0]):
            first_of_each.setdefault(gap.device_id, gap)
        for gap in [gap for gap in first_of_each.values() if now_s >= asks[gap][0]][:ASKS]:
            delay_s = min(2 * asks[gap][1], ASK_LAST_S)
            asks[gap] = (now_s + delay_s, delay_s)
            numbers = {"stream": gap.stream or None, "since_seq": gap.first, "until_seq": gap.last}
            topic = Topics(gap.device_id).command("replay")
            feed.publish(topic, msgspec.json.encode({"id": uuid.uuid4().hex, **numbers}), expire_s=ASK_EXPIRY_S)
        self._asks = asks

    def _is_steady(self, now_s: float) -> bool:
        """Return whether the wall clock has not been set for a day, or since the start: setting it must age nothing."""
        clock_s = time.time() - now_s
        if abs(clock_s - self._clock_s) > CLOCK_STEP_S:
            self._clock_s, self._steady_due = clock_s, now_s + BELIEVED_S
        return now_s >= self._steady_due

    def _report(self, error: Exception) -> None:
        sys.stderr.write(f"collector {self._name}: {_reason(error)}; trying again\n")
        with suppress(Exception):  # the database may be what is wrong
            self._say(_reason(error))

    def _say(self, problem: str | None, starts: int = 0) -> None:
        values = {"name": self._name, "seen_s": time.time(), "message_s": self._message_s, "problem": problem}
        self._store.add([Row("collector", values | {"starts": starts})])


def _reason(error: Exception) -> str:
    """Return one line; a database's error would otherwise quote its statement and every value."""
    if isinstance(error, DBAPIError):
        return str(error.orig).strip().replace("\n", " ")
    return str(error) if isinstance(error, Ended) else f"{type(error).__name__}: {error}"


def _ended(stop: threading.Event) -> bool:
    """Return whether to stop: a collector started by the pages ends with them."""
    parent = parent_process()
    return stop.is_set() or (parent is not None and not parent.is_alive())
