"""A profile for human readers: its tables as text with units in the headings, and each finding as lines."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from benchd.daemon.profiling.comparison import mark
from benchd.daemon.profiling.profile import (
    BenchmarkProfile,
    BreakEven,
    Crossing,
    Finding,
    GpuUse,
    KernelRow,
    LayerRow,
    LayersProfile,
    MemoryProfile,
    Module,
    Operator,
    Profile,
    Range,
    RatePoint,
    Sparsity,
    StepTime,
    Synchronization,
    TorchProfile,
    median_step,
)
from benchd.daemon.profiling.trace.tables import sorted_by
from benchd.daemon.reporting.results_table import figure

MIB = 2**20
UNCERTAIN = "times may be too long and gains are uncertain; run it again on a quiet machine"
INDENT = "\u00a0"
"""The prefix of a row that is part of the row above: a space that HTML does not collapse."""

TERMS = {
    "self": "without the operators that it calls, unlike total",
    "low ms": "to high ms, the shortest and longest time or the interval of the median",
    "MFLOP": "and MB, the least arithmetic and memory traffic",
    "x of floor": "the time over the shortest that the device's peak rates allow",
    "bound by": "what sets that shortest time",
    "occupancy": "the share of the GPU's threads in use",
    "SM efficiency": "the share of the time in which a GPU processor has work",
    "spike rate": "the share of neurons that fire in a step",
    "wasted spikes": "pairs of +1 and -1 of one neuron, which cancel",
    "sparsity": "the share of zeros",
}
"""The meaning of words in the headings of tables."""

Row = TypeVar("Row")
Columns = Mapping[str, Callable[[Row], str]]


class Section(NamedTuple):
    """One table: title, note, and cells of text; the first `words` columns hold text rather than figures."""

    title: str
    note: str
    headings: list[str]
    rows: list[list[str]]
    words: int = 1


def sections(profile: Profile, sort: str) -> list[Section]:
    """Return the available tables, with operators sorted by `sort`; columns and tables without values are left out.

    Raises UsageError for an unknown column.
    """
    parts = [_summary(profile), *_sections(profile, sort), _missing(profile)]
    suffix = mark(profile)
    return [_filled(section)._replace(title=f"{section.title}{suffix}") for section in parts if section.rows]


def _sections(profile: Profile, sort: str) -> Iterator[Section]:
    if profile.torch:
        yield from _torch(profile.torch, sort)
    if profile.ncu:
        yield _table(
            "Kernels, counted by ncu", "No time here is a latency: ncu replays kernels.", KERNELS, profile.ncu.kernels
        )
    if profile.nsys:
        yield _table("Kernels, by nsys", "", KERNELS, profile.nsys.kernels)
        yield _table("Runtime calls, by nsys", "", _operators(profile.nsys.runtime), profile.nsys.runtime)
        yield _table("NVTX ranges, by nsys", "", RANGES, profile.nsys.ranges)
    if profile.memory:
        yield from _memory(profile.memory)
    if profile.benchmark:
        yield _benchmark(profile.benchmark, is_certain=not profile.doubts)
    if profile.layers:
        yield from _layers(profile.layers, is_certain=not profile.doubts)
    if profile.break_even:
        yield _break_even(profile.break_even)


def all_finding_lines(profile: Profile) -> list[list[str]]:
    """Return the lines of each finding; predictions have as many digits as the noise of the steps permits."""
    suffix = mark(profile)
    blocks = [finding_lines(finding, digits(profile)) for finding in profile.findings]
    return [[f"{title}{suffix}", *others] for title, *others in blocks]


def digits(profile: Profile) -> int:
    """Return how many digits of a ratio of step times are significant, 1 to 3."""
    steps = [float(step.duration_ns) for step in profile.torch.steps] if profile.torch else []
    plain = profile.benchmark.step if profile.benchmark else None
    low, middle, high = (plain.low_ns, plain.median_ns, plain.high_ns) if plain else (0.0, 0.0, 0.0)
    if not plain and len(steps) > 1:
        low, middle, high = min(steps), sum(steps) / len(steps), max(steps)
    noise = (high - low) / (2 * middle) if middle else 0.0
    known = min(3, max(1, math.ceil(-math.log10(noise)))) if noise else 2
    return 1 if profile.doubts else known


def terms(shown: Sequence[Section]) -> str:
    """Return what the headings of these tables mean."""
    headings = " ".join(heading for section in shown for heading in section.headings)
    return "; ".join(f"{term}: {meaning}" for term, meaning in TERMS.items() if term in headings)


def finding_lines(finding: Finding, of_times: int) -> list[str]:
    """Return the conclusion, its evidence, the remedy, and the predicted (to `of_times` digits) and measured effect."""
    lines = [finding.title, *(f"evidence: {text}" for text in finding.evidence), f"do: {finding.advice}"]
    if finding.expected is not None:
        lines.append(f"predicted: about {_times(finding.expected, of_times)}")
    if finding.variant:
        options = [f"--option {name}={value}" for name, value in sorted(finding.options.items())]
        options += [f"--batch-sizes {finding.batch_size}"] if finding.batch_size else []
        lines.append(" ".join(["tested by: --variants", finding.variant, *options]))
    if finding.measured is not None:
        lines.append(f"measured: {_times(finding.measured, 3)}: {finding.verdict.upper()}{finding.mark}")
    return lines


def warning(profile: Profile) -> str | None:
    """Return a warning that applies to every figure of the profile, None if its times are certain."""
    reasons = "; ".join(f"{words}: {why}" for words, why in profile.doubts.items())
    return f"{reasons}: {UNCERTAIN}" if reasons else None


def _times(ratio: float, of_times: int) -> str:
    has_factor = ratio > 0 and of_times > 1  # rounded to one digit each, the two would contradict each other
    faster = f" ({1 / ratio:.{of_times}g}x as fast)" if has_factor else ""
    return f"{ratio:.{of_times}g} of the time{faster}"


def _table(title: str, note: str, columns: Columns[Row], rows: Sequence[Row], words: int = 1) -> Section:
    return Section(title, note, list(columns), [[cell(row) for cell in columns.values()] for row in rows], words)


def _filled(section: Section) -> Section:
    """Return the section without columns that have no measured value."""
    places = [place for place in range(len(section.headings)) if any(row[place] != "-" for row in section.rows)]
    rows = [[row[place] for place in places] for row in section.rows]
    return section._replace(headings=[section.headings[place] for place in places], rows=rows)


def _summary(profile: Profile) -> Section:
    model, traced, benchmark = profile.model, profile.torch, profile.benchmark
    ran = f", custom kernels in {profile.kernels_ran}" if profile.kernels_ran else ""
    rows = [
        ["case", f"{profile.case_id}{ran}"],
        ["workload", profile.workload],
        ["device", f"{profile.device}: {profile.device_name or profile.environment.cpu_model}"],
    ]
    if model:
        rows += [["model", f"{model.parameters} parameters, weights {model.weights}, data {model.data}"]]
    if traced and traced.steps:
        rows += [["step under the profiler", _steps(traced.steps)]]
    if benchmark:
        low, high = (figure(ns, 1e-6) for ns in (benchmark.step.low_ns, benchmark.step.high_ns))
        took = f"{figure(benchmark.step.median_ns, 1e-6)} ms [{low}, {high}], median of {benchmark.step.runs}"
        rows += [["step without it", took]]
        rows += [["throughput", _throughput(benchmark)]]
    if profile.memory:
        rows += [["memory peak", f"{figure(profile.memory.peak_bytes, 1 / MIB)} MiB on {profile.memory.device}"]]
    if profile.foreign_cpus is not None:
        rows += [["other processes", f"used {profile.foreign_cpus:.2g} CPUs during the profile"]]
    return Section("Profile", f"benchd {profile.tool_version}, {profile.t_wall}", ["what", "value"], rows, words=2)


def _steps(steps: Sequence[StepTime]) -> str:
    shortest, *_, longest = sorted(step.duration_ns for step in (*steps, *steps))
    spread = f"from {figure(shortest, 1e-6)} to {figure(longest, 1e-6)} ms"
    return f"{figure(median_step(steps).duration_ns, 1e-6)} ms, median of {len(steps)}, {spread}"


def _torch(traced: TorchProfile, sort: str) -> Iterator[Section]:
    if traced.steps:
        yield _categories(traced)
    yield _table("GPU", "", GPUS, traced.gpus)
    steps = f"Over {len(traced.steps)} steps; in total {figure(traced.cpu_ns, 1e-6)} ms on the CPU"
    steps += f" and {figure(traced.device_ns, 1e-6)} ms on the device." if traced.device_ns else "."
    yield _table("Operators", steps, _operators(traced.operators), sorted_by(traced.operators, sort))
    yield _table("Modules", "", MODULES, traced.modules)
    yield _table("Kernels", f"{traced.launches} launches.", KERNELS, traced.kernels)
    note = "Calls in which the host waited for the device, and how long the device then waited for the next launch "
    note += "as a result: at most as long as the call itself took."
    yield _table("Synchronisations", note, SYNCHRONIZATIONS, traced.synchronizations, words=2)


def _categories(traced: TorchProfile) -> Section:
    """Return the median step's time by category; if device and host are both working, the device's counts."""
    step = median_step(traced.steps)
    rows = [
        [name.replace("_", " "), figure(ns, 1e-6), _percent(ns, step.duration_ns)]
        for name, ns in step.by_category.items()
    ]
    rows += [["step", figure(step.duration_ns, 1e-6), "100"]]
    note = f"Step {step.number}, the median of {len(traced.steps)}."
    return Section("Step time by category", note, ["category", "ms", "share %"], rows)


def _operators(rows: Sequence[Operator]) -> Columns[Operator]:
    """Return the ten columns of torch.profiler's table, with shares of the sum of all self times."""
    cpu_ns, device_ns = (sum(getattr(row, name) for row in rows) for name in ("self_cpu_ns", "self_device_ns"))
    return {
        "operator": lambda row: row.name,
        "self CPU %": lambda row: _percent(row.self_cpu_ns, cpu_ns),
        "self CPU ms": lambda row: figure(row.self_cpu_ns, 1e-6),
        "CPU total %": lambda row: _percent(row.cpu_ns, cpu_ns),
        "CPU total ms": lambda row: figure(row.cpu_ns, 1e-6),
        "CPU avg us": lambda row: figure(row.cpu_ns / row.calls, 1e-3),
        "self device ms": lambda row: figure(row.self_device_ns if device_ns else None, 1e-6),
        "self device %": lambda row: _percent(row.self_device_ns, device_ns),
        "device total ms": lambda row: figure(row.device_ns if device_ns else None, 1e-6),
        "device avg us": lambda row: figure(row.device_ns / row.calls if device_ns else None, 1e-3),
        "calls": lambda row: str(row.calls),
    }


