"""The figures and texts on which conclusions are based: parts of a step, of its work and of its layers.

The work of a step is its kernels on a GPU, and its operators by self time on a CPU. Without a method's result, there
are no rows, and shares are 0.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from benchd.daemon.profiling.profile import Category, GpuUse, KernelRow, LayerRow, Profile

_SHOWN = 3
_UNNAMED = re.compile(r"(?:\(anonymous namespace\)|<unnamed>)::")


@dataclass(frozen=True)
class WorkRow:
    """One kernel or operator over all active steps; for a kernel, `operator` launched it."""

    name: str
    operator: str
    ns: int
    calls: int
    kernel: KernelRow | None = None


@dataclass(frozen=True)
class Part:
    """Part of the work, longest row first: its shares of all work and of the steps' time, and each row as text.

    Concurrent kernels share the time in which the GPU is working: `of_step` is the most that a step can gain.
    """

    rows: list[WorkRow]
    share: float
    of_step: float
    lines: list[str]


def gpus(profile: Profile) -> list[GpuUse]:
    """Return the GPUs that ran kernels."""
    return profile.torch.gpus if profile.torch else []


def steps(profile: Profile) -> int:
    """Return the number of steps in the tables; 1 if the trace has no steps."""
    return max(1, len(profile.torch.steps)) if profile.torch else 1


def step_ns(profile: Profile) -> float:
    """Return the mean time of a step; 0 if the trace has none."""
    return sum(step.duration_ns for step in profile.torch.steps) / steps(profile) if profile.torch else 0.0


def step_share(profile: Profile, *categories: Category) -> float:
    """Return the share of these categories in the steps' time."""
    step_times = [step.by_category for step in profile.torch.steps] if profile.torch else []
    return of_steps(profile, sum(ns.get(category, 0) for ns in step_times for category in categories))


def busy(profile: Profile) -> float:
    """Return the share of the steps' time spent on their work: with a kernel running or, on a CPU, in operators."""
    return step_share(profile, "kernel") if gpus(profile) else of_steps(profile, sum(row.ns for row in rows(profile)))


def host_share(profile: Profile) -> float:
    """Return the share of the steps' time in which only the host is working, in calls or between them."""
    return step_share(profile, "runtime", "cpu", "other")


def of_steps(profile: Profile, ns: float) -> float:
    """Return a time, summed over all active steps, as a share of their total time, at most 1."""
    total = step_ns(profile) * steps(profile)
    return min(1.0, ns / total) if total else 0.0


def categories(profile: Profile) -> str:
    """Return a step's time by category as text."""
    shares = {
        "kernels": step_share(profile, "kernel"),
        "copies and memsets": step_share(profile, "device_copy", "memcpy", "memset"),
        "host only": host_share(profile),
        "data loader": step_share(profile, "data_loader"),
    }
    divided = ", ".join(f"{name} {percent(share)}" for name, share in shares.items())
    return f"a step of {ms(step_ns(profile))}: {divided}"


def rows(profile: Profile) -> list[WorkRow]:
    """Return the kernels of a run on a GPU, otherwise the operators; longest first."""
    if not profile.torch:
        return []
    if gpus(profile):
        evidence = [
            WorkRow(row.name, row.operator or row.name, row.total_ns, row.calls, row) for row in profile.torch.kernels
        ]
    else:
        evidence = [WorkRow(row.name, row.name, row.self_cpu_ns, row.calls) for row in profile.torch.operators]
    return sorted(evidence, key=lambda row: -row.ns)


def work(profile: Profile, pattern: str, but: str | None = None) -> Part:
    """Return the work whose kernel or operator matches `pattern` but not `but`."""
    return part(profile, (row for row in rows(profile) if _is(row, pattern) and not (but and _is(row, but))))


