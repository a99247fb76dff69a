"""A broker's address, credentials and TLS, from a URL and `[mqtt]`, and the reasons why it cannot be reached."""

import ipaddress
import os
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from socket import socket
from typing import Any
from urllib.parse import SplitResult, quote, unquote, urlsplit

from benchd.daemon.config import MqttConfig
from benchd.daemon.errors import UsageError
from benchd.daemon.machine.sysfs import text

PORTS = {"mqtt": 1883, "mqtts": 8883}
PASSWORD_VARIABLE = "BENCHD_MQTT_PASSWORD"  # noqa: S105 - the name of a variable
CREDENTIAL = "mqtt_password"
FORM = (
    "MQTT URL: expected mqtt://[USER[:PASSWORD]@]HOST[:PORT], or mqtts:// for TLS; write an IPv6 address in brackets, "
    "and / ? # @ in a user or password as %2F %3F %23 %40"
)
KEEP_ALIVE_S = 30
# subtracted because mosquitto only checks for dead links every 5 s, and must notice them within 1.5 keep-alives
LOOK_S = 3


@dataclass(frozen=True)
class Broker:
    """A broker's address and credentials. Its repr, `url` and `address` do not show the password."""

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
        """Return `host:port`, as used in messages."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """Return the URL without the password."""
        user = f"{quote(self.user, safe='')}@" if self.user else ""
        return f"{'mqtts' if self.tls else 'mqtt'}://{user}{self.address}"


def parse_url(url: str) -> Broker:
    """Return the broker at `mqtt[s]://[user[:password]@]host[:port]`; raise UsageError for any other URL.

    For a user without a password, the one in BENCHD_MQTT_PASSWORD is used, else the systemd unit's credential
    `mqtt_password`. The error message never quotes the URL, because it may contain a password.
    """
    try:
        parts = urlsplit(url)
        host, port = _host(parts), parts.port
    except ValueError:
        raise UsageError(FORM) from None
    is_named = bool(parts.username) or parts.password is None
    if (
        parts.scheme not in PORTS
        or port == 0
        or not is_named
        or parts.path + parts.query + parts.fragment not in ("", "/")
    ):
        raise UsageError(FORM)
    user = unquote(parts.username) if parts.username else None
    password = unquote(parts.password) if parts.password is not None else _password() if user else None
    return Broker(host, port or PORTS[parts.scheme], parts.scheme == "mqtts", user, password)


def configured(url: str, given: MqttConfig) -> Broker:
    """Return the broker at a URL with the TLS files of `[mqtt]` and a keep-alive that satisfies its `keep_alive_s`."""
    return replace(
        parse_url(url),
        ca_file=given.ca_file,
        certificate_file=given.certificate_file,
        key_file=given.key_file,
        keep_alive_s=given.keep_alive_s - LOOK_S,
    )


def _password() -> str | None:
    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    return os.environ.get(PASSWORD_VARIABLE) or (text(Path(folder, CREDENTIAL)) if folder else None)


def _host(parts: SplitResult) -> str:
    host = parts.hostname or ""
    if "[" in parts.netloc:
        return str(ipaddress.IPv6Address(unquote(host)))
    name = host.encode("idna").decode()
    if not re.fullmatch(r"[\w.-]+", name, re.ASCII):
        raise ValueError("not a name or address")
    return name


class ConnectionEnded(Exception):
    """The connection is no longer usable; the message gives the reason in one sentence."""


def explain(address: str, error: OSError | None) -> str:
    """Return a message that explains why a broker cannot be reached; `error` is None after a timeout."""
    if error is None or isinstance(error, TimeoutError):
        return f"{address} did not answer in time"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"this system does not trust the certificate of {address}: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"{address} does not speak TLS as expected: {words(error)}"
    return f"cannot reach {address}: {words(error)}"


def words(error: OSError) -> str:
    """Return the system's or OpenSSL's text for this error."""
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    return error.strerror or str(error)


def tls_context(broker: Broker) -> ssl.SSLContext:
    """Return the TLS context for the broker's files; raise ConnectionEnded with the name of an unusable one."""
    context = _Context(ssl.PROTOCOL_TLS_CLIENT)
    if broker.ca_file:
        _load(context.load_verify_locations, ca_file=broker.ca_file)
    else:
        context.load_default_certs()
    if broker.certificate_file:
        _load(context.load_cert_chain, certificate_file=broker.certificate_file, key_file=broker.key_file)
    return context


class _Context(ssl.SSLContext):
    """A TLS context that performs the handshake immediately: paho's own would leave the socket open on failure."""

    def wrap_socket(self, sock: socket, **options: Any) -> ssl.SSLSocket:  # type: ignore[override]
        wrapped = super().wrap_socket(sock, **options)
        try:
            wrapped.do_handshake()
        except OSError:
            wrapped.close()
            raise
        return wrapped


def _load(load: Callable[..., None], **files: str | None) -> None:
    try:
        load(*files.values())
    except OSError as error:
        named = ", ".join(f"{name} {path}" for name, path in files.items() if path)
        raise ConnectionEnded(f"cannot be used: {named}: {words(error)}") from error
