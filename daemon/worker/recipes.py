"""Runs a process's case according to the job's recipe; recipes combine the same stages, in the same order."""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchd.daemon.measuring.protocol import Accompany, Compare, CompareDeployable, Job, Measure, Outcome, Pack, Verify
from benchd.daemon.records import Accuracy
from benchd.daemon.verdicts import timings
from benchd.daemon.worker import (
    accompanying,
    layer_times,
    metric,
    neurobench,
    packing,
    probes,
    scenarios,
    steps,
    top1,
)
from benchd.daemon.worker.building import Built, built
from benchd.daemon.worker.check import audit, golden
from benchd.daemon.worker.check.checking import check_and_answers
from benchd.daemon.worker.child import StageClock, diagnose
from benchd.daemon.worker.samples import StoredItems
from benchd.daemon.worker.scenarios.base import Run, warmed_up
from benchd.daemon.worker.scenarios.server import Monotonic
from benchd.daemon.worker.structures import each
from benchd.daemon.worker.workload import completed, shows_codes
from benchd.models import catalog

DEVICE_PARTS_S = 1.0


def run(job: Job, stages: StageClock, outcome: Outcome) -> None:
    """Follow the job's recipe, storing each result in `outcome`, so that later errors do not lose it."""
    _RECIPES[type(job.recipe)](job.recipe, job, stages, outcome)


def measure(recipe: Measure, job: Job, stages: StageClock, outcome: Outcome) -> None:
    """Measure the case in full."""
    model = built(job, stages, outcome)
    ready = checked(model, job, stages, outcome)
    if recipe.counts:
        _counted(model, job, outcome)
    ready.idle_s = recipe.idle_s
    scenario = scenarios.of(job.case.scenario)
    met = scenario.time(ready)
    if scenario.is_cold:
        return
    stages.keep(outcome)  # so that a later failure does not lose the times
    stages.enter("probe", "of the device's peak rates")
    if scenario.is_inference:
        _device_parts(ready)
        stages.keep(outcome)
    del ready.models[1:]
    if recipe.probes:
        _probed(ready)
    _repeated(ready, met)
    if not scenario.is_paused:
        _occupied(ready)  # last, because its profiler stays attached and slows all later launches


def _counted(model: Built, job: Job, outcome: Outcome) -> None:
    """Count the work of a model without a formula, and NeuroBench's metrics of one that may spike."""
    plain, example = model.workload.plain, model.workload.example(job.case.batch_size)
    is_own = job.case.model not in catalog.MODELS
    if is_own:
        # torch's formulas import Triton, for which a cold start must not wait
        from benchd.daemon.worker import counting  # noqa: PLC0415

        outcome.counted = counting.count(plain, example)
    if (is_own or shows_codes(plain)) and not job.onnx:
        try:
            outcome.neurobench = neurobench.measure(plain, example)
        except Exception as error:  # hooks may break anything in the user's code; only these metrics are lost
            outcome.missing["neurobench"] = f"{type(error).__name__}: {error}"


def compare(recipe: Compare, job: Job, stages: StageClock, outcome: Outcome) -> None:
    """Time the case for a comparison."""
    ready = checked(built(job, stages, outcome), job, stages, outcome)
    _timed(ready, recipe)


def race(recipe: CompareDeployable, job: Job, stages: StageClock, outcome: Outcome) -> None:
    """Time a candidate that can be deployed as files."""
    model = built(job, stages, outcome)
    packing.refuse(job, model.workload, model.first)
    ready = checked(model, job, stages, outcome)
    del model  # frees the reference before timing
    _timed(ready, recipe)


def verify(recipe: Verify, job: Job, stages: StageClock, outcome: Outcome) -> None:
    """Time the files of a shipped folder, if they reproduce its golden answers."""
    sys.dont_write_bytecode = True  # the folder's code would get files that its manifest does not list
    model = built(job, stages, outcome)
    stages.enter("check")
    golden.refuse_others(Path(recipe.folder), model.workload, model.models[0])
    ready = checked(model, job, stages, outcome)
    del model
    _timed(ready, recipe)


