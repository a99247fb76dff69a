"""One connection to an MQTT broker: version 5, or 3.1.1 for older brokers. The only module that uses paho.

The caller's thread drives paho, which holds only the messages in flight. paho reports a message as published even if
the broker refused it, so acknowledgements carry their reasons here. 3.1.1 has no reasons, so a broker that drops
forbidden messages cannot be distinguished from one that keeps them.
"""

import math
import re
import select
import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from paho.mqtt.client import Client, ConnectFlags, DisconnectFlags, MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties, VariableByteIntegers
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from benchd.daemon.delivery import tls
from benchd.daemon.delivery.broker import PASSWORD_VARIABLE, Broker, Ended, explain
from benchd.daemon.delivery.topics import is_name

WINDOW = 64  # messages in flight; a broker may ask for fewer
WAIT_S = 1.0
MAX_INCOMING_BYTES = 128 * 1024
HELD_BYTES = 8 * 2**20

UNSPECIFIED = 0x80  # paho also uses it for a connection that was lost
ABOUT_THE_SENDER = (0x80, 0x83, 0x87)  # unspecified, of this broker alone, not authorised: not of the message itself
UNSUPPORTED_PROTOCOL_VERSION, BAD_CREDENTIALS, NOT_AUTHORIZED, QUOTA_EXCEEDED = 0x84, 0x86, 0x87, 0x97


class Numbered(NamedTuple):
    """Which result of an outbox this is, counted from 1 without a gap; `stream` identifies the outbox."""

    stream: str
    seq: int


class Arrived(NamedTuple):
    """A publication received at the Unix time `arrived_s`; `retained` if the broker replayed it, of any age.

    With MQTT 5 one of a filter `as_published` is also `retained` if it has just been published so. `expire_s`
    is the remainder of MQTT 5's message expiry.
    """

    topic: str
    body: bytes
    arrived_s: float
    retained: bool = False
    response_topic: str | None = None
    correlation: bytes | None = None
    expire_s: float = math.inf
    packet_id: int = 0
    qos: int = 0
    numbered: Numbered | None = None


@dataclass(frozen=True)
class Terms:
    """A client's requests to its broker.

    `will` is a topic and what the broker retains there if the connection breaks. The broker keeps messages for `keep_s`
    after the connection has ended (3.1.1: as long as it likes), sends at most `receive_maximum` unacknowledged ones,
    and none larger than `max_packet_bytes`; a larger one is truncated.
    """

    will: tuple[str, bytes] | None = None
    keep_s: int = 0
    receive_maximum: int = 65535
    max_packet_bytes: int = MAX_INCOMING_BYTES


PLAIN = Terms()


class _OldBroker(Ended):
    """The broker does not support this version of MQTT."""


class Unsendable(Exception):
    """A message that the broker can never accept."""


def connect(broker: Broker, client_id: str, deadline: float, terms: Terms = PLAIN) -> "Session":
    """Return a session accepted by the broker before the monotonic time `deadline`; raise Ended with the reason."""
    try:
        return Session(broker, client_id, MQTTProtocolVersion.MQTTv5, deadline, terms)
    except _OldBroker:
        return Session(broker, client_id, MQTTProtocolVersion.MQTTv311, deadline, terms)


