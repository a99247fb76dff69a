"""Reports the service to systemd: its state over NOTIFY_SOCKET, if set, and its log.

Source: sd_notify(3). RELOADING includes the time, which `Type=notify-reload` requires and older versions ignore.
"""

import os
import socket
import sys
import time
from contextlib import suppress

LINE_CHARS = 1000


def log(line: str) -> None:
    """Write a line to stderr, which systemd stores in its journal."""
    sys.stderr.write(f"{_line(line)}\n")
    sys.stderr.flush()


class Notifier:
    """Sends state lines to systemd. Messages that systemd does not accept are lost, as sd_notify permits."""

    def __init__(self) -> None:
        path = os.environ.get("NOTIFY_SOCKET", "")
        # a leading @ stands for the NUL of an abstract socket name
        self._address = f"\0{path[1:]}" if path.startswith("@") else path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) if path else None

    def ready(self) -> None:
        """Report that the service is ready, or ready again after `reloading`."""
        self._send("READY=1")

    def reloading(self) -> None:
        """Report that the configuration is being reloaded."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """Report that the service is stopping."""
        self._send("STOPPING=1")

    def watchdog(self) -> None:
        """Report that all parts of the service are alive."""
        self._send("WATCHDOG=1")

    def status(self, line: str) -> None:
        """Set the line that `systemctl status` shows."""
        self._send(f"STATUS={_line(line)}")

    def close(self) -> None:
        """Close the socket."""
        if self._socket:
            self._socket.close()

    def _send(self, message: str) -> None:
        if self._socket:
            with suppress(OSError):
                self._socket.sendto(message.encode(), socket.MSG_DONTWAIT, self._address)


def _line(text: str) -> str:
    """Return a single line of limited length: systemd would obey further lines, and parts may come from the network."""
    return "".join(char if char.isprintable() else " " for char in text[:LINE_CHARS])
