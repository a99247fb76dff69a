"""Rules on layers, the forward and backward passes of training, and memory."""

import re
from statistics import median

from benchd.daemon.profiling.profile import Finding, LayerRow, Profile
from benchd.daemon.profiling.rules import evidence, remedies
from benchd.daemon.profiling.rules.evidence import mib, ms, percent

_LONG_NS = 100e3  # the overhead of calls alone lifts a shorter layer far above its minimum
_FAR = 10.0  # multiple of the roofline minimum: at full clocks, some layer on a busy device comes closer to it
_HELD_FOR_LONG = ("parameters", "inputs", "gradients")


def out_of_line(profile: Profile) -> Finding | None:
    """Find the layer, or kind of layer, whose share of the time most exceeds three times its share of the FLOPs."""
    rows = [*evidence.layers(profile), *evidence.kinds(profile)]
    known = [(row, share) for row in rows if (share := evidence.flops_share(profile, row))]
    beyond = [(row, share) for row, share in known if row.share >= 0.1 and row.share >= 3 * share]
    if not beyond:
        return None
    worst, flops = max(beyond, key=lambda pair: pair[0].share - pair[1])
    return Finding(
        title=f"Layer {worst.name} takes more time than its FLOPs explain",
        evidence=[
            f"{worst.name}: {ms(worst.ns)}, {percent(worst.share)} of the time for {percent(flops)} of the FLOPs"
        ],
        advice="Look at its work other than matrix products: layout changes, many small operators, too few blocks.",
        expected=1 - (worst.share - flops),
        variant=remedies.fused(profile),
    )


def far_from_floor(profile: Profile) -> Finding | None:
    """Find a busy device on which every long layer is far above its roofline minimum: no algorithm explains that."""
    known = [row for row in evidence.layers(profile) if row.x_of_floor is not None and row.ns >= _LONG_NS]
    factors = [_over(row) for row in known]
    is_busy = not evidence.gpus(profile) or evidence.step_share(profile, "kernel") >= 0.9
    if len(factors) < 3 or min(factors) < _FAR or sum(row.share for row in known) < 0.9 or not is_busy:
        return None
    return Finding(
        title="Every long layer is far above its floor: check the clocks first",
        evidence=[
            f"{len(factors)} layers of {ms(_LONG_NS)} or more at {min(factors):.3g} to {max(factors):.3g} x the floor",
            _clocks(profile),
        ],
        advice="A factor common to all layers comes from the board, not the model: set the power mode (nvpmodel), lock "
        "the clocks (jetson_clocks), let it cool, and profile again.",
        expected=1 / min(factors),
    )


def _clocks(profile: Profile) -> str:
    machine = profile.environment
    facts = {
        "power mode": machine.power_mode,
        "clocks locked": machine.clocks_locked,
        "CPU governor": machine.cpu_governor,
        "GPU governor": machine.gpu_governor,
    }
    return ", ".join(f"{name} {'unknown' if fact is None else fact}" for name, fact in facts.items())


def memory_access(profile: Profile) -> Finding | None:
    """Find the memory-bound layer, or kind of layer, that is furthest above its roofline and stands out."""
    rows = [*evidence.layers(profile), *evidence.kinds(profile)]
    usual = median([row.x_of_floor for row in rows if row.x_of_floor is not None] or [0.0])
    slow = [row for row in rows if row.binding == "bytes" and row.share >= 0.1 and _over(row) >= max(5.0, 2 * usual)]
    if not slow:
        return None
    worst = max(slow, key=_over)
    return Finding(
        title=f"Layer {worst.name} uses little of the memory bandwidth",
        evidence=[
            f"{worst.name}: {ms(worst.ns)}, {percent(worst.share)} of the time",
            f"{_over(worst):.3g} times the floor set by its bytes; the median layer takes {usual:.3g} times",
        ],
        advice="Check its layout (channels last), strides, and values that are written only to be read again.",
        expected=1 - worst.share * (1 - usual / _over(worst)),
        variant=remedies.fused(profile),
    )


def _over(layer: LayerRow) -> float:
    return layer.x_of_floor or 0.0


def late_stages(profile: Profile) -> Finding | None:
    """Find a ResNet whose stages 3 and 4, with small feature maps, take more time than their FLOPs explain."""
    if not profile.layers or profile.layers.timed_by:
        return None
    stages = [row for row in profile.layers.layers if row.parent is None]
    rows = [row for row in stages if re.match(r"layer[34]", row.name, re.IGNORECASE)]
    share = sum(row.share for row in rows)
    flops = sum(evidence.flops_share(profile, row) or 0.0 for row in rows)
    if share < 0.5 or share < 1.2 * flops:
        return None
    return Finding(
        title="Stages 3 and 4 take most of the time",
        evidence=[f"{row.name}: {ms(row.ns)}, {percent(row.share)} of the time" for row in rows]
        + [f"together {percent(share)} of the time for {percent(flops)} of the FLOPs"],
        advice="Their maps are small and their weights large: a larger batch shares one read of the weights.",
        expected=1 - (share - flops),
        variant=profile.case.variant.name,
        batch_size=4 * profile.case.batch_size,
    )


def backward(profile: Profile) -> Finding | None:
    """Find a backward pass that takes over three times as long as the forward pass, with only twice the products."""
    timed = profile.benchmark
    if not timed or not timed.forward or not timed.backward:
        return None
    ahead, back = timed.forward.median_ns, timed.backward.median_ns
    if back <= 3 * ahead:
        return None
    return Finding(
        title="The backward pass dominates",
        evidence=[f"forward {ms(ahead)}, backward {ms(back)}: {percent(back / (ahead + back))} of both"],
        advice="Twice the forward pass is usual. Look for surrogate gradients made of many small operators, and for a "
        "graph over all time steps; a fused kernel has a fused gradient.",
        expected=3 * ahead / (ahead + back),
        variant=remedies.changed(profile, kernels="custom"),
    )


def memory_peak(profile: Profile) -> Finding | None:
    """Find a peak of ten times the long-lived memory, which is usually caused by activations."""
    memory = profile.memory
    long_lived_bytes = sum(memory.peak_by_category.get(name, 0) for name in _HELD_FOR_LONG) if memory else 0
    if not memory or not long_lived_bytes or memory.peak_bytes < 10 * long_lived_bytes:
        return None
    largest = [
        f"{allocation.module or allocation.operator or 'unknown'}: {mib(allocation.bytes)} of {allocation.category}"
        for allocation in memory.largest[:3]
    ]
    return Finding(
        title="Activations cause the memory peak",
        evidence=[f"peak {mib(memory.peak_bytes)} on {memory.device}, {mib(long_lived_bytes)} long-lived", *largest],
        advice="Use smaller batches, half precision, or fused kernels that do not store every time step. This frees "
        "memory for other work but saves no time.",
        variant=remedies.changed(profile, kernels="custom"),
    )


RULES = (out_of_line, far_from_floor, memory_access, late_stages, backward, memory_peak)
