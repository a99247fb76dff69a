"""The contents of a profile: the result of each method as typed tables, and the conclusions.

Times are nanoseconds, shares are 0 to 1. Values that a method did not provide are None or absent, and `missing` gives
the reason.
"""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from benchd.daemon.machine.quiet import FOREIGN_CPUS, cpu_count
from benchd.daemon.measuring.protocol import Job
from benchd.daemon.records import Case, Environment, ModelFacts, Occupancy, OptionValue, Window
from benchd.daemon.verdicts.timings import two_levels

SCHEMA = "benchd.profile/1"
CONTRADICTORY = 1.5  # times as long: the machine changed between two measurements of one thing

Method = Literal["torch", "memory", "benchmark", "layers", "break-even", "nsys", "ncu"]
Workload = Literal["forward", "eval", "train"]
Category = Literal["kernel", "device_copy", "memcpy", "memset", "runtime", "data_loader", "cpu", "other"]

WORKLOADS: tuple[Workload, ...] = ("forward", "eval", "train")
METHODS: tuple[Method, ...] = ("torch", "memory", "benchmark", "layers", "break-even", "nsys", "ncu")


class ProfileJob(Job, frozen=True, kw_only=True):
    """The job for the child with torch.

    `capture` marks the child of an Nsight tool: it opens the capture range around its active steps and does not write
    tables itself. With a power sensor, the method `layers` repeats the forward pass for `energy_s`, and for `hold_s`
    before and after. `sweeps` is the number of processes for `break-even`.
    """

    workload: Workload
    methods: list[Method]
    warm_up: int
    steps: int
    runs: int
    capture: bool = False
    energy_s: float = 0.0
    sweeps: int = 0


class Operator(Struct, frozen=True, kw_only=True):
    """An operator or a runtime call over all active steps; `self_` values exclude its callees."""

    name: str
    calls: int
    cpu_ns: int
    self_cpu_ns: int
    device_ns: int
    self_device_ns: int


class StepTime(Struct, frozen=True, kw_only=True):
    """One active step; `by_category` divides its whole duration, counting the device first if both are working.

    A `device_copy` stays inside the GPU; a `memcpy` is to or from the host.
    """

    number: int
    duration_ns: int
    by_category: dict[Category, int]


class Module(Struct, frozen=True, kw_only=True):
    """A module class over all active steps; `host_ns` is the CPU time of its calls."""

    name: str
    calls: int
    host_ns: int
    device_ns: int


class KernelRow(Struct, frozen=True, kw_only=True):
    """All kernels of one name over all active steps.

    `estimated_occupancy` is computed from the launches and weighted by time; `theoretical_occupancy` and
    `measured_occupancy` are ncu's. `limits` lists the resources that limit the longest launch. `operator` is the
    operator that launched the kernel most often. `tensor_cores_by` is the source of `tensor_cores`.
    """

    name: str
    calls: int
    total_ns: int
    mean_ns: float
    min_ns: int
    max_ns: int
    blocks_per_sm: float | None = None
    registers: int | None = None
    shared_bytes: int | None = None
    estimated_occupancy: float | None = None
    theoretical_occupancy: float | None = None
    measured_occupancy: float | None = None
    limits: list[str] = []
    tensor_cores: bool | None = None
    tensor_cores_by: Literal["name", "counters"] | None = None
    operator: str | None = None


class GpuUse(Struct, frozen=True, kw_only=True):
    """A GPU over all active steps, with figures as defined in `gpu_metrics`."""

    name: str
    compute_capability: str | None
    utilization: float
    sm_efficiency: float | None
    estimated_occupancy: float | None
    tensor_core_share_by_name: float | None
    long_waits_share: float | None = None


