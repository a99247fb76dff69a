"""One process of one case: `python -m benchd.daemon.worker FD`, a Job on stdin, JSON lines on the pipe FD.

The pipe is a separate file descriptor, because libraries and users' modules print to stdout and stderr.
"""

import gc
import os
import sys
from collections.abc import Callable

import msgspec

from benchd.daemon.errors import BenchdError, UsageError
from benchd.daemon.measuring.protocol import Job, Outcome
from benchd.daemon.measuring.user_inputs import GIVING
from benchd.daemon.records import ProcessResult
from benchd.daemon.worker import child
from benchd.daemon.worker.child import StageClock, send


def main() -> None:
    """Read the Job, follow its recipe, and send one Outcome whatever happens."""
    pipe = os.fdopen(int(sys.argv[1]), "wb", buffering=0)
    permits = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())  # so that a user's module cannot read it
    job = msgspec.json.decode(permits.readline(), type=Job)
    stages = StageClock(pipe, job, permits)
    send(pipe, _work(job, stages))
    child.leave()


def _work(job: Job, stages: StageClock) -> Outcome:
    outcome = Outcome(process=ProcessResult(status="ok"))
    stages.enter("import")
    try:
        run = _imported(is_cold=job.case.scenario == "cold_start")
        if job.waits and not job.case.beside:
            stages.wait_for_turn()
        if job.cpus:
            os.sched_setaffinity(0, job.cpus)
            outcome.process.cpus = job.cpus
        run(job, stages, outcome)
    except (Exception, SystemExit) as error:
        outcome.process.status, reason = child.diagnose(error, job)
        outcome.process.reason = reason + ("" if isinstance(error, BenchdError) else _about(job, outcome))
        outcome.flags += ["usage_error"] if isinstance(error, UsageError) else []
    stages.leave()
    outcome.process.stages = stages.stages()
    return outcome


def _about(job: Job, outcome: Outcome) -> str:
    """Return the inputs on which a user's model failed, if they were drawn from a range, and the path of the log."""
    is_drawn = outcome.model is not None and any(spec.span for spec in outcome.model.inputs)
    drawn = f"; inputs: {outcome.model.data}; give others as {GIVING}" if outcome.model and is_drawn else ""
    return f"{drawn} (log: logs/{job.raw_name}.log)"


def _imported(*, is_cold: bool) -> Callable[[Job, StageClock, Outcome], None]:
    """Import torch as a timed stage; for a cold start, in the same way as any program.

    In other scenarios torch's 190,000 permanent objects are not scanned by the garbage collector, neither during the
    import, which saves 0.2 of 1.7 s, nor later, which saves 40 ms per collection.
    """
    if not is_cold:
        gc.disable()
    from benchd.daemon.worker import recipes  # noqa: PLC0415

    if not is_cold:
        gc.enable()
        gc.freeze()
    return recipes.run


if __name__ == "__main__":
    main()
