"""Sends the logs in a folder to a broker, and records the progress of each: the cursor.

The log is authoritative; the cursor is the number of the line up to which the broker has acknowledged it. After a crash
the cursor may be too low: the tail is sent again, and readers deduplicate. Messages from the network never move it.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from benchd.daemon.delivery.broker import Broker, ConnectionEnded
from benchd.daemon.delivery.connection import Connection, Unsendable, connect
from benchd.daemon.delivery.log import Entry, Log
from benchd.daemon.delivery.messages import RESULT_BYTES
from benchd.daemon.delivery.topics import Topics
from benchd.daemon.errors import BenchdError
from benchd.daemon.journal import explaining
from benchd.daemon.machine import folders
from benchd.daemon.machine.systemd_notify import log

CURSOR = "cursor.json"
SAVE_S = 1.0
MOST_TRIES = 3  # connections that may end while a message is the only one in flight, before it counts as refused
HUNG_UP = f"the connection ended {MOST_TRIES} times while sending it; it may be too large"
REPLAYED_PER_S = 100.0
MAX_REPLAYS = 16  # maximum number of waiting ranges
TURN_S = 0.5  # maximum time until a new line is noticed; this polling is what an idle link costs in CPU time


class Cursor(Struct):
    """The progress of a log: every line up to `acknowledged` has reached the broker, except the `refused`.

    `refused` contains the numbers of the lines that the broker refused, with its reasons.
    """

    log: str
    acknowledged: int = 0
    refused: dict[int, str] = {}


class Outgoing:
    """Sends one log to the broker. `topic_of` returns a line's topic; it may raise BenchdError or DecodeError.

    Refused lines are retried once in the lifetime of this object.
    """

    def __init__(self, source: Log, cursor: Cursor | None, topic_of: Callable[[bytes], str]) -> None:
        self.log, self._topic_of = source, topic_of
        if cursor and cursor.log == source.id and cursor.acknowledged > source.last_seq:
            # lines were lost: number new ones after the acknowledged ones, and send those that are left again
            source.skip_to(cursor.acknowledged)
            cursor = None
        if cursor is None or cursor.log != source.id:
            cursor = Cursor(source.id)
        self.acknowledged = cursor.acknowledged
        self.refused = dict(cursor.refused)
        self.first_refusal: str | None = None  # since this object was made
        self._again = deque(sorted(self.refused))
        self._replays: deque[tuple[int, int]] = deque(maxlen=MAX_REPLAYS)
        self.reset()

    def reset(self) -> None:
        """Begin a connection: resend what was in flight."""
        self._order: dict[int, bool] = {}  # lines sent beyond `acknowledged`, and whether each is settled
        self._sent = self.acknowledged
        self._reading: Iterator[Entry] = iter(())
        self._reading_to = 0
        self._replayed: Iterator[Entry] = iter(())
        self._replay_due_s = 0.0

    @property
    def pending(self) -> int:
        """Return the number of lines that the broker has not acknowledged, including refused ones."""
        return self.log.last_seq - self.acknowledged + sum(seq <= self.acknowledged for seq in list(self.refused))

    @property
    def is_done(self) -> bool:
        """Return whether every line was sent, and all beyond the cursor were acknowledged or refused."""
        return not self._again and self.acknowledged >= self.log.last_seq

    def cursor(self) -> Cursor:
        """Return the current cursor."""
        return Cursor(self.log.id, self.acknowledged, dict(self.refused))

    def replay(self, first: int, last: int) -> int:
        """Slowly resend the lines with these numbers; return an upper bound on their count."""
        self._replays.append((first, last))
        return max(0, min(last, self.log.last_seq) - max(first, self.log.first_seq()) + 1)

    def fill(self, connection: Connection) -> None:
        """Send as many lines as the window allows, in order."""
        while connection.free > 0 and (entry := self._next()):
            self._send(connection, entry)
        if not self._order:  # lines at the end may have been skipped, and then there is nothing to wait for
            self.acknowledged = max(self.acknowledged, self._sent)

    def settle(self, seq: int, refusal: str | None) -> None:
        """Record that a line was acknowledged, or why it was refused."""
        if refusal is None:
            self.refused.pop(seq, None)
        else:
            self.refused[seq] = refusal
            self.first_refusal = self.first_refusal or f"line {seq} of {self.log.path.name}: {refusal}"
        if seq in self._order:
            self._order[seq] = True
        for first in list(self._order):
            if not self._order[first]:
                return
            del self._order[first]
            self.acknowledged = max(self.acknowledged, first)

    def _next(self) -> Entry | None:
        while self._again:
            seq = self._again.popleft()
            if entry := next(self.log.entries(seq - 1, seq), None):
                return entry
            self.refused.pop(seq, None)  # its file no longer exists
        return self._next_new() or self._next_replayed()

    def _next_new(self) -> Entry | None:
        while self._sent < self.log.last_seq:
            if self._reading_to <= self._sent:
                self._reading_to = self.log.last_seq
                self._reading = self.log.entries(self._sent, self._reading_to)
            entry = next(self._reading, None)
            self._sent = entry.seq if entry else self._reading_to
            if entry and entry.seq not in self.refused:
                self._order[entry.seq] = False
                return entry
        return None

    def _next_replayed(self) -> Entry | None:
        now_s = time.monotonic()
        if now_s < self._replay_due_s:
            return None
        self._replay_due_s = max(self._replay_due_s + 1.0 / REPLAYED_PER_S, now_s - 1.0)
        entry = next(self._replayed, None)
        while entry is None and self._replays:
            first, last = self._replays.popleft()
            self._replayed = self.log.entries(first - 1, last)
            entry = next(self._replayed, None)
        return None if entry is None or entry.seq in self.refused else entry

    def _send(self, connection: Connection, entry: Entry) -> None:
        try:
            topic = self._topic_of(entry.body)
            if len(entry.body) > RESULT_BYTES:
                raise Unsendable(f"{len(entry.body)} bytes; at most {RESULT_BYTES} are accepted")
            connection.publish(topic, entry.body, 1, of=SentLine(self, entry.seq))
        except (Unsendable, BenchdError, msgspec.DecodeError) as error:
            self.settle(entry.seq, str(error))


class SentLine(NamedTuple):
    """A line that was sent."""

    outgoing: Outgoing
    seq: int

    @property
    def is_behind_cursor(self) -> bool:
        """Return whether the line will not be sent again."""
        return self.seq <= self.outgoing.acknowledged


class Delivery:
    """Sends the logs in a folder to one broker; for a single thread, except `replay` and the properties."""

    def __init__(self, folder: Path, records: Log, events: Log | None = None, device_id: str = "") -> None:
        self._path = folder / CURSOR
        cursors = _read(self._path)
        self.records = Outgoing(records, cursors.get("records"), _result_topic)
        self.outgoing = {"records": self.records}
        if events:
            topic = Topics(device_id).of("event")
            self.outgoing["events"] = Outgoing(events, cursors.get("events"), lambda body: topic)
        self._suspects: Counter[Hashable] = Counter()
        self._saved = cursors
        self._save_s = 0.0

    @property
    def pending(self) -> int:
        """Return how many lines the broker has not acknowledged."""
        return sum(outgoing.pending for outgoing in self.outgoing.values())

    @property
    def refused(self) -> list[str]:
        """Return the reason for each line that the broker refuses."""
        return list(chain.from_iterable(list(outgoing.refused.values()) for outgoing in self.outgoing.values()))

    @property
    def first_refusal(self) -> str | None:
        """Return the first line that the broker has refused since the start, with its reason."""
        return next(filter(None, (outgoing.first_refusal for outgoing in self.outgoing.values())), None)

    @property
    def is_done(self) -> bool:
        """Return whether every line was sent, and acknowledged or refused."""
        return all(outgoing.is_done for outgoing in self.outgoing.values())

    def replay(self, log_id: str, first: int, last: int) -> int | None:
        """Resend lines of a log (default: the results'); return their maximum number, None for an unknown log."""
        outgoing = next((candidate for candidate in self.outgoing.values() if log_id in ("", candidate.log.id)), None)
        return outgoing.replay(first, last) if outgoing else None

    def be_careful(self, connection: Connection) -> None:
        """Allow only one message in flight while one of several may have made the broker hang up."""
        connection.is_careful = not all(
            isinstance(suspect, SentLine) and suspect.is_behind_cursor for suspect in self._suspects
        )

    def fill(self, connection: Connection) -> None:
        """Send as much as the window allows, events first, because they are few and one may be an alarm."""
        for outgoing in reversed(self.outgoing.values()):
            outgoing.fill(connection)

    def settle(self, what: Hashable, refusal: str | None) -> None:
        """Record that a line or document was acknowledged, or why it was refused."""
        self._suspects.pop(what, None)
        if isinstance(what, SentLine):
            what.outgoing.settle(what.seq, refusal)

    def end(self, flight: Collection[Hashable], documents: Collection[str] = ()) -> list[str]:
        """Record that a connection ended with these messages in flight; return the documents that count as refused.

        A message counts as refused if it was the only one in flight three times when the connection ended. Besides
        lines, only `documents` are sent again.
        """
        for message in flight:
            if not message.is_behind_cursor if isinstance(message, SentLine) else message in documents:
                self._suspects[message] += len(flight) == 1
        hung_up = [message for message, times in self._suspects.items() if times == MOST_TRIES]
        for message in hung_up:
            self.settle(message, HUNG_UP)
        for outgoing in self.outgoing.values():
            outgoing.reset()
        return [message for message in hung_up if isinstance(message, str)]

    def rewind(self) -> None:
        """Send everything again."""
        for outgoing in self.outgoing.values():
            outgoing.acknowledged = 0
            outgoing.reset()

    def save(self, *, at_once: bool = True) -> None:
        """Write the cursor if it has moved, either `at_once` or at most once a second."""
        now_s = time.monotonic()
        if not at_once and now_s < self._save_s:
            return
        self._save_s = now_s + SAVE_S
        cursors = self._saved | {name: outgoing.cursor() for name, outgoing in self.outgoing.items()}
        if cursors == self._saved:
            return
        with explaining(self._path):
            folders.write_through(self._path, msgspec.json.encode(cursors))
        self._saved = cursors

    def drain(self, broker: Broker, client_id: str, timeout_s: float) -> str | None:
        """Send everything that is pending; return why anything was not acknowledged, or None if all was."""
        deadline, reason = time.monotonic() + timeout_s, None
        while reason is None and not self.is_done:
            reason = self._converse(broker, client_id, deadline)
        self.save()
        return reason or next(iter(self.refused), None)

    def _converse(self, broker: Broker, client_id: str, deadline: float) -> str | None:
        """Send over one connection; return why it ended, or None to retry, because a message may be the cause."""
        flight: dict[int, Hashable] = {}
        try:
            with closing(connect(broker, client_id, deadline)) as connection:
                flight = connection.flight
                self._send_all(connection, deadline)
        except ConnectionEnded as end:
            self.end(flight.values())
            return None if flight and time.monotonic() < deadline else str(end)
        return None

    def _send_all(self, connection: Connection, deadline: float) -> None:
        while connection.flight or not self.is_done:
            if time.monotonic() > deadline:
                raise ConnectionEnded(f"timed out before {connection.address} had acknowledged everything")
            self.be_careful(connection)
            self.fill(connection)
            if connection.flight:
                connection.turn(TURN_S)
            for message, answer in connection.take_acknowledged():
                self.settle(message, refusal(connection, answer))


def refusal(connection: Connection, answer: object) -> str | None:
    """Return why the broker refused a message, or None if it accepted it."""
    return f"{connection.address} refused it: {answer}" if getattr(answer, "is_failure", False) else None


class _Address(Struct):
    device_id: str
    run_id: str


def _result_topic(body: bytes) -> str:
    """Return the topic of a record under its own device id, which may differ from the current one."""
    address = msgspec.json.decode(body, type=_Address)
    return Topics(address.device_id).result(address.run_id)


def _read(path: Path) -> dict[str, Cursor]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Cursor])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        log(f"{path} cannot be read ({error}); everything will be sent again")
        return {}
