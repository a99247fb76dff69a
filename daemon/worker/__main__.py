"""One process of one case: `python -m benchd.daemon.worker FD`, a Job on stdin, JSON lines on the pipe FD.

The pipe is a file descriptor of its own, because libraries and users' modules print to stdout and stderr.
"""

import ctypes
import os
import signal
import sys
import traceback

import msgspec

from benchd.daemon.errors import BenchdError, Unsupported
from benchd.daemon.protocol import Job, Outcome
from benchd.daemon.records import ProcessResult, Status
from benchd.daemon.worker.stages import StageClock, send

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Read the Job, do the work, send one Outcome whatever happens."""
    _die_with_parent()
    pipe = os.fdopen(int(sys.argv[1]), "wb", buffering=0)
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    stages = StageClock(pipe, job)
    send(pipe, _work(job, stages))


def _die_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _work(job: Job, stages: StageClock) -> Outcome:
    stages.enter("import")
    findings = None
    try:
        from benchd.daemon.worker.phases import Findings, run  # noqa: PLC0415 - torch's import is a timed stage

        findings = Findings(stages)
        run(job, findings)
        return findings.outcome("ok", None)
    except Exception as error:
        stages.leave()
        status, reason = _diagnose(error)
        if findings is None:
            return Outcome(process=ProcessResult(status=status, reason=reason, stages=stages.stages()))
        return findings.outcome(status, reason)


def _diagnose(error: Exception) -> tuple[Status, str]:
    if isinstance(error, Unsupported):
        return "unsupported", str(error)
    if isinstance(error, BenchdError):
        return "failed", str(error)
    traceback.print_exc()
    text = str(error).strip().split("\n")[0] or "no message"
    if isinstance(error, MemoryError) or "memory" in type(error).__name__.lower() or "alloc" in text.lower():
        return "failed", f"out of memory: {text}"
    return "failed", f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    main()
