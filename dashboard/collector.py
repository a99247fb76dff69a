"""A process that stores what devices publish: first the commit, then the acknowledgements.

Unacknowledged messages come again after a crash of this process, the broker or the database; their keys make that
harmless. Several collectors can share the work: each has its own name.
"""

import re
import signal
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing, suppress
from multiprocessing import parent_process

import msgspec
from sqlalchemy.exc import DBAPIError

from benchd.daemon.delivery.broker import Broker, Ended
from benchd.daemon.delivery.outbox import body_digest
from benchd.daemon.delivery.session import Arrived
from benchd.daemon.delivery.topics import Topics
from benchd.daemon.errors import UsageError
from benchd.dashboard.feed import Feed
from benchd.dashboard.messages import Row, acknowledged_key, rows
from benchd.dashboard.store import Store

SESSION_S = 7 * 86400  # how long a broker queues messages for an absent collector
IDLE_S = 1.0
TIDY_S = 60.0
PRESENCE_S = 5.0
MAX_DELAY_S = 30.0


def default_name() -> str:
    """Return this host's name as a valid topic level."""
    return re.sub(r"[^a-z0-9-]+", "-", socket.gethostname().lower()).strip("-") or "collector"


def run(broker: Broker, database: str, name: str) -> None:
    """Collect until SIGTERM or SIGINT, or until the process that started this one has ended."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name):
        raise UsageError(
            f"collector name {name!r}: use lower-case letters, digits, '-' and '_', starting with a letter"
        )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with closing(Store(database)) as store:
        Collector(store, broker, name).run(stop)


class Collector:
    """Moves messages from a broker into a store; `name` identifies the session to the broker and the devices."""

    def __init__(self, store: Store, broker: Broker, name: str) -> None:
        self._store, self._broker, self._name = store, broker, name
        self._presence_due = self._tidy_due = 0.0

    def run(self, stop: threading.Event) -> None:
        """Collect until `stop`; lost connections are retried at growing intervals."""
        delay_s = 1.0
        while not _ended(stop):
            began = time.monotonic()
            try:
                with closing(Feed(self._broker, f"benchd-collector-{self._name}", SESSION_S)) as feed:
                    self._collect(feed, stop)
            except (Ended, DBAPIError) as error:
                self._report(error)
                delay_s = 1.0 if time.monotonic() - began > MAX_DELAY_S else min(2 * delay_s, MAX_DELAY_S)
                stop.wait(delay_s)

    def _collect(self, feed: Feed, stop: threading.Event) -> None:
        while not _ended(stop):
            arrived = feed.batch(IDLE_S)
            if arrived:
                self._store.add(row for one in arrived for row in rows(one))
                feed.acknowledge(arrived)
                self._confirm(feed, arrived)
            self._keep_house()

    def _confirm(self, feed: Feed, arrived: Sequence[Arrived]) -> None:
        """Inform each device which of its results are stored: the broker's acknowledgement does not show that."""
        stored: dict[str, dict[str, str]] = defaultdict(dict)
        for one in arrived:
            confirmed = acknowledged_key(one.topic)
            if confirmed:
                stored[confirmed[0]][confirmed[1]] = body_digest(one.body)
        for device_id, digests in stored.items():
            said = {"schema": "benchd.ack/1", "keys": list(digests), "digests": list(digests.values())}
            feed.publish(Topics(device_id).ack(self._name), msgspec.json.encode(said))

    def _keep_house(self) -> None:
        now_s = time.time()
        if now_s >= self._presence_due:
            self._presence_due = now_s + PRESENCE_S
            self._store.add([self._presence(None)])
        if now_s >= self._tidy_due:
            self._tidy_due = now_s + TIDY_S
            self._store.tidy(now_s)

    def _report(self, error: Exception) -> None:
        sys.stderr.write(f"collector {self._name}: {error}; trying again\n")
        if isinstance(error, Ended):
            with suppress(DBAPIError):  # the next attempt will report it
                self._store.add([self._presence(str(error))])

    def _presence(self, problem: str | None) -> Row:
        return Row("collector", {"name": self._name, "seen_s": time.time(), "problem": problem})


def _ended(stop: threading.Event) -> bool:
    """Return whether to stop: a collector started by the pages ends with them."""
    parent = parent_process()
    return stop.is_set() or (parent is not None and not parent.is_alive())
