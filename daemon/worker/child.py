"""What children with torch do alike: end with their parent, say in a line why they failed, leave fast. Torch-free."""

import ctypes
import os
import signal
import sys
import traceback
from typing import NoReturn

from benchd.daemon.errors import BenchdError, Unsupported
from benchd.daemon.records import Status

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def leave() -> NoReturn:
    """End this process at once, its result being sent: an interpreter takes up to a second to take torch down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def diagnose(error: Exception) -> tuple[Status, str]:
    """Return the status and the reason that an exception stands for; print the traceback of an unexpected one."""
    if isinstance(error, Unsupported):
        return "unsupported", str(error)
    if isinstance(error, BenchdError):
        return "failed", str(error)
    traceback.print_exception(error)
    text = str(error).strip().split("\n")[0] or "no message"
    if isinstance(error, MemoryError) or "memory" in type(error).__name__.lower() or _lacks_memory(text.lower()):
        return "failed", f"out of memory: {text}"
    return "failed", f"{type(error).__name__}: {text}"


def _lacks_memory(text: str) -> bool:
    """Say so of an error in lower case; an allocator's failed assertion, which names its file, is another matter."""
    return "out of memory" in text or ("alloc" in text and "internal assert" not in text)
