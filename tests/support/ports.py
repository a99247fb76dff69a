"""Ports of loopback, for tests and for the soaks, which have no pytest."""

import random
import socket
from contextlib import closing, suppress

HOST = "127.0.0.1"


def answers(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex((HOST, port)) == 0


def free_port() -> int:
    """Return a free port below those that the kernel hands out, so that no client takes it before its server does."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with closing(socket.socket()) as probe, suppress(OSError):
            probe.bind((HOST, port))
            return port
