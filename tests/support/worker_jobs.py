"""Jobs for tests of a worker: a module of the test's own, small limits, and a run in a process of its own or here."""

import io
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from benchd.daemon.measuring import process
from benchd.daemon.measuring.process import Worker
from benchd.daemon.measuring.protocol import Job, Limits, Outcome
from benchd.daemon.records import Case
from benchd.daemon.verdicts.statistics import StopRule
from benchd.daemon.worker import __main__ as worker_main
from benchd.daemon.worker import child
from benchd.daemon.worker.child import StageClock

TINY = Limits(
    processes=1,
    warm_up_cap_s=0.1,
    rule=StopRule(min_blocks=3, min_block_runs=1, min_block_s=0.02, cap_s=0.1, half_width=None),
    check_images=4,
)
# for runs at a rate, and for streams that begin one after the other
LONGER = msgspec.structs.replace(TINY, rule=msgspec.structs.replace(TINY.rule, cap_s=0.3))
NET = """
import os, sys, time
import torch
from torch import nn

class Net(nn.Module):
    input_shape = (3, 4, 4)

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(48, 5)

    def forward(self, images):
        {forward}
        return self.fc(images.flatten(1))

def build():
    {build}
    return Net()
"""


def user_module(folder: Path, *, build: str = "pass", forward: str = "pass") -> str:
    """Write a small module with these lines in its functions; return it as `FILE.py:build`."""
    path = folder / "net.py"
    path.write_text(NET.format(build=build, forward=forward))
    return f"{path}:build"


def job(
    folder: Path, *, limits: Limits = TINY, module: str | None = None, probes: bool = False, **fields: object
) -> Job:
    """Return a job on the CPU with one thread and without `probes`; `fields` replace those of the case."""
    case = Case(**{"model": "own.net.build" if module else "square"} | fields)
    return Job(
        case=case,
        suite_id="the run of a test",
        options={} if module else {"size": 16},
        limits=limits,
        device="cpu",
        threads=1,
        output=str(folder),
        raw_name="run.0",
        cache=str(folder / "cache"),
        artifacts=str(folder / "artifacts"),
        spawned_ns=time.monotonic_ns(),
        module=module,
        probes=probes,
    )


def run(a_job: Job, python: str = "") -> Outcome:
    """Run the job in a real worker to its end, however it ends; deadlines are the supervisor's and kept here too.

    `python` is another interpreter than this one.
    """
    with Worker(a_job, Path(a_job.output) / "logs" / "run.log", python) as worker:
        while True:
            remaining_s = worker.remaining_s()
            if remaining_s <= 0:
                worker.stop()
                return worker.outcome("timeout", f"stage {worker.stage}")
            ready, _, _ = select.select([worker], [], [], remaining_s)
            if ready and worker.receive():
                return worker.outcome(None, None)


def run_here(a_job: Job) -> Outcome:
    """Run the job as the worker does, but in this process, which has imported torch already."""
    return worker_main._work(a_job, StageClock(io.BytesIO(), a_job))


class WorkerHere:
    """What Popen gives of a worker, for one that is a thread of this process, which has imported torch already."""

    pid, stdin = os.getpid(), None

    def __init__(self, a_job: Job, write_end: int) -> None:
        line, own_end = msgspec.json.encode(a_job), os.dup(write_end)
        self._thread = threading.Thread(target=_answer, args=(line, own_end), name="worker")
        self._thread.start()

    def poll(self) -> int | None:
        """Return None while it works."""
        return None if self._thread.is_alive() else 0

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; raise TimeoutExpired if it works on."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("worker", timeout or 0.0)
        return 0


def _answer(line: bytes, fd: int) -> None:
    a_job = msgspec.json.decode(line, type=Job)
    with os.fdopen(fd, "wb", buffering=0) as pipe:
        child.send(pipe, worker_main._work(a_job, StageClock(pipe, a_job)))


def workers_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let whoever measures in this process do so in threads: neither can be killed."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(process.Child, "_spawn", lambda self, command, a_job, end: WorkerHere(a_job, end))
    monkeypatch.setattr(process.Child, "_signal", lambda self, number: None)
