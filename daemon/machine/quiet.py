"""How much of the CPUs other processes use, and a wait until that is little."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

FOREIGN_CPUS = 0.25  # used by other processes; less than one CPU already slows threads that wait for each other
STEP_S, SAY_S = 1.0, 10.0


@dataclass(frozen=True)
class Start:
    """What a session waits for before it measures.

    With `waiting` it waits until nobody else measures the machine, and reports that there; then until other processes
    have left the CPUs alone for `quiet_s`.
    """

    waiting: TextIO | None = None
    quiet_s: float = 0.0


class ForeignUse:
    """The CPU time of other processes since this object was made; children count as this process once they ended."""

    def __init__(self) -> None:
        self._begun_s, self._begun_used_s = time.monotonic(), _foreign_s()

    def cpus(self) -> float:
        """Return the mean number of CPUs that others have used."""
        return max(0.0, (_foreign_s() - self._begun_used_s) / (time.monotonic() - self._begun_s))


def wait_until_quiet(quiet_s: float, out: TextIO, is_over: Callable[[], bool]) -> None:
    """Return once others have used at most FOREIGN_CPUS in every second of `quiet_s`, or `is_over`.

    `out` gets a line at the start, and one in ten seconds while they use more.
    """
    if quiet_s <= 0:
        return
    out.write(f"waiting until the CPUs have been quiet for {quiet_s:g} s\n")
    out.flush()
    since_s, said_s = time.monotonic(), -SAY_S
    while time.monotonic() - since_s < quiet_s and not is_over():
        use = ForeignUse()
        time.sleep(STEP_S)
        if (cpus := use.cpus()) > FOREIGN_CPUS:
            since_s = time.monotonic()
            if since_s - said_s >= SAY_S:
                said_s = since_s
                out.write(f"busy machine: other processes use {cpus:.2g} CPUs\n")
                out.flush()


def _foreign_s() -> float:
    """Return how long the CPUs of this machine have worked for others since it booted, together."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])