def accompany(recipe: Accompany, job: Job, stages: StageClock, outcome: Outcome) -> None:
    """Run as a neighbour until SIGTERM and record the times of all frames."""
    ready = checked(built(job, stages, outcome), job, stages, outcome)
    ready.forget_peaks()
    step = scenarios.of(job.case.scenario).step(ready, ready.models[0])
    with warmed_up(ready, [step]), accompanying.until_sigterm() as is_over:
        stages.enter("measure")  # reports to the supervisor that the neighbour is running
        values_ns = accompanying.accompany(step, recipe.rate_hz, is_over)
    stages.leave()
    ready.write_raw(values_ns)


def pack(recipe: Pack, job: Job, stages: StageClock, outcome: Outcome) -> None:
    """Write the files needed to deploy the variant."""
    model = built(job, stages, outcome)
    packing.refuse(job, model.workload, model.first)
    checked(model, job, stages, outcome)
    outcome.packed = packing.write(Path(recipe.folder), job, model.workload, model.models[0], model.first)


_RECIPES: dict[type, Callable[[Any, Job, StageClock, Outcome], None]] = {
    Measure: measure,
    Compare: compare,
    CompareDeployable: race,
    Verify: verify,
    Accompany: accompany,
    Pack: pack,
}


def checked(model: Built, job: Job, stages: StageClock, outcome: Outcome) -> Run:
    """Check the model against float64 and, if requested, measure its accuracy; return it ready to be timed."""
    workload, loaded = model.workload, model.models[0]
    stages.enter("check")
    outcome.check, expected, outcome.synaptic_flops = check_and_answers(workload, loaded, job, stages.go_on)
    outcome.model = completed(job, workload.facts)
    if expected:
        outcome.check = audit.audited(outcome.check, expected, [(0, model.first)], "in its first run")
    outcome.flags += ["reference_fp32"] if outcome.check.reference == "float32" else []
    if job.inputs.accuracy is not None:
        _accuracy(model, job, stages, outcome)
    outcome.threads = (
        outcome.runtime and outcome.runtime.threads
    ) or torch.get_num_threads()  # read here, because a forward pass may set its own number of threads
    return Run(job, stages, outcome, model.models, model.pool, expected, workload.camera, model.first_ended_ns)


def _accuracy(model: Built, job: Job, stages: StageClock, outcome: Outcome) -> None:
    """Measure the accuracy; if the labels are unsuitable, only that figure is missing."""
    dataset = model.workload.dataset
    if dataset is None:
        outcome.missing["accuracy"] = f"the images of {job.case.scenario} have no labels: measure it with single_stream"
        return
    stages.enter("accuracy")
    workload, loaded = model.workload, model.models[0]
    counted: Accuracy | str
    if job.inputs.metric:
        plain = partial(top1.plain_fp32, workload, loaded, job)
        counted = metric.measure(workload, dataset, loaded, plain, job, lambda percent: stages.go_on(f"{percent} %"))
    elif isinstance(dataset, StoredItems):
        counted = "--inputs has no image labels: give --metric FILE.py:FUNCTION"
    else:
        counted = top1.measure(workload, dataset, loaded, job, stages.go_on)
    if isinstance(counted, str):
        outcome.missing["accuracy"] = counted
    else:
        outcome.accuracy = counted