class Synchronization(Struct, frozen=True, kw_only=True):
    """Calls in which the host waits for the device; `idle_after_ns` is how long the device then waits for a launch.

    That wait counts only up to the call's own duration. `operator` is the outermost operator around the call, such
    as aten::item; `launches_after` counts launches that could have been issued earlier.
    """

    name: str
    operator: str | None
    calls: int
    waited_ns: int
    idle_after_ns: int
    launches_after: int


class TorchProfile(Struct, frozen=True, kw_only=True):
    """torch.profiler's tables for the active steps; the trace file is next to the profile."""

    trace: str
    steps: list[StepTime]
    operators: list[Operator]
    modules: list[Module]
    kernels: list[KernelRow]
    gpus: list[GpuUse]
    synchronizations: list[Synchronization]
    launches: int
    cpu_ns: int
    device_ns: int


class Allocation(Struct, frozen=True, kw_only=True):
    """One of the largest allocations, with the innermost module that made it."""

    bytes: int
    module: str | None
    operator: str | None
    category: str


class MemoryPoint(Struct, frozen=True, kw_only=True):
    """The memory in use at one moment, counted from the start of the step, by category."""

    t_ns: int
    by_category: dict[str, int]


class MemoryProfile(Struct, frozen=True, kw_only=True):
    """Memory during one step on `device`: `peak_bytes` is the allocator's peak, the rest is by purpose."""

    device: str
    peak_bytes: int
    peak_by_category: dict[str, int]
    timeline: list[MemoryPoint]
    largest: list[Allocation]
    snapshot: str | None


class Distribution(Struct, frozen=True, kw_only=True):
    """Times of single runs."""

    median_ns: float
    low_ns: float
    high_ns: float
    mean_ns: float
    min_ns: float
    max_ns: float
    runs: int


class BenchmarkProfile(Struct, frozen=True, kw_only=True):
    """Speed without a profiler; `overhead` is the torch profiler's cost as a share of the plain step's time."""

    step: Distribution
    throughput_per_s: float
    forward: Distribution | None
    backward: Distribution | None
    overhead: float | None


class LayerRow(Struct, frozen=True, kw_only=True):
    """A component or a layer: its synchronised time, and its minimum work for one batch.

    Rows without `parent` add up to the whole run, and rows with the same parent to that parent; `share` is relative to
    the whole run. For a part, `ns` is the median over the runs, `low_ns` the shortest and `high_ns` the longest time;
    for a group, they are sums over its parts. `synaptic_operations` is the exact number of pairs of a spike and a
    synapse that it reaches, considering borders and strides; `wasted_spikes` reach none or cancel each other. Both and
    the energies are per image, `spike_rate` is per neuron per time step.
    """

    name: str
    parent: str | None = None
    ns: float
    share: float
    low_ns: float | None = None
    high_ns: float | None = None
    flops: int | None = None
    bytes: int | None = None
    x_of_floor: float | None = None
    binding: str | None = None
    spike_rate: float | None = None
    wasted_spikes: float | None = None
    synaptic_operations: float | None = None
    modelled_energy_j: float | None = None


class Sparsity(Struct, frozen=True, kw_only=True):
    """NeuroBench's sparsities for one module: the shares of zeros among its weights and among its outputs."""

    name: str
    connection: float | None
    activation: float | None


class LayersProfile(Struct, frozen=True, kw_only=True):
    """The time of a forward pass by component and by layer.

    `fused_ns` is the time of a run without inner synchronisation, `synchronised_ns` of one with a synchronisation at
    each boundary of `layers`, both medians over the runs; the difference is the cost of synchronisation. `run_ns` are
    the fused runs and `variation` their standard deviation divided by their mean. `loading` is the time to construct
    the model, if it has parts. `measured_energy_j` is per image, over `energy_window`, in which `energy_images` ran
    without segment boundaries. `sparsity` is for nets whose neurons or activations are modules.

    `timed_by` is a runtime that timed its own layers: there are then no components, and `synchronised_ns` is the sum of
    the layers.
    """

    components: list[LayerRow]
    layers: list[LayerRow]
    fused_ns: float
    synchronised_ns: float
    run_ns: list[float]
    variation: float
    loading: list[LayerRow] = []
    measured_energy_j: float | None = None
    measured_energy_err_j: float | None = None
    energy_scope: str | None = None
    energy_window: Window | None = None
    energy_images: int = 0
    timed_by: str | None = None
    sparsity: list[Sparsity] = []
    notes: list[str] = []


