"""Runs a ProfileJob's methods: the child with torch, the analysis of its trace, and the Nsight tools."""

import signal
import sys
import time
from pathlib import Path

import msgspec

from benchd.daemon.errors import BenchdError
from benchd.daemon.machine.quiet import ForeignUse
from benchd.daemon.machine.ticker import show
from benchd.daemon.measuring.process import Child
from benchd.daemon.measuring.protocol import SILENT, Stage
from benchd.daemon.measuring.session import Session
from benchd.daemon.profiling import break_even
from benchd.daemon.profiling.nsight import nsight
from benchd.daemon.profiling.occupancy import of_trace
from benchd.daemon.profiling.profile import (
    CollectedProfile,
    LayersProfile,
    Method,
    NsightCompute,
    NsightSystems,
    Profile,
    ProfileJob,
)
from benchd.daemon.profiling.trace import tables, trace
from benchd.daemon.records import Energy, Occupancy, Window
from benchd.daemon.sampling import energy
from benchd.daemon.sampling.child import SamplerProcess

CHILD = "benchd.daemon.worker.profiling"
LEAST_S = 2.0
BREAK_EVEN: Method = "break-even"
NSIGHT: tuple[Method, ...] = ("nsys", "ncu")


def gather(profile: Profile, session: Session, job: ProfileJob, deadline_s: float, kernel_regex: str | None) -> None:
    """Run every method of the job, with a deadline for the child and each tool; a failure affects only its own result.

    After the child has ended, an interrupt also affects only the running method.
    """
    foreign = ForeignUse()
    trace_name = _add_child(profile, session, job, deadline_s)
    if BREAK_EVEN in job.methods:
        _add_break_even(profile, session, job, deadline_s)
    profile.foreign_cpus = foreign.cpus()
    show(sys.stderr, "read the trace and write the report")
    if trace_name:
        read_trace(profile, job, trace_name)
    try:
        _add_nsight(profile, job, deadline_s, kernel_regex)
    except KeyboardInterrupt:
        profile.interrupted = True
        ended = {"nsys": profile.nsys, "ncu": profile.ncu} | profile.missing
        profile.missing |= {tool: "interrupted" for tool in NSIGHT if tool in job.methods and not ended[tool]}


def _add_nsight(profile: Profile, job: ProfileJob, deadline_s: float, kernel_regex: str | None) -> None:
    if "nsys" in job.methods:
        show(sys.stderr, "nsys")
        systems = nsight.systems(job, deadline_s)
        profile.nsys = systems if isinstance(systems, NsightSystems) else None
        profile.missing |= {"nsys": systems} if isinstance(systems, str) else {}
    if "ncu" in job.methods:
        show(sys.stderr, "ncu")
        compute = nsight.compute(job, deadline_s, kernel_regex)
        profile.ncu = compute if isinstance(compute, NsightCompute) else None
        profile.missing |= {"ncu": compute} if isinstance(compute, str) else {}


def _add_child(profile: Profile, session: Session, job: ProfileJob, deadline_s: float) -> str | None:
    """Add the results of the methods that need the child; return the name of its trace, or None."""
    methods = [method for method in job.methods if method not in (*NSIGHT, BREAK_EVEN)]
    if not methods:
        return None
    job = msgspec.structs.replace(job, methods=methods)
    collected = (_with_energy if "layers" in methods else _collect)(session, job, deadline_s)
    if collected.error is None:
        profile.missing |= collected.missing
        profile.failed += collected.failed
    else:
        profile.missing |= dict.fromkeys(methods, collected.error)
        profile.failed += [] if collected.unsupported else methods
    profile.memory, profile.benchmark, profile.layers = collected.memory, collected.benchmark, collected.layers
    _describe(profile, collected)
    return collected.trace


def _describe(profile: Profile, collected: CollectedProfile) -> None:
    """Add the child's description of the model and the device."""
    profile.model, profile.kernels_ran = collected.model, collected.kernels_ran
    profile.device_name = collected.device_name
    versions = profile.environment.versions | collected.versions
    profile.environment = msgspec.structs.replace(profile.environment, versions=versions)