class Session:
    """One connection to a broker. Nothing happens between two calls; callbacks only record events."""

    def __init__(
        self, broker: Broker, client_id: str, protocol: MQTTProtocolVersion, deadline: float, terms: Terms
    ) -> None:
        self.address = broker.address
        self.window = WINDOW
        self.is_version_5 = protocol == MQTTProtocolVersion.MQTTv5
        self.shares = self.is_version_5  # whether the broker splits messages among the clients of a group
        self._broker, self._deadline = broker, deadline
        self._max_packet_bytes: int | None = None
        self._answer: ReasonCode | None = None
        self._lost: str | None = None
        self._acknowledged: list[tuple[int, ReasonCode]] = []
        self._received: list[Arrived] = []
        self._unanswered: set[int] = set()  # packet ids; QoS 0 has no acknowledgement
        self._owing_s = 0.0  # since when there are some and none was acknowledged
        self._subscribing: set[int] = set()
        self._tls = tls.context(broker) if broker.tls else None
        self._client = _client(broker, client_id, protocol, terms)
        if self._tls:
            self._client.tls_set_context(self._tls)
        self._asked = _asked(terms) if self.is_version_5 else {}
        self._client.on_message = self._on_message
        self._client.on_subscribe = self._on_subscribe
        self._client.on_connect = self._on_connect
        self._client.on_disconnect = self._on_disconnect
        self._client.on_publish = self._on_publish
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    @property
    def free(self) -> int:
        """Return how many more messages may be in flight."""
        return self.window - len(self._unanswered)

    @property
    def silent_s(self) -> float:
        """Return for how long the broker has acknowledged nothing, 0 if it owes no acknowledgement."""
        return time.monotonic() - self._owing_s if self._unanswered else 0.0

    def endure(self) -> None:
        """Remove the deadline: the session now lasts as long as the connection."""
        self._deadline = math.inf

    def step(self, wake: socket.socket | None = None, wait_s: float = WAIT_S) -> None:
        """Wait for the network, at most `wait_s`, and record what arrived; `wake` ends the wait when readable.

        Raises Ended when the connection has ended or the deadline has passed.
        """
        if self._lost:
            raise Ended(self._lost)
        connection: Any = self._client.socket()
        buffered = isinstance(connection, ssl.SSLSocket) and connection.pending() > 0
        wait_s = 0.0 if buffered else min(self._remaining_s(), wait_s)
        writers = [connection] if self._client.want_write() else []
        readers = [connection] if wake is None else [connection, wake]
        readable, writable, _ = select.select(readers, writers, [], wait_s)
        try:
            if connection in readable or buffered:
                self._client.loop_read()
            if writable:
                self._client.loop_write()
            self._client.loop_misc()
        except Exception as error:  # paho raises anything on a malformed packet
            raise Ended(f"{self.address} does not speak MQTT: {error}") from error

    def publish(
        self,
        topic: str,
        body: bytes,
        qos: int,
        *,
        retain: bool = False,
        correlation: bytes | None = None,
        expire_s: int | None = None,
        numbered: Numbered | None = None,
    ) -> int:
        """Send one message and return its packet id; raise Unsendable or Ended."""
        properties = _properties(body)
        for name, value in numbered._asdict().items() if numbered else ():
            properties.UserProperty = (name, str(value))  # paho adds it to the ones before
        if correlation is not None:
            properties.CorrelationData = correlation
        if expire_s is not None:
            properties.MessageExpiryInterval = expire_s
        size = _packet_bytes(topic, body, properties)
        if self._max_packet_bytes is not None and size > self._max_packet_bytes:
            raise Unsendable(f"{size} bytes, but {self.address} accepts packets of at most {self._max_packet_bytes}")
        try:
            info = self._client.publish(topic, body, qos, retain, properties)
        except ValueError as error:
            raise Unsendable(f"not an MQTT message: {error}") from error
        if info.rc != MQTTErrorCode.MQTT_ERR_SUCCESS:
            raise Ended(self._lost or f"the connection to {self.address} ended")
        if qos:
            if not self._unanswered:
                self._owing_s = time.monotonic()
            self._unanswered.add(info.mid)
        return info.mid

    def subscribe(self, filters: Sequence[tuple[str, int]], *, must: bool = True, as_published: str = "") -> None:
        """Subscribe to these topics with their QoS and wait for the answer; raise Ended if the broker refuses one.

        If much arrives before the answer, a later step raises that. With `must` False the broker may refuse. Of the
        filter `as_published` MQTT 5 keeps the retain flag, which a broker otherwise clears for those connected.
        """
        wanted: list[Any] = list(filters)
        if self.is_version_5:
            wanted = [(one, SubscribeOptions(qos, retainAsPublished=one == as_published)) for one, qos in filters]
        _, packet_id = self._client.subscribe(wanted)
        if must and packet_id is not None:
            self._subscribing.add(packet_id)
        while self._subscribing and sum(len(one.body) for one in self._received) < HELD_BYTES:
            self.step()  # what a broker has kept for a session may come before its answer

    def take_received(self) -> list[Arrived]:
        """Return the messages received since the last call; the caller must acknowledge them."""
        taken, self._received = self._received, []
        return taken

    def acknowledge(self, arrived: Sequence[Arrived]) -> None:
        """Acknowledge these to the broker, which may then drop them."""
        for one in arrived:
            self._client.ack(one.packet_id, one.qos)

    def take_acknowledged(self) -> list[tuple[int, ReasonCode]]:
        """Return the packet ids acknowledged since the last call, with the broker's reason."""
        taken, self._acknowledged = self._acknowledged, []
        return taken

    def close(self) -> None:
        """Disconnect, if the broker still accepts it, and close the socket."""
        self._client.disconnect()
        connection: Any = self._client.socket()
        if connection is not None:  # the disconnect waits behind unsent data
            connection.close()

    def _open(self) -> None:
        self._reach(_addresses(self._broker, self._remaining_s()))
        # some brokers without MQTT 5 never answer, others hang up: half of the time is reserved for 3.1.1
        least_s = self._remaining_s() / 2 if self.is_version_5 else 0.0
        while self._answer is None:
            self.step()
            has_hung_up = self._lost and not (self._tls and self._tls.objection)
            if self._answer is None and (has_hung_up or self._remaining_s() < least_s):
                raise _OldBroker(self._lost or f"{self.address} did not answer in time")
        if self._answer.value == UNSUPPORTED_PROTOCOL_VERSION:
            raise _OldBroker(f"{self.address} supports neither MQTT 5 nor 3.1.1")
        if self._answer.is_failure:
            check = self._answer.value in (BAD_CREDENTIALS, NOT_AUTHORIZED)
            remedy = f"; check the user and the password in the URL or {PASSWORD_VARIABLE}" if check else ""
            raise Ended(f"{self.address} refused the connection: {self._answer}{remedy}")

    def _reach(self, addresses: list[str]) -> None:
        """Connect to the first address that answers; they share the time, and TLS gets as long again."""
        attempts = len(addresses) * (2 if self._broker.tls else 1)
        self._client.connect_timeout = self._remaining_s() / attempts
        failure = None
        for address in addresses:
            failure = self._try(address)
            if failure is None:
                return
        raise Ended(explain(self.address, failure))

    def _try(self, address: str) -> OSError | None:
        try:
            self._client.connect(address, self._broker.port, self._broker.keep_alive_s, **self._asked)
        except OSError as error:
            return error
        return None

    def _remaining_s(self) -> float:
        remaining_s = self._deadline - time.monotonic()
        if remaining_s <= 0 and self._answer:
            raise Ended(f"timed out before {self.address} had acknowledged everything")
        if remaining_s <= 0:
            raise Ended(f"{self.address} did not answer in time")
        return remaining_s

    def _on_connect(
        self, client: Client, userdata: None, flags: ConnectFlags, reason: ReasonCode, properties: Properties | None
    ) -> None:
        self._answer = reason
        self.window = min(WINDOW, getattr(properties, "ReceiveMaximum", WINDOW))
        self._max_packet_bytes = getattr(properties, "MaximumPacketSize", None)
        self.shares = self.is_version_5 and bool(getattr(properties, "SharedSubscriptionAvailable", 1))

    def _on_disconnect(
        self, client: Client, userdata: None, flags: DisconnectFlags, reason: ReasonCode, properties: Properties | None
    ) -> None:
        why = "" if reason.value == UNSPECIFIED else f": {reason}"
        self._lost = f"the connection to {self.address} ended{why}"
        if self._tls and self._answer is None:
            objection = self._tls.objection
            self._lost = f"{self.address} ended TLS before it answered{objection}; check the certificate and key files"

    def _on_publish(
        self, client: Client, userdata: None, packet_id: int, reason: ReasonCode, properties: Properties | None
    ) -> None:
        if packet_id in self._unanswered:
            self._unanswered.remove(packet_id)
            self._owing_s = time.monotonic()
            self._acknowledged.append((packet_id, reason))

    def _on_message(self, client: Client, userdata: None, message: MQTTMessage) -> None:
        properties = message.properties
        self._received.append(
            Arrived(
                topic=message.topic,
                body=bytes(message.payload[: self._client.max_packet_bytes]),
                arrived_s=time.time(),
                retained=message.retain,
                response_topic=getattr(properties, "ResponseTopic", None),
                correlation=getattr(properties, "CorrelationData", None),
                expire_s=getattr(properties, "MessageExpiryInterval", math.inf),
                packet_id=message.mid,
                qos=message.qos,
                numbered=_numbered(dict(getattr(properties, "UserProperty", ()))),
            )
        )

    def _on_subscribe(
        self, client: Client, userdata: None, packet_id: int, reasons: list[ReasonCode], properties: Properties | None
    ) -> None:
        refused = next((reason for reason in reasons if reason.is_failure), None)
        if refused and packet_id in self._subscribing:
            self._lost = f"{self.address} refused a subscription: {refused}; check the broker's access rules"
        self._subscribing.discard(packet_id)


