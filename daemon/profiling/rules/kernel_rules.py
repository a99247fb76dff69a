"""Rules on the work of a step: GPU kernels and CPU operators, by name.

Kernels are recognised by their libraries' names, operators by PyTorch's.
"""

from benchd.daemon.profiling.nsight.nsight import SNN_KERNELS
from benchd.daemon.profiling.profile import Finding, KernelRow, Profile
from benchd.daemon.profiling.rules import evidence, remedies
from benchd.daemon.profiling.rules.evidence import Part, percent
from benchd.models import catalog

_SCAN = r"selective_scan|bidirectional_scan|_scan_kernel|chunk_scan"
_MATRIX = r"(?i)gemm|winograd|implicit|cutlass|[fdw]grad|[fs]prop|cudnn.*conv"
_COPIES = r"aten::(?:copy_|_to_copy|to|clone|contiguous)(?!\w)|copy_kernel"
_FLIPS = r"flip|index_elementwise_kernel|aten::index(?!\w)"
_ELEMENTWISE = (
    r"aten::(?:add|sub|rsub|mul|div|where|avg_pool2d|ge|gt|le|lt|clamp|floor|exp2?|sigmoid|silu|softplus|threshold|relu"
    r"|addcmul|addcdiv|neg|pow|masked_fill|sqrt|rsqrt)_?(?!\w)"
)
_CPU_CONVOLUTION = r"nnpack_spatial_convolution|mkldnn_convolution|slow_conv2d|thnn_conv2d"

_LOW_OCCUPANCY = 0.5
# speed of fp16 with tensor cores relative to fp32 without: 4 on a GA102, 8 on an Orin, 15 on an H100
_TENSOR_CORE_SPEED = 8
_CASTS_A_STEP = 20


def scan(profile: Profile) -> Finding | None:
    """Find a dominant selective scan. Only our GPU kernels offer a choice of its form."""
    share, of_step, lines = _scan_part(profile)
    if share < 0.3:
        return None
    has_form = bool(evidence.gpus(profile)) and remedies.options(profile).get("scan") == "serial"
    custom = remedies.changed(profile, kernels="custom")
    occupancy = _scan_occupancy(profile)
    return Finding(
        title="The selective scan dominates: each token waits for the one before it",
        evidence=[*lines, *([] if occupancy is None else [f"occupancy of its kernel {percent(occupancy)}"])],
        advice="The two-level form scans chunks of tokens in parallel, and is exact. Mamba-2's scan consists of "
        "matrix products, but its recurrence is different: it needs retraining.",
        expected=1 - of_step * (1 - (occupancy or 0.0)),
        variant=custom or (profile.case.variant.name if has_form else None),
        options={"scan": "two_level"} if has_form else {},
    )


def _scan_part(profile: Profile) -> tuple[float, float, list[str]]:
    """Return the scan's shares of the work and of a step, with evidence from its kernels or else from its layers."""
    part = evidence.work(profile, _SCAN)
    layered = sum(row.share for row in evidence.layers(profile) if "scan" in row.name.lower())
    if part.share >= layered:
        return part.share, part.of_step, part.lines
    return layered, layered, [f"layers named scan: {percent(layered)} of the forward pass"]


def _scan_occupancy(profile: Profile) -> float | None:
    kernels = [row.kernel for row in evidence.work(profile, _SCAN).rows if row.kernel]
    return evidence.occupancy(evidence.by_counters(profile), kernels[0]) if kernels else None


def sequence_length(profile: Profile) -> Finding | None:
    """Find a dominant scan over a sequence that larger patches would shorten."""
    share, _, lines = _scan_part(profile)
    options = remedies.options(profile)
    if share < 0.3 or "patch_size" not in options:
        return None
    patch, stride = int(options["patch_size"]), int(options["stride"])
    side = catalog.entry(profile.case.model).image_shape(profile.case.options)[-1]
    if 2 * patch > side:
        return None
    now, then = _tokens(side, patch, stride), _tokens(side, 2 * patch, 2 * stride)
    return Finding(
        title="The sequence is long for a scan",
        evidence=[*lines, f"{now} tokens with patches of {patch} pixels, {then} with {2 * patch}"],
        advice="Time falls with the number of tokens, at a cost in accuracy that is not measured here: larger patches "
        "need weights trained for them.",
        expected=1 - evidence.busy(profile) * (1 - then / now),
        variant=profile.case.variant.name,
        options={"patch_size": 2 * patch, "stride": 2 * stride},
    )


