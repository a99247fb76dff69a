"""A neighbour: a case in a separate process that runs from before the measured case warms up until that ends."""

import time
from array import array
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchd.daemon.measuring.process import Worker
from benchd.daemon.measuring.protocol import Accompany, Job, Outcome, StageName, unmeasured
from benchd.daemon.measuring.session import Session
from benchd.daemon.records import NeighbourResult, ProcessResult, Window
from benchd.daemon.verdicts import timings

END_S = 60.0


def accompanied(session: Session, job: Job, measured: Callable[[int], Outcome]) -> Outcome:
    """Call `measured` with the neighbour's pid and return its outcome, or a failure if the neighbour ended early."""
    with Worker(job, session.output / "logs" / f"{job.raw_name}.log") as worker:
        ended = _until(session, worker, "measure")
        if ended is None:
            outcome = measured(worker.pid)
            worker.ask_to_end()
            ended = _until(session, worker, None)
        else:
            outcome = unmeasured("ok", None)
    if ended is None or outcome.process.status != "ok":
        return outcome
    if ended.process.status != "ok":
        return unmeasured(ended.process.status, f"its neighbour {job.case.case_id}: {ended.process.reason}")
    framed = _with_frames(outcome.process, ended.process, job)
    return msgspec.structs.replace(outcome, process=framed)


def _until(session: Session, worker: Worker, stage: StageName | None) -> Outcome | None:
    """Wait until the neighbour reaches a stage or ends; return its outcome if it ended, else None."""
    end = time.monotonic() + END_S
    while worker.stage != stage:
        remaining_s = worker.remaining_s() if stage else end - time.monotonic()
        ended = session.follow(worker, remaining_s, f"stage {worker.stage} took too long")
        if ended:
            return worker.outcome(*ended)
    return None


def _with_frames(process: ProcessResult, beside: ProcessResult, job: Job) -> ProcessResult:
    """Return the measured process with the neighbour's frames in its window."""
    if process.window is None or not isinstance(job.recipe, Accompany):
        return process
    rate_hz = job.recipe.rate_hz
    files = (Path(job.output) / beside.raw[name].path for name in ("released", "latency"))
    released_ns, latency_ns = (array("q", file.read_bytes()) for file in files)
    within = [
        latency
        for release, latency in zip(released_ns, latency_ns, strict=True)
        if process.window.start_ns <= release < process.window.end_ns
    ]
    releases = _releases(process.window, released_ns, rate_hz)
    neighbour = NeighbourResult(
        case_id=job.case.case_id,
        rate_hz=rate_hz,
        releases=releases,
        misses=releases - sum(latency <= 1e9 / rate_hz for latency in within),
        timing=timings.part_timing(within) if within else None,
    )
    raw = {f"beside_{name}": file for name, file in beside.raw.items()}
    return msgspec.structs.replace(process, beside=neighbour, raw=process.raw | raw)


def _releases(window: Window, released_ns: "array[int]", rate_hz: float) -> int:
    """Return how many frames were due in the window, including dropped ones."""
    if not released_ns:
        return int(window.seconds * rate_hz)
    first, end = (-((released_ns[0] - bound_ns) * rate_hz // 1e9) for bound_ns in (window.start_ns, window.end_ns))
    return int(end - first)
