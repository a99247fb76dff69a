"""From a ProfileJob to what every method found: the child with torch, the trace that it leaves, the Nsight tools."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from benchd.daemon.config import SamplingConfig
from benchd.daemon.errors import BenchdError
from benchd.daemon.measuring.process import environment
from benchd.daemon.profiling.nsight import nsight
from benchd.daemon.profiling.occupancy import of_trace
from benchd.daemon.profiling.profile import (
    Collected,
    Frame,
    LayersProfile,
    Method,
    NsightCompute,
    NsightSystems,
    ProfileJob,
    TorchProfile,
)
from benchd.daemon.profiling.trace import tables, trace
from benchd.daemon.profiling.trace.icicle import icicle
from benchd.daemon.records import Energy, Occupancy, Window
from benchd.daemon.sampling import energy
from benchd.daemon.sampling.child import SamplerProcess

PERIOD_S = SamplingConfig().period_s
LEAST_S = 2.0
NSIGHT: tuple[Method, ...] = ("nsys", "ncu")


@dataclass
class Found:
    """What the methods of one job found; `missing` says why one found nothing, and `failed` which of these broke."""

    collected: Collected
    missing: dict[str, str]
    failed: list[Method]
    torch: TorchProfile | None = None
    nesting: list[Frame] = field(default_factory=list)
    occupancy: Occupancy | None = None
    nsys: NsightSystems | None = None
    ncu: NsightCompute | None = None


def gather(job: ProfileJob, deadline_s: float, kernel_regex: str | None) -> Found:
    """Run every method of the job, child and tools each to a deadline; one that fails costs its own result alone."""
    found = _in_child(job, deadline_s)
    if found.collected.trace:
        read_trace(found, job, found.collected.trace)
    if "nsys" in job.methods:
        systems = nsight.systems(job, deadline_s)
        found.nsys = systems if isinstance(systems, NsightSystems) else None
        found.missing |= {"nsys": systems} if isinstance(systems, str) else {}
    if "ncu" in job.methods:
        compute = nsight.compute(job, deadline_s, kernel_regex)
        found.ncu = compute if isinstance(compute, NsightCompute) else None
        found.missing |= {"ncu": compute} if isinstance(compute, str) else {}
    return found


def _in_child(job: ProfileJob, deadline_s: float) -> Found:
    methods = [method for method in job.methods if method not in NSIGHT]
    collect = _with_energy if "layers" in methods and job.sources else _collect
    collected = collect(job, deadline_s) if methods else Collected()
    if collected.error is None:
        return Found(collected, dict(collected.missing), list(collected.failed))
    return Found(collected, dict.fromkeys(methods, collected.error), [] if collected.unsupported else methods)


def _with_energy(job: ProfileJob, deadline_s: float) -> Collected:
    """Run the child beside the sampler; its layers get the energy of a pass, or a note why there is none."""
    with SamplerProcess(job.sources, PERIOD_S) as samples:
        power = samples.power()
        lasting_s = max(LEAST_S, energy.idle_s(power, PERIOD_S)) if power else 0.0
        beside = msgspec.structs.replace(job, energy_s=lasting_s, hold_s=energy.hold_s(power, PERIOD_S))
        collected = _collect(beside, deadline_s)
        samples.flush()
        layers = collected.layers
        return msgspec.structs.replace(collected, layers=_measured(layers, samples)) if layers else collected


def _measured(layers: LayersProfile, samples: SamplerProcess) -> LayersProfile:
    found: Energy | str = "no_sensor"
    if layers.energy_window:
        read = samples.raw(Window(0, time.monotonic_ns()))
        found = energy.measure(read, samples.power(), layers.energy_window, layers.energy_images, PERIOD_S)
    if isinstance(found, str):
        return msgspec.structs.replace(layers, notes=[*layers.notes, f"Measured energy: {found}."])
    return msgspec.structs.replace(
        layers,
        measured_energy_j=found.gross_per_inference_j,
        measured_energy_err_j=found.energy_err_j / layers.energy_images,
        energy_scope=f"{found.scope}, by {found.source}",
    )


def _collect(job: ProfileJob, deadline_s: float) -> Collected:
    """Return the child's answer; one that dies or takes too long has an error for an answer."""
    # on a CPU the profiler's library complains that there is no GPU
    quiet = {"KINETO_LOG_LEVEL": "6"} if job.device == "cpu" else {}
    with subprocess.Popen(
        [sys.executable, "-m", "benchd.daemon.worker.profiling"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env=environment(job.device, job.cache, job.gpu_uuid) | quiet,
    ) as child:
        try:
            answer, _ = child.communicate(msgspec.json.encode(job), deadline_s)
        except subprocess.TimeoutExpired:
            return Collected(error=f"it took longer than {deadline_s:g} s")
        finally:
            with suppress(ProcessLookupError):  # already gone, with all that it had started
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return _decoded(answer, child.returncode)


def _decoded(answer: bytes, code: int) -> Collected:
    try:
        return msgspec.json.decode(answer, type=Collected)
    except msgspec.DecodeError:
        ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return Collected(error=f"the process that profiles {ended} and gave no result")


def read_trace(found: Found, job: ProfileJob, name: str) -> None:
    """Add what the trace of this name in the output folder holds, or why it is of no use."""
    is_cuda = job.device != "cpu"
    try:
        read = trace.read(Path(job.output, name))
        found.torch = tables.torch_profile(read, name, is_cuda)
    except BenchdError as error:
        found.missing["torch"] = str(error)
        found.failed.append("torch")
        return
    found.nesting = icicle(read)
    filled = of_trace(read, None, "a trace holds no counters") if is_cuda else "a GPU's alone"
    found.occupancy = filled if isinstance(filled, Occupancy) else None