def _percent(part: float | None, whole: float = 1.0) -> str:
    return f"{100 * part / whole:.2f}" if part is not None and whole else "-"


def _tensor_cores(row: KernelRow) -> str:
    if row.tensor_cores is None:
        return "-"
    return f"{'yes' if row.tensor_cores else 'no'}, by {row.tensor_cores_by}"


GPUS: Columns[GpuUse] = {
    "GPU": lambda row: row.name,
    "compute capability": lambda row: row.compute_capability or "-",
    "utilisation %": lambda row: _percent(row.utilization),
    "SM efficiency %": lambda row: _percent(row.sm_efficiency),
    "est. occupancy %": lambda row: _percent(row.estimated_occupancy),
    "tensor cores % (by name)": lambda row: _percent(row.tensor_core_share_by_name),
}
MODULES: Columns[Module] = {
    "module": lambda row: row.name,
    "calls": lambda row: str(row.calls),
    "host total ms": lambda row: figure(row.host_ns, 1e-6),
    "device total ms": lambda row: figure(row.device_ns or None, 1e-6),
}
KERNELS: Columns[KernelRow] = {
    "kernel": lambda row: row.name,
    "calls": lambda row: str(row.calls),
    "total ms": lambda row: figure(row.total_ns, 1e-6),
    "mean us": lambda row: figure(row.mean_ns, 1e-3),
    "min us": lambda row: figure(row.min_ns, 1e-3),
    "max us": lambda row: figure(row.max_ns, 1e-3),
    "blocks per SM": lambda row: figure(row.blocks_per_sm),
    "registers": lambda row: figure(row.registers),
    "shared B": lambda row: figure(row.shared_bytes),
    "est. occupancy %": lambda row: _percent(row.estimated_occupancy),
    "theoretical occupancy %": lambda row: _percent(row.theoretical_occupancy),
    "measured occupancy %": lambda row: _percent(row.measured_occupancy),
    "limited by": lambda row: ", ".join(row.limits) or "-",
    "tensor cores": _tensor_cores,
    "launched by": lambda row: row.operator or "-",
}
SYNCHRONIZATIONS: Columns[Synchronization] = {
    "call": lambda row: row.name,
    "in operator": lambda row: row.operator or "-",
    "calls": lambda row: str(row.calls),
    "waited ms": lambda row: figure(row.waited_ns, 1e-6),
    "device idle after ms": lambda row: figure(row.idle_after_ns, 1e-6),
    "launches after": lambda row: str(row.launches_after),
}
RANGES: Columns[Range] = {
    "range": lambda row: row.name,
    "calls": lambda row: str(row.calls),
    "total ms": lambda row: figure(row.total_ns, 1e-6),
    "mean ms": lambda row: figure(row.mean_ns, 1e-6),
}
LAYERS: Columns[LayerRow] = {
    "part": lambda row: row.name,
    "ms": lambda row: figure(row.ns, 1e-6),
    "share %": lambda row: _percent(row.share),
    "low ms": lambda row: figure(row.low_ns, 1e-6),
    "high ms": lambda row: figure(row.high_ns, 1e-6),
    "MFLOP": lambda row: figure(row.flops, 1e-6),
    "MB": lambda row: figure(row.bytes, 1e-6),
    "x of floor": lambda row: figure(row.x_of_floor),
    "bound by": lambda row: row.binding or "-",
    "spike rate %": lambda row: _percent(row.spike_rate),
    "wasted spikes": lambda row: figure(row.wasted_spikes),
    "synaptic operations": lambda row: figure(row.synaptic_operations),
    "modelled mJ per image": lambda row: figure(row.modelled_energy_j, 1e3),
}

