"""Reads JSON lines from a child's pipe; each line is a message or rubbish."""

import os
from contextlib import suppress
from typing import Generic, NamedTuple, TypeVar

import msgspec

MOST_BYTES = 2**24  # per line
READ_BYTES = 2**16  # per call, so that a child that writes without pause does not keep the reader from its other work

T = TypeVar("T")


class Rubbish(NamedTuple):
    """The beginning of a line that is not a valid message."""

    line: bytes

    def __str__(self) -> str:
        return repr(self.line)


class Lines(Generic[T]):
    """Reads the messages that have arrived at a pipe's read end, without waiting for more.

    `ended` is set once the other end is closed; an incomplete last line is then dropped.
    """

    def __init__(self, fd: int, decoder: msgspec.json.Decoder[T], most_bytes: int = MOST_BYTES) -> None:
        self.ended = False
        self._fd, self._decoder, self._most_bytes = fd, decoder, most_bytes
        self._buffer = b""
        os.set_blocking(fd, False)

    def fileno(self) -> int:
        """Return the read end, for a select loop."""
        return self._fd

    def read(self) -> list[T | Rubbish]:
        """Return the messages in complete lines; the rest stays for the next call."""
        read = b""
        with suppress(BlockingIOError):
            while not self.ended and len(read) < READ_BYTES:
                data = os.read(self._fd, READ_BYTES)
                read += data
                self.ended = not data
        self._buffer += read
        *lines, self._buffer = self._buffer.split(b"\n")
        if len(self._buffer) > self._most_bytes:
            lines, self._buffer = [*lines, self._buffer], b""
        return [self._decoded(line) for line in lines]

    def _decoded(self, line: bytes) -> T | Rubbish:
        try:
            return self._decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return Rubbish(line[:60])