def part(profile: Profile, selected: Iterable[WorkRow]) -> Part:
    """Return these rows, longest first, as a part of the work."""
    chosen = list(selected)
    ns, total_ns = sum(row.ns for row in chosen), sum(row.ns for row in rows(profile))
    lines = [
        f"{row.name}: {percent(row.ns / total_ns)} of the work, {ms(row.ns / steps(profile))} and "
        f"{row.calls / steps(profile):.4g} calls per step"
        for row in chosen[:_SHOWN]
    ]
    share = ns / total_ns if total_ns else 0.0
    return Part(chosen, share, share * busy(profile), lines)


def occupancy(counted: Mapping[str, KernelRow], kernel: KernelRow) -> float | None:
    """Return a kernel's occupancy as measured by ncu, otherwise as allowed by its launches, 0 to 1.

    `counted` is the result of `by_counters`.
    """
    row = counted.get(kernel.name)
    return kernel.estimated_occupancy if row is None or row.measured_occupancy is None else row.measured_occupancy


def by_counters(profile: Profile) -> dict[str, KernelRow]:
    """Return ncu's rows by the kernels' names in the trace; kernels that ncu did not count are absent.

    ncu spells template arguments and parameters differently. If no kernel has the same full name, the plain name is
    used, provided that it belongs to exactly one kernel on each side.
    """
    if not (profile.ncu and profile.torch):
        return {}
    by_name = {row.name: row for row in profile.ncu.kernels}
    by_plain_name = {plain_name(name): row for name, row in by_name.items()}
    traced = [row.name for row in profile.torch.kernels]
    ours, theirs = (Counter(map(plain_name, names)) for names in (traced, by_name))
    alone = {name: by_plain_name[plain] for name in traced if ours[plain := plain_name(name)] == theirs[plain] == 1}
    return alone | {name: by_name[name] for name in traced if name in by_name}


def plain_name(kernel: str) -> str:
    """Return the qualified name of a kernel without return type, unnamed namespaces, arguments and parameters."""
    return re.split(r"[<(]", _UNNAMED.sub("", kernel), maxsplit=1)[0].removeprefix("void ").strip()


def layers(profile: Profile) -> list[LayerRow]:
    """Return the layers without parts, which together make up the run; empty for a runtime's own layers."""
    every = profile.layers.layers if profile.layers and not profile.layers.timed_by else []
    groups = {row.parent for row in every}
    return [row for row in every if row.name not in groups]


def kinds(profile: Profile) -> list[LayerRow]:
    """Return one row for each group of layers that differ only in a number, such as layers.*.scan."""
    alike: dict[str, list[LayerRow]] = {}
    for row in layers(profile):
        alike.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", row.name), []).append(row)
    return [_together(name, same_kind) for name, same_kind in alike.items() if len(same_kind) > 1]


def _together(name: str, layers: list[LayerRow]) -> LayerRow:
    ns = sum(row.ns for row in layers)
    flops = [row.flops for row in layers if row.flops is not None]
    floors_ns = [row.ns / row.x_of_floor for row in layers if row.x_of_floor]
    return LayerRow(
        name=name,
        ns=ns,
        share=sum(row.share for row in layers),
        flops=sum(flops) if len(flops) == len(layers) else None,
        x_of_floor=ns / sum(floors_ns) if len(floors_ns) == len(layers) else None,
        binding=max(layers, key=lambda row: row.ns).binding,
    )


def flops_share(profile: Profile, layer: LayerRow) -> float | None:
    """Return a layer's share of the FLOPs of all layers; None if unknown."""
    total = sum(row.flops or 0 for row in layers(profile))
    return None if layer.flops is None or not total else layer.flops / total


def percent(share: float) -> str:
    """Return a share as text: 60.6 %."""
    return f"{100 * share:.4g} %"


def ms(ns: float) -> str:
    """Return a time as text: 15.3 ms."""
    return f"{ns / 1e6:.4g} ms"


def mib(size: float) -> str:
    """Return a size as text: 327.6 MiB."""
    return f"{size / 2**20:.4g} MiB"


def _is(row: WorkRow, pattern: str) -> bool:
    return bool(re.search(pattern, row.name) or re.search(pattern, row.operator))
