"""Figures of a profile that conclusions stand on, and words for them: parts of a step, of its work and of its layers.

The work of a step is its kernels on a GPU, and its operators by their own time on a CPU. A method that did not run
leaves nothing: no rows, and shares of 0.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from benchd.daemon.profiling.profile import Category, Gpu, KernelRow, LayerRow, Profile

_SHOWN = 3
_UNNAMED = re.compile(r"(?:\(anonymous namespace\)|<unnamed>)::")


@dataclass(frozen=True)
class Row:
    """One kernel or operator over all active steps; `operator` is the one behind a kernel."""

    name: str
    operator: str
    ns: int
    calls: int
    kernel: KernelRow | None = None


@dataclass(frozen=True)
class Part:
    """Some of the work, the longest row first: its shares of all work and of the steps' time, and each row in words."""

    rows: list[Row]
    share: float
    of_step: float
    lines: list[str]


def gpus(profile: Profile) -> list[Gpu]:
    """Return the GPUs that ran kernels."""
    return profile.torch.gpus if profile.torch else []


def steps(profile: Profile) -> int:
    """Return how many steps the tables sum up; one where the trace has no steps."""
    return max(1, len(profile.torch.steps)) if profile.torch else 1


def step_ns(profile: Profile) -> float:
    """Return the mean time of a step; 0 where the trace has none."""
    return sum(step.duration_ns for step in profile.torch.steps) / steps(profile) if profile.torch else 0.0


def step_share(profile: Profile, *categories: Category) -> float:
    """Return the share of the steps' time that falls to these categories."""
    each = [step.by_category for step in profile.torch.steps] if profile.torch else []
    return of_steps(profile, sum(ns.get(one, 0) for ns in each for one in categories))


def host_share(profile: Profile) -> float:
    """Return the share of the steps' time in which the host works alone, in calls or between them."""
    return step_share(profile, "runtime", "cpu", "other")


def of_steps(profile: Profile, ns: float) -> float:
    """Return a time over all active steps as a share of theirs, at most 1."""
    total = step_ns(profile) * steps(profile)
    return min(1.0, ns / total) if total else 0.0


def categories(profile: Profile) -> str:
    """Return in words what a step's time divides into."""
    shares = {
        "kernels": step_share(profile, "kernel"),
        "copies and memsets": step_share(profile, "memcpy", "memset"),
        "the host alone": host_share(profile),
        "the data loader": step_share(profile, "data_loader"),
    }
    divided = ", ".join(f"{name} {percent(share)}" for name, share in shares.items())
    return f"a step of {ms(step_ns(profile))}: {divided}"


def rows(profile: Profile) -> list[Row]:
    """Return the kernels of a run on a GPU, else the operators; the longest first."""
    if not profile.torch:
        return []
    if gpus(profile):
        found = [Row(row.name, row.operator or row.name, row.total_ns, row.calls, row) for row in profile.torch.kernels]
    else:
        found = [Row(row.name, row.name, row.self_cpu_ns, row.calls) for row in profile.torch.operators]
    return sorted(found, key=lambda row: -row.ns)


def work(profile: Profile, pattern: str, but: str | None = None) -> Part:
    """Return the work whose kernel or operator `pattern` finds and `but` does not."""
    return part(profile, (row for row in rows(profile) if _is(row, pattern) and not (but and _is(row, but))))


def part(profile: Profile, found: Iterable[Row]) -> Part:
    """Return these rows, the longest first, as a part of the work."""
    chosen = list(found)
    ns, whole = sum(row.ns for row in chosen), sum(row.ns for row in rows(profile))
    lines = [
        f"{row.name}: {percent(row.ns / whole)} of the work, {ms(row.ns / steps(profile))} and "
        f"{row.calls / steps(profile):.4g} calls a step"
        for row in chosen[:_SHOWN]
    ]
    return Part(chosen, ns / whole if whole else 0.0, of_steps(profile, ns), lines)


def occupancy(counted: Mapping[str, KernelRow], kernel: KernelRow) -> float | None:
    """Return the occupancy that ncu measured of a kernel, else the one that its launches allow, 0 to 1.

    Takes what `by_counters` gave.
    """
    row = counted.get(kernel.name)
    return kernel.estimated_occupancy if row is None or row.measured_occupancy is None else row.measured_occupancy


def by_counters(profile: Profile) -> dict[str, KernelRow]:
    """Return the rows of ncu by the names that their kernels have in the trace; those that it did not count are absent.

    ncu spells template arguments and parameters otherwise than a trace. Where it has no kernel of the same whole name,
    the plain name tells, if it is that of one kernel alone on both sides.
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
    """Return the layers that have no parts in the table, which divide the pass."""
    every = profile.layers.layers if profile.layers else []
    groups = {row.parent for row in every}
    return [row for row in every if row.name not in groups]


def kinds(profile: Profile) -> list[LayerRow]:
    """Return layers that differ only in a number, such as layers.*.scan, as one row each."""
    alike: dict[str, list[LayerRow]] = {}
    for row in layers(profile):
        alike.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", row.name), []).append(row)
    return [_together(name, found) for name, found in alike.items() if len(found) > 1]


def _together(name: str, found: list[LayerRow]) -> LayerRow:
    ns = sum(row.ns for row in found)
    flops = [row.flops for row in found if row.flops is not None]
    floors_ns = [row.ns / row.x_of_floor for row in found if row.x_of_floor]
    return LayerRow(
        name=name,
        ns=ns,
        share=sum(row.share for row in found),
        flops=sum(flops) if len(flops) == len(found) else None,
        x_of_floor=ns / sum(floors_ns) if len(floors_ns) == len(found) else None,
        binding=max(found, key=lambda row: row.ns).binding,
    )


def flops_share(profile: Profile, layer: LayerRow) -> float | None:
    """Return a layer's share of the FLOPs of all layers; None where they are not known."""
    whole = sum(row.flops or 0 for row in layers(profile))
    return None if layer.flops is None or not whole else layer.flops / whole


def percent(share: float) -> str:
    """Return a share in words: 60.6 %."""
    return f"{100 * share:.4g} %"


def ms(ns: float) -> str:
    """Return a time in words: 15.3 ms."""
    return f"{ns / 1e6:.4g} ms"


def mib(size: float) -> str:
    """Return a size in words: 327.6 MiB."""
    return f"{size / 2**20:.4g} MiB"


def _is(row: Row, pattern: str) -> bool:
    return bool(re.search(pattern, row.name) or re.search(pattern, row.operator))
