"""The phases of one process in order: build, export, load, check, warm up, measure, probe."""

import ctypes
import os
import time
from array import array
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import torch

from benchd.daemon.errors import Unsupported
from benchd.daemon.machine.environment import variables
from benchd.daemon.measuring.process import settings
from benchd.daemon.measuring.protocol import Job, Outcome
from benchd.daemon.records import Memory, Requests, Window
from benchd.daemon.verdicts import timings
from benchd.daemon.worker import (
    accuracy,
    audit,
    backends,
    builds,
    device_memory,
    golden,
    measure,
    packing,
    probes,
    scenarios,
    server,
    steps,
    user_code,
)
from benchd.daemon.worker.audit import Expected
from benchd.daemon.worker.backends import Loaded
from benchd.daemon.worker.check import check_and_answers
from benchd.daemon.worker.child import StageClock, diagnose
from benchd.daemon.worker.pipeline import Camera, Pipeline
from benchd.daemon.worker.streams import Streams, back_to_back
from benchd.daemon.worker.structures import Batch, Tensors, tensors
from benchd.daemon.worker.workload import Workload, build, completed
from benchd.models import catalog

OFFLINE_CHUNK_S = 0.1
DEVICE_PARTS_S = 1.0
SHARED = ("eager", "compile")
PAUSED = ("periodic", "wake_up", "server")


def run(job: Job, stages: StageClock, found: Outcome) -> None:
    """Run every phase of the job, writing each result into `found`, so that a later error loses nothing."""
    found.versions = versions()
    found.variables = variables(os.environ, settings(job.device, job.cache))
    device = _opened(job, found)
    at_first = device_memory.own_bytes(found.device_uuid) if _counted_by_driver(job) else 0
    stages.enter("build")
    workload = _built(job, found)
    stages.enter("export")
    backends.prepare(job.case.variant, workload.source, device, job.case.batch_size)
    stages.enter("load")
    _set_threads(job)  # again: building and exporting ran a user's module, which may have set others
    loaded = backends.load(job.case.variant, workload.source, device, workload.example(job.case.batch_size))
    found.runtime = loaded.runtime
    stages.leave()
    pool = steps.batches(workload.images, job.case.batch_size, loaded)
    loaded, first, first_ended_ns = _first_runs(loaded, pool, stages)
    others = _other_streams(job, workload, loaded, pool)
    found.kernels_ran = builds.kernels_ran(job.case.variant, device)
    found.software = builds.loaded()  # not before the first run, which a cold start times
    if job.ships:
        packing.refuse(job, workload, first)
    loaded = _counted(job, loaded, at_first, found.device_uuid)  # before the check, whose reference also takes memory
    of_streams = [loaded, *others]
    stages.enter("check")
    if job.deployed:
        golden.refuse_others(Path(job.deployed), workload, loaded)
    found.check, right, found.synaptic_flops = check_and_answers(workload, loaded, job)
    found.model = completed(job, workload.facts)
    if job.ship_to:
        found.packed = packing.write(job, workload, loaded, first)
        stages.leave()
        return
    if right:
        found.check = audit.audited(found.check, right, [(0, first)], "in its first run")
    found.flags += ["reference_fp32"] if found.check.reference == "float32" else []
    _accuracy(job, workload, loaded, stages, found)
    found.threads = (found.runtime and found.runtime.threads) or torch.get_num_threads()  # a forward may set its own
    camera = workload.camera
    del workload
    if job.case.scenario == "cold_start":
        _cold_start(job, loaded, first_ended_ns, stages, found)
        return
    if job.case.beside:
        stages.wait_for_turn()  # for the neighbour: engines choose kernels by their times, and are kept
    met = _timed(job, of_streams, pool, camera, right, stages, found)
    stages.keep(found)
    stages.enter("probe")
    del of_streams, others
    _probed(job, device, stages, found)
    _repeated(job, loaded, [pool[place] for place in met], stages, found)
    _occupied(job, loaded, pool, found)  # last: its profiler stays attached and slows every later launch
    stages.leave()


def _built(job: Job, found: Outcome) -> Workload:
    """Return the job's workload, which `found` then names, and watch what a user's module opens."""
    if job.module:
        user_code.watch()
    workload = build(job)
    found.model, found.artifacts = workload.facts, workload.source.used
    return workload


