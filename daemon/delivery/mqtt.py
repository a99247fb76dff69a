"""Deliver an outbox to an MQTT broker: version 5, or 3.1.1 where the broker knows no more.

paho is driven by the caller's thread and holds only what is on its way. A message counts as sent when its
acknowledgement says so: paho calls one published that the broker has refused. 3.1.1 has no such reasons, so a broker
that drops what it does not permit cannot be told from one that keeps it.
"""

import ipaddress
import math
import os
import re
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import SplitResult, quote, unquote, urlsplit

import msgspec
from paho.mqtt.client import Client, ConnectFlags, DisconnectFlags, MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties, VariableByteIntegers
from paho.mqtt.reasoncodes import ReasonCode

from benchd.daemon.config import MqttConfig
from benchd.daemon.delivery.outbox import Outbox, Row
from benchd.daemon.errors import UsageError
from benchd.daemon.machine.sysfs import text

PORTS = {"mqtt": 1883, "mqtts": 8883}
PASSWORD_VARIABLE = "BENCHD_MQTT_PASSWORD"  # noqa: S105 - the name of a variable
CREDENTIAL = "mqtt_password"
WINDOW = 64  # messages on their way at once; a broker may ask for fewer
KEEP_ALIVE_S = 30
LOOK_S = 3  # taken off it: mosquitto looks for dead links every 5 s, and they are to show after one and a half of it
MAX_INCOMING_BYTES = 128 * 1024

UNSPECIFIED = 0x80  # also paho's word for a connection that just went away
UNSUPPORTED_PROTOCOL_VERSION, BAD_CREDENTIALS, NOT_AUTHORIZED, QUOTA_EXCEEDED = 0x84, 0x86, 0x87, 0x97


@dataclass(frozen=True)
class Broker:
    """Where a broker listens and as whom to connect. Neither its repr nor `url` and `address` show the password."""

    host: str
    port: int
    tls: bool = False
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None
    keep_alive_s: int = KEEP_ALIVE_S

    @property
    def address(self) -> str:
        """Return `host:port`, as messages name it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """Return the URL without the password."""
        user = f"{quote(self.user, safe='')}@" if self.user else ""
        return f"{'mqtts' if self.tls else 'mqtt'}://{user}{self.address}"


def parse_url(url: str) -> Broker:
    """Return the broker of `mqtt[s]://[user[:password]@]host[:port]`; raise UsageError that names the wrong part.

    A user without a password takes the one in BENCHD_MQTT_PASSWORD, else the credential `mqtt_password` of the systemd
    unit. No message quotes what may hold a password.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        raise _wrong("host", "no name or address; an IPv6 one stands in brackets, as in [::1]") from None
    if parts.scheme not in PORTS:
        raise _wrong("scheme", "expected mqtt://HOST[:PORT] or mqtts://HOST[:PORT]")
    _refuse_path(parts)
    user, password = _credentials(parts)
    return Broker(_host(parts), _port(parts), parts.scheme == "mqtts", user, password)


def configured(url: str, given: MqttConfig) -> Broker:
    """Return the broker of a URL with the files of `[mqtt]`, and with a keep-alive that makes its own come true."""
    return replace(
        parse_url(url),
        ca_file=given.ca_file,
        certificate_file=given.certificate_file,
        key_file=given.key_file,
        keep_alive_s=given.keep_alive_s - LOOK_S,
    )


def _wrong(part: str, what: str) -> UsageError:
    return UsageError(f"MQTT URL, {part}: {what}")


def _refuse_path(parts: SplitResult) -> None:
    tail = parts.path + parts.query + parts.fragment
    if "@" in tail:
        raise _wrong("user or password", "write / ? and # in them as %2F, %3F and %23")
    if tail not in ("", "/"):
        raise _wrong("path", "none is allowed; the topics are fixed")


def _port(parts: SplitResult) -> int:
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise _wrong("port", "expected a number from 1 to 65535")
    return port or PORTS[parts.scheme]


def _credentials(parts: SplitResult) -> tuple[str | None, str | None]:
    if parts.password and not parts.username:
        raise _wrong("user", "missing before the password")
    if not parts.username:
        return None, None
    password = _password() if parts.password is None else unquote(parts.password)
    return unquote(parts.username), password