def _tokens(side: int, patch: int, stride: int) -> int:
    return ((side - patch) // stride + 1) ** 2 + 1


def dominant_kernel(profile: Profile) -> Finding | None:
    """Find a single kernel with over 30 % of the GPU's time, except the scan, which has its own rule."""
    longest = evidence.part(profile, evidence.rows(profile)[:1])
    if not evidence.gpus(profile) or longest.share <= 0.3 or evidence.work(profile, _SCAN).share >= 0.3:
        return None
    return Finding(
        title="One kernel takes the most time",
        evidence=longest.lines,
        advice="Look at this kernel first: speeding up all others gains at most the time they take.",
        expected=1 - longest.of_step,
        variant=remedies.fused(profile),
    )


def low_occupancy(profile: Profile) -> Finding | None:
    """Find kernels that fill less than half of the warps, except those on tensor cores, which are fast even so."""
    counted = evidence.by_counters(profile)
    occupancies = [
        (row, row.kernel, evidence.occupancy(counted, row.kernel))
        for row in evidence.rows(profile)
        if row.kernel and not row.kernel.tensor_cores
    ]
    low = [(row, kernel, share) for row, kernel, share in occupancies if share is not None and share < _LOW_OCCUPANCY]
    part = evidence.part(profile, (row for row, _, _ in low))
    if part.share < 0.3:
        return None
    limits = low[0][1].limits
    few_blocks = "grid" in limits
    empty = sum(row.ns * (1 - share / _LOW_OCCUPANCY) for row, _, share in low) / sum(row.ns for row in part.rows)
    return Finding(
        title=f"Low occupancy, limited by {' and '.join(limits) or 'an unknown resource'}",
        evidence=[
            f"{line}; occupancy {percent(share)}{_launched(kernel)}"
            for line, (_, kernel, share) in zip(part.lines, low, strict=False)
        ],
        advice="The grid is too small: use a larger batch, or split the work into more blocks."
        if few_blocks
        else "Use fewer registers, less shared memory or a different block size: more warps hide memory latency.",
        expected=1 - part.of_step * empty,
        variant=profile.case.variant.name if few_blocks else remedies.changed(profile, kernels="custom"),
        batch_size=4 * profile.case.batch_size if few_blocks else None,
    )


def _launched(kernel: KernelRow) -> str:
    """Return the known facts about a kernel's launches, as the end of a sentence."""
    blocks = "" if kernel.blocks_per_sm is None else f", {kernel.blocks_per_sm:.3g} blocks per SM"
    return blocks + ("" if kernel.registers is None else f", {kernel.registers} registers")


def no_tensor_cores(profile: Profile) -> Finding | None:
    """Find fp32 matrix products that do not use the tensor cores."""
    measured = evidence.by_counters(profile)
    counted = {name: row.tensor_cores for name, row in measured.items() if row.tensor_cores is not None}
    plain = [
        row
        for row in evidence.work(profile, _MATRIX, but="causal_conv|depthwise").rows
        if row.kernel and not row.kernel.tensor_cores and not counted.get(row.name)
    ]
    part = evidence.part(profile, plain)
    if part.share < 0.1 or profile.case.variant.precision != "fp32":
        return None
    with_counters = sum(row.name in counted for row in plain)
    mixed = f"{with_counters} of them identified by counters and {len(plain) - with_counters} by name"
    by = {0: "judging by the kernels' names", len(plain): "according to hardware counters"}.get(with_counters, mixed)
    return Finding(
        title="Matrix products in fp32 run without tensor cores",
        evidence=[f"{percent(part.share)} of the work is matrix products that use no tensor cores, {by}", *part.lines],
        advice="Tensor cores need fp16 or bf16: use half precision, or amp if weights must stay in fp32.",
        expected=1 - part.of_step * (1 - 1 / _TENSOR_CORE_SPEED),
        variant=remedies.changed(profile, precision="fp16"),
    )


def casts_and_copies(profile: Profile) -> Finding | None:
    """Find time spent on casts and copies, which autocast inserts around every operator."""
    part = evidence.work(profile, _COPIES)
    operators = profile.torch.operators if profile.torch else []
    casts = sum(row.calls for row in operators if row.name == "aten::_to_copy") / evidence.steps(profile)
    if part.share < 0.1:
        return None
    precision = profile.case.variant.precision
    return Finding(
        title="Too many casts" if casts >= _CASTS_A_STEP else "Copies take time",
        evidence=[*part.lines, f"{casts:.4g} casts (aten::_to_copy) per step, in {precision}"],
        advice="Keep weights and inputs in one format to avoid casts; fused kernels convert in registers.",
        expected=1 - part.of_step,
        variant=_without_casts(profile),
    )


def _without_casts(profile: Profile) -> str | None:
    if profile.case.variant.precision == "amp":
        return remedies.half(profile) if evidence.gpus(profile) else remedies.changed(profile, precision="bf16")
    return remedies.changed(profile, kernels="custom")


def flips(profile: Profile) -> Finding | None:
    """Find tensors that are reversed in memory."""
    part = evidence.work(profile, _FLIPS)
    if part.share < 0.02:
        return None
    return Finding(
        title="Sequences are reversed in memory",
        evidence=part.lines,
        advice="Read them backwards instead: the kernels of the scan and the convolution accept reverse=True and copy "
        "nothing.",
        expected=1 - part.of_step,
        variant=remedies.changed(profile, kernels="custom"),
    )


def cpu_convolution(profile: Profile) -> Finding | None:
    """Find a dominant eager convolution on a CPU. For a spiking net, the custom convolution skips the zeros."""
    part = evidence.work(profile, _CPU_CONVOLUTION)
    if part.share < 0.3:
        return None
    rates = [row.spike_rate for row in evidence.layers(profile) if row.spike_rate is not None]
    left = sum(rates) / len(rates) if rates else 0.0
    spikes = "time_steps" in remedies.options(profile)
    packed = "ONNX Runtime packs weights once and fuses the following operators."
    custom = remedies.changed(profile, kernels="custom")
    return Finding(
        title="Eager convolutions dominate on this CPU",
        evidence=[*part.lines, *([f"mean spike rate {percent(left)}"] if rates else [])],
        advice=f"Spikes are mostly zeros, which the custom convolution skips. {packed}" if spikes else packed,
        expected=1 - part.of_step * (1 - left) if spikes else None,
        variant=custom or remedies.changed(profile, backend="onnxruntime", precision="fp32"),
    )


def elementwise_chain(profile: Profile) -> Finding | None:
    """Find a chain of elementwise operators that could be fused, because each reads and writes all its numbers."""
    part = _elementwise(profile)
    kinds = {row.operator for row in part.rows if row.ns >= 0.02 * sum(part_row.ns for part_row in part.rows)}
    if part.share < 0.25 or len(kinds) < 3:
        return None
    return Finding(
        title="A chain of elementwise operators could be one kernel",
        evidence=[f"{len(kinds)} operators make up {percent(part.share)} of the work", *part.lines],
        advice="A fused kernel reads and writes each number once; a membrane stays in registers over all steps.",
        expected=1 - part.of_step * (1 - 1 / len(kinds)),
        variant=remedies.fused(profile),
    )


def _elementwise(profile: Profile) -> Part:
    """Return the elementwise work without copies and flips."""
    return evidence.work(profile, _ELEMENTWISE, but=f"{_COPIES}|{_FLIPS}")


def neurons(profile: Profile) -> Finding | None:
    """Find dominant kernels of spiking neurons on a GPU, if half precision has not been tried."""
    part, variant = _neurons(profile), remedies.half(profile)
    if part.share < 0.3 or variant is None or not evidence.gpus(profile):
        return None
    shapes = [f"{row.name}{_launched(row.kernel)}" for row in part.rows[:3] if row.kernel]
    return Finding(
        title="Neuron kernels dominate",
        evidence=[f"{percent(part.share)} of the work", *part.lines, *shapes],
        advice="They are limited by memory bandwidth: half precision halves the bytes of input current that they read.",
        expected=1 - part.of_step / 2,
        variant=variant,
    )


def _neurons(profile: Profile) -> Part:
    """Return the work of neurons with their own kernel; a convolution of spikes does not count."""
    return evidence.work(profile, SNN_KERNELS, but="conv|linear")


def time_steps(profile: Profile) -> Finding | None:
    """Find a spiking net dominated by its neurons, which would take less time with fewer steps or a lower level."""
    share = max(_neurons(profile).share, _elementwise(profile).share)
    options = remedies.options(profile)
    steps = int(options.get("time_steps", 1))
    if share < 0.25 or steps < 2:
        return None
    fewer: dict[str, int] = {"time_steps": steps // 2}
    if "level" in options and int(options["level"]) // 2 - 1 > steps // 2:
        fewer["level"] = max(4, 2 * (steps // 2) + 2)  # the input is spread over level // 2 - 1 steps
    tested = [f"{name} {options[name]}, tested with {value}" for name, value in fewer.items()]
    return Finding(
        title=f"Neurons compute all {steps} time steps",
        evidence=[f"the neurons take {percent(share)} of the work", "; ".join(tested)],
        advice="Sweep both: the level alone does not change the time, only the number of steps the input needs. The "
        "accuracy lost with fewer steps is not measured here.",
        expected=steps // 2 / steps,
        variant=profile.case.variant.name,
        options=dict(fewer),
    )


RULES = (
    scan,
    sequence_length,
    dominant_kernel,
    low_occupancy,
    no_tensor_cores,
    casts_and_copies,
    flips,
    cpu_convolution,
    elementwise_chain,
    neurons,
    time_steps,
)