class _CuttingClient(Client):
    """paho with a limit on received packets: it would buffer up to 256 MB, and MQTT 3.1.1 cannot announce a limit.

    The rest of an oversized packet is read and dropped; the kept part still exceeds every consumer's limit.
    """

    max_packet_bytes = MAX_INCOMING_BYTES

    def _sock_recv(self, bufsize: int) -> bytes:
        del self._in_packet["packet"][self.max_packet_bytes :]
        return super()._sock_recv(min(bufsize, self.max_packet_bytes))

    def _handle_publish(self) -> MQTTErrorCode:
        """End the connection on QoS 2, which nothing subscribes to: paho would hold each message until its release."""
        if self._in_packet["command"] & 0x04:
            return MQTTErrorCode.MQTT_ERR_PROTOCOL
        return super()._handle_publish()


def _client(broker: Broker, client_id: str, protocol: MQTTProtocolVersion, terms: Terms) -> _CuttingClient:
    client = _CuttingClient(
        CallbackAPIVersion.VERSION2,
        client_id,
        clean_session=None if protocol == MQTTProtocolVersion.MQTTv5 else not terms.keep_s,
        protocol=protocol,
        reconnect_on_failure=False,
        manual_ack=True,
    )
    client.max_packet_bytes = terms.max_packet_bytes
    client.max_inflight_messages = WINDOW
    client.username_pw_set(broker.user, broker.password)
    if terms.will:
        client.will_set(*terms.will, qos=1, retain=True)
    return client