def _password() -> str | None:
    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    return os.environ.get(PASSWORD_VARIABLE) or (text(Path(folder, CREDENTIAL)) if folder else None)


def _host(parts: SplitResult) -> str:
    host = parts.hostname or ""
    try:
        if "[" in parts.netloc:
            return str(ipaddress.IPv6Address(unquote(host)))
        name = host.encode("idna").decode()
    except ValueError:
        name = ""
    if not re.fullmatch(r"[\w.-]+", name, re.ASCII):
        raise _wrong("host", f"{host!r} is no name or address")
    return name


class DrainReport(NamedTuple):
    """What came of one attempt. `left` are still pending; `reason` says why not all were sent, else it is None."""

    sent: int
    refused: int
    left: int
    reason: str | None


def drain(outbox: Outbox, broker: Broker, client_id: str, timeout_s: float) -> DrainReport:
    """Send what is pending, in order and each at most once, and return within `timeout_s` what came of it.

    Whatever the network or the broker does is a reason in the report, never an exception.
    """
    deadline = time.monotonic() + timeout_s
    sender = Sender(outbox)
    if outbox.counts().pending:
        try:
            with closing(connect(broker, client_id, deadline)) as session:
                sender.send_all(session)
        except Ended as end:
            sender.reason = str(end)
    return DrainReport(sender.sent, sender.refused, outbox.counts().pending, sender.reason)


class Ended(Exception):
    """The connection is of no more use; the message is the reason in one sentence."""


class _OldBroker(Ended):
    """The broker does not know this version of MQTT."""


class Unsendable(Exception):
    """A message that the broker can never take."""


class Sender:
    """Moves rows from the outbox to a session and their acknowledgements back.

    `awaits_storage` says of which rows a broker's word is not the last one.
    """

    def __init__(self, outbox: Outbox, awaits_storage: Callable[[Row], bool] = lambda row: False) -> None:
        self._outbox, self._awaits_storage = outbox, awaits_storage
        self._waiting: dict[int, Row] = {}  # by packet id
        self._last_seq = 0  # each is sent once a session, also where it stays pending
        self.stopped = False
        self.sent = self.refused = 0
        self.reason: str | None = None

    @property
    def waiting(self) -> int:
        """Return how many messages are on their way."""
        return len(self._waiting)

    def send_all(self, session: "Session") -> None:
        """Send what is pending and wait for the last acknowledgement."""
        while True:
            self.fill(session)
            if not self._waiting:
                return
            session.step()
            self.settle(session)

    def fill(self, session: "Session") -> None:
        """Send what is pending, in order, as far as the window allows."""
        while not self.stopped and (free := session.free) > 0:
            rows = self._outbox.pending(free, after=self._last_seq)
            if not rows:
                return
            self._last_seq = rows[-1].seq
            for row in rows:
                self._send(session, row)

    def begin_again(self) -> None:
        """Look at pending messages from the first on, those included that were sent and are pending once more."""
        self._last_seq = 0

    def _send(self, session: "Session", row: Row) -> None:
        try:
            self._waiting[session.publish(row)] = row
        except Unsendable as error:
            self._refuse(row.seq, str(error))

    def settle(self, session: "Session") -> None:
        """Take the acknowledgements that have come, in one commit."""
        sent = []
        for packet_id, reason in session.take_acknowledged():
            row = self._waiting.pop(packet_id, None)
            if row is None:  # not one of ours
                continue
            if reason.value == QUOTA_EXCEEDED:
                self.stopped, self.reason = True, f"{session.address} takes no more for now: {reason}"
            elif reason.is_failure:
                self._refuse(row.seq, f"{session.address} refused it: {reason}")
            else:
                sent.append(row)
        for unstored in (False, True):
            seqs = [row.seq for row in sent if self._awaits_storage(row) == unstored]
            if seqs:
                self._outbox.mark_sent(*seqs, at_s=time.time(), unstored=unstored)
        self.sent += len(sent)

    def _refuse(self, seq: int, reason: str) -> None:
        self._outbox.mark_refused(seq, reason)
        self.refused += 1
        self.reason = self.reason or reason


