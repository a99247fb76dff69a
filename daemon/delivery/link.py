"""The service's connection to its broker: a thread that maintains it, drains the outbox and receives messages.

The outbox is the truth; everything else here may be lost and is bounded. While a case is timed the link is held: it
only keeps the connection alive and sends health and telemetry, and does not touch the outbox. A connection that finds
an outbox which cannot be written delivers nothing, but lasts: subscribers must hear what is wrong with the disk.
"""

import math
import random
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec

from benchd.daemon.delivery.broker import Broker, Ended
from benchd.daemon.delivery.collectors import Collectors
from benchd.daemon.delivery.disk_reserve import Reserve
from benchd.daemon.delivery.messages import Status
from benchd.daemon.delivery.outbox import Outbox
from benchd.daemon.delivery.sender import Sender
from benchd.daemon.delivery.session import Arrived, Session, Terms, Unsendable, connect
from benchd.daemon.delivery.topics import Topics, is_name, parse
from benchd.daemon.errors import Full, UsageError
from benchd.daemon.machine.systemd_notify import log
from benchd.daemon.records import wall_now

CONNECT_S = 10.0
STUCK_S = 2 * CONNECT_S + 10.0  # longer than any turn, pause or attempt, even with a locked outbox
BACK_OFF_S = 60.0
CONFLICT_S = 300.0
ON_ITS_WAY_S = 0.5  # the error of comparing the ages of two machines
CONTRADICTED_S = 10.0  # another machine with the same id has answered by then
GOODBYE_S = 3.0
MAX_WAITING = 100  # unprocessed answers and commands
MAX_ACK_BYTES = 4 * 2**20  # of unprocessed acknowledgements; a collector may send one per result
TELEMETRY_EXPIRY_S = 5
ACKS_PER_TURN = 500  # each is a commit
WRITE_AGAIN_S = 10.0
SILENT_S = 600.0  # a record of 2 MB takes its time on a slow network
SESSION = "session"


@dataclass(frozen=True)
class Identity:
    """The sender's identity: `instance` differs between two machines with the same device id."""

    boot_id: str
    instance: str


@dataclass(frozen=True)
class Answer:
    """A reply to one command."""

    topic: str
    body: bytes
    correlation: bytes | None


@dataclass
class Seen:
    """The link's state, read by the service; times are monotonic."""

    connected: bool = False
    reason: str | None = "not connected yet"
    conflict: str | None = None
    session: int = 0  # the number of the last connection
    unwritable: str | None = None  # why the outbox cannot be written, and nothing is delivered
    acknowledged_s: float | None = None
    telemetry_dropped: int = 0
    commands: deque[Arrived] = field(default_factory=deque)
    events: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=MAX_WAITING))


