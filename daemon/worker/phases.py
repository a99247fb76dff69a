"""The phases of one process in order: build, export, load, check, warm up, measure, probe."""

import ctypes
import os
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchd.daemon.errors import Unsupported
from benchd.daemon.measuring.protocol import Job, Outcome
from benchd.daemon.records import (
    Accuracy,
    ArtifactFacts,
    BlockStatistics,
    Check,
    Deadlines,
    Memory,
    ModelFacts,
    Occupancy,
    Probes,
    ProcessResult,
    RawFile,
    RuntimeFacts,
    Status,
    TimeSlice,
    Timing,
    WarmUp,
    Window,
)
from benchd.daemon.worker import accuracy, audit, backends, measure, occupancy, probes, scenarios, steps
from benchd.daemon.worker.audit import Expected
from benchd.daemon.worker.backends import Loaded
from benchd.daemon.worker.check import check_and_answers
from benchd.daemon.worker.child import StageClock
from benchd.daemon.worker.structures import Batch, Tensors, tensors
from benchd.daemon.worker.subject import Subject, build
from benchd.models import catalog

OFFLINE_CHUNK_S = 0.1
DEVICE_PARTS_S = 1.0


@dataclass
class Findings:
    """What the phases have found so far; an exception in the middle loses nothing of it."""

    stages: StageClock
    model: ModelFacts | None = None
    artifacts: list[ArtifactFacts] = field(default_factory=list)
    runtime: RuntimeFacts | None = None
    check: Check | None = None
    accuracy: Accuracy | None = None
    device_name: str | None = None
    device_uuid: str | None = None
    taken_by_runtime_bytes: int = 0
    kernels_ran: str | None = None
    warm_up: WarmUp | None = None
    timing: Timing | None = None
    parts: dict[str, Timing] = field(default_factory=dict)
    blocks: BlockStatistics | None = None
    window: Window | None = None
    idle: list[Window] = field(default_factory=list)
    memory: Memory | None = None
    raw: dict[str, RawFile] = field(default_factory=dict)
    throughput_per_s: float | None = None
    probes: Probes | None = None
    occupancy: Occupancy | None = None
    deadlines: list[Deadlines] = field(default_factory=list)
    timeline: list[TimeSlice] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def outcome(self, status: Status, reason: str | None) -> Outcome:
        """Return the last line of this process."""
        process = ProcessResult(
            status=status,
            reason=reason,
            stages=self.stages.stages(),
            warm_up=self.warm_up,
            timing=self.timing,
            parts=self.parts,
            blocks=self.blocks,
            window=self.window,
            idle=self.idle,
            memory=self.memory,
            raw=self.raw,
            throughput_per_s=self.throughput_per_s,
            probes=self.probes,
            deadlines=self.deadlines,
            timeline=self.timeline,
        )
        return Outcome(
            process=process,
            model=self.model,
            artifacts=self.artifacts,
            runtime=self.runtime,
            check=self.check,
            accuracy=self.accuracy,
            threads=torch.get_num_threads(),
            occupancy=self.occupancy,
            kernels_ran=self.kernels_ran,
            device_name=self.device_name,
            device_uuid=self.device_uuid,
            versions=versions(),
            flags=self.flags,
            missing=self.missing,
        )


