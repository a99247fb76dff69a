"""Measures how much CPU time other processes use, and waits or asks before a measurement."""

import os
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from benchd.daemon.machine.ticker import show

FOREIGN_CPUS = 0.25  # CPUs used by other processes; even a part of a CPU slows threads that wait for each other
STEP_S, SAY_S = 1.0, 10.0
LOOK_S = 0.2  # 20 ticks of CPU accounting
ASKED_QUIET_S = 5.0  # for how long the CPUs must be quiet if the user chose to wait
ANSWER_S = 60.0  # how long the question waits
QUESTION = (
    "type a letter and Enter: w to wait until the CPUs are quiet, g to go on (without this question: --wait or "
    f"--no-wait), s to stop; without an answer it goes on after {ANSWER_S:g} s"
)


@dataclass(frozen=True)
class Start:
    """The conditions that a session waits for before it measures.

    If `waiting` is given, the session waits, reporting to it, until no other process is measuring on this machine, and
    then until other processes have left the CPUs alone for `quiet_s`. Otherwise it reports to `out` that the machine is
    busy, and asks what to do if `answers` is a terminal.
    """

    waiting: TextIO | None = None
    quiet_s: float = 0.0
    out: TextIO | None = None
    answers: TextIO | None = None


class ForeignUse:
    """The CPU time of other processes since this object was created; ended children count as this process."""

    def __init__(self) -> None:
        self._begun_s, self._begun_used_s = time.monotonic(), _foreign_s()

    def cpus(self) -> float:
        """Return the mean number of CPUs that other processes have used."""
        return max(0.0, (_foreign_s() - self._begun_used_s) / (time.monotonic() - self._begun_s))


def settle(start: Start, wake: socket.socket, is_over: Callable[[], bool]) -> None:
    """Wait, report that the machine is busy, or ask what to do, according to `start`; `wake` interrupts a question.

    Raises KeyboardInterrupt if the answer is to stop.
    """
    if start.quiet_s or start.out is None:
        wait_until_quiet(start.quiet_s, start.out, is_over)
        return
    use = ForeignUse()
    time.sleep(LOOK_S)
    if (cpus := use.cpus()) <= FOREIGN_CPUS:
        return
    advice = "" if start.answers else " (--quiet-for 30s waits)"
    start.out.write(f"BUSY MACHINE: other processes use {cpu_count(cpus)}, so times may be far too long{advice}\n")
    start.out.flush()
    answer = _answer(start.answers, start.out, wake) if start.answers else "g"
    if answer == "s":
        raise KeyboardInterrupt
    show(start.out, "start")
    wait_until_quiet(ASKED_QUIET_S if answer == "w" else 0.0, start.out, is_over)


def _answer(answers: TextIO, out: TextIO, wake: socket.socket) -> str:
    """Ask until the answer is w, g or s; a signal counts as s, the end of input and ANSWER_S of silence as g."""
    show(out, "")
    while True:
        out.write(f"{QUESTION}\n")
        out.flush()
        ready, _, _ = select.select([answers.fileno(), wake.fileno()], [], [], ANSWER_S)
        if wake.fileno() in ready:
            return "s"
        line = answers.readline() if ready else ""
        if not line:
            out.write("no answer: going on\n")
            return "g"
        if (answer := line.strip().lower()[:1]) in ("w", "g", "s"):
            return answer


def wait_until_quiet(quiet_s: float, out: TextIO | None, is_over: Callable[[], bool]) -> None:
    """Return once other processes have used at most FOREIGN_CPUS in each second of `quiet_s`, or `is_over` is true.

    A line is written to `out` at the start, and every ten seconds while they use more.
    """
    if quiet_s <= 0 or out is None:
        return
    out.write(f"waiting until the CPUs have been quiet for {quiet_s:g} s\n")
    out.flush()
    show(out, "waiting")
    since_s, said_s = time.monotonic(), -SAY_S
    while time.monotonic() - since_s < quiet_s and not is_over():
        use = ForeignUse()
        time.sleep(STEP_S)
        if (cpus := use.cpus()) > FOREIGN_CPUS:
            since_s = time.monotonic()
            if since_s - said_s >= SAY_S:
                said_s = since_s
                out.write(f"busy machine: other processes use {cpu_count(cpus)}\n")
                out.flush()


def cpu_count(cpus: float) -> str:
    """Return a number of CPUs as text."""
    return f"{cpus:.2g} CPU{'' if f'{cpus:.2g}' == '1' else 's'}"


def _foreign_s() -> float:
    """Return the total CPU time of other processes since boot, over all CPUs."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])
