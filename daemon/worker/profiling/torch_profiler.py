"""Runs torch.profiler over the active steps: writes a Chrome trace, with a range for each call of a module."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

from benchd.daemon.errors import Unsupported, UsageError
from benchd.daemon.profiling.trace import tables, trace
from benchd.daemon.profiling.trace.trace import MODULE_RANGE
from benchd.daemon.worker.profiling.calls import calls_through
from benchd.daemon.worker.profiling.nvtx import named_range
from benchd.daemon.worker.profiling.work import Whole, Work

TRACE = "trace.json.gz"
TABLES = "profile.json"


def run(work: Work) -> str:
    """Profile the job's active steps after its warm-up and return the name of the trace in the output folder."""
    warm_up, steps = work.job.warm_up, work.job.steps
    path = Path(work.job.output) / TRACE
    with module_ranges([work.module, work.loss]), _recorded(path, work.device.type, warm_up, steps) as profiler:
        for _ in range(warm_up + steps):
            work.step()
            profiler.step()
    return TRACE


@contextmanager
def profiled(output: str | Path, *modules: nn.Module, steps: int = 3, warm_up: int = 1) -> Iterator[profile]:
    """Profile your own loop into the folder `output`; call `step()` of the returned profiler after each step.

    The first `warm_up` steps run with the profiler and are discarded, the next `steps` are kept, and further ones run
    without the profiler. Each call of `modules`, and of the modules inside them, becomes a range named after its class.
    Afterwards the folder contains `trace.json.gz`, which Perfetto and TensorBoard open, and `profile.json`, a
    `TorchProfile`.

            with profiled("profile", model, steps=3) as profiler:
                for images, labels in loader:
                    loss(model(images), labels).backward()
                    profiler.step()

    Raises UsageError if the folder already contains a trace or the loop was too short, and Unsupported if a GPU ran and
    the profiler was not allowed to see its kernels.
    """
    path = Path(output) / TRACE
    if path.exists():
        raise UsageError(f"{path} already exists: choose a different folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with module_ranges(modules), _recorded(path, device, warm_up, steps) as profiler:
        yield profiler
    if not path.exists():
        raise UsageError(f"the loop ended within its {warm_up} steps of warm-up: call step() after each step")
    traced = tables.torch_profile(trace.read(path), TRACE, torch.cuda.is_initialized())
    path.with_name(TABLES).write_bytes(msgspec.json.encode(traced))


def activities(device: str) -> list[ProfilerActivity]:
    """Return the activities to record on this type of device; raise Unsupported if torch cannot record them."""
    if device != "cuda":
        return [ProfilerActivity.CPU]
    if ProfilerActivity.CUDA not in supported_activities():
        raise Unsupported(f"torch {torch.__version__} was built without CUPTI: its profiler cannot record kernels")
    return [ProfilerActivity.CPU, ProfilerActivity.CUDA]


def module_ranges(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Inside the block, make each call of these modules and those inside them a range named after the class."""
    return calls_through(_in_range, (inner for outer in modules for inner in outer.modules()))


def _in_range(module: nn.Module, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    name = module.class_name if isinstance(module, Whole) else type(module).__name__
    with named_range(MODULE_RANGE + name):
        return forward(*inputs, **options)


def _recorded(path: Path, device: str, warm_up: int, steps: int) -> profile:
    """Return a profiler that writes its active steps to `path` once they are done."""
    return profile(
        activities=activities(device),
        schedule=schedule(wait=0, warmup=warm_up, active=steps, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        record_shapes=True,
        acc_events=True,
    )
