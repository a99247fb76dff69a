"""The service's connection to its broker: a thread that maintains it, sends the logs, and receives commands.

While a case is timed, the link is held: only health and telemetry are sent, and nothing is written.
"""

import random
import secrets
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from benchd.daemon.delivery.broker import Broker, ConnectionEnded
from benchd.daemon.delivery.connection import Connection, IncomingMessage, Terms, Unsendable, connect
from benchd.daemon.delivery.delivery import HUNG_UP, TURN_S, Delivery, SentLine, refusal
from benchd.daemon.delivery.messages import Status
from benchd.daemon.delivery.topics import Topics
from benchd.daemon.errors import UsageError
from benchd.daemon.machine.systemd_notify import log
from benchd.daemon.records import wall_now

CONNECT_S = 10.0
BACK_OFF_S = 60.0
GOODBYE_S = 3.0
MAX_WAITING = 100  # unprocessed answers and commands
TELEMETRY_EXPIRY_S = 5
HELD_TURN_S = 1.0
SILENT_S = 600.0  # long enough for a record of 2 MB on a slow network


@dataclass(frozen=True)
class Reply:
    """A reply to one command."""

    topic: str
    body: bytes
    correlation: bytes | None


@dataclass
class LinkState:
    """The link's state for the service; `denied` and `conflict` are sentences for an operator."""

    connected: bool = False
    reason: str | None = "not connected yet"
    denied: str | None = None
    conflict: str | None = None
    acknowledged_s: float | None = None  # on the monotonic clock
    telemetry_dropped: int = 0
    commands: deque[IncomingMessage] = field(default_factory=deque)
    events: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=MAX_WAITING))