def run(job: Job, findings: Findings) -> None:
    """Do every phase of the job, writing what each one finds into `findings`."""
    device = open_device(job)
    if device.type == "cuda":
        findings.device_name = torch.cuda.get_device_name()
        findings.device_uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", "")) or None
    free_at_first_bytes = _free_bytes(device)
    findings.stages.enter("build")
    subject = build(job)
    findings.model = subject.facts
    if job.case.variant.kernels == "custom":
        findings.kernels_ran = "triton" if device.type == "cuda" else "c"
    findings.artifacts = subject.source.used
    findings.stages.enter("export")
    backends.prepare(job.case.variant, subject.source, device, job.case.batch_size)
    findings.stages.enter("load")
    loaded = backends.load(job.case.variant, subject.source, device, subject.images[: job.case.batch_size])
    findings.runtime = loaded.runtime
    findings.stages.leave()
    pool = steps.batches(subject.images, job.case.batch_size, loaded)
    loaded, first, first_ended_ns = _first_runs(loaded, pool, findings.stages)
    # before the check, whose reference takes memory of its own
    findings.taken_by_runtime_bytes = free_at_first_bytes - _free_bytes(device)
    findings.stages.enter("check")
    findings.check, right = check_and_answers(subject, loaded, job)
    if right:
        findings.check = audit.audited(findings.check, right, [(0, first)], "in its first run")
    findings.flags += ["reference_fp32"] if findings.check.reference == "float32" else []
    _accuracy(job, subject, loaded, findings)
    del subject
    if job.case.scenario == "cold_start":
        _cold_start(job, first_ended_ns, findings)
        return
    met = _timed(job, loaded, pool, right, findings)
    _beside(job, loaded, pool, [pool[place] for place in met], findings)
    del loaded, pool
    _probed(job, device, findings)


def open_device(job: Job) -> torch.device:
    """Return the job's device with its threads set; raise Unsupported where it is not here or does not train so."""
    if job.device == "cuda" and not torch.cuda.is_available():
        raise Unsupported(f"torch {torch.__version__} cannot use a CUDA device here; --device cpu measures the CPU")
    if job.case.direction == "training" and not catalog.trains(job.case.model, job.case.variant.name):
        raise Unsupported(catalog.TRAINING)
    torch.set_num_threads(job.threads or len(os.sched_getaffinity(0)))
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return torch.device(job.device)


def _first_runs(loaded: Loaded, pool: list[Batch], stages: StageClock) -> tuple[Loaded, Batch, int]:
    """Time the first two runs; return what is loaded as a step runs it, the first answer, and when that was there."""
    with torch.inference_mode():
        start_ns = time.monotonic_ns()
        output = loaded.run(pool[0].to(loaded.device, non_blocking=True))
        first = Tensors(tensors(output)).cpu()
        first_ended_ns = time.monotonic_ns()
        stages.seconds["first_run_s"] = (first_ended_ns - start_ns) / 1e9
        first = first.clone()  # the next run may write to the same memory
        loaded = steps.uniform(loaded, output)
        stages.seconds["second_run_s"] = steps.SingleStream(loaded, pool)(0)[0] / 1e9
    return loaded, first, first_ended_ns


def _accuracy(job: Job, subject: Subject, loaded: Loaded, findings: Findings) -> None:
    """Count right answers where this process is to; labels that do not fit cost that figure alone."""
    if job.accuracy is None or subject.dataset is None:
        return
    findings.stages.enter("accuracy")
    found = accuracy.measure(subject, subject.dataset, loaded, job, findings.stages.go_on)
    if isinstance(found, str):
        findings.missing["accuracy"] = found
    else:
        findings.accuracy = found


def _cold_start(job: Job, first_ended_ns: int, findings: Findings) -> None:
    """Record the one run of a process that counts here: from its spawn to its first output."""
    findings.stages.leave()
    findings.window = Window(job.spawned_ns, first_ended_ns)
    taken_ns = first_ended_ns - job.spawned_ns
    findings.timing = measure.timing([taken_ns], None, taken_ns)
    _take_peaks(job, findings)
    findings.flags.append("rss_peak_since_start")
    findings.missing["probes"] = "a cold start is not held against a floor"


def _timed(job: Job, loaded: Loaded, pool: list[Batch], right: Expected | None, findings: Findings) -> list[int]:
    """Warm up, measure and audit; return which batches were run."""
    if not _forget_peaks(loaded.device):
        findings.flags.append("rss_peak_since_start")
    known = [place for place in right.outputs if place < len(pool)] if right else []
    step, mode = _step(job, loaded, pool, known)
    _rest(job, findings)
    with mode:
        findings.stages.enter("warm_up")
        findings.warm_up = measure.warm_up(step, job.limits.warm_up_cap_s)
        step.sample.clear()
        findings.stages.enter("measure")
        if job.case.scenario in ("periodic", "wake_up"):
            _paced(job, step, findings)
        else:
            measured = measure.measure(step, job.limits.rule, job.hold_s)
            _take_peaks(job, findings)
            _device_parts(job, loaded, pool, findings)
            _rest(job, findings, settle_s=job.idle_s / 2)
            findings.stages.leave()
            _record(job, step, measured, findings)
    if right:
        _audit(step, loaded, right, findings)
    return list(step.sample.met)


