"""Keys pressed on this terminal, without waiting for Enter; none if standard input is not a terminal."""

import os
import select
import sys
import termios
import tty
from typing import Any

NAMES = {
    b"\x1b[A": "up",
    b"k": "up",
    b"\x1b[B": "down",
    b"j": "down",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b" ": "page down",
    b"s": "sort",
    b"q": "quit",
}


class Keys:
    """Reads single keys while it is entered, and restores the terminal afterwards; Ctrl-C still interrupts."""

    def __enter__(self) -> "Keys":
        self._old: list[Any] | None = None
        if sys.stdin is not None and sys.stdin.isatty():
            self._file = sys.stdin.fileno()
            self._old = termios.tcgetattr(self._file)
            tty.setcbreak(self._file)
        return self

    def __exit__(self, *_: object) -> None:
        if self._old:
            termios.tcsetattr(self._file, termios.TCSADRAIN, self._old)

    def pressed(self) -> list[str]:
        """Return the names of the keys pressed since the last call; unknown keys are left out."""
        if not self._old or not select.select([self._file], [], [], 0)[0]:
            return []
        typed, keys = os.read(self._file, 256), []
        while typed:
            key = next((key for key in NAMES if typed.startswith(key)), None)
            keys += [NAMES[key]] if key else []
            typed = typed[len(key or b"?") :]
        return keys
