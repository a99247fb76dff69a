"""Compares two profiles: finds operators, kernels and layers whose time changed by more than the steps vary."""

from pathlib import Path
from typing import NamedTuple

import msgspec

from benchd.daemon.errors import UsageError
from benchd.daemon.profiling.profile import Profile, TorchProfile, median_step
from benchd.daemon.verdicts import sameness

LEAST_SHARE = 0.002
"""The smallest change to show, as a share of A's step time."""


class ProfileChange(NamedTuple):
    """The time of one operator, kernel or layer per step in both profiles; None if it did not run."""

    name: str
    before_ns: float | None
    after_ns: float | None

    @property
    def added_ns(self) -> float:
        """Return how much longer it takes in the second profile."""
        return (self.after_ns or 0.0) - (self.before_ns or 0.0)


class ProfileChanges(NamedTuple):
    """The changes (by kind, largest first), the number of unchanged entries, and other differences of the profiles.

    `noise` is the variation of the steps within a profile, as a share of their time: smaller changes cannot be
    distinguished. `mark` follows each figure if the times of one of the profiles are uncertain.
    """

    step: ProfileChange
    noise: float
    changed: dict[str, list[ProfileChange]]
    same: dict[str, int]
    differences: list[str]
    mark: str = ""


def read(path: Path) -> Profile:
    """Return the profile in a folder from `benchd profile`, or in its profile.json; raise UsageError if it has none."""
    file = path / "profile.json" if path.is_dir() else path
    try:
        return msgspec.json.decode(file.read_bytes(), type=Profile)
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"{path}: not a profile ({error}); give a folder written by benchd profile") from error


def compare(a: Profile, b: Profile) -> ProfileChanges:
    """Return what changed from A to B; raise UsageError if either has no steps to compare."""
    step = ProfileChange("step", _step_ns(a), _step_ns(b))
    noise = max(_noise(a), _noise(b))
    times, times_of_b = _times(a), _times(b)
    changed, same = {}, {}
    for kind, before in times.items():
        after = times_of_b[kind]
        both = [ProfileChange(name, before.get(name), after.get(name)) for name in before | after]
        changes = [change for change in both if _is_change(change, noise, LEAST_SHARE * (step.before_ns or 0.0))]
        changed[kind] = sorted(changes, key=lambda change: -abs(change.added_ns))
        same[kind] = len(both) - len(changes)
    return ProfileChanges(step, noise, changed, same, _differences(a, b), next(filter(None, map(mark, (a, b))), ""))


def _is_change(change: ProfileChange, noise: float, least_ns: float) -> bool:
    return abs(change.added_ns) > max(least_ns, noise * max(change.before_ns or 0.0, change.after_ns or 0.0))


def _traced(profile: Profile) -> TorchProfile:
    if not profile.torch or not profile.torch.steps:
        raise UsageError(f"the profile of {profile.case_id} has no steps: run it with --method torch")
    return profile.torch


def _step_ns(profile: Profile) -> float:
    return float(median_step(_traced(profile).steps).duration_ns)


def _noise(profile: Profile) -> float:
    """Return half the spread of the steps as a share of the median step; 1 for a single step."""
    steps = [step.duration_ns for step in _traced(profile).steps]
    return (max(steps) - min(steps)) / 2 / _step_ns(profile) if len(steps) > 1 else 1.0


def _times(profile: Profile) -> dict[str, dict[str, float]]:
    """Return the time per step of each operator, kernel and layer that took any, by kind."""
    traced, layers = _traced(profile), profile.layers.layers if profile.layers else []
    count = len(traced.steps)
    return {
        "operator": {row.name: row.self_cpu_ns / count for row in traced.operators if row.self_cpu_ns},
        "kernel": {row.name: row.total_ns / count for row in traced.kernels if row.total_ns},
        "layer": {row.name: row.ns for row in layers if row.ns},
    }


def _differences(a: Profile, b: Profile) -> list[str]:
    """Return the other differences between the profiles, in words."""
    sides = {"case": (a.case_id, b.case_id), "workload": (a.workload, b.workload), "device": (a.device_id, b.device_id)}
    differences = [f"{name}: {first} and {other}" for name, (first, other) in sides.items() if first != other]
    differences += sameness.environment_differences(a.environment, b.environment)
    return differences + [f"{side}{mark(profile)}" for side, profile in (("A", a), ("B", b)) if profile.doubts]


def mark(profile: Profile) -> str:
    """Return the suffix for each figure and finding of a profile, which is empty unless its times are uncertain."""
    return f" ({', '.join(profile.doubts)})" if profile.doubts else ""
