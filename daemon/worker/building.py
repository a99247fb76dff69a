"""Turns a job into a running model: opens the device, builds the module, exports the file and loads the backend."""

import os
import time
from dataclasses import dataclass, replace

import torch

from benchd.daemon.errors import Unsupported
from benchd.daemon.machine.environment import variables
from benchd.daemon.measuring.process import settings
from benchd.daemon.measuring.protocol import Job, Outcome
from benchd.daemon.records import UserModule
from benchd.daemon.worker import backends, builds, device_memory, peaks, steps, user_code
from benchd.daemon.worker.backends import LoadedModel
from benchd.daemon.worker.child import StageClock, blaming, folder_of
from benchd.daemon.worker.structures import Batch, Tensors, tensors, trimmed, values
from benchd.daemon.worker.workload import Workload, build
from benchd.models import catalog

SHARED = ("eager", "compile")


@dataclass(frozen=True)
class Built:
    """The workload, each stream's loaded model, the pool, and the first answer with its time of arrival."""

    workload: Workload
    models: list[LoadedModel]
    pool: list[Batch]
    first: Batch
    first_ended_ns: int


def built(job: Job, stages: StageClock, outcome: Outcome) -> Built:
    """Build, export and load the job's model and run it twice; `outcome` gets the facts and the durations."""
    outcome.versions = versions()
    outcome.variables = variables(os.environ, settings(job.device, job.cache))
    device = _opened(job, outcome)
    at_first = device_memory.held(outcome.device_uuid) if peaks.counted_by_driver(job) else ""
    stages.enter("build")
    workload = _workload(job, outcome)
    try:
        stages.enter("export")
        backends.prepare(job.case.variant, workload.source, device, job.case.batch_size)
        stages.enter("load")
        # set again, because building and exporting run a user's module, which may have changed the threads
        _set_threads(job)
        loaded = backends.load(job.case.variant, workload.source, device, workload.example(job.case.batch_size))
        outcome.runtime = loaded.runtime
        stages.leave()
        pool = steps.batches(workload.images, job.case.batch_size, loaded)
        loaded, first, first_ended_ns = _first_runs(loaded, pool, stages)
    except Exception:
        if job.module and job.inputs.samples:
            _refuse_unread(job.module, job, workload)
        raise
    others = _other_streams(job, workload, loaded, pool)
    outcome.kernels_ran = builds.kernels_ran(job.case.variant, device)
    outcome.software = builds.loaded()  # after the first run, which is timed in a cold start
    loaded = _counted(job, loaded, at_first, outcome)  # counted before the check, whose reference also takes memory
    return Built(workload, [loaded, *others], pool, first, first_ended_ns)


def _refuse_unread(module: UserModule, job: Job, workload: Workload) -> None:
    """Raise UsageError if the user's module cannot run on the user's own items, whatever the variant."""
    read = ", ".join(f"{spec.name or 'an item'} {spec.dtype} {spec.shape}" for spec in workload.facts.inputs)
    option = f"--inputs {workload.facts.inputs[0].file} ({read})"
    with blaming(option, folder_of(module)), torch.inference_mode():
        workload.plain(*values(trimmed(workload.example(job.case.batch_size))))


def _workload(job: Job, outcome: Outcome) -> Workload:
    """Return the job's workload, also storing it in `outcome`, and watch which files a user's module opens."""
    if job.module:
        user_code.watch()
    workload = build(job)
    outcome.model, outcome.artifacts = workload.facts, workload.source.used
    return workload


def _opened(job: Job, outcome: Outcome) -> torch.device:
    """Return the job's device, also storing it in `outcome`."""
    device = open_device(job)
    outcome.threads = torch.get_num_threads()
    if device.type == "cuda":
        outcome.device_name = torch.cuda.get_device_name()
        outcome.device_uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", "")) or None
    return device


def open_device(job: Job) -> torch.device:
    """Return the job's device with its threads set; raise Unsupported if it is absent or cannot train this way."""
    if job.device == "cuda" and not torch.cuda.is_available():
        raise Unsupported(f"torch {torch.__version__} cannot use a CUDA device here; --device cpu measures the CPU")
    if job.case.direction == "training" and not catalog.trains(job.case.model, job.case.variant.name):
        raise Unsupported(catalog.TRAINING)
    _set_threads(job)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return torch.device(job.device)


def _set_threads(job: Job) -> None:
    torch.set_num_threads(job.case.threads or max(1, len(os.sched_getaffinity(0)) // job.case.streams))


def _first_runs(loaded: LoadedModel, pool: list[Batch], stages: StageClock) -> tuple[LoadedModel, Batch, int]:
    """Time the first two runs; return the model in the form used by steps, the first answer and its time."""
    with torch.inference_mode():
        start_ns = time.monotonic_ns()
        output = loaded.run(pool[0].to(loaded.device, non_blocking=True))
        first = Tensors(tensors(output)).cpu()
        first_ended_ns = time.monotonic_ns()
        stages.seconds["first_run_s"] = (first_ended_ns - start_ns) / 1e9
        first = first.clone()  # copied, because the next run may overwrite its memory
        loaded = steps.uniform(loaded, output)
        stages.seconds["second_run_s"] = steps.SingleInference(loaded, pool)(0)[0] / 1e9
    return loaded, first, first_ended_ns


def _other_streams(job: Job, workload: Workload, loaded: LoadedModel, pool: list[Batch]) -> list[LoadedModel]:
    """Return the model for each further stream: the same one if it is Python, else a new session, engine or graph."""
    variant, others = job.case.variant, job.case.streams - 1
    if variant.backend in SHARED:
        return [loaded] * others
    example = workload.example(job.case.batch_size)
    # outside inference mode, like the first: without version counters, Vim would derive its weights again and again
    models = [backends.load(variant, workload.source, loaded.device, example) for _ in range(others)]
    with torch.inference_mode():
        return [steps.uniform(other, other.run(pool[0].to(loaded.device))) for other in models]


def _counted(
    job: Job, loaded: LoadedModel, at_first: device_memory.DeviceMemory | str, outcome: Outcome
) -> LoadedModel:
    """Return the model with a non-torch runtime's GPU memory; a flag in `outcome` says if it may include others'."""
    if not peaks.counted_by_driver(job):
        return loaded
    built_s = loaded.runtime.build_s if loaded.runtime else None
    usage = device_memory.taken(at_first, device_memory.held(outcome.device_uuid), built_s)
    if isinstance(usage, str):
        return replace(loaded, taken=usage)
    taken_bytes, by_all = usage
    outcome.flags += ["device_memory_of_all"] if by_all else []
    return replace(loaded, taken=taken_bytes)


def versions() -> dict[str, str]:
    """Return the versions that only a process with torch can read."""
    installed = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return {name: str(version) for name, version in installed.items() if version}