class RateTimes(Struct, kw_only=True):
    """One process at one firing rate: medians over a few runs, each followed by a run of the net without spikes.

    `kernels` lists the kernels that convolved spikes. With a power sensor, both nets were repeated for the length of a
    window.
    """

    rate: float
    ns: list[float] = []
    ann_ns: list[float] = []
    kernels: str = ""
    window: Window | None = None
    inferences: int = 0
    joules: float | None = None
    ann_window: Window | None = None
    ann_inferences: int = 0
    ann_joules: float | None = None


class Sweep(Struct, frozen=True, kw_only=True):
    """One process of the method `break-even`: the points by rate, and the net at its own firing rate."""

    ann: str
    time_steps: int
    points: list[RateTimes]
    own: RateTimes


class Crossing(Struct, frozen=True, kw_only=True):
    """The firing rate, in spikes per neuron per step, at which a spiking net costs as much as the net without spikes.

    `answer` says whether there is one between 0 and 1; the 95 % interval is from a bootstrap over processes, using the
    resamples whose curves cross, and `without` is the share of resamples whose curves do not.
    """

    answer: Literal["crosses", "always slower", "always faster"]
    rate: float | None = None
    low: float | None = None
    high: float | None = None
    without: float = 0.0


class RatePoint(Struct, frozen=True, kw_only=True):
    """All processes at one firing rate: medians of the run times and of the ratio, and the kernels that ran."""

    rate: float
    ns: float
    ann_ns: float
    ratio: float
    kernels: str


class BreakEven(Struct, frozen=True, kw_only=True):
    """The firing rates at which a spiking net takes as long as `ann` and, if measured, as much energy.

    `halves` are the crossings fitted to each half of the points (every second one), and `halves_differ` is the larger
    relative error of one half's curve at the other's crossing. `own` is the net at its own firing rate, and `predicted`
    the curve's ratio for that rate.
    """

    ann: str
    time_steps: int
    processes: int
    points: list[RatePoint]
    own: RatePoint
    predicted: float
    time: Crossing
    halves: list[Crossing]
    halves_differ: float | None = None
    energy: Crossing | None = None


class Range(Struct, frozen=True, kw_only=True):
    """The NVTX ranges of one name, as summed by nsys."""

    name: str
    calls: int
    total_ns: int
    mean_ns: float


class NsightSystems(Struct, frozen=True, kw_only=True):
    """The tables of `nsys stats`."""

    report: str
    kernels: list[KernelRow]
    runtime: list[Operator]
    ranges: list[Range]


class NsightCompute(Struct, frozen=True, kw_only=True):
    """ncu's counters; because ncu replays kernels, its times are not latencies."""

    report: str
    kernels: list[KernelRow]


class Finding(Struct, frozen=True, kw_only=True):
    """One conclusion: the problem, its evidence, the maximum gain from a remedy, and the variant that tests the remedy.

    `expected` is the predicted time of a step divided by its present time, `measured` the ratio measured with the
    tested variant. If the test uses a different `batch_size`, both are per image. `mark` says what disturbed the test.
    """

    title: str
    evidence: list[str]
    advice: str
    rule: str = ""
    expected: float | None = None
    variant: str | None = None
    options: dict[str, OptionValue] = {}
    batch_size: int | None = None
    measured: float | None = None
    verdict: Literal["confirmed", "refuted", "inconclusive", "not measured"] = "not measured"
    mark: str = ""


