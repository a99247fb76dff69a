"""Keeps standard output and error working without a reader, on a full disk, or in an encoding that lacks a character.

Output that cannot be written is discarded or escaped, and the work continues.
"""

import codecs
import io
import json
import os
import textwrap
from typing import Any, TextIO

from benchd.daemon.machine.ticker import Ticker, columns_of

STDOUT, STDERR = 1, 2
ESCAPED = "benchd_escaped"
"""Error handler for a character that the encoding lacks: it is escaped as in JSON, so that JSON stays valid."""


def _escaped(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


codecs.register_error(ESCAPED, _escaped)


class Discarding(io.FileIO):
    """A standard stream that discards what can no longer be written, including output of children that inherit it.

    A reader that ends, such as `| head`, is not a failure; a full disk is, and sets `failure`.
    """

    failure: str | None = None
    ticker: Ticker | None = None

    def write(self, data: Any) -> int:
        """Write the data, or discard it."""
        try:
            if self.ticker:
                self.ticker.before(data)
            return super().write(data)
        except OSError as error:
            _discard(self.fileno())
            if not isinstance(error, BrokenPipeError):
                self.failure = error.strerror
            return len(data)


class _Wrapping(io.TextIOWrapper):
    """A terminal's text, wrapped between words; not JSON, which must stay valid, nor what is styled for this width."""

    def write(self, text: str) -> int:
        """Write the text with its long lines wrapped."""
        super().write("\n".join(map(self._wrapped, text.split("\n"))))
        return len(text)

    def _wrapped(self, line: str) -> str:
        columns = columns_of(self.fileno())
        words = line.lstrip()
        is_json = words[:1] in tuple('{["') and not words.startswith("[...]")
        if len(line) <= columns or "\x1b" in line or is_json:
            return line
        indent = line[: len(line) - len(words)]
        return textwrap.fill(line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def lasting(stream: TextIO | None, descriptor: int, ticker: Ticker | None = None) -> tuple[TextIO, Discarding | None]:
    """Return a stream to replace sys.stdout or sys.stderr (None if closed), and the file that it writes to.

    An in-memory stream is returned unchanged: it has no reader to lose. The given stream also escapes characters that
    its encoding lacks from now on. A terminal's `ticker` makes room for the output, which is wrapped between words.
    """
    if stream is None:
        _discard(descriptor)  # otherwise the next file to be opened would use this descriptor
        stream = open(descriptor, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    try:
        file = Discarding(stream.fileno(), "w", closefd=False)
    except io.UnsupportedOperation:
        return stream, None
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors=ESCAPED)
    file.ticker = ticker if stream.isatty() else None
    kind = _Wrapping if stream.isatty() else io.TextIOWrapper
    by_line = descriptor == STDERR or stream.isatty()
    return kind(io.BufferedWriter(file), stream.encoding, stream.errors, line_buffering=by_line), file


def _discard(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere == descriptor:
        os.set_inheritable(nowhere, True)
    else:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