def connect(
    broker: Broker, client_id: str, deadline: float, prepare: Callable[[Client], None] = lambda client: None
) -> "Session":
    """Return a session that the broker has accepted by the monotonic time `deadline`; raise Ended with the reason.

    `prepare` sets what has to be known before connecting, such as a will.
    """
    try:
        return Session(broker, client_id, MQTTProtocolVersion.MQTTv5, deadline, prepare)
    except _OldBroker:
        return Session(broker, client_id, MQTTProtocolVersion.MQTTv311, deadline, prepare)


def secure(client: Client, broker: Broker) -> None:
    """Make a client speak TLS where the broker does; raise Ended for a file that cannot be used."""
    if broker.tls:
        client.tls_set_context(_context(broker))


class Session:
    """One connection to a broker. Nothing happens between two calls; callbacks only take notes."""

    def __init__(
        self,
        broker: Broker,
        client_id: str,
        protocol: MQTTProtocolVersion,
        deadline: float,
        prepare: Callable[[Client], None],
    ) -> None:
        self.address = broker.address
        self.window = WINDOW
        self._broker, self._deadline = broker, deadline
        self._max_packet_bytes: int | None = None
        self._answer: ReasonCode | None = None
        self._lost: str | None = None
        self._acknowledged: list[tuple[int, ReasonCode]] = []
        self._received: list[MQTTMessage] = []
        self._unanswered: set[int] = set()  # packet ids; a QoS of 0 has no answer
        self._subscribing: set[int] = set()
        self._tls = _context(broker) if broker.tls else None
        self._client = _client(broker, client_id, protocol)
        if self._tls:
            self._client.tls_set_context(self._tls)
        self._limits = _limits() if protocol == MQTTProtocolVersion.MQTTv5 else None
        self._client.on_message = self._on_message
        self._client.on_subscribe = self._on_subscribe
        prepare(self._client)
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
        """Return how many more messages may be on their way."""
        return self.window - len(self._unanswered)

    def endure(self) -> None:
        """Last from now on as long as the connection does."""
        self._deadline = math.inf

    def step(self, wake: socket.socket | None = None) -> None:
        """Wait for the network, at most a second, and take note of what came; `wake` ends the wait when readable.

        Raises Ended when the connection or the time is over.
        """
        if self._lost:
            raise Ended(self._lost)
        connection: Any = self._client.socket()
        buffered = isinstance(connection, ssl.SSLSocket) and connection.pending() > 0
        wait_s = 0.0 if buffered else min(self._remaining_s(), 1.0)
        writers = [connection] if self._client.want_write() else []
        readers = [connection] if wake is None else [connection, wake]
        readable, writable, _ = select.select(readers, writers, [], wait_s)
        try:
            if connection in readable or buffered:
                self._client.loop_read()
            if writable:
                self._client.loop_write()
            self._client.loop_misc()
        except Exception as error:  # whatever paho trips over in a packet
            raise Ended(f"{self.address} does not speak MQTT: {error}") from error

    def publish(self, row: Row) -> int:
        """Hand one message over and return its packet id; raise Unsendable or Ended."""
        return self.say(row.topic, row.body, row.qos)

    def say(
        self,
        topic: str,
        body: bytes,
        qos: int,
        *,
        retain: bool = False,
        correlation: bytes | None = None,
        expire_s: int | None = None,
    ) -> int:
        """Hand over a message that no outbox knows and return its packet id; raise Unsendable or Ended."""
        properties = _properties(body)
        if correlation is not None:
            properties.CorrelationData = correlation
        if expire_s is not None:
            properties.MessageExpiryInterval = expire_s
        size = _packet_bytes(topic, body, properties)
        if self._max_packet_bytes is not None and size > self._max_packet_bytes:
            raise Unsendable(f"{size} bytes, and {self.address} takes packets of at most {self._max_packet_bytes}")
        try:
            info = self._client.publish(topic, body, qos, retain, properties)
        except ValueError as error:
            raise Unsendable(f"not an MQTT message: {error}") from error
        if info.rc != MQTTErrorCode.MQTT_ERR_SUCCESS:
            raise Ended(self._lost or f"the connection to {self.address} ended")
        if qos:
            self._unanswered.add(info.mid)
        return info.mid

    def subscribe(self, *topics: str) -> None:
        """Ask for these topics and wait for the broker's answer; raise Ended where it does not give them."""
        _, packet_id = self._client.subscribe([(topic, 1) for topic in topics])
        if packet_id is not None:
            self._subscribing.add(packet_id)
        while self._subscribing:
            self.step()

    def take_received(self) -> list[MQTTMessage]:
        """Return what the broker has sent since the last call."""
        taken, self._received = self._received, []
        return taken

    def take_acknowledged(self) -> list[tuple[int, ReasonCode]]:
        """Return the packet ids that were answered since the last call, with the broker's reason."""
        taken, self._acknowledged = self._acknowledged, []
        return taken

    def close(self) -> None:
        """Say goodbye, where the broker still takes it, and let go of the socket."""
        self._client.disconnect()
        connection: Any = self._client.socket()
        if connection is not None:  # the goodbye waits behind what the broker does not take
            connection.close()

    def _open(self) -> None:
        self._reach(_addresses(self._broker, self._remaining_s()))
        # of brokers that know no version 5 some say nothing at all: half of the time is for the older one
        least_s = self._remaining_s() / 2 if self._limits else 0.0
        while self._answer is None:
            self.step()
            if self._answer is None and self._remaining_s() < least_s:
                raise _OldBroker(f"{self.address} did not answer in time")
        if self._answer.value == UNSUPPORTED_PROTOCOL_VERSION:
            raise _OldBroker(f"{self.address} knows neither MQTT 5 nor 3.1.1")
        if self._answer.is_failure:
            check = self._answer.value in (BAD_CREDENTIALS, NOT_AUTHORIZED)
            remedy = f"; check the user and the password in the URL or {PASSWORD_VARIABLE}" if check else ""
            raise Ended(f"{self.address} refused the connection: {self._answer}{remedy}")

    def _reach(self, addresses: list[str]) -> None:
        """Connect to the first address that answers; they share the time, and TLS takes as long again."""
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
            self._client.connect(address, self._broker.port, self._broker.keep_alive_s, properties=self._limits)
        except OSError as error:
            return error
        return None

    def _remaining_s(self) -> float:
        remaining_s = self._deadline - time.monotonic()
        if remaining_s <= 0 and self._answer:
            raise Ended(f"time was up before {self.address} had acknowledged everything")
        if remaining_s <= 0:
            raise Ended(f"{self.address} did not answer in time")
        return remaining_s

    def _on_connect(
        self, client: Client, userdata: None, flags: ConnectFlags, reason: ReasonCode, properties: Properties | None
    ) -> None:
        self._answer = reason
        self.window = min(WINDOW, getattr(properties, "ReceiveMaximum", WINDOW))
        self._max_packet_bytes = getattr(properties, "MaximumPacketSize", None)

    def _on_disconnect(
        self, client: Client, userdata: None, flags: DisconnectFlags, reason: ReasonCode, properties: Properties | None
    ) -> None:
        why = "" if reason.value == UNSPECIFIED else f": {reason}"
        self._lost = f"the connection to {self.address} ended{why}"
        if self._tls and self._answer is None:
            objection = self._tls.objection
            self._lost = f"{self.address} ended TLS before it answered{objection}; check certificate_file and key_file"

    def _on_publish(
        self, client: Client, userdata: None, packet_id: int, reason: ReasonCode, properties: Properties | None
    ) -> None:
        if packet_id in self._unanswered:
            self._unanswered.remove(packet_id)
            self._acknowledged.append((packet_id, reason))

    def _on_message(self, client: Client, userdata: None, message: MQTTMessage) -> None:
        self._received.append(message)

    def _on_subscribe(
        self, client: Client, userdata: None, packet_id: int, reasons: list[ReasonCode], properties: Properties | None
    ) -> None:
        self._subscribing.discard(packet_id)
        refused = next((reason for reason in reasons if reason.is_failure), None)
        if refused:
            self._lost = f"{self.address} refused a subscription: {refused}"