def _timed(ready: Run, recipe: Compare) -> None:
    """Time the runs as the scenario requires, skipping what a comparison does not use."""
    scenario = scenarios.of(ready.job.case.scenario)
    if recipe.one_input:
        del ready.pool[1:]
        for loaded in ready.models:
            if loaded.reuse:
                loaded.reuse()
    if recipe.span:
        ready.expected = None  # the answers to other inputs
        draw = partial(_drawn, recipe.span)
        ready.pool[:] = steps.pinned((each(batch, draw) for batch in ready.pool), ready.models[0].device)
    met = scenario.time(ready)
    ready.outcome.missing.setdefault("probes", "no floor is computed for a comparison")
    if scenario.is_cold:
        return
    ready.stages.keep(ready.outcome)
    ready.stages.enter("probe", "of repeated inputs")
    del ready.models[1:]
    if recipe.repeats:
        _repeated(ready, met)
    if recipe.layers and scenario.is_inference:
        _divided(ready)


def _drawn(span: tuple[float, float], value: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(value).uniform_(*span) if value.is_floating_point() else value


def _divided(ready: Run) -> None:
    """Profile the layers; if a runtime refuses, only that profile is missing."""
    outcome = ready.outcome
    try:
        layers = layer_times.measure(ready.models[0], ready.pool[0])
    except Exception as error:  # raised by torch or another runtime
        layers = diagnose(error)[1]
    if isinstance(layers, str):
        outcome.missing["layers"] = layers
    else:
        outcome.process.layers = layers


def _device_parts(ready: Run) -> None:
    """On a GPU, time the parts of an inference with events, in a short separate loop after the timed one."""
    case, loaded = ready.job.case, ready.models[0]
    if loaded.device.type != "cuda" or case.direction == "training" or case.streams > 1:
        return
    step = steps.DeviceParts(loaded, ready.pool)
    values: list[tuple[int, ...]] = []
    end = time.monotonic() + DEVICE_PARTS_S
    with torch.inference_mode():
        # limited by time, because each run may take seconds with a large batch
        while len(values) < 2 or time.monotonic() < end:
            values.append(step(len(values)))
    columns = zip(step.parts, zip(*values, strict=True), strict=True)
    ready.outcome.process.parts |= {part: timings.part_timing(column) for part, column in columns}


def _probed(ready: Run) -> None:
    """Probe the device's rates and store them; if that fails, only the floor is missing."""
    outcome = ready.outcome
    try:
        outcome.process.probes = probes.probe(ready.models[0].device, ready.job.case.variant.precision)
        ready.stages.keep(outcome)
    except Exception as error:  # raised by torch, Triton or a compiler
        outcome.missing["probes"] = f"the probes did not run: {error}"


def _repeated(ready: Run, met: list[int]) -> None:
    """Flag a variant that answers repeated inputs faster, as found in separate runs; for inference only.

    If the test fails, only its result is missing, which a flag indicates.
    """
    outcome = ready.outcome
    if ready.job.case.direction == "training" or outcome.process.timing is None:
        return
    batches, beat = [ready.pool[place] for place in met], Monotonic(ready.stages.go_on).beat
    try:
        with torch.inference_mode():
            if audit.repeated_is_faster(ready.models[0], batches, beat):
                outcome.flags.append("repeated_input_faster")
    except Exception as error:  # raised by a runtime, for example if there is no memory for another batch
        outcome.flags.append("repeated_input_untested")
        outcome.missing["repeated_input"] = f"the test for cached answers did not run: {diagnose(error)[1]}"


def _occupied(ready: Run) -> None:
    """On a GPU, measure the occupancy in separate runs; if the profiler is refused, only that figure is missing."""
    outcome, loaded = ready.outcome, ready.models[0]
    if loaded.device.type != "cuda" or ready.job.case.direction == "training" or outcome.process.timing is None:
        return
    from benchd.daemon.worker import occupancy  # noqa: PLC0415 - reads traces and NVML, which a CPU's case never needs

    try:
        occupied = occupancy.measure(steps.SingleInference(loaded, ready.pool), outcome.device_uuid)
    except (RuntimeError, OSError) as error:
        occupied = f"the profiler did not run: {error}"
    if isinstance(occupied, str):
        outcome.missing["occupancy"] = occupied
    else:
        outcome.occupancy = occupied
