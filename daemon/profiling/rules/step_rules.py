"""Rules that find what limits a step: the GPU, launches, input, transfers, waiting, a small batch, other programs."""

from benchd.daemon.profiling.profile import Finding, Profile, Synchronization
from benchd.daemon.profiling.rules import evidence, remedies
from benchd.daemon.profiling.rules.evidence import ms, percent


def gpu_bound(profile: Profile) -> Finding | None:
    """Find a step dominated by kernels, if a variant with less work has not been tried."""
    share, variant = evidence.step_share(profile, "kernel"), remedies.half(profile)
    if share < 0.95 or variant is None:
        return None
    return Finding(
        title="The GPU is the bottleneck, not the host or the data loader",
        evidence=[evidence.categories(profile)],
        advice="More workers or a faster host will not help; fewer or faster kernels will. Half precision halves their "
        "bytes.",
        expected=1 - share / 2,
        variant=variant,
    )


def launch_bound(profile: Profile) -> Finding | None:
    """Find a GPU that waits about equally long for many launches. A few long waits indicate other work on the host."""
    gpus, host = evidence.gpus(profile), evidence.host_share(profile)
    launches = profile.torch.launches / evidence.steps(profile) if profile.torch and gpus else 0
    if launches < 20 or host < 0.3 or (gpus[0].long_waits_share or 0) > 0.5:
        return None
    wait_us = host * evidence.step_ns(profile) / launches / 1e3
    return Finding(
        title="Launch overhead: the GPU waits for the host to launch its kernels",
        evidence=[
            evidence.categories(profile),
            f"{launches:.4g} launches per step, and the GPU waits {wait_us:.3g} us for each",
        ],
        advice="Use a CUDA graph, which launches all kernels of the step at once, or fused kernels.",
        expected=1 - host,
        variant=remedies.changed(profile, backend="cudagraph", kernels="custom")
        or remedies.changed(profile, backend="cudagraph"),
    )


def input_bound(profile: Profile) -> Finding | None:
    """Find a step that waits for its input."""
    share = evidence.step_share(profile, "data_loader")
    if share < 0.1:
        return None
    return Finding(
        title="The step waits for the data loader",
        evidence=[evidence.categories(profile)],
        advice="Decode in more worker processes with pinned memory and prefetching, or cache the decoded images.",
        expected=1 - share,
    )


def transfers(profile: Profile) -> Finding | None:
    """Find copies between host and device that do not overlap other work."""
    share = evidence.step_share(profile, "memcpy")
    if share < 0.1:
        return None
    return Finding(
        title="Memory transfers could overlap the kernels",
        evidence=[evidence.categories(profile)],
        advice="Copy from pinned memory with non_blocking=True while the previous step computes, and keep reused data "
        "on the GPU.",
        expected=1 - share,
    )


def synchronization(profile: Profile) -> Finding | None:
    """Find waits of the host that leave the GPU idle afterwards."""
    calls = profile.torch.synchronizations if profile.torch else []
    idle = evidence.of_steps(profile, sum(call.idle_after_ns for call in calls))
    if idle < 0.02:
        return None
    worst = sorted(calls, key=lambda call: -call.idle_after_ns)[:3]
    return Finding(
        title="The host waits for the GPU, then the GPU waits for the host",
        evidence=[
            f"the GPU idles {percent(idle)} of the time after such calls",
            *_waits(worst, evidence.steps(profile)),
        ],
        advice="Leave results on the GPU: no item(), tolist() or print of a tensor in the loop. Read them at its end.",
        expected=1 - idle,
    )


def _waits(calls: list[Synchronization], steps: int) -> list[str]:
    return [
        f"{call.operator or call.name}: {call.calls / steps:.4g} calls per step wait {ms(call.waited_ns / steps)}, "
        f"then the GPU waits {ms(call.idle_after_ns / steps)}; "
        f"{call.launches_after / steps:.4g} launches could have come earlier"
        for call in calls
    ]


def low_utilization(profile: Profile) -> Finding | None:
    """Find a GPU that is half idle or half empty although it is not waiting for input."""
    if not evidence.gpus(profile) or evidence.step_share(profile, "data_loader") >= 0.1:
        return None
    gpu, batch = evidence.gpus(profile)[0], profile.case.batch_size
    filled = gpu.utilization if gpu.sm_efficiency is None else min(gpu.utilization, gpu.sm_efficiency)
    if filled >= 0.5:
        return None
    sms = "" if gpu.sm_efficiency is None else f", SM efficiency {percent(gpu.sm_efficiency)}"
    return Finding(
        title=f"A batch of {batch} is too small for this GPU",
        evidence=[f"{gpu.name}: utilisation {percent(gpu.utilization)}{sms}"],
        advice="Use a larger batch: sweep the batch size and compare the time per image.",
        expected=max(filled, 0.25),
        variant=profile.case.variant.name,
        batch_size=4 * batch,
    )


def unsteady(profile: Profile) -> Finding | None:
    """Find runs that differ so much that conclusions from one of them may not hold for the next."""
    variation = profile.layers.variation if profile.layers else 0.0
    if not profile.layers or variation < 0.1:
        return None
    runs = ", ".join(ms(ns) for ns in profile.layers.run_ns)
    return Finding(
        title="Runs of the same work differ",
        evidence=[f"variation {percent(variation)} over {runs}"],
        advice="First rule out other running programs, changing clocks and high temperature; then profile again.",
    )


RULES = (gpu_bound, launch_bound, input_bound, transfers, synchronization, low_utilization, unsteady)
