"""Processes that left their parent's session: found by a mark in the environment that they inherit, and ended."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

MARK = "BENCHD_PROCESS"
END_S = 1.0
AGAIN_S = 0.01
# torch's, which removes the shared memory of processes that have ended and then ends itself
KEPT = "torch_shm_manag"


def end(mark: str) -> None:
    """Kill every process with this mark, again until none is left that could have started another, for a second."""
    wanted, until_s = f"{MARK}={mark}".encode(), time.monotonic() + END_S
    while sum(_kill(entry, wanted) for entry in Path("/proc").glob("[0-9]*")) and time.monotonic() < until_s:
        time.sleep(AGAIN_S)


def _kill(process: Path, wanted: bytes) -> bool:
    """Kill the process if it has the mark; return whether it had. One that has ended has none."""
    with suppress(OSError):  # of another user, or it has ended
        is_ours = wanted in (process / "environ").read_bytes().split(b"\0")
        if is_ours and (process / "comm").read_text().strip() != KEPT:
            os.kill(int(process.name), signal.SIGKILL)
            return True
    return False
