"""Starts that did not last: systemd starts the service again for ever, and each one waits longer, from 5 to 60 s.

The unit cannot do it: options for growing delays came with systemd 254.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from benchd.daemon.machine.systemd_notify import Notifier, log

FILE = "starts.json"
STEADY_S = 300.0  # a service that ran longer has started well
FIRST_S, LAST_S = 5.0, 60.0


class Starts(Struct, frozen=True):
    """How many starts in a row did not last, when the last one began on CLOCK_MONOTONIC, and why it ended."""

    failed: int = 0
    begun_s: float = 0.0
    reason: str = "it was killed"


@contextmanager
def counted() -> Iterator[str | None]:
    """Wait if starts before this one did not last, and yield what to say about them; None if there were none.

    They are counted in systemd's runtime folder, which outlives a restart. Without systemd nothing is counted.
    """
    folder = os.environ.get("RUNTIME_DIRECTORY")
    if folder is None:
        yield None
        return
    file, last = Path(folder, FILE), _last(Path(folder, FILE))
    said = f"started again after {last.failed} starts that did not last: {last.reason}" if last.failed else None
    _wait(delay_s(last.failed), said)
    now = Starts(last.failed + 1, time.monotonic())
    _keep(file, now)
    try:
        yield said
    except Exception as error:
        _keep(file, msgspec.structs.replace(now, reason=str(error) or type(error).__name__))
        raise
    file.unlink(missing_ok=True)


def _keep(file: Path, starts: Starts) -> None:
    with suppress(OSError):  # a runtime folder that is full: the next start begins to count
        file.write_bytes(msgspec.json.encode(starts))


def delay_s(failed: int) -> float:
    """Return how long to wait after so many starts that did not last; the first one may have been an accident."""
    doublings = min(failed - 2, 10)  # after 18 hours of failed starts the power would no longer fit a float
    return 0.0 if failed < 2 else min(FIRST_S * 2**doublings, LAST_S)


def _last(file: Path) -> Starts:
    """Return the starts so far; none if the last one ran long enough."""
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Starts)
    except (OSError, msgspec.DecodeError):
        return Starts()
    return Starts() if time.monotonic() - found.begun_s > STEADY_S else found


def _wait(seconds: float, said: str | None) -> None:
    if seconds:
        line = f"waiting {seconds:g} s; {said}"
        log(line)
        Notifier().status(line)
        time.sleep(seconds)