SPARSITIES: Columns[Sparsity] = {
    "module": lambda row: row.name,
    "connection sparsity %": lambda row: _percent(row.connection),
    "activation sparsity %": lambda row: _percent(row.activation),
}


def _memory(memory: MemoryProfile) -> Iterator[Section]:
    peak = sorted(memory.peak_by_category.items(), key=lambda item: -item[1])
    total = sum(size for _, size in peak)
    rows = [[name, figure(size, 1 / MIB), _percent(size, total)] for name, size in peak]
    note = f"The allocator's peak on {memory.device} is {figure(memory.peak_bytes, 1 / MIB)} MiB."
    note += f" Snapshot: {memory.snapshot}." if memory.snapshot else ""
    yield Section("Memory at its peak", note, ["category", "MiB", "share %"], rows)
    cells = [[a.category, a.operator or "-", a.module or "-", figure(a.bytes, 1 / MIB)] for a in memory.largest]
    yield Section("Largest allocations", "", ["category", "operator", "module", "MiB"], cells, words=3)


def _benchmark(benchmark: BenchmarkProfile, *, is_certain: bool) -> Section:
    timed = {"step": benchmark.step, "forward": benchmark.forward, "backward": benchmark.backward}
    rows = [
        [name, *(figure(ns, 1e-6) for ns in (times.median_ns, times.low_ns, times.high_ns)), str(times.runs)]
        for name, times in timed.items()
        if times
    ]
    note = f"{_throughput(benchmark)}, without a profiler."
    if benchmark.overhead is not None and is_certain:
        note += f" The torch profiler adds {_percent(benchmark.overhead)} %."
    return Section("Benchmark", note, ["what", "median ms", "low ms", "high ms", "runs"], rows)