class Link:
    """A thread that runs from `start` to `stop`. Any thread may call its methods, which never wait for the network.

    The link writes to `wake` when `state` contains news for the service.
    """

    def __init__(self, broker: Broker, topics: Topics, delivery: Delivery, boot_id: str, wake: socket.socket) -> None:
        self.state, self.delivery = LinkState(), delivery
        self._broker, self._topics, self._boot_id, self._wake = broker, topics, boot_id, wake
        self.is_held = False  # while set, only health and telemetry are sent
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._documents: dict[str, bytes] = {}
        self._unsent: dict[str, None] = {}  # topics with an unsent document, in order
        self._answers: deque[Reply] = deque(maxlen=MAX_WAITING)
        self._telemetry: bytes | None = None
        self._sessions: list[str] = []
        # sessions of other machines with this id that have been answered
        self._others: deque[str] = deque(maxlen=MAX_WAITING)
        # refused topics, not tried again: some brokers end the connection at each refusal
        self._denied: set[str] = set()
        self._unsaved = ""
        self._thread = threading.Thread(target=self._run, name="benchd.link", daemon=True)

    def start(self) -> None:
        """Start connecting."""
        self._thread.start()

    def is_alive(self) -> bool:
        """Return whether the thread is running, connected or not."""
        return self._thread.is_alive()

    def stop(self, within_s: float = CONNECT_S + 2 * GOODBYE_S) -> None:
        """Spend a few seconds sending what is pending, publish `offline` and end.

        A thread that takes longer than `within_s` ends with the process, and the broker publishes the will.
        """
        self.is_held = False
        self._stopping.set()
        self._thread.join(within_s)

    def retain(self, topic: str, body: bytes) -> None:
        """Retain this body under the topic on the broker, even after a reconnection; an empty body deletes it."""
        with self._lock:
            self._documents[topic] = body
            self._unsent[topic] = None

    def answer(self, topic: str, body: bytes, correlation: bytes | None) -> None:
        """Reply to a command."""
        self._answers.append(Reply(topic, body, correlation))

    def telemetry(self, body: bytes) -> None:
        """Send the latest samples; earlier unsent ones are dropped and counted."""
        with self._lock:
            self.state.telemetry_dropped += self._telemetry is not None
            self._telemetry = body

    def problem(self) -> str | None:
        """Return what an operator must fix, or None."""
        refused = self.delivery.refused
        words = f"{len(refused)} not delivered: {refused[0]}" if refused else None
        return "; ".join(filter(None, (self.state.conflict, self.state.denied, words))) or None

    def tell(self, event: str, detail: str) -> None:
        """Pass an event to the service, which publishes it."""
        self.state.events.append((event, detail))
        self._wake_service()

    def _run(self) -> None:
        delay_s = 1.0
        while not self._stopping.is_set():
            began_s = time.monotonic()
            try:
                self._converse()
            except ConnectionEnded as end:
                self._end(str(end))
            except Exception as error:  # any failure ends the connection but not the thread
                self._end(f"{type(error).__name__}: {error}")
            delay_s = 1.0 if time.monotonic() - began_s > BACK_OFF_S else min(2 * delay_s, BACK_OFF_S)
            self._pause(random.uniform(0.0, delay_s))  # noqa: S311 - no secret
        self.state.connected = False

    def _end(self, reason: str) -> None:
        self.state.connected = False
        if reason != self.state.reason:  # logged once, not at every attempt
            log(f"mqtt down: {reason}")
        self.state.reason = reason
        if not self.is_held:
            self._save()

    def _pause(self, seconds: float) -> None:
        """Wait, longer while held, because a handshake would disturb the timed case."""
        until_s = time.monotonic() + seconds
        while not self._stopping.is_set() and (self.is_held or time.monotonic() < until_s):
            self._stopping.wait(TURN_S)

    def _converse(self) -> None:
        """Keep one connection until the link stops; raise ConnectionEnded with the reason if it ends first."""
        session = secrets.token_hex(8)
        self._sessions.append(session)
        will = (self._topics.of("status"), self._status("offline", session))
        client_id = f"benchd-{self._topics.device_id}-{self._boot_id[:8]}-{session[:4]}"
        connection = connect(self._broker, client_id, time.monotonic() + CONNECT_S, Terms(will=will))
        try:
            commands = self._topics.command("+")
            connection.subscribe([(self._topics.of("status"), 1), (commands, 1)], as_published=commands)
            self._be_born(connection, session)
            while not self._stopping.is_set():
                self._turn(connection)
            self._say_goodbye(connection, session)
        finally:
            connection.close()
            for topic in self.delivery.end(connection.flight.values(), self._documents):
                self._deny(topic, HUNG_UP)

    def _status(self, state: Literal["online", "offline"], session: str) -> bytes:
        return msgspec.json.encode(Status(state=state, session=session, boot_id=self._boot_id, t_wall=wall_now()))

    def _be_born(self, connection: Connection, session: str) -> None:
        self._say(connection, self._topics.of("status"), self._status("online", session), retain=True)
        with self._lock:  # the broker may have lost retained documents, or be a new one
            self._unsent = dict.fromkeys(self._documents)
        self.state.connected, self.state.reason = True, None

    def _turn(self, connection: Connection) -> None:
        """Wait briefly for the network, then process arrived and waiting messages."""
        self.delivery.be_careful(connection)
        connection.turn(HELD_TURN_S if self.is_held else TURN_S)
        arrived = connection.take_received()
        for message in arrived:
            self._take(connection, message)
        connection.acknowledge(arrived)
        self._settle(connection)
        self._say_always(connection)
        if not self.is_held:
            self._say_waiting(connection)
            self.delivery.fill(connection)
            self._report(self.delivery.first_refusal)
            self._save(at_once=False)
            if connection.silent_s > SILENT_S:
                raise ConnectionEnded(f"{connection.address} does not acknowledge anything")

    def _settle(self, connection: Connection) -> None:
        for message, answer in connection.take_acknowledged():
            words = refusal(connection, answer)
            self.delivery.settle(message, words)
            if words and isinstance(message, str):
                self._deny(message, words)
            elif not words and isinstance(message, SentLine):
                self.state.acknowledged_s = time.monotonic()
        for topic, reason in connection.take_refused():
            self._deny(topic, f"{connection.address} refused the subscription: {reason}")

    def _deny(self, topic: str, words: str) -> None:
        """Send nothing more on this topic."""
        self._denied.add(topic)
        self.delivery.settle(topic, words)
        self._report(f"{topic}: {words}")

    def _report(self, refusal: str | None) -> None:
        """Report the first message that the broker refuses."""
        if refusal and self.state.denied is None:
            self.state.denied = f"{refusal}; check the broker's access rules and limits"
            self.tell("not_sent", self.state.denied)

    def _take(self, connection: Connection, message: IncomingMessage) -> None:
        if message.topic == self._topics.of("status"):
            self._take_status(connection, message)
        elif message.topic.startswith(self._topics.command("")):
            if len(self.state.commands) < MAX_WAITING:  # in a flood, the newest commands are dropped, as in the gate
                self.state.commands.append(message)
            self._wake_service()

    def _take_status(self, connection: Connection, message: IncomingMessage) -> None:
        """Correct a late will of this device, and detect another machine with the same id."""
        try:
            status = msgspec.json.decode(message.body, type=Status)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            status = None
        if status and (status.session, status.state) == (self._sessions[-1], "online"):
            return
        is_other = status is not None and status.session not in self._sessions and not message.retained
        if status and is_other and status.state == "online":
            self._tell_conflict(status)
            if status.session in self._others:
                return  # already told about this machine
            self._others.append(status.session)
        online = self._status("online", self._sessions[-1])
        self._say(connection, self._topics.of("status"), online, retain=True)

    def _tell_conflict(self, other: Status) -> None:
        conflict = (
            f"the device id {self._topics.device_id} is also in use by another machine (boot {other.boot_id}, this one "
            f"is boot {self._boot_id}); change [device] id on one of them and reload"
        )
        is_new, self.state.conflict = self.state.conflict is None, conflict
        if is_new:
            self.tell("identity_conflict", conflict)

    def _say_always(self, connection: Connection) -> None:
        health = self._topics.of("health")
        with self._lock:
            is_new = health in self._unsent and connection.free > 0
            if is_new:
                del self._unsent[health]
            body, samples, self._telemetry = self._documents.get(health, b""), self._telemetry, None
        if is_new:
            self._say(connection, health, body, retain=True)
        if samples:
            self._say(connection, self._topics.of("telemetry"), samples, qos=0, expire_s=TELEMETRY_EXPIRY_S)

    def _say_waiting(self, connection: Connection) -> None:
        while connection.free > 0 and self._answers:
            answer = self._answers.popleft()
            self._say(connection, answer.topic, answer.body, correlation=answer.correlation)
        while connection.free > 0:
            with self._lock:
                topic = next(iter(self._unsent), None)
                if topic is None:
                    return
                del self._unsent[topic]
                body = self._documents[topic]
            self._say(connection, topic, body, retain=True)

    def _say(self, connection: Connection, topic: str, body: bytes, qos: int = 1, **options: Any) -> None:
        """Publish anything except a log line, unless the broker has refused its topic or cannot accept it."""
        if topic in self._denied:
            return
        try:
            connection.publish(topic, body, qos, of=topic, **options)
        except Unsendable as error:
            self._deny(topic, str(error))

    def _say_goodbye(self, connection: Connection, session: str) -> None:
        """Wait briefly for what is pending, then publish `offline`."""
        until_s = time.monotonic() + GOODBYE_S
        self._turn(connection)
        while connection.flight and time.monotonic() < until_s:
            self._turn(connection)
        self._say(connection, self._topics.of("status"), self._status("offline", session), retain=True)
        while connection.flight and time.monotonic() < until_s + GOODBYE_S:
            connection.turn(TURN_S)
            self._settle(connection)
        self._save()

    def _save(self, *, at_once: bool = True) -> None:
        try:
            self.delivery.save(at_once=at_once)
        except UsageError as error:  # for example because the disk is full: the tail is sent again after the next start
            if str(error) != self._unsaved:
                log(f"not kept: {error}")
            self._unsaved = str(error)

    def _wake_service(self) -> None:
        # if the pipe is full, the service wakes anyway; or the service has ended
        with suppress(BlockingIOError, OSError):
            self._wake.send(b"\0")
