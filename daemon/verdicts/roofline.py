"""Computes the roofline of a case, the shortest time that its device allows: its cost divided by probed rates.

The cost of a catalogued model follows from a formula; that of any other module is counted while it runs.
"""

from benchd.daemon.records import Bound, Case, Floor, ModelFacts, Probes, WorkCount
from benchd.models import catalog
from benchd.models.cost import BYTES, Cost, cost, parameters


def of(case_cost: Cost, probes: Probes, synaptic_flops: float | None = None, *, is_convolved: bool = False) -> Floor:
    """Return the roofline of one run: the longest of three times, because a device does all three things at once.

    `synaptic_flops` replaces the dense products for a spiking network that skips zeros. `is_convolved` is set if the
    run is dominated by dense convolutions, which need not be computed in direct form.
    """
    matrix_flops = case_cost.matrix_flops if synaptic_flops is None else synaptic_flops
    times_ms: dict[Bound, float] = {
        "matrix": 1e3 * matrix_flops / probes.matrix_flops_per_s,
        "bytes": 1e3 * case_cost.bytes / probes.copy_bytes_per_s,
        "exponentials": 1e3 * case_cost.exponentials / probes.exponentials_per_s,
    }
    bound_by = max(times_ms, key=lambda bound: times_ms[bound])
    return Floor(
        floor_ms=times_ms[bound_by],
        bound_by=bound_by,
        matrix_ms=times_ms["matrix"],
        bytes_ms=times_ms["bytes"],
        exponentials_ms=times_ms["exponentials"],
        matrix_flops=case_cost.matrix_flops,
        synaptic_flops=synaptic_flops,
        reference_because=_no_bound(bound_by, case_cost, probes, is_convolved and synaptic_flops is None),
        elementwise_flops=case_cost.elementwise_flops,
        bytes=case_cost.bytes,
        parameters_bytes=case_cost.parameters_bytes,
        exponentials=case_cost.exponentials,
    )


def _no_bound(bound_by: Bound, case_cost: Cost, probes: Probes, is_convolved: bool) -> str | None:
    """Return why a run may be faster than its roofline, which is then only a reference; None if it cannot be."""
    if bound_by == "bytes" and probes.cache_bytes and case_cost.bytes <= probes.cache_bytes:
        return f"its {case_cost.bytes / 2**20:.3g} MiB fit in the caches of {probes.cache_bytes / 2**20:.3g} MiB"
    if bound_by == "matrix" and is_convolved:
        return "a convolution may multiply less than in its direct form, for example with Winograd's algorithm"
    return None


def is_convolved(case: Case, counted: WorkCount | None = None) -> bool:
    """Return whether convolutions account for most of a model's products."""
    if counted:
        return counted.is_convolved
    return catalog.entry(case.model).cost in ("resnet", "onepass")


def cost_of(case: Case, model: ModelFacts, counted: WorkCount | None = None) -> Cost | str:
    """Return the cost of one run of the case, or why it is unknown; `counted` is the count for a user's module."""
    if case.variant.precision == "int8":
        return "the rate of int8 products is not probed"
    if case.model not in catalog.MODELS:
        if counted is None or case.direction == "training":
            return "for a module, only inference is counted"
        share = BYTES[case.variant.precision] / BYTES["fp32"]
        return Cost(
            matrix_flops=counted.matrix_flops,
            elementwise_flops=0,
            exponentials=0,
            bytes=int(share * counted.bytes),
            parameters_bytes=int(share * counted.parameters_bytes),
        )
    expected = parameters(case.model, model.options)
    if model.parameters != expected:
        return f"the cost is known for the catalog's {expected} parameters, but these weights have {model.parameters}"
    return cost(case.model, model.options, case.batch_size, case.variant.precision, case.direction)


def change(first: Probes, last: Probes) -> float:
    """Return the relative change of the rate that changed the most."""
    pairs = (
        (first.copy_bytes_per_s, last.copy_bytes_per_s),
        (first.matrix_flops_per_s, last.matrix_flops_per_s),
        (first.exponentials_per_s, last.exponentials_per_s),
    )
    return max(abs(after / before - 1) for before, after in pairs)
