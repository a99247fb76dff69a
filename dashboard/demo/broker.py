"""An in-memory broker for `benchd demo`: the part of MQTT 5 that benchd's own processes use.

QoS 0 and 1, retained messages, wills. A session ends with its connection, a shared subscription is a plain one, and
properties of a publication are forwarded unchanged. Names follow the OASIS standard, version 5.0.
"""

import asyncio
import itertools
import re
import uuid
from contextlib import suppress
from typing import NamedTuple

HOST = "127.0.0.1"
CONNECT, CONNACK, PUBLISH, PUBACK, SUBSCRIBE, SUBACK = 1, 2, 3, 4, 8, 9
PINGREQ, PINGRESP, DISCONNECT = 12, 13, 14
VERSION = 5
SESSION_EXPIRY, ASSIGNED_CLIENT_ID, MAXIMUM_QOS = b"\x11", b"\x12", b"\x24"
MAX_PACKET_BYTES = 2**21


class _Malformed(Exception):
    """A packet that this broker rejects; its connection ends."""


class _Message(NamedTuple):
    """A publication: `rest` is its properties and its payload, unchanged."""

    topic: str
    qos: int
    rest: bytes


class _Fields:
    """The fields of a packet, taken from its front."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def __bool__(self) -> bool:
        return bool(self._body)

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        if count > len(self._body):
            raise _Malformed
        taken, self._body = self._body[:count], self._body[count:]
        return taken

    def number(self, count: int) -> int:
        """Return the next big-endian integer of `count` bytes."""
        return int.from_bytes(self.take(count), "big")

    def data(self) -> bytes:
        """Return the next binary data or UTF-8 text: two bytes of length, then that many bytes."""
        return self.take(self.number(2))

    def properties(self) -> bytes:
        """Return the next properties without their length."""
        length = shift = 0
        while (byte := self.number(1)) & 0x80:
            length |= (byte & 0x7F) << shift
            shift += 7
        return self.take(length | byte << shift)

    def rest(self) -> bytes:
        """Return the rest."""
        return self.take(len(self._body))


class Broker:
    """Serves connections on the loopback interface from `start` to `close`, in the loop that runs it."""

    def __init__(self) -> None:
        self._connections: dict[str, _Connection] = {}
        self._retained: dict[str, _Message] = {}
        self._attending: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """Begin to listen and return the port."""
        self._server = await asyncio.start_server(self._begin, HOST, 0, limit=MAX_PACKET_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """End every connection."""
        self._server.close()
        for connection in list(self._connections.values()):
            connection.writer.close()
        await asyncio.gather(*self._attending)

    async def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._attend(reader, writer))
        self._attending.add(task)
        task.add_done_callback(self._attending.discard)

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(reader, writer)
        with suppress(_Malformed, OSError, EOFError, UnicodeDecodeError, TimeoutError, asyncio.TimeoutError):
            await connection.open()
            former, self._connections[connection.client_id] = self._connections.get(connection.client_id), connection
            if former:
                former.writer.close()
            await self._listen(connection)
        if self._connections.get(connection.client_id) is connection:
            del self._connections[connection.client_id]
        if connection.will:
            self._publish(*connection.will)
        writer.close()

    async def _listen(self, connection: "_Connection") -> None:
        while True:
            kind, flags, fields = await connection.packet()
            if kind == PUBLISH:
                self._publish(*connection.published(flags, fields))
            elif kind == SUBSCRIBE:
                self._subscribe(connection, fields)
            elif kind == PINGREQ:
                connection.send(PINGRESP, b"")
            elif kind == DISCONNECT:
                if not fields or fields.number(1) == 0:
                    connection.will = None
                return
            elif kind != PUBACK:
                raise _Malformed

    def _publish(self, message: _Message, retain: bool) -> None:
        if retain:
            self._retain(message)
        for connection in self._connections.values():
            connection.deliver(message, connection.filters, retained=False)

    def _retain(self, message: _Message) -> None:
        fields = _Fields(message.rest)
        fields.properties()
        if fields:
            self._retained[message.topic] = message
        else:
            self._retained.pop(message.topic, None)

    def _subscribe(self, connection: "_Connection", fields: _Fields) -> None:
        new = connection.subscribed(fields)
        for message in self._retained.values():
            connection.deliver(message, new, retained=True)


class _Connection:
    """One client: its subscriptions, and its will until it disconnects."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.client_id = uuid.uuid4().hex
        self.filters: dict[str, int] = {}
        self.will: tuple[_Message, bool] | None = None
        self._reader = reader
        self._patience_s: float | None = 10.0
        self._packet_ids = itertools.cycle(range(1, 65536))

    async def open(self) -> None:
        """Receive the CONNECT packet and answer it."""
        kind, _, fields = await self.packet()
        if kind != CONNECT or (fields.data(), fields.number(1)) != (b"MQTT", VERSION):
            raise _Malformed
        flags, keep_alive_s = fields.number(1), fields.number(2)
        fields.properties()
        self.client_id = fields.data().decode() or self.client_id
        self._patience_s = 1.5 * keep_alive_s or None
        if flags & 0x04:
            fields.properties()  # properties of the will, such as a delay
            will = _Message(fields.data().decode(), (flags >> 3) & 1, b"\0" + fields.data())
            self.will = (will, bool(flags & 0x20))
        said = SESSION_EXPIRY + bytes(4) + MAXIMUM_QOS + b"\x01" + ASSIGNED_CLIENT_ID + _data(self.client_id)
        self.send(CONNACK, b"\0\0" + _length(len(said)) + said)

    async def packet(self) -> tuple[int, int, _Fields]:
        """Return the next packet's type, flags and fields; a client that is silent for too long is dropped."""
        return await asyncio.wait_for(self._packet(), self._patience_s)

    async def _packet(self) -> tuple[int, int, _Fields]:
        (first,) = await self._reader.readexactly(1)
        length = shift = 0
        while (byte := (await self._reader.readexactly(1))[0]) & 0x80:
            length |= (byte & 0x7F) << shift
            shift += 7
        length |= byte << shift
        if length > MAX_PACKET_BYTES:
            raise _Malformed
        return first >> 4, first & 0x0F, _Fields(await self._reader.readexactly(length))

    def send(self, kind: int, body: bytes, flags: int = 0) -> None:
        """Send one packet."""
        self.writer.write(bytes([kind << 4 | flags]) + _length(len(body)) + body)

    def published(self, flags: int, fields: _Fields) -> tuple[_Message, bool]:
        """Return what the client publishes and whether to retain it, and acknowledge it."""
        topic, qos = fields.data().decode(), (flags >> 1) & 3
        if qos > 1 or not topic:  # MAXIMUM_QOS and the missing maximum of topic aliases announced this
            raise _Malformed
        if qos:
            self.send(PUBACK, fields.take(2))
        return _Message(topic, qos, fields.rest()), bool(flags & 1)

    def subscribed(self, fields: _Fields) -> dict[str, int]:
        """Return the filters that the client has added, each with its QoS."""
        packet_id, new = fields.take(2), dict[str, int]()
        fields.properties()
        while fields:
            wanted = fields.data().decode()
            shared = wanted.startswith("$share/")
            new[wanted.split("/", 2)[2] if shared else wanted] = min(fields.number(1) & 3, 1)
        self.filters |= new
        self.send(SUBACK, packet_id + b"\0" + bytes(new.values()))
        return new

    def deliver(self, message: _Message, filters: dict[str, int], *, retained: bool) -> None:
        """Send a message that matches one of `filters`."""
        granted = [qos for wanted, qos in filters.items() if _takes(wanted, message.topic)]
        if granted:
            qos = min(max(granted), message.qos)
            packet_id = next(self._packet_ids).to_bytes(2, "big") if qos else b""
            self.send(PUBLISH, _data(message.topic) + packet_id + message.rest, qos << 1 | retained)


def _takes(wanted: str, topic: str) -> bool:
    """Return whether a filter matches a topic; `#` also matches its parent level."""
    pattern = re.escape(wanted).replace(r"\+", "[^/]*").replace(r"/\#", "(/.*)?").replace(r"\#", ".*")
    return re.fullmatch(pattern, topic, re.DOTALL) is not None


def _data(text: str) -> bytes:
    return len(text.encode()).to_bytes(2, "big") + text.encode()


def _length(count: int) -> bytes:
    """Return a variable byte integer."""
    if count < 0x80:
        return bytes([count])
    return bytes([count & 0x7F | 0x80]) + _length(count >> 7)
