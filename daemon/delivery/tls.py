"""TLS from a broker's files."""

import ssl
from collections.abc import Callable
from socket import socket
from typing import Any

from benchd.daemon.delivery.broker import Broker, Ended, words


def context(broker: Broker) -> ssl.SSLContext:
    """Return the TLS context of the broker's files; raise Ended naming a file that cannot be used."""
    made = _Context(ssl.PROTOCOL_TLS_CLIENT)
    if broker.ca_file:
        _load(made.load_verify_locations, ca_file=broker.ca_file)
    else:
        made.load_default_certs()
    if broker.certificate_file:
        _load(made.load_cert_chain, certificate_file=broker.certificate_file, key_file=broker.key_file)
    return made


class _Context(ssl.SSLContext):
    """TLS that shakes hands at once: paho's own handshake would leave the socket open on failure."""

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
        raise Ended(f"cannot be used: {named}: {words(error)}") from error