def _audit(step: steps.Step, loaded: Loaded, right: Expected, findings: Findings) -> None:
    """Hold what was answered while it was timed against the reference too, and what new inputs are answered."""
    if findings.check is None:
        raise ValueError("an audit comes after the check")
    was = findings.check
    findings.check = audit.audited(was, right, step.sample.answers)
    with torch.inference_mode():
        findings.check = audit.audited_fresh(findings.check, right, loaded)
    if findings.check.verdict == "failed" != was.verdict:
        findings.flags.append("output_changed")


def _beside(job: Job, loaded: Loaded, pool: list[Batch], met: list[Batch], findings: Findings) -> None:
    """Take what has passes of its own, in inference: whether a repeated input is faster, and the occupancy."""
    if job.case.direction == "training" or findings.timing is None:
        return
    findings.stages.enter("probe")
    if job.repeats:
        with torch.inference_mode():
            if audit.repeated_is_faster(loaded, met):
                findings.flags.append("repeated_input_faster")
    if job.case.scenario not in ("periodic", "wake_up") and not job.is_compared:
        _occupied(loaded, pool, findings)


def _rest(job: Job, findings: Findings, settle_s: float = 0.0) -> None:
    """Leave the device alone, the model loaded, where a power sensor asks for it; clocks and sensors settle first."""
    if not job.idle_s or job.is_compared:
        return
    findings.stages.enter("idle")
    time.sleep(settle_s)
    start = time.monotonic_ns()
    time.sleep(job.idle_s)
    findings.idle.append(Window(start, time.monotonic_ns()))


def _step(
    job: Job, loaded: Loaded, pool: list[Batch], known: list[int]
) -> tuple[steps.Step, AbstractContextManager[object]]:
    """Return what one run is, and the mode it runs in; the right answers to the `known` batches are known."""
    if job.case.direction == "training":
        if loaded.module is None:
            raise Unsupported("this backend does not train")
        return steps.Training(loaded.module, loaded.device, pool, job.case.seed), nullcontext()
    if job.case.scenario == "offline":
        return steps.Offline(loaded, pool, _chunk(loaded, pool), known), torch.inference_mode()
    return steps.SingleStream(loaded, pool, known), torch.inference_mode()


def _chunk(loaded: Loaded, pool: list[Batch]) -> int:
    """Return how many inferences make a chunk of about a tenth of a second, at least two."""
    with torch.inference_mode():
        return max(2, int(OFFLINE_CHUNK_S * 1e9 / steps.SingleStream(loaded, pool)(0)[0]))


def _record(job: Job, step: steps.Step, measured: measure.Measured, findings: Findings) -> None:
    """Turn the timed loop into the fields of a record."""
    first, *others = step.parts
    summary = measured.summary
    findings.timing = measure.timing(measured.values_ns[first], summary.interval_ns, summary.median_ns)
    findings.parts |= {part: measure.part_timing(measured.values_ns[part]) for part in others}
    findings.blocks = measure.block_statistics(summary, measured.bounds_ns)
    findings.window = measured.window
    findings.raw = measure.write_raw(measured.values_ns, Path(job.output), job.raw_name)
    findings.throughput_per_s = job.case.batch_size * summary.runs * step.runs / measured.window.seconds
    if job.case.scenario == "sustained":
        findings.timeline = scenarios.slices(measured.values_ns[first], measured.window)
    _flag_unsteady(findings)