class _CuttingClient(Client):
    """paho, which would gather a packet of up to 256 MB: version 3.1.1 has no word for a limit, and brokers may err.

    The rest of what is too large is read and dropped; what is kept of it is still more than anyone takes.
    """

    def _sock_recv(self, bufsize: int) -> bytes:
        del self._in_packet["packet"][MAX_INCOMING_BYTES:]
        return super()._sock_recv(min(bufsize, MAX_INCOMING_BYTES))


def _client(broker: Broker, client_id: str, protocol: MQTTProtocolVersion) -> Client:
    client = _CuttingClient(CallbackAPIVersion.VERSION2, client_id, protocol=protocol, reconnect_on_failure=False)
    client.max_inflight_messages = WINDOW
    client.username_pw_set(broker.user, broker.password)
    return client


def _context(broker: Broker) -> "_NamedContext":
    """Return what the broker's TLS files say; raise Ended that names one that cannot be used."""
    context = _NamedContext(broker.host)
    if broker.ca_file:
        _load(context.load_verify_locations, ca_file=broker.ca_file)
    else:
        context.load_default_certs()
    if broker.certificate_file:
        _load(context.load_cert_chain, certificate_file=broker.certificate_file, key_file=broker.key_file)
    return context


def _load(load: Callable[..., None], **files: str | None) -> None:
    try:
        load(*files.values())
    except OSError as error:
        named = ", ".join(f"{name} {path}" for name, path in files.items() if path)
        raise Ended(f"cannot be used: {named}: {_words(error)}") from error


