"""Rules on what bounds a step: the GPU, its launches, the input, transfers, waiting, a small batch, other load."""

from benchd.daemon.profiling.profile import Finding, Profile, Synchronization
from benchd.daemon.profiling.rules import evidence, remedies
from benchd.daemon.profiling.rules.evidence import ms, percent


def gpu_bound(profile: Profile) -> Finding | None:
    """Find a step that is all kernels, as long as there is a variant with less work left to try."""
    share, variant = evidence.step_share(profile, "kernel"), remedies.half(profile)
    if share < 0.95 or variant is None:
        return None
    return Finding(
        rule="gpu_bound",
        title="The GPU is the bottleneck: the host and the data loader are not",
        evidence=[evidence.categories(profile)],
        advice="More workers or a faster host change nothing, fewer or faster kernels do. Half precision halves the "
        "bytes of each.",
        expected=1 - share / 2,
        variant=variant,
    )


def launch_bound(profile: Profile) -> Finding | None:
    """Find a GPU that waits for launches: many, each with a short wait. A longer one hides other work of the host."""
    launches = profile.torch.launches / evidence.steps(profile) if profile.torch and evidence.gpus(profile) else 0
    host = evidence.host_share(profile)
    if launches < 20 or host < 0.3 or host * evidence.step_ns(profile) / launches > 50e3:
        return None
    wait_us = host * evidence.step_ns(profile) / launches / 1e3
    return Finding(
        rule="launch_bound",
        title="Launch overhead: the GPU waits for the host to launch its kernels",
        evidence=[
            evidence.categories(profile),
            f"{launches:.4g} launches a step, and the GPU waits {wait_us:.3g} us for each",
        ],
        advice="A CUDA graph of the step launches all its kernels at once, and fused kernels need fewer launches.",
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
        rule="input_bound",
        title="The step waits for the data loader",
        evidence=[evidence.categories(profile)],
        advice="Decode in more worker processes, with pinned memory and prefetching, or keep the decoded images.",
        expected=1 - share,
    )


def transfers(profile: Profile) -> Finding | None:
    """Find copies between memories that nothing hides."""
    share = evidence.step_share(profile, "memcpy")
    if share < 0.1:
        return None
    return Finding(
        rule="transfers",
        title="Memory transfers take time that the kernels could hide",
        evidence=[evidence.categories(profile)],
        advice="Copy from pinned memory with non_blocking=True while the step before computes, and leave on the GPU "
        "what it reads again.",
        expected=1 - share,
    )


def synchronization(profile: Profile) -> Finding | None:
    """Find waits of the host after which the GPU has nothing to do."""
    calls = profile.torch.synchronizations if profile.torch else []
    idle = evidence.of_steps(profile, sum(call.idle_after_ns for call in calls))
    if idle < 0.02:
        return None
    worst = sorted(calls, key=lambda call: -call.idle_after_ns)[:3]
    return Finding(
        rule="synchronization",
        title="The host waits for the GPU, and then the GPU for the host",
        evidence=[
            f"the GPU idles {percent(idle)} of the time behind such calls",
            *_waits(worst, evidence.steps(profile)),
        ],
        advice="Leave results on the GPU: no item(), tolist() or print of a tensor in the loop. Read them at its end.",
        expected=1 - idle,
    )


def _waits(calls: list[Synchronization], steps: int) -> list[str]:
    return [
        f"{call.operator or call.name}: {call.calls / steps:.4g} calls a step wait {ms(call.waited_ns / steps)}, then "
        f"the GPU {ms(call.idle_after_ns / steps)}; {call.launches_after / steps:.4g} launches could have gone before"
        for call in calls
    ]


def low_utilization(profile: Profile) -> Finding | None:
    """Find a GPU that is half idle or half empty though its input is there."""
    if not evidence.gpus(profile) or evidence.step_share(profile, "data_loader") >= 0.1:
        return None
    gpu, batch = evidence.gpus(profile)[0], profile.case.batch_size
    filled = gpu.utilization if gpu.sm_efficiency is None else min(gpu.utilization, gpu.sm_efficiency)
    if filled >= 0.5:
        return None
    sms = "" if gpu.sm_efficiency is None else f", SM efficiency {percent(gpu.sm_efficiency)}"
    return Finding(
        rule="low_utilization",
        title=f"A batch of {batch} is too small for this GPU",
        evidence=[f"{gpu.name}: utilisation {percent(gpu.utilization)}{sms}"],
        advice="A larger batch fills it; sweep the batch size and look at the time of an image.",
        expected=max(filled, 0.25),
        variant=profile.case.variant.name,
        batch_size=4 * batch,
    )


def unsteady(profile: Profile) -> Finding | None:
    """Find single runs that disagree: what is concluded from one of them may not hold for the next."""
    variation = profile.layers.variation if profile.layers else 0.0
    if not profile.layers or variation < 0.1:
        return None
    runs = ", ".join(ms(ns) for ns in profile.layers.run_ns)
    return Finding(
        rule="unsteady",
        title="Runs of the same work differ",
        evidence=[f"variation {percent(variation)} over {runs}"],
        advice="Look for other load, changing clocks and temperature before anything else, and profile again.",
    )


RULES = (gpu_bound, launch_bound, input_bound, transfers, synchronization, low_utilization, unsteady)
