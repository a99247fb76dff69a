"""The method `layers`: measures the time of a forward pass by component and by layer.

Ranges are named as in the published profile of the ST-BIF network, and placed around the actual work:

    Complete_Profiling_Session
        Model_Loading                        QANN_Creation, SNN_Wrapper_Creation
        Warmup_Runs                          Warmup_0 and so on
        Main_Inference_Timing_Run_0 and so on
            Model_Reset, Time_Encoding, Input_Reshaping, Model_Forward_Pass > Model_Compute_All_Layers,
            Output_Processing, Memory_Profiling_Run_0
            Detailed_Layer_Profiling_Run_0   Conv1_Block, MaxPool, Layer1_ResBlocks and so on, with their parts
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import mean, median, stdev
from typing import TypeVar

import torch
from torch import nn

from benchd.daemon.errors import Unsupported
from benchd.daemon.profiling.profile import LayerRow, LayersProfile
from benchd.daemon.records import Window
from benchd.daemon.worker import neurobench, probes
from benchd.daemon.worker.backends import LayerRun
from benchd.daemon.worker.profiling import breakdown, costs, segments, spikes
from benchd.daemon.worker.profiling.nvtx import named_range
from benchd.daemon.worker.profiling.segments import Path, Segments
from benchd.daemon.worker.profiling.spikes import Spikes
from benchd.daemon.worker.profiling.work import Work
from benchd.daemon.worker.structures import values
from benchd.models import stbif
from benchd.models.snn_onepass import OnePass
from benchd.models.stbif import SpikingNetwork
from benchd.models.vim import Vim

MIN_RUNS = 5
COMPONENTS = (segments.RESET, segments.ENCODING, segments.RESHAPING, segments.FORWARD, segments.OUTPUT)
IDLE = {
    "Model_Reset": "no state outlives a forward pass, so there is nothing to reset",
    "Time_Encoding": "the model has no time steps to encode for",
    "Input_Reshaping": "reshaping the input takes no work",
    "Output_Processing": "the output is the last layer's",
}

Of = TypeVar("Of")


def run(work: Work) -> LayersProfile:
    """Return the breakdown of the forward pass, without gradients, over at least MIN_RUNS runs.

    Some runtimes time their own layers. Raises Unsupported for any other variant whose modules do not run one by one,
    and for training.
    """
    if work.layer_times:
        return _by_runtime(work, work.layer_times)
    require_modules(work)
    split = segments.of(work.module)
    with named_range("Complete_Profiling_Session"):
        loading = _load(work)
        with torch.inference_mode():
            _warm_up(work)
            runs = [_timed(work, split, number) for number in range(max(MIN_RUNS, work.job.runs))]
            part_costs = costs.count(work.module, work.forward, len(work.images), split)
            part_spikes = list(_spikes(work, split))
            sparsity = neurobench.by_layer(work.module, work.forward)
            window, passes = _repeated(work)
    fused_ns, coarse, fine = zip(*runs, strict=True)
    rates = probes.probe(work.device, work.job.case.variant.precision)
    # the published profile's components are those of spiking networks; other models only have a forward pass
    is_spiking = isinstance(work.module, OnePass | SpikingNetwork)
    components = breakdown.rows(coarse, _placed(part_costs), _placed(part_spikes), rates) if is_spiking else []
    layers = breakdown.rows(fine, part_costs, part_spikes, rates)
    return LayersProfile(
        components=components,
        layers=layers,
        fused_ns=median(fused_ns),
        synchronised_ns=median(sum(run.values()) for run in fine),
        run_ns=[float(ns) for ns in fused_ns],
        variation=stdev(fused_ns) / mean(fused_ns),
        loading=loading,
        energy_window=window,
        energy_images=passes * len(work.images),
        sparsity=sparsity if any(row.activation is not None for row in sparsity) else [],
        notes=list(_notes(work, components, layers)),
    )


def _by_runtime(work: Work, layer_times: Callable[..., list[list[LayerRun]]]) -> LayersProfile:
    """Return the time of each layer as measured by the runtime itself; fused layers count as one."""
    count = max(MIN_RUNS, work.job.runs)
    with torch.inference_mode():
        _warm_up(work)
        fused_ns = [work.timed(work.forward) for _ in range(count)]
        runs = [_summed_ns(run) for run in layer_times(count, *values(work.images))]
        window, passes = _repeated(work)
    return LayersProfile(
        components=[],
        layers=_rows(runs),
        fused_ns=median(fused_ns),
        synchronised_ns=median(sum(run.values()) for run in runs),
        run_ns=[float(ns) for ns in fused_ns],
        variation=stdev(fused_ns) / mean(fused_ns),
        energy_window=window,
        energy_images=passes * len(work.images),
        timed_by=work.job.case.variant.backend,
    )


def _summed_ns(run: Iterable[LayerRun]) -> dict[str, float]:
    """Return the nanoseconds of each layer in one run; a layer in a loop is reported for each iteration."""
    totals: dict[str, float] = {}
    for row in run:
        totals[row.name] = totals.get(row.name, 0.0) + row.ms * 1e6
    return totals


def _rows(runs: Sequence[Mapping[str, float]]) -> list[LayerRow]:
    """Return a row for each layer, in the order of the runtime."""
    times_ns = {name: [run[name] for run in runs] for name in runs[0]}
    whole_ns = sum(median(times) for times in times_ns.values())
    return [
        LayerRow(name=name, ns=median(times), share=median(times) / whole_ns, low_ns=min(times), high_ns=max(times))
        for name, times in times_ns.items()
    ]


def require_modules(work: Work) -> None:
    """Raise Unsupported unless the modules of the work run one by one, without gradients."""
    if work.job.workload == "train":
        raise Unsupported("this needs a forward pass without gradients: use --workload forward or eval")
    if work.job.case.variant.backend != "eager":
        raise Unsupported(
            f"the modules of {work.job.case.variant.name} do not run one by one: profile eager, fp16, amp, custom or "
            "tensorrt"
        )


def _load(work: Work) -> list[LayerRow]:
    """Build the ST-BIF network again to time each half; other models are built in one piece."""
    if not isinstance(work.module, SpikingNetwork) or work.job.module:
        return []
    options = work.job.options
    begun = time.monotonic_ns()
    with named_range("Model_Loading"):
        with named_range("QANN_Creation"):
            qann = stbif.calibrated_qann(level=int(options["level"]), width=int(options["width"]))
        built = time.monotonic_ns()
        # the device for the trial run of its kernels
        with named_range("SNN_Wrapper_Creation"), torch.device(work.device):
            stbif.convert(qann, int(options["time_steps"]), kernels=work.job.case.variant.built_on)
    ended = time.monotonic_ns()
    times = {"QANN_Creation": built - begun, "SNN_Wrapper_Creation": ended - built}
    return [LayerRow(name=name, ns=ns, share=ns / (ended - begun)) for name, ns in times.items()]


def _warm_up(work: Work) -> None:
    with named_range("Warmup_Runs"):
        for number in range(max(1, work.job.warm_up)):
            with named_range(f"Warmup_{number}"):
                work.forward()


def _timed(work: Work, split: Segments, number: int) -> tuple[int, dict[Path, int], dict[Path, int]]:
    """Return the nanoseconds of an uninterrupted run, of a run by component and of a run by part."""
    fused_ns = work.timed(work.forward)
    with named_range(f"Main_Inference_Timing_Run_{number}"):
        coarse = dict.fromkeys(COMPONENTS, 0)
        with named_range("Model_Reset"):
            pass
        coarse |= segments.run(work.forward, split, work.device, segments.component)
        with named_range(f"Memory_Profiling_Run_{number}"):
            pass
        with named_range(f"Detailed_Layer_Profiling_Run_{number}"):
            fine = segments.run(work.forward, split, work.device)
    return fused_ns, {path[:1]: ns for path, ns in coarse.items()}, fine


def _repeated(work: Work) -> tuple[Window | None, int]:
    """Repeat the run while the power sensor is sampled; return the window and the count."""
    if not work.job.energy_s:
        return None, 0
    _passes(work, work.job.hold_s)
    begun = time.monotonic_ns()
    count = _passes(work, work.job.energy_s)
    window = Window(begun, time.monotonic_ns())
    _passes(work, work.job.hold_s)
    return window, count


def _passes(work: Work, seconds: float) -> int:
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        work.timed(work.forward)
        count += 1
    return count


def _spikes(work: Work, split: Segments) -> Iterator[tuple[Path, Spikes]]:
    if isinstance(work.module, OnePass | SpikingNetwork):
        precision = work.job.case.variant.precision
        counted = spikes.count(work.module, work.forward, len(work.images), precision)
        yield from ((split.modules[module], figures) for module, figures in counted.items())


def _placed(parts: Iterable[tuple[Path, Of]]) -> list[tuple[Path, Of]]:
    return [(segments.component(path)[:1], value) for path, value in parts]


def _notes(work: Work, components: Iterable[LayerRow], layers: Iterable[LayerRow]) -> Iterator[str]:
    """Yield the notes that a reader needs for these figures."""
    for row in components:
        if not row.ns:
            yield f"{row.name}: {IDLE[row.name]}."
    yield "Memory_Profiling_Run is an empty range: use --method memory."
    yield "Bytes are counted as if each part ran alone: its parameters, inputs and outputs, once each."
    yield "For an embedding table, only the rows that are read count; a part that only passes on its input has none."
    if any(row.x_of_floor is not None and row.x_of_floor < 1 for row in layers):
        yield "A part below its floor finds its data in the caches, unlike the probes, or skips zeros."
    yield from _model_notes(work.module, work.job.case.variant.precision in spikes.JOULES)


def _model_notes(module: nn.Module, has_energy_model: bool) -> Iterator[str]:
    if isinstance(module, Vim):
        yield "The layers' FLOPs come from formulas. A scan includes delta's projection, both directions and the gate."
        return
    yield "FLOPs are counted from the observed products, including taps on padding; for neurons, from formulas."
    if isinstance(module, SpikingNetwork):
        yield "Time_Encoding is inside the forward pass, after conv1, which sees one image for all time steps."
    if isinstance(module, OnePass | SpikingNetwork):
        yield "Wasted spikes cancel an earlier one of their neuron; pools and shortcuts have none."
        unknown = "" if has_energy_model else "; there is none for this precision"
        yield f"Modelled energy covers only the synapses, at 45 nm{unknown}."