def _throughput(benchmark: BenchmarkProfile) -> str:
    # if other programs interfere, the mean is far above the median, which is also printed
    mean_ms = figure(benchmark.step.mean_ns, 1e-6)
    return f"{figure(benchmark.throughput_per_s)} images per second, from a mean step of {mean_ms} ms"


def _layers(layers: LayersProfile, *, is_certain: bool) -> Iterator[Section]:
    summary = [_run_taken(layers, is_certain=is_certain)]
    if layers.measured_energy_j is not None:
        error = figure(layers.measured_energy_err_j, 1e3)
        summary += [
            f"Measured: {figure(layers.measured_energy_j, 1e3)} ± {error} mJ per image, of {layers.energy_scope}."
        ]
    yield _table("Model loading", "", LAYERS, _indented(layers.loading))
    yield _table("Components", " ".join(summary), LAYERS, _indented(layers.components))
    notes = [*([] if layers.components else summary), *layers.notes]
    yield _table("Layers", " ".join(notes), LAYERS, _indented(layers.layers))
    note = (
        "Shares of zeros as NeuroBench counts them: in a layer's weights, and in the outputs of neurons or activations."
    )
    yield _table("Sparsity", note, SPARSITIES, layers.sparsity)


def _break_even(even: BreakEven) -> Section:
    steps = even.time_steps
    notes = [f"{_crossed('time', even.time, steps)}, which is {even.ann} in the same variant."]
    notes += [f"{_crossed('energy', even.energy, steps)}."] if even.energy else []
    halves = " and ".join("none" if half.rate is None else f"{half.rate:.3g}" for half in even.halves)
    off = "" if even.halves_differ is None else f", where they differ by {even.halves_differ:.2%}"
    notes += [
        f"The two curves through every second rate break even at {halves}{off}. "
        f"The interval is from {even.processes} processes."
    ]
    notes += [
        f"With its own spikes it fires at {even.own.rate:.3g} and takes {even.own.ratio:.3g} times as long as its ANN; "
        f"the curve predicts {even.predicted:.3g} at this rate."
    ]
    return _table("Break-even", " ".join(notes), RATES, even.points)


