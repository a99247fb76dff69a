"""Receives the devices' messages over one connection; they are acknowledged explicitly, once they are stored safely."""

import time

from benchd.daemon.delivery import topics
from benchd.daemon.delivery.broker import Broker, ConnectionEnded
from benchd.daemon.delivery.connection import IncomingMessage, Terms, Unsendable, connect

BATCH = 256
BATCH_BYTES = 8 * 2**20
BATCH_S = 0.1  # maximum time that a batch waits for more messages
PAUSE_S = 0.02  # a batch ends after this time without a message
CONNECT_S = 10.0
MAX_PACKET_BYTES = 2**21  # a broker drops larger messages


class Feed:
    """A connection, for a single thread. Raises ConnectionEnded if it cannot be made, or ends.

    With `session_s`, the broker queues messages for this client id for that long after the connection has ended. Feeds
    in the same `group`, one per database and with an unguessable name, split the work. With MQTT 3.1.1 or a broker
    without shared subscriptions, each feed gets all messages. The store recognises duplicate results and events by
    their keys, but stores telemetry once for each collector.
    """

    def __init__(self, broker: Broker, client_id: str, session_s: int = 0, group: str = "") -> None:
        # twice, so that one batch is in transit while the other is being stored
        terms = Terms(keep_s=session_s, receive_maximum=2 * BATCH, max_packet_bytes=MAX_PACKET_BYTES)
        deadline = time.monotonic() + CONNECT_S
        self._connection = connect(broker, client_id, deadline, terms)
        try:
            self._connection.subscribe(topics.collector_filters(group if self._connection.shares else ""))
            self._connection.wait_subscribed(deadline)
        except ConnectionEnded:
            self.close()
            raise
        self._last = BATCH  # size of the last non-empty batch

    def batch(self, wait_s: float) -> list[IncomingMessage]:
        """Return the messages that have arrived, in order; empty if none came within `wait_s`."""
        self._connection.take_acknowledged()  # not needed: requested messages that do not arrive are requested again
        # these may include messages from before the answer to the subscription
        arrived = self._connection.take_received()
        arrived += self._more(0.0 if arrived else wait_s)
        deadline = time.monotonic() + BATCH_S
        # single messages are not held back, because some brokers wait for each acknowledgement
        pause_s = PAUSE_S if self._last > 1 else 0.0
        while 0 < len(arrived) < BATCH and time.monotonic() < deadline:
            if sum(len(message.body) for message in arrived) > BATCH_BYTES or not (more := self._more(pause_s)):
                break
            arrived += more
        self._last = len(arrived) or self._last
        return arrived

    def acknowledge(self, arrived: list[IncomingMessage]) -> None:
        """Acknowledge these messages, so that the broker can drop them."""
        self._connection.acknowledge(arrived)

    def publish(self, topic: str, body: bytes, expire_s: int | None = None) -> None:
        """Publish one message with QoS 1."""
        try:
            self._connection.publish(topic, body, 1, expire_s=expire_s)
        except Unsendable as error:
            raise ConnectionEnded(str(error)) from error

    def close(self) -> None:
        """Disconnect and close the socket."""
        self._connection.close()

    def _more(self, wait_s: float) -> list[IncomingMessage]:
        self._connection.turn(wait_s)
        return self._connection.take_received()