def _opened(job: Job, found: Outcome) -> torch.device:
    """Return the job's device, which `found` then names."""
    device = open_device(job)
    found.threads = torch.get_num_threads()
    if device.type == "cuda":
        found.device_name = torch.cuda.get_device_name()
        found.device_uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", "")) or None
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
    torch.set_num_threads(job.threads or max(1, len(os.sched_getaffinity(0)) // job.case.streams))


def _first_runs(loaded: Loaded, pool: list[Batch], stages: StageClock) -> tuple[Loaded, Batch, int]:
    """Time the first two runs; return the model as steps run it, the first answer, and the time of that answer."""
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


def _other_streams(job: Job, workload: Workload, loaded: Loaded, pool: list[Batch]) -> list[Loaded]:
    """Return the model for each further stream: the same if it is Python, else its own session, engine or graph."""
    variant, others = job.case.variant, job.case.streams - 1
    if variant.backend in SHARED:
        return [loaded] * others
    example = workload.example(job.case.batch_size)
    # as the first: in inference mode a copied model has parameters without versions, and Vim derives its weights anew
    made = [backends.load(variant, workload.source, loaded.device, example) for _ in range(others)]
    with torch.inference_mode():
        return [steps.uniform(one, one.run(pool[0].to(loaded.device))) for one in made]


def _accuracy(job: Job, workload: Workload, loaded: Loaded, stages: StageClock, found: Outcome) -> None:
    """Measure the accuracy if the job requests it; unsuitable labels cost only that figure."""
    if job.accuracy is None:
        return
    if workload.dataset is None:
        found.missing["accuracy"] = f"the images of {job.case.scenario} have no labels: measure it in single_stream"
        return
    stages.enter("accuracy")
    counted = accuracy.measure(workload, workload.dataset, loaded, job, stages.go_on)
    if isinstance(counted, str):
        found.missing["accuracy"] = counted
    else:
        found.accuracy = counted


def _cold_start(job: Job, loaded: Loaded, first_ended_ns: int, stages: StageClock, found: Outcome) -> None:
    """Record the only run that counts here: from the process's spawn to its first output."""
    stages.leave()
    found.process.window = Window(job.spawned_ns, first_ended_ns)
    taken_ns = first_ended_ns - job.spawned_ns
    found.process.timing = timings.timing([taken_ns], None, taken_ns)
    _take_peaks(job, loaded, found)
    found.flags.append("rss_peak_since_start")
    found.missing["probes"] = "a cold start is not compared with a floor"


def _timed(
    job: Job,
    of_streams: list[Loaded],
    pool: list[Batch],
    camera: Camera | None,
    right: Expected | None,
    stages: StageClock,
    found: Outcome,
) -> list[int]:
    """Warm up, measure and audit, with a model for each stream; return the batches that were run."""
    loaded = of_streams[0]
    if not _forget_peaks(loaded.device):
        found.flags.append("rss_peak_since_start")
    known = [place for place in right.outputs if place < len(pool)] if right else []
    mode = nullcontext if job.case.direction == "training" else torch.inference_mode
    _rest(job, stages, found)
    made = [_step(job, one, pool, known, camera) for one in of_streams]
    with mode(), Streams(made, loaded.device, mode) as streams:
        stages.enter("warm_up")
        found.process.warm_up, *_ = streams.together(partial(measure.warm_up, cap_s=job.limits.warm_up_cap_s))
        for step in streams.steps:
            step.sample.clear()
        if job.neighbour_hz:
            _accompany(job, job.neighbour_hz, streams.steps[0], stages, found)
            return []
        stages.enter("measure")
        if job.case.scenario == "server":
            _serve(job, loaded, streams, stages, found)
        elif job.case.scenario in ("periodic", "wake_up"):
            _paced(job, loaded, streams.steps[0], stages, found)
        elif job.case.streams > 1:
            _side_by_side(job, loaded, streams, stages, found)
        else:
            _back_to_back(job, loaded, pool, streams.steps[0], stages, found)
    _flag_unsteady(found)
    if right:
        _audit(streams.steps, loaded, right, found)
    return list({place: None for step in streams.steps for place in step.sample.met})


def _back_to_back(
    job: Job, loaded: Loaded, pool: list[Batch], step: steps.Step, stages: StageClock, found: Outcome
) -> None:
    """Run without pauses until the rule says stop, and record that."""
    wait_for_turn = partial(stages.wait_for_turn, "measure") if job.interleaved else None
    measured = measure.measure(step, job.limits.rule, job.hold_s, wait_for_turn)
    _take_peaks(job, loaded, found)
    if isinstance(step, steps.Offline) and step.waits():
        found.flags.append("one_in_flight")
    if job.case.scenario != "pipeline":  # which has parts of its own
        _device_parts(job, loaded, pool, found)
    _rest(job, stages, found, settle_s=job.idle_s / 2)
    stages.leave()
    _record(job, measured, measured.values_ns, found)
    timed_ns, seconds = measured.values_ns[step.parts[0]], found.process.measured_s
    if job.case.scenario == "offline":  # its window also has the inferences that were not timed
        seconds = sum(timed_ns) * step.runs / 1e9
    found.process.throughput_per_s = job.case.batch_size * measured.summary.runs * step.runs / seconds
    if job.case.scenario == "sustained":
        found.process.timeline = scenarios.slices(timed_ns, measured.window)


def _side_by_side(job: Job, loaded: Loaded, streams: Streams, stages: StageClock, found: Outcome) -> None:
    """Run all streams without pauses and record each; the first one bounds the blocks."""
    measured, by_stream, values_ns, held = back_to_back(streams, job.limits.rule, job.hold_s)
    _take_peaks(job, loaded, found)
    _rest(job, stages, found, settle_s=job.idle_s / 2)
    stages.leave()
    _record(job, measured, {"total": values_ns, **_named_streams(by_stream)}, found)
    found.process.throughput_per_s = job.case.batch_size * held / measured.window.seconds


def _named_streams(by_stream: "Sequence[array[int]]") -> "dict[str, array[int]]":
    return {f"stream_{number}": column for number, column in enumerate(by_stream, start=1)} if by_stream[1:] else {}


def _audit(timed: Sequence[steps.Step], loaded: Loaded, right: Expected, found: Outcome) -> None:
    """Compare the answers of the timed runs with the reference too, and those to unseen inputs."""
    if found.check is None:
        raise ValueError("an audit comes after the check")
    was = found.check
    found.check = audit.audited(was, right, [answer for step in timed for answer in step.sample.answers])
    with torch.inference_mode():
        found.check = audit.audited_fresh(found.check, right, loaded)
    if found.check.verdict == "failed" != was.verdict:
        found.flags.append("output_changed")


def _repeated(job: Job, loaded: Loaded, met: list[Batch], stages: StageClock, found: Outcome) -> None:
    """Flag a variant of inference that answers a repeated input faster, in runs of their own.

    A test that fails costs only its answer, which a flag says, not the measurement.
    """
    if job.case.direction == "training" or found.process.timing is None or not job.repeats:
        return
    try:
        with torch.inference_mode():
            if audit.repeated_is_faster(loaded, met, server.Monotonic(partial(stages.go_on, None)).beat):
                found.flags.append("repeated_input_faster")
    except Exception as error:  # of torch and the other runtimes, as without memory for a further batch
        found.flags.append("repeated_input_untested")
        found.missing["repeated_input"] = f"the test for cached answers did not run: {diagnose(error)[1]}"


def _rest(job: Job, stages: StageClock, found: Outcome, settle_s: float = 0.0) -> None:
    """Keep the device idle with the model loaded if a power sensor needs it; clocks and sensors settle first."""
    if not job.idle_s or job.is_compared:
        return
    stages.enter("idle")
    time.sleep(settle_s)
    start = time.monotonic_ns()
    time.sleep(job.idle_s)
    found.process.idle.append(Window(start, time.monotonic_ns()))


def _step(job: Job, loaded: Loaded, pool: list[Batch], known: list[int], camera: Camera | None) -> steps.Step:
    """Return the step of one stream; the right answers to the `known` batches are known."""
    if camera:
        return Pipeline(loaded, camera, job.case.batch_size, len(pool), known)
    if job.case.direction == "training":
        if loaded.module is None:
            raise Unsupported("this backend does not train")
        return steps.Training(loaded.module, loaded.device, pool, job.case.seed)
    if job.case.scenario == "offline":
        return steps.Offline(loaded, pool, _chunk(loaded, pool), known)
    return steps.SingleStream(loaded, pool, known)


def _chunk(loaded: Loaded, pool: list[Batch]) -> int:
    """Return the number of inferences in a chunk of about a tenth of a second, at least two."""
    with torch.inference_mode():
        return max(2, int(OFFLINE_CHUNK_S * 1e9 / steps.SingleStream(loaded, pool)(0)[0]))


def _record(job: Job, measured: measure.Measured, values_ns: "dict[str, array[int]]", found: Outcome) -> None:
    """Turn the timed loop into the fields of a record; the first of the values decides, the others are its parts."""
    total_ns, *_ = values_ns.values()
    summary = measured.summary
    found.process.timing = timings.timing(total_ns, summary.interval_ns, summary.median_ns)
    found.process.blocks = measure.block_statistics(measured)
    found.process.window = measured.window
    _record_parts(job, values_ns, found)


def _record_parts(job: Job, values_ns: "dict[str, array[int]]", found: Outcome) -> None:
    """Write all values to files; those behind the first are parts of it, without those of no run."""
    _, *parts = values_ns.items()
    found.process.parts |= {name: timings.part_timing(column) for name, column in parts if column}
    found.process.raw = measure.write_raw(values_ns, Path(job.output), job.raw_name)


def _paced(job: Job, loaded: Loaded, step: steps.Step, stages: StageClock, found: Outcome) -> None:
    """Run a scenario with pauses and record its parts; the first part decides."""
    start_ns, cap_s = time.monotonic_ns(), job.limits.rule.cap_s
    if job.case.scenario == "periodic":
        values_ns, found.process.deadlines = scenarios.periodic(step, cap_s)
    else:
        values_ns = scenarios.wake_up(step, cap_s)
    found.process.window = Window(start_ns, time.monotonic_ns())
    _take_peaks(job, loaded, found)
    stages.leave()
    found.process.parts |= {part: timings.part_timing(values) for part, values in values_ns.items()}
    found.process.timing = next(iter(found.process.parts.values()))
    found.process.raw = measure.write_raw(values_ns, Path(job.output), job.raw_name)


def _serve(job: Job, loaded: Loaded, streams: Streams, stages: StageClock, found: Outcome) -> None:
    """Answer requests as a server and record each one's latency and what became of it."""
    if job.case.load is None:
        raise ValueError("a server needs a load")
    load, seed = job.case.load, f"{job.case.seed} {job.raw_name.rpartition('.')[2]}"
    clock = server.Monotonic(partial(stages.go_on, None))
    with measure.no_collection():
        served, trials = server.run(
            streams.together, load, job.limits.rule.cap_s, seed, clock, streams=len(streams.steps)
        )
    found.process.window = Window(served.start_ns, served.end_ns)
    _take_peaks(job, loaded, found)
    _rest(job, stages, found, settle_s=job.idle_s / 2)
    stages.leave()
    found.process.timing = timings.request_timing(served.asked_ns)
    columns = {"service": served.service_ns, **_named_streams(served.of_stream_ns)}
    _record_parts(job, {"total": served.latency_ns, **columns}, found)
    found.process.requests = Requests(
        rate_hz=served.rate_hz,
        asked=served.asked,
        answered=len(served.latency_ns) - len(served.late),
        late=len(served.late),
        dropped=len(served.dropped),
        met=server.is_met(served, load),
        arrivals_p=served.arrivals_p,
        noticed_ms=median(served.noticed_ns) / 1e6 if served.noticed_ns else None,
        busy_share=sum(served.service_ns) / (len(streams.steps) * 1e9 * found.process.window.seconds),
        trials=trials,
    )


def _accompany(job: Job, rate_hz: float, step: steps.Step, stages: StageClock, found: Outcome) -> None:
    """Run as a neighbour until SIGTERM and leave the times of all frames."""
    with scenarios.until_sigterm() as is_over:
        stages.enter("measure")  # which tells the supervisor that it runs
        values_ns = scenarios.accompany(step, rate_hz, is_over)
    stages.leave()
    found.process.raw = measure.write_raw(values_ns, Path(job.output), job.raw_name)


def _flag_unsteady(found: Outcome) -> None:
    warm_up, blocks = found.process.warm_up, found.process.blocks
    if warm_up and warm_up.slope_share is None and blocks and blocks.is_interleaved:
        return  # a warm-up too short to tell: what drifts on does so for the other process too
    if warm_up and not warm_up.steady:
        found.flags.append("warm_up_not_steady")


def _occupied(job: Job, loaded: Loaded, pool: list[Batch], found: Outcome) -> None:
    """On a GPU, measure the occupancy in separate runs; a refused profiler costs only that figure."""
    if loaded.device.type != "cuda" or job.case.direction == "training" or found.process.timing is None:
        return
    if job.case.scenario in PAUSED or job.is_compared:
        return
    from benchd.daemon.worker import occupancy  # noqa: PLC0415 - reads traces and NVML, which a CPU's case never needs

    try:
        occupied = occupancy.measure(steps.SingleStream(loaded, pool), found.device_uuid)
    except (RuntimeError, OSError) as error:
        occupied = f"the profiler did not run: {error}"
    if isinstance(occupied, str):
        found.missing["occupancy"] = occupied
    else:
        found.occupancy = occupied


def _device_parts(job: Job, loaded: Loaded, pool: list[Batch], found: Outcome) -> None:
    """On a GPU, time the parts of an inference by events in a short separate loop after the timed one."""
    if loaded.device.type != "cuda" or job.case.direction == "training" or job.is_compared:
        return
    step = steps.DeviceParts(loaded, pool)
    values: list[tuple[int, ...]] = []
    end = time.monotonic() + DEVICE_PARTS_S
    while len(values) < 2 or time.monotonic() < end:  # of a large batch each takes seconds of the stage
        values.append(step(len(values)))
    columns = zip(step.parts, zip(*values, strict=True), strict=True)
    found.process.parts |= {part: timings.part_timing(column) for part, column in columns}


def _probed(job: Job, device: torch.device, stages: StageClock, found: Outcome) -> None:
    """Probe the device's rates and keep them; a failed probe costs the floor, not the measurement."""
    if job.is_compared:
        found.missing["probes"] = "a comparison is not compared with a floor"
    if job.is_compared or not job.probes:
        return
    try:
        found.process.probes = probes.probe(device, job.case.variant.precision)
        stages.keep(found)
    except Exception as error:  # of torch, Triton and compilers
        found.missing["probes"] = f"the probes did not run: {error}"


def _forget_peaks(device: torch.device) -> bool:
    """Free the memory of building and checking and reset the peaks; return whether the kernel resets its own."""
    ctypes.CDLL(None).malloc_trim(0)
    if device.type == "cuda":
        with suppress(RuntimeError):  # torch up to 2.12 believes that a failed capture is still in progress
            torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _take_peaks(job: Job, loaded: Loaded, found: Outcome) -> None:
    lines = Path("/proc/self/status").read_text().splitlines()
    resident = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    peak = _device_peak(job, loaded)
    if isinstance(peak, str):
        found.missing["memory.device_peak_bytes"] = peak
    found.process.memory = Memory(rss_peak_bytes=resident, device_peak_bytes=None if isinstance(peak, str) else peak)


def _device_peak(job: Job, loaded: Loaded) -> int | str | None:
    """Return this process's GPU memory: torch counts its own, the driver a runtime's, or why it does not."""
    if job.device != "cuda":
        return None
    if _counted_by_driver(job):
        return loaded.taken
    if job.case.variant.backend == "cudagraph":  # a graph's memory was allocated during capture
        return torch.cuda.max_memory_reserved()
    return torch.cuda.max_memory_allocated()


def _counted_by_driver(job: Job) -> bool:
    """Return whether the case's GPU memory is allocated by a runtime beside torch."""
    return job.device == "cuda" and job.case.variant.backend in ("onnxruntime", "tensorrt")


def _counted(job: Job, loaded: Loaded, at_first: int | str, device_uuid: str | None) -> Loaded:
    """Return it with the GPU memory that a runtime beside torch took."""
    if not _counted_by_driver(job):
        return loaded
    built_s = loaded.runtime.build_s if loaded.runtime else None
    return replace(loaded, taken=device_memory.taken(at_first, device_memory.own_bytes(device_uuid), built_s))


def versions() -> dict[str, str]:
    """Return the versions that only a process with torch can read."""
    found = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return {name: str(version) for name, version in found.items() if version}
