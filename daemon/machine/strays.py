"""Kills processes that left their parent's session; a mark in their inherited environment identifies them."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

MARK = "BENCHD_PROCESS"
END_S = 1.0
AGAIN_S = 0.01
# torch's process that removes the shared memory of ended processes; it exits by itself
KEPT = "torch_shm_manag"


def end(mark: str) -> None:
    """Kill every process with this mark; repeat for up to a second until none is left that could start another."""
    wanted, until_s = f"{MARK}={mark}".encode(), time.monotonic() + END_S
    while sum(_kill(entry, wanted) for entry in Path("/proc").glob("[0-9]*")) and time.monotonic() < until_s:
        time.sleep(AGAIN_S)


def _kill(process: Path, wanted: bytes) -> bool:
    """Kill the process if it has the mark; return whether it had (False if it has already ended)."""
    with suppress(OSError):  # the process belongs to a different user, or has ended
        is_ours = wanted in (process / "environ").read_bytes().split(b"\0")
        if is_ours and (process / "comm").read_text().strip() != KEPT:
            os.kill(int(process.name), signal.SIGKILL)
            return True
    return False
