"""The child of `benchd profile`: a ProfileJob on stdin, a CollectedProfile on the pipe FD, the rest on stderr."""

import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO

import msgspec
import torch

from benchd.daemon.errors import Unsupported
from benchd.daemon.machine.standard_streams import STDERR, lasting
from benchd.daemon.machine.ticker import ticker_of
from benchd.daemon.measuring.protocol import Stage, silent
from benchd.daemon.profiling.profile import CollectedProfile, ProfileJob
from benchd.daemon.worker import building, builds, child
from benchd.daemon.worker.profiling.nvtx import named_range
from benchd.daemon.worker.profiling.torch_profiler import module_ranges
from benchd.daemon.worker.profiling.work import Work, open_work
from benchd.daemon.worker.steps import wait_for

# the module of each method and the field for its result; `benchmark` is last, because its profiler slows all later
# launches
METHODS = {
    "layers": ("layers", "layers"),
    "break-even": ("break_even", "sweep"),
    "benchmark": ("benchmark", "benchmark"),
    "memory": ("memory", "memory"),
    "torch": ("torch_profiler", "trace"),
}


def main() -> int:
    """Read the job, run its methods, and answer in any case: on the pipe or, under an Nsight tool, on stdout."""
    sys.stderr, _ = lasting(sys.stderr, STDERR, ticker_of(sys.stderr))
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=ProfileJob)
    fd = int(sys.argv[1]) if len(sys.argv) > 1 else os.dup(sys.stdout.fileno())
    with os.fdopen(fd, "wb") as answer:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # because libraries and modules print to stdout
        tell = partial(_tell, answer if len(sys.argv) > 1 else None)  # under an Nsight tool, there is a single answer
        answer.write(msgspec.json.encode(collected(job, tell)) + b"\n")
    return 0


def _tell(pipe: BinaryIO | None, stage: Stage) -> None:
    if pipe:
        child.send(pipe, stage)
        pipe.flush()


def collected(job: ProfileJob, tell: Callable[[Stage], None] = lambda _: None) -> CollectedProfile:
    """Return the results of the job's methods, or why none could start; call `tell` at the start of each."""
    try:
        sys.stderr.write("build and load the model\n")
        tell(Stage("build"))
        work = open_work(job)
        if job.capture:
            _capture(work)
    except (Exception, SystemExit) as error:  # a user's module or a backend may raise anything
        status, reason = child.diagnose(error, job)
        return CollectedProfile(error=reason, unsupported=status == "unsupported")
    results = {} if job.capture else _results(work, tell)
    return CollectedProfile(
        model=work.facts,
        kernels_ran=builds.kernels_ran(job.case.variant, work.device),
        device_name=torch.cuda.get_device_name() if work.device.type == "cuda" else None,
        versions=building.versions(),
        missing=work.missing,
        **results,
    )


def _results(work: Work, tell: Callable[[Stage], None]) -> dict[str, Any]:
    """Return each method's result by its field; a method that fails loses only its own result."""
    wanted = [name for name in METHODS if name in work.job.methods]
    results: dict[str, Any] = {"failed": []}
    for number, name in enumerate(wanted, 1):
        sys.stderr.write(f"[{number}/{len(wanted)}] {name}\n")
        tell(Stage("measure", name))
        module, field = METHODS[name]
        try:
            if name != "memory":  # its result does not depend on what is printed
                tell(Stage("measure", f"{name}, {silent(_seconds(work, name))}"))
            method = importlib.import_module(f"benchd.daemon.worker.profiling.{module}")
            results[field] = method.run(work)
        except (Exception, SystemExit) as error:  # torch may raise anything
            status, work.missing[name] = child.diagnose(error)
            results["failed"] += [name] * (status == "failed")
    return results


def _seconds(work: Work, name: str) -> float:
    """Return about how long a method takes, from a step that is timed first."""
    job, step_s = work.job, work.timed(work.step) / 1e9
    steps, more_s = {
        "layers": (3 * job.runs + 10, 5.0 + 2 * job.hold_s + job.energy_s),
        "break-even": (18 * 8 * job.runs, 18 * job.energy_s),  # 18 rates, with and without spikes, 4 runs each
        "benchmark": (5 * job.runs, 2.0),
        "torch": (5 * (job.warm_up + job.steps), 2.0),
    }[name]
    return steps * step_s + more_s


def _capture(work: Work) -> None:
    """Run only the active steps in the range that an Nsight tool records."""
    if work.device.type != "cuda":
        raise Unsupported("Nsight records CUDA activity, but this runs on the CPU")
    for _ in range(work.job.warm_up):
        work.step()
    wait_for(work.device)
    with module_ranges([work.module, work.loss]):
        torch.cuda.profiler.start()
        for number in range(work.job.steps):
            with named_range(f"step {number}"):
                work.step()
        wait_for(work.device)
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    sys.exit(main())