def _crossed(quantity: str, crossing: Crossing, time_steps: int) -> str:
    """Return the rate at which the net costs as much as its ANN, as a clause."""
    if crossing.rate is None:
        return f"At every firing rate its {quantity} is {crossing.answer.removeprefix('always ')} than its ANN's"
    interval = "" if crossing.low is None else f" [{crossing.low:.3g}, {crossing.high:.3g}]"
    without = f" (in {crossing.without:.0%} of resamples the curves do not cross)" if crossing.without else ""
    return (
        f"It takes the same {quantity} as its ANN at {crossing.rate:.3g}{interval} spikes per neuron per step, "
        f"{crossing.rate * time_steps:.3g} per inference{without}"
    )


RATES: Columns[RatePoint] = {
    "spikes per neuron per step": lambda row: figure(row.rate),
    "ms": lambda row: figure(row.ns, 1e-6),
    "ANN ms": lambda row: figure(row.ann_ns, 1e-6),
    "ratio": lambda row: figure(row.ratio),
    "kernels": lambda row: row.kernels or "-",
}


def _run_taken(layers: LayersProfile, *, is_certain: bool) -> str:
    parts, run, added = (
        figure(ns, 1e-6) for ns in (layers.synchronised_ns, layers.fused_ns, layers.synchronised_ns - layers.fused_ns)
    )
    variation = f"Variation between {len(layers.run_ns)} runs: {_percent(layers.variation)} %."
    if layers.timed_by:
        return (
            f"Timed by {layers.timed_by} itself, whose layers may each combine several of the model's: they take "
            f"{parts} ms in total, and a run without its profiler takes {run} ms. {variation}"
        )
    cost = f": the synchronisation costs {added} ms" if is_certain else ""
    return f"A run takes {parts} ms with a synchronisation around each part and {run} ms without{cost}. {variation}"


def _indented(rows: Sequence[LayerRow]) -> list[LayerRow]:
    """Return the rows, with the parts of a group indented."""
    depths: dict[str | None, int] = {None: -1}
    for row in rows:
        depths[row.name] = depths[row.parent] + 1
    return [msgspec.structs.replace(row, name=2 * depths[row.name] * INDENT + row.name) for row in rows]


def _missing(profile: Profile) -> Section:
    rows = [[name, reason] for name, reason in sorted(profile.missing.items())]
    return Section("Not measured", "", ["what", "why"], rows, words=2)
