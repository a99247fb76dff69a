"""The floor of a case: the longest of three times, its cost by formula, and why there is none."""

import msgspec
import pytest

from benchd.daemon.records import Case, ModelFacts, Probes, Variant, WorkCount
from benchd.daemon.verdicts import roofline
from benchd.models.catalog import MODELS
from benchd.models.cost import Cost, cost, parameters

COST = Cost(matrix_flops=4000, elementwise_flops=99, exponentials=300, bytes=2000, parameters_bytes=500)


def probes(copy=1e6, matrix=1e6, exponentials=1e6, **fields):
    given = {"matrix_dtype": "float32", "exponentials_by": "c"} | fields
    return Probes(copy_bytes_per_s=copy, matrix_flops_per_s=matrix, exponentials_per_s=exponentials, **given)


def facts(model="vim_tiny", **fields):
    given = {"options": {}, "input_shape": [3, 224, 224], "weights": "random", "weights_sha256": "0", "data": "random"}
    return ModelFacts(**{"parameters": parameters(model, {})} | given | fields)


@pytest.mark.parametrize(
    ("rates", "bound", "floor_ms"),
    [
        (probes(), "matrix", 4.0),
        (probes(copy=1e5), "bytes", 20.0),
        (probes(exponentials=1e4), "exponentials", 30.0),
        (probes(matrix=1e9, copy=1e9), "exponentials", 0.3),
    ],
)
def test_the_longest_of_the_three_times_is_the_floor(rates, bound, floor_ms):
    floor = roofline.of(COST, rates)
    assert (floor.bound_by, floor.floor_ms) == (bound, pytest.approx(floor_ms))
    assert floor.floor_ms == max(floor.matrix_ms, floor.bytes_ms, floor.exponentials_ms)
    assert floor.matrix_ms * rates.matrix_flops_per_s == pytest.approx(4000e3)
    assert (floor.matrix_flops, floor.elementwise_flops, floor.exponentials) == (4000, 99, 300)
    assert (floor.bytes, floor.parameters_bytes) == (2000, 500)


@pytest.mark.parametrize("direction", ["inference", "training"])
def test_the_cost_is_the_case_s(direction):
    options = {"time_steps": 4, "encoding": "rate"}
    case = Case(model="snn_onepass", variant=Variant(precision="fp16"), batch_size=7, direction=direction)
    case_cost = roofline.cost_of(case, facts("snn_onepass", options=dict(MODELS["snn_onepass"].resolve(options))))
    assert case_cost == cost("snn_onepass", options, 7, "fp16", direction)


@pytest.mark.parametrize(("precision", "moved"), [("fp32", 400), ("bf16", 200)])
def test_another_module_costs_what_was_counted_in_inference(precision, moved):
    counted = WorkCount(matrix_flops=1000, bytes=400, parameters_bytes=80, is_convolved=True)
    case = Case(model="own.net.build", variant=Variant(precision=precision))
    case_cost = roofline.cost_of(case, facts(), counted)
    assert (case_cost.matrix_flops, case_cost.bytes, case_cost.parameters_bytes) == (1000, moved, moved // 5)
    assert roofline.is_convolved(case, counted)
    learning = msgspec.structs.replace(case, direction="training")
    assert roofline.cost_of(learning, facts(), counted) == "for a module, only inference is counted"


def test_weights_of_another_shape_have_no_formula():
    reason = roofline.cost_of(Case(model="vim_tiny"), facts(parameters=7_000_000))
    assert "7148008 parameters, but these weights have 7000000" in reason


def test_the_change_of_rates_is_that_of_the_one_that_changed_most():
    first = probes(2e6, 3e6, 5e6)
    assert roofline.change(first, first) == 0
    assert roofline.change(first, probes(2e6, 3.3e6, 4e6)) == pytest.approx(0.2)


def test_the_products_of_spikes_replace_the_dense_ones():
    floor = roofline.of(COST, probes(copy=1e9, exponentials=1e9), synaptic_flops=1000.0)
    assert (floor.floor_ms, floor.bound_by, floor.matrix_flops, floor.synaptic_flops) == (1.0, "matrix", 4000, 1000.0)


@pytest.mark.parametrize(
    ("rates", "given", "words"),
    [
        (probes(), {"is_convolved": True}, "Winograd"),
        (probes(), {}, None),
        (probes(), {"is_convolved": True, "synaptic_flops": 3000.0}, None),
        (probes(copy=1e5, cache_bytes=2**20), {"is_convolved": True}, "fit in the caches of 1 MiB"),
        (probes(copy=1e5, cache_bytes=1000), {}, None),
        (probes(copy=1e5), {}, None),
    ],
)
def test_what_is_no_bound_says_why(rates, given, words):
    because = roofline.of(COST, rates, **given).reference_because
    assert because is None if words is None else words in because