def _with_energy(session: Session, job: ProfileJob, deadline_s: float) -> CollectedProfile:
    """Run the child while sampling; add the energy of a run to its layers, or the reason why there is none."""
    sampler, period_s = session.sampler([]), session.config.sampling.period_s
    power = sampler.samples.power
    lasting_s = max(LEAST_S, energy.idle_s(power, period_s)) if power else 0.0
    beside = msgspec.structs.replace(job, energy_s=lasting_s, hold_s=energy.hold_s(power, period_s))
    collected = _collect(session, beside, deadline_s)
    sampler.flush()
    layers = collected.layers and _measured(collected.layers, sampler, period_s)
    for point in collected.sweep.points if collected.sweep else ():
        point.joules = _joules(sampler, point.window, point.inferences, period_s)
        point.ann_joules = _joules(sampler, point.ann_window, point.ann_inferences, period_s)
    session.rest()
    return msgspec.structs.replace(collected, layers=layers)


def _joules(sampler: SamplerProcess, window: Window | None, inferences: int, period_s: float) -> float | None:
    """Return the energy per inference in a window, including idle power; None if it was not measured."""
    if window is None:
        return None
    read = sampler.samples.raw(Window(0, time.monotonic_ns()))
    measured = energy.measure(read, sampler.samples.power, window, inferences, period_s)
    return None if isinstance(measured, str) else measured.gross_per_inference_j


def _add_break_even(profile: Profile, session: Session, job: ProfileJob, deadline_s: float) -> None:
    """Add the combined result of sweeps in fresh processes, or why one of them failed."""
    sweeps = []
    for number in range(1, job.sweeps + 1):
        sys.stderr.write(f"break-even: process {number} of {job.sweeps}\n")
        collected = _with_energy(session, msgspec.structs.replace(job, methods=[BREAK_EVEN]), deadline_s)
        if collected.sweep is None:
            profile.missing[BREAK_EVEN] = collected.error or collected.missing[BREAK_EVEN]
            profile.failed += [BREAK_EVEN] * (
                BREAK_EVEN in collected.failed or bool(collected.error and not collected.unsupported)
            )
            return
        sweeps.append(collected.sweep)
        if profile.model is None:
            _describe(profile, collected)
    profile.break_even = break_even.conclude(sweeps)


def _measured(layers: LayersProfile, sampler: SamplerProcess, read_period_s: float) -> LayersProfile:
    layer_energy: Energy | str = "no_sensor"
    if layers.energy_window:
        read = sampler.samples.raw(Window(0, time.monotonic_ns()))
        layer_energy = energy.measure(
            read, sampler.samples.power, layers.energy_window, layers.energy_images, read_period_s
        )
    if isinstance(layer_energy, str):
        return msgspec.structs.replace(layers, notes=[*layers.notes, f"Measured energy: {layer_energy}."])
    return msgspec.structs.replace(
        layers,
        measured_energy_j=layer_energy.gross_per_inference_j,
        measured_energy_err_j=layer_energy.energy_err_j / layers.energy_images,
        energy_scope=f"{layer_energy.scope}, by {layer_energy.source}",
    )


def _collect(session: Session, job: ProfileJob, deadline_s: float) -> CollectedProfile:
    """Return the child's answer, or an error if it dies or takes too long."""
    until_s = time.monotonic() + deadline_s
    with Child(CHILD, job, msgspec.json.Decoder(Stage | CollectedProfile)) as child:
        while (left_s := until_s - time.monotonic()) > 0:
            if not session.wait(child, left_s):
                continue
            for answer in child.messages():
                if isinstance(answer, CollectedProfile):
                    return answer
                text = f"{job.case.case_id}: {answer.name} {answer.done}"
                show(sys.stderr, text, ticks=not answer.done.endswith(SILENT))
            if child.has_ended:
                return CollectedProfile(error=f"the profiling process {_ending(child.reap())} without a result")
    return CollectedProfile(error=f"it took longer than {deadline_s:g} s")


def _ending(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


def read_trace(profile: Profile, job: ProfileJob, name: str) -> None:
    """Add the tables for the trace with this name in the output folder, or the reason why it is unusable."""
    is_cuda = job.device != "cpu"
    try:
        read = trace.read(Path(job.output, name))
        profile.torch = tables.torch_profile(read, name, is_cuda)
    except BenchdError as error:
        profile.missing["torch"] = str(error)
        profile.failed.append("torch")
        return
    filled = of_trace(read, None, "traces do not contain counters") if is_cuda else None
    profile.occupancy = filled if isinstance(filled, Occupancy) else None
