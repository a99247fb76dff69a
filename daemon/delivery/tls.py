"""TLS from a broker's files and URL; the broker's objection is recorded."""

import ssl
from collections.abc import Callable
from socket import socket
from typing import Any

from benchd.daemon.delivery.broker import Broker, Ended, words


def context(broker: Broker) -> "_NamedContext":
    """Return the TLS context of the broker's files; raise Ended naming a file that cannot be used."""
    found = _NamedContext(broker.host)
    if broker.ca_file:
        _load(found.load_verify_locations, ca_file=broker.ca_file)
    else:
        found.load_default_certs()
    if broker.certificate_file:
        _load(found.load_cert_chain, certificate_file=broker.certificate_file, key_file=broker.key_file)
    return found


def _load(load: Callable[..., None], **files: str | None) -> None:
    try:
        load(*files.values())
    except OSError as error:
        named = ", ".join(f"{name} {path}" for name, path in files.items() if path)
        raise Ended(f"cannot be used: {named}: {words(error)}") from error


class _ListeningSocket(ssl.SSLSocket):
    """TLS that records the broker's objection: version 1.3 sends it after the handshake, and paho drops it."""

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        try:
            return super().recv(buflen, flags)
        except ssl.SSLWantReadError:
            raise
        except ssl.SSLError as error:
            _, alert, objection = words(error).partition(" alert ")
            context: Any = self.context
            context.objection = f": {objection}" if alert else ""
            raise


class _NamedContext(ssl.SSLContext):
    """TLS that verifies the name in the URL, whichever address it resolved to."""

    sslsocket_class = _ListeningSocket
    objection = ""
    _name: str

    def __new__(cls, name: str) -> "_NamedContext":
        context = super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)
        context._name = name
        return context

    def wrap_socket(self, sock: socket, **options: Any) -> ssl.SSLSocket:  # type: ignore[override]
        wrapped = super().wrap_socket(sock, **options | {"server_hostname": self._name})
        try:
            wrapped.do_handshake()  # paho's own handshake would leave the socket open on failure
        except OSError:
            wrapped.close()
            raise
        return wrapped
