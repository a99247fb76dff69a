"""Jobs for tests of a worker: a module of the test's own, small limits, and a run in a process of its own or here."""

import io
import select
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchd.daemon.measuring.process import Worker
from benchd.daemon.measuring.protocol import Job, Limits, Measure, Outcome
from benchd.daemon.records import Case, Inputs, OptionValue, UserFile, UserModule, Variant
from benchd.daemon.verdicts.statistics import StopRule
from benchd.daemon.worker import __main__ as worker_main
from benchd.daemon.worker import backends, user_code, workload
from benchd.daemon.worker.child import StageClock
from benchd.models import catalog, demo

# what pytest has imported is no code of a module that is measured in its process
user_code._INSTALLED.add("tests")
TINY = Limits(
    processes=1,
    warm_up_cap_s=0.03,
    rule=StopRule(min_blocks=3, min_block_runs=1, min_block_s=0.005, cap_s=0.03, half_width=None),
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
    case = Case(**{"model": "own.net.build" if module else "square", "threads": 1} | fields)
    if case.model == "square":
        case = msgspec.structs.replace(case, options={"size": 16} | case.options)
    return Job(
        case=case,
        suite_id="the run of a test",
        limits=limits,
        device="cpu",
        output=str(folder),
        raw_name="run.0",
        cache=str(folder / "cache"),
        artifacts=str(folder / "artifacts"),
        spawned_ns=time.monotonic_ns(),
        own=UserModule(module) if module else None,
        recipe=Measure(probes=probes, counts=probes),
    )


def changed(a_job: Job, **fields: object) -> Job:
    """Return the job with these fields of its own, of its inputs, of its case or of the user's model."""
    replace, own = msgspec.structs.replace, a_job.own
    inputs = {name: fields.pop(name) for name in Inputs.__struct_fields__ if name in fields}
    case = {name: fields.pop(name) for name in Case.__struct_fields__ if name in fields}
    for name, kind in (("module", UserModule), ("onnx", UserFile)):
        if name in fields:
            path = str(fields.pop(name))
            own = replace(own, path=path) if isinstance(own, kind) else kind(path)
    of_own = {"inputs": "inputs", "module_folder": "folder", "reference": "reference"}
    own = replace(own, **{to: fields.pop(name) for name, to in of_own.items() if name in fields}) if own else own
    job = replace(a_job, own=own, inputs=replace(a_job.inputs, **inputs), case=replace(a_job.case, **case))
    return replace(job, **fields)


def of_file(folder: Path, path: Path, variant: str = "onnxruntime", **fields: object) -> Job:
    """Return a job of the user's own ONNX file."""
    file_job = job(folder, model=f"own.{path.stem}", variant=Variant.parse(variant), **fields)
    return changed(file_job, options={}, onnx=path)


def catalogued(folder: Path, model: str, options: Mapping[str, OptionValue] | None = None, **fields: object) -> Job:
    """Return a job of the catalogued model with these options, of random weights and images."""
    return changed(job(folder, model=model, **fields), options=catalog.entry(model).resolve(options or {}))


def trained(folder: Path, model: str, options: Mapping[str, OptionValue] | None = None, **fields: object) -> Job:
    """Return a job of the trained net of this model that ships, on the images that ship."""
    completed = demo.complete(model, options or {})
    return changed(catalogued(folder, model, completed, **fields), weights=demo.DEMO, data=demo.DEMO)


def as_loaded(module: Callable[..., Any]) -> backends.LoadedModel:
    """Return what runs on a CPU in float32 as a backend loads it."""
    return backends.LoadedModel(module, torch.float32, torch.device("cpu"), module)


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


def build_and_load(a_job: Job) -> tuple[workload.Workload, backends.LoadedModel]:
    """Return what a worker builds of the job and loads to run it."""
    built, batch = workload.build(a_job), a_job.case.batch_size
    return built, backends.load(a_job.case.variant, built.source, torch.device(a_job.device), built.images[:batch])


def run_here(a_job: Job) -> Outcome:
    """Run the job as the worker does, but in this process, which has imported torch already."""
    return worker_main._work(a_job, StageClock(io.BytesIO(), a_job))


def measured(a_job: Job) -> Outcome:
    """Run the job here; it has to end well."""
    outcome = run_here(a_job)
    assert outcome.process.status == "ok", outcome.process.reason
    return outcome
