"""How close a case comes to the roofline, the least time its device allows: cost by formula over probed rates."""

from benchd.daemon.records import Bound, Case, Floor, ModelFacts, Probes
from benchd.models import catalog
from benchd.models.cost import Cost, cost, parameters


def of(case_cost: Cost, probes: Probes) -> Floor:
    """Return the roofline of one run: the longest of its three times, because a device does all three at once."""
    times_ms: dict[Bound, float] = {
        "matrix": 1e3 * case_cost.matrix_flops / probes.matrix_flops_per_s,
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
        elementwise_flops=case_cost.elementwise_flops,
        bytes=case_cost.bytes,
        parameters_bytes=case_cost.parameters_bytes,
        exponentials=case_cost.exponentials,
    )


def cost_of(case: Case, model: ModelFacts) -> Cost | str:
    """Return the cost of one run of the case, or why it is unknown."""
    if case.model not in catalog.MODELS:
        whose = "a library's model" if catalog.find(case.model) else "your own module"
        return f"the cost of {whose} is unknown"
    expected = parameters(case.model, model.options)
    if model.parameters != expected:
        return f"the cost is known for the catalog's {expected} parameters, but these weights have {model.parameters}"
    return cost(case.model, model.options, case.batch_size, case.variant.precision, case.direction)


def change(first: Probes, last: Probes) -> float:
    """Return the relative change of the rate that changed most."""
    pairs = (
        (first.copy_bytes_per_s, last.copy_bytes_per_s),
        (first.matrix_flops_per_s, last.matrix_flops_per_s),
        (first.exponentials_per_s, last.exponentials_per_s),
    )
    return max(abs(after / before - 1) for before, after in pairs)