class Link:
    """A thread that lives from `start` to `stop`. Any thread may call its methods; none waits for the network.

    The link writes to `wake` when `seen` holds something new, and releases the `reserve` if the disk is full.
    """

    def __init__(
        self,
        broker: Broker,
        topics: Topics,
        outbox: Path,
        identity: Identity,
        collectors: Sequence[str],
        wake: socket.socket,
        reserve: Reserve,
    ) -> None:
        self.seen = Seen()
        self.broker, self.topics, self.identity = broker, topics, identity
        self.held, self.stopping, self.replaying = threading.Event(), threading.Event(), threading.Event()
        self.path, self._collectors, self._wake, self.reserve = outbox, collectors, wake, reserve
        self._lock = threading.Lock()
        self._documents: dict[str, bytes] = {}
        self._unsent: dict[str, None] = {}  # topics with an unsent document, in order
        self._answers: deque[Answer] = deque(maxlen=MAX_WAITING)
        self._telemetry: bytes | None = None
        self.poked, self._poke_end = socket.socketpair()
        self.poked.setblocking(False)
        self._poke_end.setblocking(False)
        self.moved_s = time.monotonic()  # the thread's last progress
        self._back_off_s = 1.0
        self._thread = threading.Thread(target=self._run, name="benchd.link", daemon=True)

    def start(self) -> None:
        """Begin to connect."""
        self._thread.start()

    def is_alive(self) -> bool:
        """Return whether the thread is making progress, connected or waiting to connect."""
        return self._thread.is_alive() and time.monotonic() - self.moved_s < STUCK_S

    def stop(self, within_s: float = CONNECT_S + 2 * GOODBYE_S) -> None:
        """Send pending messages for at most a few seconds, publish `offline` and end.

        A thread that takes longer than `within_s` ends with the process, and the broker publishes the will.
        """
        self.stopping.set()
        self.release()
        self._thread.join(within_s)
        if not self._thread.is_alive():
            self.poked.close()
            self._poke_end.close()

    def hold(self) -> None:
        """Send nothing but health and telemetry from now on."""
        self.held.set()

    def release(self) -> None:
        """Send everything again."""
        self.held.clear()
        self.poke()

    def retain(self, topic: str, body: bytes) -> None:
        """Retain this under the topic on the broker, also after a reconnection; an empty body deletes it."""
        with self._lock:
            self._documents[topic] = body
            self._unsent[topic] = None
        self.poke()

    def answer(self, topic: str, body: bytes, correlation: bytes | None) -> None:
        """Reply to a command."""
        self._answers.append(Answer(topic, body, correlation))
        self.poke()

    def telemetry(self, body: bytes) -> None:
        """Send the last samples; earlier unsent ones are dropped and counted."""
        with self._lock:
            self.seen.telemetry_dropped += self._telemetry is not None
            self._telemetry = body
        self.poke()

    def drop_telemetry(self) -> None:
        """Count samples as dropped."""
        with self._lock:
            self.seen.telemetry_dropped += 1

    def poke(self) -> None:
        """Check the outbox again for new messages."""
        _write(self._poke_end)

    def replay(self) -> None:
        """Go through the outbox from its first message: earlier ones are pending again."""
        self.replaying.set()
        self.poke()

    def hand_over(self, arrived: Arrived) -> None:
        """Give a command to the service; of a flood the newest are dropped, as the limit on the rate does."""
        if len(self.seen.commands) < MAX_WAITING:
            self.seen.commands.append(arrived)
        _write(self._wake)

    def tell(self, event: str, detail: str) -> None:
        """Give the service an event to publish."""
        self.seen.events.append((event, detail))
        _write(self._wake)

    def resend_documents(self) -> None:
        """Mark every document as unsent: the broker may have lost them, or be a new one."""
        with self._lock:
            self._unsent = dict.fromkeys(self._documents)

    def take_document(self, *, only: str | None = None) -> tuple[str, bytes] | None:
        """Return the next unsent document, or the unsent one of the topic `only`."""
        with self._lock:
            topic = next(iter(self._unsent), None) if only is None else only
            if topic is None or topic not in self._unsent:
                return None
            del self._unsent[topic]
            return topic, self._documents[topic]

    def take_telemetry(self) -> bytes | None:
        """Return the last samples, once."""
        with self._lock:
            body, self._telemetry = self._telemetry, None
            return body

    def take_answer(self) -> Answer | None:
        """Return the next reply."""
        return self._answers.popleft() if self._answers else None

    def rest(self) -> None:
        """Forget the pokes so far."""
        with suppress(BlockingIOError):
            while self.poked.recv(4096):
                pass

    def _run(self) -> None:
        """Converse until the link stops; an unexpected error costs the connection, not the thread."""
        while not self.stopping.is_set():
            self.moved_s = time.monotonic()
            try:
                with Outbox(self.path, durable=False) as outbox:
                    self._talk(outbox, Collectors(outbox, self._collectors))
            except Exception as error:
                if isinstance(error, Full):
                    self.reserve.release()  # else a disconnected device could not report its problem
                self._end(str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}")
        self.seen.connected = False

    def _talk(self, outbox: Outbox, collectors: Collectors) -> None:
        """Converse again and again with this outbox, as long as it can be written."""
        while not self.stopping.is_set():
            talk = _Conversation(self, outbox, collectors)
            for lost in outbox.take_lost():
                self.tell("state_lost", lost)
            try:
                talk.run()
            except Ended as end:
                self._end(str(end), talk.held_s)
            if self.seen.unwritable:
                return

    def _end(self, reason: str, lasted_s: float = 0.0) -> None:
        """Log why a connection ended and wait, with growing delays if connections end early."""
        self.seen.connected = False
        if reason != self.seen.reason:  # logged once, not at every attempt
            log(f"mqtt down: {reason}")
        self.seen.reason = reason
        self._back_off_s = 1.0 if lasted_s > BACK_OFF_S else min(2 * self._back_off_s, BACK_OFF_S)
        self._pause()

    def _pause(self) -> None:
        """Wait with full jitter, and longer while held: a handshake would disturb the timed case."""
        least_s, most_s = (CONFLICT_S / 2, CONFLICT_S) if self.seen.conflict else (0.0, self._back_off_s)
        until_s = time.monotonic() + random.uniform(least_s, most_s)  # noqa: S311 - no secret
        while not self.stopping.is_set() and (self.held.is_set() or time.monotonic() < until_s):
            self.moved_s = time.monotonic()
            select.select([self.poked], [], [], 0.5)
            self.rest()
            self.stopping.wait(0.05)  # pokes may come in bursts


