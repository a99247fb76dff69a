"""What systemd is told about the service: states over the socket in NOTIFY_SOCKET, where there is one, and its log.

Source: sd_notify(3). RELOADING carries the time that `Type=notify-reload` asks for; older versions ignore it.
"""

import os
import socket
import sys
import time

LINE_CHARS = 1000


def log(line: str) -> None:
    """Say a line on stderr, which systemd keeps in its journal."""
    sys.stderr.write(f"{_line(line)}\n")
    sys.stderr.flush()


class Notifier:
    """Sends state lines to systemd. A message that systemd does not take is lost, as sd_notify says it may be."""

    def __init__(self) -> None:
        path = os.environ.get("NOTIFY_SOCKET", "")
        # a leading @ stands for the NUL of an abstract name
        self._address = f"\0{path[1:]}" if path.startswith("@") else path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) if path else None

    def ready(self) -> None:
        """Say that the service is up, or up again after `reloading`."""
        self._send("READY=1")

    def reloading(self) -> None:
        """Say that the configuration is read again."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """Say that the service ends."""
        self._send("STOPPING=1")

    def watchdog(self) -> None:
        """Say that all parts are alive."""
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
            try:
                self._socket.sendto(message.encode(), socket.MSG_DONTWAIT, self._address)
            except OSError:
                return


def _line(text: str) -> str:
    """Return one line of bounded length: part of it may have come over the network, and systemd obeys what follows."""
    return "".join(char if char.isprintable() else " " for char in text[:LINE_CHARS])
