"""What devices publish, received over one MQTT 5 connection and acknowledged by hand, once it is safe."""

import time
from collections.abc import Iterable
from typing import NamedTuple

from paho.mqtt.client import Client, ConnectFlags, DisconnectFlags, MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from benchd.daemon.delivery import topics
from benchd.daemon.delivery.mqtt import KEEP_ALIVE_S, Broker, Ended, explain, secure
from benchd.dashboard.messages import Message

BATCH = 256
BATCH_S = 0.1  # how long the first message of a batch waits at most for more
PAUSE_S = 0.02  # a batch ends when nothing more came for so long
CONNECT_S = 10.0
MAX_PACKET_BYTES = 2**21  # a broker drops what is larger before it gets here


class Lost(Exception):
    """The connection is of no more use; the message is the reason in one sentence."""


class Arrived(NamedTuple):
    """A message and what its acknowledgement needs."""

    message: Message
    packet_id: int
    qos: int


class Feed:
    """One connection, for one thread. Raises Lost where it cannot be made, or ends.

    With `session_s` the broker keeps what arrives for this client id for so long after the connection has ended, and
    the work is split among all such feeds; with 0 the feed sees everything, from now on.
    """

    def __init__(self, broker: Broker, client_id: str, session_s: int) -> None:
        self._address, self._tls, self._shared = broker.address, broker.tls, session_s > 0
        self._waiting: list[Arrived] = []
        self._lost: str | None = None
        self._answered = self._subscribed = False
        self._client = Client(
            CallbackAPIVersion.VERSION2,
            client_id,
            protocol=MQTTProtocolVersion.MQTTv5,
            reconnect_on_failure=False,
            manual_ack=True,
        )
        self._client.username_pw_set(broker.user, broker.password)
        self._client.on_connect = self._on_connect
        self._client.on_subscribe = self._on_subscribe
        self._client.on_disconnect = self._on_disconnect
        self._client.on_message = self._on_message
        self._connect(broker, session_s)

    def batch(self, wait_s: float) -> list[Arrived]:
        """Return what has arrived, in order; nothing where nothing came in `wait_s`."""
        self._step(0.0 if self._waiting else wait_s)
        deadline = time.monotonic() + BATCH_S
        count = 0
        while count < len(self._waiting) < BATCH and time.monotonic() < deadline:
            count = len(self._waiting)
            self._step(PAUSE_S)
        taken, self._waiting = self._waiting, []
        return taken

    def acknowledge(self, arrived: Iterable[Arrived]) -> None:
        """Tell the broker that it need not keep these any more."""
        for one in arrived:
            if one.qos:
                self._client.ack(one.packet_id, one.qos)

    def publish(self, topic: str, body: bytes) -> None:
        """Hand over one message with QoS 1."""
        self._client.publish(topic, body, qos=1)

    def close(self) -> None:
        """Say goodbye and let go of the socket."""
        self._client.disconnect()
        connection = self._client.socket()
        if connection is not None:
            connection.close()

    def _connect(self, broker: Broker, session_s: int) -> None:
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        properties.SessionExpiryInterval = session_s
        properties.ReceiveMaximum = 2 * BATCH  # one batch on its way while the other is stored
        properties.MaximumPacketSize = MAX_PACKET_BYTES
        self._client.connect_timeout = CONNECT_S
        deadline = time.monotonic() + CONNECT_S
        address = (broker.host, broker.port, KEEP_ALIVE_S)
        try:
            secure(self._client, broker)
            self._client.connect(*address, clean_start=not session_s, properties=properties)
            while not self._subscribed:
                self._step(0.1)
                if time.monotonic() > deadline:
                    raise Lost(f"{self._address} did not answer in time")
        except OSError as error:
            raise Lost(explain(self._address, error)) from error
        except Ended as error:
            raise Lost(str(error)) from error
        except Lost:
            self.close()
            raise

    def _step(self, wait_s: float) -> None:
        result = self._client.loop(wait_s)
        if self._lost or result != MQTTErrorCode.MQTT_ERR_SUCCESS:
            raise Lost(self._lost or f"the connection to {self._address} ended")

    def _on_connect(
        self, client: Client, userdata: None, flags: ConnectFlags, reason: ReasonCode, properties: Properties | None
    ) -> None:
        self._answered = True
        if reason.is_failure:
            self._lost = f"{self._address} refused the connection: {reason}"
            return
        filters = topics.collector_filters(shared=self._shared)
        client.subscribe([(topic, SubscribeOptions(qos)) for topic, qos in filters])

    def _on_subscribe(
        self, client: Client, userdata: None, packet_id: int, reasons: list[ReasonCode], properties: Properties | None
    ) -> None:
        refused = [str(reason) for reason in reasons if reason.is_failure]
        if refused:
            self._lost = f"{self._address} refused the subscription: {refused[0]}; check the broker's access rules"
        self._subscribed = True

    def _on_disconnect(
        self, client: Client, userdata: None, flags: DisconnectFlags, reason: ReasonCode, properties: Properties | None
    ) -> None:
        ended = f"the connection to {self._address} ended: {reason}"
        if self._tls and not self._answered:  # TLS 1.3 asks for the certificate when the handshake is over
            ended = f"{self._address} ended TLS before it answered; check --certificate-file and --key-file"
        self._lost = self._lost or ended

    def _on_message(self, client: Client, userdata: None, message: MQTTMessage) -> None:
        arrived = Message(message.topic, bytes(message.payload), time.time(), message.retain)
        self._waiting.append(Arrived(arrived, message.mid, message.qos))