def _asked(terms: Terms) -> dict[str, Any]:
    """Return the CONNECT properties for MQTT 5."""
    properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
    properties.SessionExpiryInterval = terms.keep_s
    properties.ReceiveMaximum = terms.receive_maximum
    properties.MaximumPacketSize = terms.max_packet_bytes
    return {"clean_start": not terms.keep_s, "properties": properties}


def _addresses(broker: Broker, timeout_s: float) -> list[str]:
    """Return the addresses of the broker's host; raise Ended if there are none or the resolver is too slow.

    The system's resolver cannot be interrupted, so it runs in a thread that ends with its answer.
    """
    found: list[str] = []
    failure: list[OSError] = []

    def look_up() -> None:
        try:
            for *_, address in socket.getaddrinfo(broker.host, broker.port, type=socket.SOCK_STREAM):
                # the plain address would lose the interface of a link-local one
                found.append(socket.getnameinfo(address, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0])
        except OSError as error:
            failure.append(error)

    thread = threading.Thread(target=look_up, name="benchd.resolve", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not found:
        raise Ended(explain(broker.address, failure[0] if failure else None))
    return found


def _numbered(given: Mapping[str, str]) -> Numbered | None:
    """Return the number of a result from its user properties; None if they are missing or no number."""
    stream, seq = given.get("stream", ""), given.get("seq", "")
    is_numbered = is_name(stream) and re.fullmatch(r"[1-9][0-9]{0,17}", seq)
    return Numbered(stream, int(seq)) if is_numbered else None


def _properties(body: bytes) -> Properties:
    """Return the MQTT 5 properties of a message: its content type and schema."""
    properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
    properties.ContentType = "application/json"
    with suppress(msgspec.DecodeError):
        properties.UserProperty = ("schema", msgspec.json.decode(body, type=_Header).schema)
    return properties


class _Header(msgspec.Struct):
    schema: str


def _packet_bytes(topic: str, body: bytes, properties: Properties) -> int:
    """Return the size of a PUBLISH packet: fixed header, topic, packet id, properties and body."""
    properties_bytes = len(properties.pack())  # type: ignore[no-untyped-call]
    rest = 2 + len(topic.encode()) + 2 + properties_bytes + len(body)
    return 1 + len(VariableByteIntegers.encode(rest)) + rest  # type: ignore[no-untyped-call]
