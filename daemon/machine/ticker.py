"""Shows in the terminal's last line what a command is doing, and for how long, to prove that it is not hanging.

Nothing is drawn while a case is timed, because drawing occupies a CPU for a moment.
"""

import os
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

TICK_S = 0.8
PLAIN_COLUMNS = 80  # for a terminal of unknown size
ERASE = b"\r\x1b[J"


class Ticker:
    """Status lines at the bottom of the terminal with this descriptor, redrawn each second by a thread.

    Any other output must be passed to `before` first, which erases the status lines; in a child that does not draw its
    own, those of its parent.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._lock = descriptor, threading.RLock()
        self._text, self._since_s, self._written_s = "", 0.0, time.monotonic()
        self._ahead: Callable[[], str] = str
        self._is_at_start = self._is_drawn = True
        self._is_brief = False
        self._ticks, self._thread = threading.Event(), threading.Thread(target=self._run, daemon=True)

    def show(
        self, text: str, *, ticks: bool = True, ahead: Callable[[], str] = str, until_output: bool = False
    ) -> None:
        """Draw this text from now on (none if empty): each second with the elapsed time, or once if not `ticks`.

        What `ahead` returns each time is drawn before it. With `until_output`, the next output ends it.
        """
        with self._lock:
            if not self._thread.is_alive():
                self._is_drawn = False
                self._thread.start()
            self._since_s = self._since_s if text == self._text else time.monotonic()
            self._text, self._ahead, self._is_brief = text, ahead, until_output
            if not (text and ticks):
                self._ticks.clear()
                self._erase()
                self._draw()
            else:
                self._ticks.set()

    def before(self, data: Any) -> None:
        """Make room for data that is about to be written to the terminal."""
        with self._lock:
            if self._is_at_start:
                self._erase()
            if self._is_brief:
                self._ticks.clear()
            self._written_s = time.monotonic()
            self._is_at_start = bytes(data[-1:]) == b"\n" if len(data) else self._is_at_start

    def _run(self) -> None:
        while self._ticks.wait():
            time.sleep(TICK_S)
            with self._lock:
                if self._ticks.is_set() and time.monotonic() - self._written_s >= TICK_S:
                    self._erase()
                    self._draw(f", {time.monotonic() - self._since_s:.0f} s")

    def _draw(self, clock: str = "") -> None:
        if not self._text or not self._is_at_start:
            return
        text, columns = f"{self._ahead()}{self._text}{clock}", columns_of(self._descriptor)
        lines = textwrap.wrap(text, max(columns - 1, 1), break_on_hyphens=False)
        back = f"\x1b[{len(lines) - 1}A" if len(lines) > 1 else ""
        self._is_drawn = self._write(("\n".join(lines) + f"{back}\r").encode())

    def _erase(self) -> None:
        if self._is_drawn:
            self._write(ERASE)
            self._is_drawn = not self._thread.is_alive()

    def _write(self, data: bytes) -> bool:
        try:
            os.write(self._descriptor, data)
        except OSError:  # the terminal is gone
            self._ticks.clear()
            return False
        return True


def columns_of(descriptor: int) -> int:
    """Return the width of this terminal, or PLAIN_COLUMNS if it is unknown or the terminal is gone."""
    try:
        return os.get_terminal_size(descriptor).columns or PLAIN_COLUMNS
    except OSError:
        return PLAIN_COLUMNS


def ticker_of(stream: TextIO | None) -> Ticker | None:
    """Return a ticker for this stream, or None if it is not a terminal that can move its cursor."""
    can_draw = stream is not None and stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return Ticker(stream.fileno()) if stream and can_draw else None


def show(stream: TextIO, text: str, **options: Any) -> bool:
    """Show the current activity below all other lines of this stream; return whether the terminal supports that."""
    ticker = getattr(getattr(getattr(stream, "buffer", None), "raw", None), "ticker", None)
    if ticker:
        ticker.show(text, **options)
    return ticker is not None