class Profile(Struct, kw_only=True):
    """All methods of one case on one device; `missing` gives the reason for each absent method or figure.

    `failed` lists those methods in `missing` that failed; the others do not apply. `foreign_cpus` is the mean number of
    CPUs that other processes used during the profile. `interrupted` is set if an Nsight tool was interrupted after the
    child had ended.
    """

    run_id: str
    device_id: str
    case_id: str
    case: Case
    workload: Workload
    t_wall: str
    tool_version: str
    command: str
    device: str
    environment: Environment
    schema: str = SCHEMA
    device_name: str | None = None
    model: ModelFacts | None = None
    kernels_ran: str | None = None
    torch: TorchProfile | None = None
    memory: MemoryProfile | None = None
    benchmark: BenchmarkProfile | None = None
    layers: LayersProfile | None = None
    break_even: BreakEven | None = None
    nsys: NsightSystems | None = None
    ncu: NsightCompute | None = None
    occupancy: Occupancy | None = None
    findings: list[Finding] = []
    missing: dict[str, str] = {}
    failed: list[Method] = []
    foreign_cpus: float | None = None
    interrupted: bool = False

    @property
    def is_disturbed(self) -> bool:
        """Return whether other processes used the CPUs, which makes times too long and gains uncertain."""
        return self.foreign_cpus is not None and self.foreign_cpus > FOREIGN_CPUS

    @property
    def doubts(self) -> dict[str, str]:
        """Return why the times and findings are uncertain: each reason in a few words, with its figures."""
        reasons = {}
        if self.is_disturbed:
            used = cpu_count(self.foreign_cpus or 0.0)
            reasons["busy machine"] = f"other processes used {used} during the profile"
        if self.layers and (contradiction := self._contradiction(self.layers)):
            reasons["contradictory times"] = contradiction
        if self.layers and (levels := two_levels([ns / 1e6 for ns in self.layers.run_ns])):
            fast, slow = (f"{level.ms:.4g} ms" for level in levels)
            reasons["jumps between two speeds"] = f"a run takes either {fast} or {slow}"
        return reasons

    def _contradiction(self, layers: LayersProfile) -> str:
        """Return two CONTRADICTORY times of a forward pass, in words; empty if there are none."""
        times_ns = [(layers.fused_ns, "a run takes")]
        if self.benchmark and self.benchmark.forward:
            times_ns.append((self.benchmark.forward.median_ns, "the benchmark's forward pass takes"))
        if self.device == "cpu":  # on a GPU, each layer also waits for its own kernels
            times_ns.append((layers.synchronised_ns, "the layers add up to"))
        (least_ns, shortest), (most_ns, longest) = min(times_ns), max(times_ns)
        if most_ns <= CONTRADICTORY * least_ns:
            return ""
        return f"{longest} {most_ns / 1e6:.4g} ms, but {shortest} {least_ns / 1e6:.4g} ms"

    @property
    def measured(self) -> bool:
        """Return whether any method produced a result."""
        return any(getattr(self, method.replace("-", "_")) is not None for method in METHODS)


class CollectedProfile(Struct, frozen=True, kw_only=True, tag="collected"):
    """The child's answer: each method's result; the trace is a file in the output folder that the parent reads.

    `failed` lists those methods in `missing` that failed; the others do not apply to this case.
    """

    model: ModelFacts | None = None
    kernels_ran: str | None = None
    device_name: str | None = None
    trace: str | None = None
    memory: MemoryProfile | None = None
    benchmark: BenchmarkProfile | None = None
    layers: LayersProfile | None = None
    sweep: Sweep | None = None
    versions: dict[str, str] = {}
    missing: dict[str, str] = {}
    failed: list[Method] = []
    error: str | None = None
    unsupported: bool = False


def median_step(steps: Sequence[StepTime]) -> StepTime:
    """Return the step of median duration; for an even number, the longer of the middle two."""
    return sorted(steps, key=lambda step: (step.duration_ns, step.number))[len(steps) // 2]
