"""Signals, delivered as a byte on a socket, which wakes a loop waiting in `select`, or as an interrupt."""

import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType


@contextmanager
def on_signals(
    numbers: Sequence[signal.Signals], take: Callable[[int, FrameType | None], None]
) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Pass these signals to `take` and write a byte for each to the first socket; finally restore the old handlers.

    A byte sent to the second socket wakes the loop from another thread.
    """
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    old_wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    old = {number: signal.signal(number, take) for number in numbers}
    try:
        yield reader, writer
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(old_wakeup)
        reader.close()
        writer.close()


def ending() -> tuple[signal.Signals, ...]:
    """Return the signals that end a run, including a lost remote shell unless nohup blocks it."""
    is_held = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *([] if is_held else [signal.SIGHUP]))


@contextmanager
def as_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt once for any signal that ends a run, so that child processes end too."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        # when a shell is lost, SIGHUP arrives twice: from the kernel and from the shell
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    old = {number: signal.signal(number, interrupt) for number in ending() if number != signal.SIGINT}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