def _limits() -> Properties:
    """Return what a broker of version 5 is told: no message of that size reaches us."""
    properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
    properties.MaximumPacketSize = MAX_INCOMING_BYTES
    return properties


class _ListeningSocket(ssl.SSLSocket):
    """TLS that keeps what the broker objects to: version 1.3 says it after the handshake, and paho drops it."""

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        try:
            return super().recv(buflen, flags)
        except ssl.SSLWantReadError:
            raise
        except ssl.SSLError as error:
            _, alert, words = _words(error).partition(" alert ")
            context: Any = self.context
            context.objection = f": {words}" if alert else ""
            raise


class _NamedContext(ssl.SSLContext):
    """TLS that asks for the name in the URL, whichever address it led to."""

    sslsocket_class = _ListeningSocket
    objection = ""
    _name: str

    def __new__(cls, name: str) -> "_NamedContext":
        context = super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)
        context._name = name
        return context

    def wrap_socket(self, sock: socket.socket, **options: Any) -> ssl.SSLSocket:  # type: ignore[override]
        wrapped = super().wrap_socket(sock, **options | {"server_hostname": self._name})
        try:
            wrapped.do_handshake()  # paho's own would leave the socket open when it fails
        except OSError:
            wrapped.close()
            raise
        return wrapped


def _addresses(broker: Broker, timeout_s: float) -> list[str]:
    """Return the addresses of the broker's host; raise Ended if there are none or the resolver takes too long.

    The system's resolver cannot be interrupted, so it gets a thread that ends with its answer.
    """
    found: list[str] = []
    failure: list[OSError] = []

    def look_up() -> None:
        try:
            for *_, address in socket.getaddrinfo(broker.host, broker.port, type=socket.SOCK_STREAM):
                # the address alone would lose the interface of a link-local one
                found.append(socket.getnameinfo(address, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0])
        except OSError as error:
            failure.append(error)

    thread = threading.Thread(target=look_up, name="benchd.resolve", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not found:
        raise Ended(explain(broker.address, failure[0] if failure else None))
    return found


def explain(address: str, error: OSError | None) -> str:
    """Return in one sentence why a broker cannot be reached; None stands for one that takes too long."""
    if error is None or isinstance(error, TimeoutError):
        return f"{address} did not answer in time"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"this system does not trust the certificate of {address}: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"{address} does not speak TLS as expected: {_words(error)}"
    return f"cannot reach {address}: {_words(error)}"


def _words(error: OSError) -> str:
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    return error.strerror or str(error)


def _properties(body: bytes) -> Properties:
    """Return what MQTT 5 says beside a message: its content type and its schema."""
    properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
    properties.ContentType = "application/json"
    with suppress(msgspec.DecodeError):
        properties.UserProperty = ("schema", msgspec.json.decode(body, type=_Header).schema)
    return properties


class _Header(msgspec.Struct):
    schema: str


def _packet_bytes(topic: str, body: bytes, properties: Properties) -> int:
    """Return the size of a PUBLISH packet: topic, packet id, properties and body behind the fixed header."""
    properties_bytes = len(properties.pack())  # type: ignore[no-untyped-call]
    rest = 2 + len(topic.encode()) + 2 + properties_bytes + len(body)
    return 1 + len(VariableByteIntegers.encode(rest)) + rest  # type: ignore[no-untyped-call]