def _paced(job: Job, step: steps.Step, findings: Findings) -> None:
    """Run a scenario with pauses in it and record its parts; the first one decides."""
    start_ns, cap_s = time.monotonic_ns(), job.limits.rule.cap_s
    if job.case.scenario == "periodic":
        values_ns, findings.deadlines = scenarios.periodic(step, cap_s)
    else:
        values_ns = scenarios.wake_up(step, cap_s)
    findings.window = Window(start_ns, time.monotonic_ns())
    _take_peaks(job, findings)
    findings.stages.leave()
    findings.parts |= {part: measure.part_timing(values) for part, values in values_ns.items()}
    findings.timing = next(iter(findings.parts.values()))
    findings.raw = measure.write_raw(values_ns, Path(job.output), job.raw_name)
    _flag_unsteady(findings)


def _flag_unsteady(findings: Findings) -> None:
    if findings.warm_up and not findings.warm_up.steady:
        findings.flags.append("warm_up_not_steady")


def _occupied(loaded: Loaded, pool: list[Batch], findings: Findings) -> None:
    """On a GPU, take the occupancy in passes of its own; a profiler that is refused costs that figure alone."""
    if loaded.device.type != "cuda":
        return
    try:
        found = occupancy.measure(steps.SingleStream(loaded, pool), findings.device_uuid)
    except (RuntimeError, OSError) as error:
        found = f"the profiler did not run: {error}"
    if isinstance(found, str):
        findings.missing["occupancy"] = found
    else:
        findings.occupancy = found


def _device_parts(job: Job, loaded: Loaded, pool: list[Batch], findings: Findings) -> None:
    """On a GPU, take the parts of an inference by events in a short pass of its own, after the timed one."""
    if loaded.device.type != "cuda" or job.case.direction == "training" or job.is_compared:
        return
    step = steps.DeviceParts(loaded, pool)
    values: list[tuple[int, ...]] = []
    end = time.monotonic() + DEVICE_PARTS_S
    while len(values) < 10 or time.monotonic() < end:
        values.append(step(len(values)))
    columns = zip(step.parts, zip(*values, strict=True), strict=True)
    findings.parts |= {part: measure.part_timing(column) for part, column in columns}


def _probed(job: Job, device: torch.device, findings: Findings) -> None:
    """Take the device's rates; a probe that fails costs the floor and not the measurement."""
    if job.is_compared:
        findings.missing["probes"] = "a comparison is not held against a floor"
    if job.is_compared or not job.probes:
        findings.stages.leave()
        return
    findings.stages.enter("probe")
    try:
        findings.probes = probes.probe(device, job.case.variant.precision)
    except Exception as error:  # of torch, Triton and compilers
        findings.missing["probes"] = f"the probes did not run: {error}"
    findings.stages.leave()


def _forget_peaks(device: torch.device) -> bool:
    """Give back what building and checking used and restart the peaks; return whether the kernel restarts its own."""
    ctypes.CDLL(None).malloc_trim(0)
    if device.type == "cuda":
        with suppress(RuntimeError):  # up to 2.12 torch takes a failed capture for one still under way
            torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _take_peaks(job: Job, findings: Findings) -> None:
    lines = Path("/proc/self/status").read_text().splitlines()
    resident = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    findings.memory = Memory(rss_peak_bytes=resident, device_peak_bytes=_device_peak(job, findings))


def _device_peak(job: Job, findings: Findings) -> int | None:
    """Return what this process took of the GPU: torch counts its own memory, a runtime's shows in what was free."""
    if job.device != "cuda":
        return None
    if job.case.variant.backend in ("onnxruntime", "tensorrt"):
        return findings.taken_by_runtime_bytes
    if job.case.variant.backend == "cudagraph":  # what a graph works in was allocated for it while it was captured
        return torch.cuda.max_memory_reserved()
    return torch.cuda.max_memory_allocated()


def _free_bytes(device: torch.device) -> int:
    """Return how much of the GPU's memory nobody has taken; 0 on a CPU."""
    return torch.cuda.mem_get_info()[0] if device.type == "cuda" else 0


def versions() -> dict[str, str]:
    """Return the versions that only a process with torch knows."""
    found = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return {name: str(version) for name, version in found.items() if version}
