"""A proxy between MQTT clients and a broker that cuts, stalls and replays as its test wants, on loopback."""

import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

from broker import HOST, RunningBroker

CONNECT, CONNACK, PUBLISH, PUBACK = 1, 2, 3, 4
REFUSAL_OF_5 = b"\x20\x02\x00\x01"
TICK_S = 0.02


class Cut(Exception):
    """A fault raises it to end the connection."""


class Wire:
    """One client's connection and the one behind it. One that is stalled passes nothing on and never ends by itself."""

    def __init__(self, client: socket.socket, broker: socket.socket, *, stalled: bool) -> None:
        self.client, self.broker, self.stalled = client, broker, stalled

    def shut(self) -> None:
        for end in (self.client, self.broker):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


Fault = Callable[[Wire, bytes, bool], None]


def forward(wire: Wire, packet: bytes, up: bool) -> None:
    """Pass a packet on, `up` to the broker; what a fault does with those that it leaves alone."""
    (wire.broker if up else wire.client).sendall(packet)


def kind(packet: bytes) -> int:
    return packet[0] >> 4


def refuse_5(wire: Wire, packet: bytes, up: bool) -> None:
    """Know MQTT 3.1.1 only."""
    if up and _is_of_5(packet):
        wire.client.sendall(REFUSAL_OF_5)
    cut_5(wire, packet, up)


def cut_5(wire: Wire, packet: bytes, up: bool) -> None:
    """Know MQTT 3.1.1 only, and hang up on all else."""
    if up and _is_of_5(packet):
        raise Cut
    forward(wire, packet, up)


def _is_of_5(packet: bytes) -> bool:
    return kind(packet) == CONNECT and packet[packet.index(b"MQTT") + 4] == 5


def share_nothing(wire: Wire, packet: bytes, up: bool) -> None:
    """Say as a broker of MQTT 5 may that there are no shared subscriptions."""
    if kind(packet) == CONNACK:
        size, properties = packet[1], packet[4]  # a byte each: a CONNACK is short
        packet = bytes([packet[0], size + 2, *packet[2:4], properties + 2, 0x2A, 0, *packet[5:]])
    forward(wire, packet, up)


class Proxy:
    """Passes on what comes, packet by packet, through `fault`; `url` is where clients connect."""

    def __init__(self, broker: RunningBroker, fault: Fault) -> None:
        self.fault, self._broker, self._stalling = fault, broker, False
        self._wires: list[Wire] = []
        self._threads: list[threading.Thread] = []
        self._server = socket.create_server((HOST, 0))
        self.port = int(self._server.getsockname()[1])
        self.url = f"mqtt://{HOST}:{self.port}"
        self._start(self._accept)

    def stall(self) -> None:
        """Be half-open: take connections and pass on nothing, without a word to either end."""
        self._stalling = True
        for wire in self._wires:
            wire.stalled = True

    def heal(self) -> None:
        """Pass on what comes on new connections, and end the stalled ones."""
        self._stalling = False
        self.cut()

    def cut(self) -> None:
        for wire in self._wires:
            wire.shut()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self.cut()
        for thread in self._threads:
            thread.join()
        for wire in self._wires:
            wire.client.close()
            wire.broker.close()
        self._server.close()

    def _start(self, target: Callable[..., None], *given: Wire) -> None:
        thread = threading.Thread(target=target, args=given)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            try:
                broker = socket.create_connection((self._broker.host, self._broker.port))
            except OSError:
                client.close()
                continue
            wire = Wire(client, broker, stalled=self._stalling)
            self._wires.append(wire)
            self._start(self._carry, wire)

    def _carry(self, wire: Wire) -> None:
        coming = {wire.client: bytearray(), wire.broker: bytearray()}
        with suppress(OSError, Cut):
            while not wire.stalled:
                for source in select.select(list(coming), [], [], TICK_S)[0]:
                    data = source.recv(65536)
                    if not data:
                        raise Cut
                    coming[source] += data
                    for packet in _packets(coming[source]):
                        self.fault(wire, packet, source is wire.client)
        if not wire.stalled:
            wire.shut()


def _packets(buffer: bytearray) -> Iterator[bytes]:
    """Take the whole packets off the front of what has come."""
    while (size := _size(buffer)) and len(buffer) >= size:
        packet = bytes(buffer[:size])
        del buffer[:size]
        yield packet


def _size(buffer: bytearray) -> int | None:
    """Return how many bytes the first packet has, None where its header is not whole."""
    rest = 0
    for place, byte in enumerate(buffer[1:5]):
        rest |= (byte & 127) << 7 * place
        if byte < 128:
            return 2 + place + rest
    return None


@contextmanager
def proxying(broker: RunningBroker, fault: Fault = forward) -> Iterator[Proxy]:
    """Stand before a broker over the block."""
    with closing(Proxy(broker, fault)) as proxy:
        yield proxy
