"""For a profiled case, the variants and options to measure in order to test a remedy."""

import msgspec

from benchd.daemon.errors import UsageError
from benchd.daemon.profiling.profile import Profile
from benchd.daemon.records import Kernels, OptionValue
from benchd.daemon.runtimes import Backend, Precision
from benchd.models import catalog


def changed(
    profile: Profile,
    *,
    backend: Backend | None = None,
    precision: Precision | None = None,
    kernels: Kernels | None = None,
) -> str | None:
    """Return the profiled variant with these changes; None if it already has them or the model does not support them.

    A backend does not replace a CUDA graph or a different runtime, whose time would not test the finding.
    """
    case = profile.case
    if backend and case.variant.backend not in ("eager", "compile"):
        return None
    changes = {"backend": backend, "precision": precision, "kernels": kernels}
    try:
        variant = msgspec.structs.replace(case.variant, **{name: value for name, value in changes.items() if value})
    except UsageError:
        return None
    entry = catalog.find(case.model)
    runs = variant.kernels == "torch" or (entry is not None and profile.device in entry.custom_kernels)
    trains = profile.workload != "train" or catalog.trains(case.model, variant.name)
    return variant.name if variant != case.variant and runs and trains else None


def half(profile: Profile) -> str | None:
    """Return the variant with fp16 weights, with custom kernels if available; None if it is in half precision."""
    if profile.case.variant.precision in ("fp16", "bf16"):
        return None
    return changed(profile, precision="fp16", kernels="custom") or changed(profile, precision="fp16")


def fused(profile: Profile) -> str | None:
    """Return the variant with fused kernels: the custom ones or, failing that, the compiler's."""
    if profile.case.variant.kernels == "custom":
        return None
    return changed(profile, kernels="custom") or changed(profile, backend="compile")


def options(profile: Profile) -> dict[str, OptionValue]:
    """Return all options of a model with their values; empty for a user's own model."""
    entry = catalog.find(profile.case.model)
    return entry.resolve(profile.case.options) if entry else {}
