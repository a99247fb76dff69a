"""What every child with torch does alike: it ends with its parent, and says in a line why it failed. Torch-free."""

import ctypes
import signal
import traceback

from benchd.daemon.errors import BenchdError, Unsupported
from benchd.daemon.records import Status

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def diagnose(error: Exception) -> tuple[Status, str]:
    """Return the status and the reason that an exception stands for; print the traceback of an unexpected one."""
    if isinstance(error, Unsupported):
        return "unsupported", str(error)
    if isinstance(error, BenchdError):
        return "failed", str(error)
    traceback.print_exception(error)
    text = str(error).strip().split("\n")[0] or "no message"
    if isinstance(error, MemoryError) or "memory" in type(error).__name__.lower() or "alloc" in text.lower():
        return "failed", f"out of memory: {text}"
    return "failed", f"{type(error).__name__}: {text}"