class _Conversation:
    """One connection, from its will to its disconnect."""

    def __init__(self, link: Link, outbox: Outbox, collectors: Collectors) -> None:
        self._link, self._outbox, self._collectors = link, outbox, collectors
        self._topics = link.topics
        self._number = max(outbox.kept_as(SESSION, int, 0), link.seen.session) + 1
        self._sender = Sender(outbox, collectors.awaited)
        self._acks: deque[tuple[str, bytes]] = deque()
        self._ack_bytes = 0
        self._answered: deque[tuple[str, int, str]] = deque(maxlen=MAX_WAITING)
        self._unsendable: deque[str] = deque(maxlen=MAX_WAITING)
        self._nonce = secrets.token_hex(8)
        self._born_s: float | None = None
        self._look_s = 0.0
        self._restore_s = math.inf

    @property
    def held_s(self) -> float:
        """Return how long this connection has lasted."""
        return 0.0 if self._born_s is None else time.monotonic() - self._born_s

    def run(self) -> None:
        """Converse until the link stops; raise Ended with the reason if the connection ends first."""
        self._link.moved_s = time.monotonic()
        client_id = f"benchd-{self._topics.device_id}-{self._link.identity.instance[:8]}"
        terms = Terms(will=(self._topics.of("status"), self._status("offline")))
        with closing(connect(self._link.broker, client_id, time.monotonic() + CONNECT_S, terms)) as session:
            self._begin()  # not earlier: nothing is written while the broker is unreachable
            session.subscribe(self._topics.incoming, as_published=self._topics.command("+"))
            others = [Topics(one).ack("+") for one in self._outbox.device_ids() if one != self._topics.device_id]
            if others:  # results from before the id was changed: they are acknowledged under their own
                session.subscribe([(topic, 1) for topic in others], must=False)
            session.endure()
            self._be_born(session)
            while not self._link.stopping.is_set():
                self._turn(session)
            self._say_goodbye(session)

    def _begin(self) -> None:
        """Store the number of this connection, before anyone hears it, or why that cannot be written."""
        seen = self._link.seen
        seen.session, seen.unwritable = self._number, None
        try:
            self._link.reserve.write(lambda: self._keep_number(self._outbox))
            self._outbox.retry_refused(every=False)
        except UsageError as error:
            log(f"nothing is delivered: {error}")
            seen.unwritable = str(error)

    def _keep_number(self, outbox: Outbox) -> None:
        outbox.keep({SESSION: str(self._number).encode()})

    def _status(self, state: Literal["online", "offline"], answers: str = "") -> bytes:
        return msgspec.json.encode(
            Status(
                state=state,
                session=self._number,
                boot_id=self._link.identity.boot_id,
                instance=self._link.identity.instance,
                held_s=round(self.held_s, 3),
                t_wall=wall_now(),
                nonce=self._nonce if state == "online" else "",
                answers=answers,
            )
        )

    def _be_born(self, session: Session) -> None:
        self._born_s = time.monotonic()
        self._say_online(session)
        self._link.resend_documents()
        self._link.seen.connected, self._link.seen.reason = True, None

    def _say_online(self, session: Session, answers: str = "") -> None:
        session.publish(self._topics.of("status"), self._status("online", answers), 1, retain=True)

    def _turn(self, session: Session) -> None:
        """Wait for an event, at most a second, and process it."""
        self._link.moved_s = time.monotonic()
        session.step(self._link.poked)
        self._link.rest()
        arrived = session.take_received()
        for message in arrived:
            self._take(session, message)
        session.acknowledge(arrived)
        if self._link.seen.conflict and self.held_s < CONTRADICTED_S:
            return  # nothing but the status, which the other machine may still contradict
        self._link.seen.conflict = None
        if time.monotonic() > self._restore_s:
            self._restore_s = math.inf
            self._link.resend_documents()
        self._say_always(session)
        if not self._link.held.is_set():
            self._say_documents(session)
            if self._link.seen.unwritable:
                self._look_again()
            else:
                self._deliver(session)
            if session.silent_s > SILENT_S:
                raise Ended(f"{session.address} acknowledges nothing")

    def _take(self, session: Session, message: Arrived) -> None:
        if message.topic == self._topics.of("status"):
            self._judge(session, message)
        elif message.topic.startswith(self._topics.command("")):
            self._link.hand_over(message)
        elif (address := parse(message.topic)) and address.kind == "ack" and not message.retained:
            self._keep_ack(address.leaf, message.body)  # a retained one does not show that a collector is alive

    def _keep_ack(self, collector: str, body: bytes) -> None:
        """Keep an acknowledgement until the outbox may be written; results of one beyond the limit are sent again."""
        size = len(collector) + len(body)
        if self._ack_bytes + size <= MAX_ACK_BYTES:
            self._acks.append((collector, body))
            self._ack_bytes += size

    def _judge(self, session: Session, message: Arrived) -> None:
        """Detect another machine with the same id on the status topic, and correct a late will of this device's own.

        A retained status may be from a machine long gone. Of two live machines the later yields; if both came within
        a message's travel time, their instances decide, so that both reach the same answer. Each is answered once. One
        yields only to an answer to its own status: a message that somebody made up takes no device off. The one that
        stays retains its documents again once the other must have gone, because that one's may have replaced them.
        """
        status = _decode(message.body)
        if message.retained or status is None or status.instance == self._link.identity.instance:
            if status is None or (status.session, status.state) != (self._number, "online"):
                self._say_online(session)
            return
        older_s = status.held_s - self.held_s
        is_other_s = status.instance > self._link.identity.instance if abs(older_s) < ON_ITS_WAY_S else older_s > 0
        if status.state == "online" and is_other_s and status.answers == self._nonce:
            self._give_way(status)
        other = (status.instance, status.session, status.state)
        if other not in self._answered:
            self._answered.append(other)
            self._say_online(session, status.nonce if is_name(status.nonce) else "")
            self._restore_s = min(self._restore_s, time.monotonic() + CONTRADICTED_S)

    def _give_way(self, other: Status) -> NoReturn:
        conflict = (
            f"the device id {self._topics.device_id} is in use by another machine (boot {other.boot_id}, this one is "
            f"boot {self._link.identity.boot_id}); give one of them another [device] id and reload"
        )
        if conflict != self._link.seen.conflict:  # logged once, not at every attempt
            self._link.tell("identity_conflict", conflict)
        self._link.seen.conflict = conflict
        raise Ended(conflict)

    def _say_always(self, session: Session) -> None:
        if session.free > 0 and (document := self._link.take_document(only=self._topics.of("health"))):
            self._try_to_say(session, *document, retain=True)
        samples, telemetry = self._link.take_telemetry(), self._topics.of("telemetry")
        if samples and not self._try_to_say(session, telemetry, samples, 0, expire_s=TELEMETRY_EXPIRY_S):
            self._link.drop_telemetry()

    def _look_again(self) -> None:
        """Raise Ended once the outbox can be written, for a connection that opens it anew."""
        if time.monotonic() < self._look_s:
            return
        self._look_s = time.monotonic() + WRITE_AGAIN_S
        with suppress(UsageError), Outbox(self._link.path, durable=False) as outbox:
            self._keep_number(outbox)
            raise Ended("the outbox can be written again")

    def _deliver(self, session: Session) -> None:
        self._settle(session)
        self._store_acks()
        expired = self._collectors.expire(time.monotonic())
        if expired:
            self._link.tell("collector_expired", expired)
        if not self._sender.waiting:
            self._look_back()
        self._sender.fill(session)
        if self._sender.stopped and not self._sender.waiting:
            raise Ended(self._sender.reason or "the broker accepts no more messages for now")

    def _store_acks(self) -> None:
        for _ in range(min(len(self._acks), ACKS_PER_TURN)):
            collector, body = self._acks.popleft()
            self._ack_bytes -= len(collector) + len(body)
            if told := self._collectors.take(collector, body):
                self._link.tell(*told)
        if self._acks:
            self._link.poke()

    def _look_back(self) -> None:
        """Restart from the first row of the outbox if a message before the last one sent is pending again."""
        again = self._collectors.send_again(time.monotonic())
        if again or self._link.replaying.is_set():
            self._link.replaying.clear()
            self._sender.begin_again()

    def _settle(self, session: Session) -> None:
        """Take in the broker's acknowledgements."""
        sent = self._sender.sent
        self._sender.settle(session)
        if self._sender.sent > sent:
            self._link.seen.acknowledged_s = time.monotonic()

    def _say_documents(self, session: Session) -> None:
        while session.free > 0 and (answer := self._link.take_answer()):
            self._try_to_say(session, answer.topic, answer.body, correlation=answer.correlation)
        while session.free > 0 and (document := self._link.take_document()):
            self._try_to_say(session, *document, retain=True)

    def _try_to_say(self, session: Session, topic: str, body: bytes, qos: int = 1, **options: Any) -> bool:
        """Publish a message; if the broker can never accept it, log that once per connection and return False."""
        try:
            session.publish(topic, body, qos, **options)
        except Unsendable as error:
            if topic not in self._unsendable:
                self._unsendable.append(topic)
                self._link.tell("not_sent", f"{topic}: {error}")
            return False
        return True

    def _say_goodbye(self, session: Session) -> None:
        """Wait briefly for messages in flight, then publish `offline`."""
        until_s = time.monotonic() + GOODBYE_S
        while self._sender.waiting and time.monotonic() < until_s:
            self._turn(session)
        last = session.publish(self._topics.of("status"), self._status("offline"), 1, retain=True)
        while time.monotonic() < until_s + GOODBYE_S:
            session.step()
            if last in [packet_id for packet_id, _ in session.take_acknowledged()]:
                return


def _decode(body: bytes) -> Status | None:
    """Return a status message of benchd, None for anything else."""
    try:
        found = msgspec.json.decode(body, type=Status)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found if is_name(found.boot_id) and is_name(found.instance) else None


def _write(writer: socket.socket) -> None:
    with suppress(BlockingIOError):  # full: the reader wakes anyway
        writer.send(b"\0")
