"""A connection to an MQTT broker: version 5, or 3.1.1 for older brokers. The only module that uses paho.

The thread that calls `turn` runs paho's loop and every callback. Acknowledgements include the broker's reason, because
paho counts a refused message as published. Version 3.1.1 lacks reasons, so a broker that drops forbidden messages looks
like one that keeps them.
"""

import math
import time
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from paho.mqtt.client import Client, ConnectFlags, DisconnectFlags, MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from benchd.daemon.delivery.broker import PASSWORD_VARIABLE, Broker, ConnectionEnded, explain, tls_context

WINDOW = 64  # messages in flight; a broker may set a lower limit
MAX_INCOMING_BYTES = 128 * 1024
HEADER_BYTES = 16  # upper bound on the size of a PUBLISH packet without topic, properties and body

UNSPECIFIED = 0x80  # the reason code that paho also uses for a lost connection
UNSUPPORTED_PROTOCOL_VERSION, BAD_CREDENTIALS, NOT_AUTHORIZED = 0x84, 0x86, 0x87


class IncomingMessage(NamedTuple):
    """A publication received at the Unix time `arrived_s`; `retained` if the broker had stored it, possibly for long.

    With MQTT 5, a publication for the filter `as_published` is also `retained` if it was just published with that flag.
    `expire_s` is the remaining time of MQTT 5's message expiry.
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


@dataclass(frozen=True)
class Terms:
    """A client's requests to its broker.

    `will` is a topic and the body that the broker retains there if the connection breaks. The broker keeps messages for
    `keep_s` after the connection has ended (3.1.1: as long as it likes), and sends at most `receive_maximum`
    unacknowledged messages, of at most `max_packet_bytes` each.
    """

    will: tuple[str, bytes] | None = None
    keep_s: int = 0
    receive_maximum: int = 65535
    max_packet_bytes: int = MAX_INCOMING_BYTES


PLAIN = Terms()


class Unsendable(Exception):
    """A message that the broker can never accept."""


def connect(broker: Broker, client_id: str, deadline: float, terms: Terms = PLAIN) -> "Connection":
    """Return a connection accepted by the broker before the monotonic time `deadline`.

    Raises ConnectionEnded with the reason.

    MQTT 5 gets half of the time, because some older brokers never answer it and others hang up.
    """
    half = time.monotonic() + (deadline - time.monotonic()) / 2
    connection = Connection(broker, client_id, MQTTProtocolVersion.MQTTv5, terms)
    if connection.open(half):
        return connection
    connection.close()
    connection = Connection(broker, client_id, MQTTProtocolVersion.MQTTv311, terms)
    if connection.open(deadline):
        return connection
    reason = connection.lost or f"{broker.address} did not answer in time"
    connection.close()
    raise ConnectionEnded(reason)


class Connection:
    """A connection to a broker. Messages arrive only during calls of `turn`."""

    def __init__(self, broker: Broker, client_id: str, protocol: MQTTProtocolVersion, terms: Terms) -> None:
        self.address = broker.address
        self.window = WINDOW
        self.is_careful = False  # one message in flight at a time, because a message may have made the broker hang up
        self.is_version_5 = protocol == MQTTProtocolVersion.MQTTv5
        self.shares = self.is_version_5  # whether the broker splits messages between the clients of a group
        self.lost: str | None = None
        self._broker, self._terms = broker, terms
        self._max_packet_bytes: int | None = None
        self._answer: ReasonCode | None = None
        self._acknowledged: list[tuple[Hashable, ReasonCode]] = []
        self._received: list[IncomingMessage] = []
        self.flight: dict[int, Hashable] = {}  # the content of each unacknowledged packet; QoS 0 is not acknowledged
        self._owing_s = 0.0  # time since which packets have been unacknowledged without any progress
        self._subscriptions: dict[int, list[str]] = {}
        self._refused: list[tuple[str, ReasonCode]] = []
        self._client = Client(
            CallbackAPIVersion.VERSION2,
            client_id,
            clean_session=None if self.is_version_5 else not terms.keep_s,
            protocol=protocol,
            reconnect_on_failure=False,
            manual_ack=True,
        )
        self._client.max_inflight_messages = WINDOW
        self._client.username_pw_set(broker.user, broker.password)
        if terms.will:
            self._client.will_set(*terms.will, qos=1, retain=True)
        if broker.tls:
            self._client.tls_set_context(tls_context(broker))
        self._client.on_connect = self._on_connect
        self._client.on_disconnect = self._on_disconnect
        self._client.on_message = self._on_message
        self._client.on_publish = self._on_publish
        self._client.on_subscribe = self._on_subscribe

    def open(self, deadline: float) -> bool:
        """Connect; return False if the broker lacks this MQTT version; raise ConnectionEnded if it is unreachable."""
        self._client.connect_timeout = max(deadline - time.monotonic(), 0.1)
        try:
            self._client.connect(self._broker.host, self._broker.port, self._broker.keep_alive_s, **self._asked())
        except OSError as error:
            raise ConnectionEnded(explain(self.address, error)) from error
        while self._answer is None and not self.lost and (left_s := deadline - time.monotonic()) > 0:
            with suppress(ConnectionEnded):
                self.turn(left_s)
        if self._answer is None or self._answer.value == UNSUPPORTED_PROTOCOL_VERSION:
            return False
        if self._answer.is_failure:
            self.close()
            check = self._answer.value in (BAD_CREDENTIALS, NOT_AUTHORIZED)
            remedy = f"; check the user and the password in the URL or {PASSWORD_VARIABLE}" if check else ""
            raise ConnectionEnded(f"{self.address} refused the connection: {self._answer}{remedy}")
        return True

    @property
    def free(self) -> int:
        """Return how many more messages may be in flight."""
        return (1 if self.is_careful else self.window) - len(self.flight)

    @property
    def silent_s(self) -> float:
        """Return for how long the broker has not acknowledged any packet, or 0 if none is unacknowledged."""
        return time.monotonic() - self._owing_s if self.flight else 0.0

    def turn(self, wait_s: float) -> None:
        """Run paho's loop once: wait up to `wait_s` for the network, and process what has arrived.

        Raises ConnectionEnded if the connection has ended; messages that arrived earlier can still be taken.
        """
        if self.lost:
            raise ConnectionEnded(self.lost)
        try:
            code = self._client.loop(wait_s)
        except Exception as error:  # paho may raise anything for a malformed packet
            raise ConnectionEnded(f"{self.address} does not speak MQTT: {error}") from error
        if code != MQTTErrorCode.MQTT_ERR_SUCCESS:
            self.lost = self.lost or f"the connection to {self.address} ended"
            if not self._acknowledged and not self._received:
                raise ConnectionEnded(self.lost)

    def publish(
        self,
        topic: str,
        body: bytes,
        qos: int,
        *,
        of: Hashable = None,
        retain: bool = False,
        correlation: bytes | None = None,
        expire_s: int | None = None,
    ) -> None:
        """Send a message; its acknowledgement is identified by `of`. Raises Unsendable or ConnectionEnded."""
        properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
        properties.ContentType = "application/json"
        if correlation is not None:
            properties.CorrelationData = correlation
        if expire_s is not None:
            properties.MessageExpiryInterval = expire_s
        size = HEADER_BYTES + len(topic.encode()) + len(properties.pack()) + len(body)  # type: ignore[no-untyped-call]
        if self._max_packet_bytes is not None and size > self._max_packet_bytes:
            raise Unsendable(f"{size} bytes, but {self.address} accepts packets of at most {self._max_packet_bytes}")
        try:
            info = self._client.publish(topic, body, qos, retain, properties)
        except ValueError as error:
            raise Unsendable(f"not an MQTT message: {error}") from error
        if info.rc != MQTTErrorCode.MQTT_ERR_SUCCESS:
            raise ConnectionEnded(self.lost or f"the connection to {self.address} ended")
        if qos:
            if not self.flight:
                self._owing_s = time.monotonic()
            self.flight[info.mid] = of

    def subscribe(self, filters: Sequence[tuple[str, int]], *, as_published: str = "") -> None:
        """Subscribe to these topics with their QoS; `take_refused` returns those that the broker refuses.

        For the filter `as_published`, MQTT 5 keeps the retain flag, which brokers otherwise clear for connected
        clients.
        """
        wanted: list[Any] = list(filters)
        if self.is_version_5:
            wanted = [
                (topic_filter, SubscribeOptions(qos, retainAsPublished=topic_filter == as_published))
                for topic_filter, qos in filters
            ]
        _, packet_id = self._client.subscribe(wanted)
        if packet_id is not None:
            self._subscriptions[packet_id] = [topic for topic, _ in filters]

    def wait_subscribed(self, deadline: float) -> None:
        """Wait until every subscription is answered; raise ConnectionEnded if the broker refuses one or is too slow."""
        while self._subscriptions:
            if time.monotonic() > deadline:
                raise ConnectionEnded(f"{self.address} did not answer a subscription in time")
            self.turn(0.5)
        for topic, reason in self.take_refused():
            raise ConnectionEnded(
                f"{self.address} refused the subscription {topic}: {reason}; check the broker's access rules"
            )

    def take_refused(self) -> list[tuple[str, ReasonCode]]:
        """Return the subscriptions refused since the last call."""
        refused, self._refused = self._refused, []
        return refused

    def take_received(self) -> list[IncomingMessage]:
        """Return the messages received since the last call; the caller must acknowledge them."""
        received, self._received = self._received, []
        return received

    def acknowledge(self, arrived: Sequence[IncomingMessage]) -> None:
        """Acknowledge these messages to the broker, which may then drop them."""
        for message in arrived:
            self._client.ack(message.packet_id, message.qos)

    def take_acknowledged(self) -> list[tuple[Hashable, ReasonCode]]:
        """Return the messages acknowledged since the last call, with the broker's reasons."""
        acknowledged, self._acknowledged = self._acknowledged, []
        return acknowledged

    def close(self) -> None:
        """Disconnect, if the broker still accepts that, and close the socket."""
        self._client.disconnect()
        connection: Any = self._client.socket()
        if connection is not None:  # the DISCONNECT packet is queued behind unsent data
            connection.close()
        # freed from the reference cycle, the client closes its socket pair now instead of at garbage collection
        client = self._client
        client.on_connect = client.on_disconnect = client.on_message = client.on_publish = client.on_subscribe = None

    def _asked(self) -> dict[str, Any]:
        """Return the properties of the MQTT 5 CONNECT packet."""
        if not self.is_version_5:
            return {}
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        properties.SessionExpiryInterval = self._terms.keep_s
        properties.ReceiveMaximum = self._terms.receive_maximum
        properties.MaximumPacketSize = self._terms.max_packet_bytes
        return {"clean_start": not self._terms.keep_s, "properties": properties}

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
        self.lost = f"the connection to {self.address} ended{why}"
        if self._broker.tls and self._answer is None:
            self.lost = f"{self.address} ended TLS before it answered; check the certificate and key files"

    def _on_publish(
        self, client: Client, userdata: None, packet_id: int, reason: ReasonCode, properties: Properties | None
    ) -> None:
        if packet_id in self.flight:
            self._owing_s = time.monotonic()
            self._acknowledged.append((self.flight.pop(packet_id), reason))

    def _on_message(self, client: Client, userdata: None, message: MQTTMessage) -> None:
        properties = message.properties
        self._received.append(
            IncomingMessage(
                topic=message.topic,
                body=bytes(message.payload),
                arrived_s=time.time(),
                retained=message.retain,
                response_topic=getattr(properties, "ResponseTopic", None),
                correlation=getattr(properties, "CorrelationData", None),
                expire_s=getattr(properties, "MessageExpiryInterval", math.inf),
                packet_id=message.mid,
                qos=message.qos,
            )
        )

    def _on_subscribe(
        self, client: Client, userdata: None, packet_id: int, reasons: list[ReasonCode], properties: Properties | None
    ) -> None:
        topics = self._subscriptions.pop(packet_id, [])
        self._refused += [(topic, reason) for topic, reason in zip(topics, reasons, strict=False) if reason.is_failure]
