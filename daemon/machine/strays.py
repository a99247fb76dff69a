"""Processes that left their parent's session: found by a mark in the environment that they inherit, and ended."""

import os
import select
import signal
from pathlib import Path

MARK = "BENCHD_PROCESS"
ROUNDS = 10
END_S = 1.0


def end(mark: str) -> None:
    """Kill every process with this mark; one that forks meanwhile is found in the next round."""
    wanted = f"{MARK}={mark}".encode()
    for _ in range(ROUNDS):
        if not sum(_end(int(entry.name), wanted) for entry in Path("/proc").glob("[0-9]*")):
            return


def _end(pid: int, wanted: bytes) -> bool:
    """Kill the process if it has the mark, and wait until it has ended; return whether it had."""
    try:
        process = os.pidfd_open(pid)
    except OSError:  # it has ended
        return False
    try:
        if wanted not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return False
        signal.pidfd_send_signal(process, signal.SIGKILL)
        select.select([process], [], [], END_S)
    except OSError:  # of another user, or it has ended
        return False
    finally:
        os.close(process)
    return True
