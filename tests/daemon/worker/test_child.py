"""What an exception becomes: a status and one line."""

import pytest

from benchd.daemon.errors import Unsupported, UsageError
from benchd.daemon.worker import child


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


ASSERTION = 'captures_underway.empty() INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":3085'


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (Unsupported("no GPU"), "unsupported", "no GPU"),
        (UsageError("no such file"), "failed", "no such file"),
        (MemoryError(), "failed", "out of memory: no message"),
        (OutOfMemoryError("tried 2 GiB"), "failed", "out of memory: tried 2 GiB"),
        (
            RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
            "failed",
            "out of memory: CUDA error: out of memory",
        ),
        (RuntimeError("can't allocate 8 bytes"), "failed", "out of memory: can't allocate 8 bytes"),
        (RuntimeError(ASSERTION), "failed", f"RuntimeError: {ASSERTION}"),
        (KeyError("x"), "failed", "KeyError: 'x'"),
    ],
    ids=["unsupported", "ours", "Python's", "by type", "CUDA's", "allocator", "assertion", "other"],
)
def test_an_exception_is_a_status_and_a_line(error, status, reason, capsys):
    assert child.diagnose(error) == (status, reason)
    assert bool(capsys.readouterr().err) is not isinstance(error, (Unsupported, UsageError))
