"""The ratio of a spiking net to its ANN: of the best checked variants, on one machine, with its interval."""

import msgspec
import pytest
from records_made import ENERGY, ENVIRONMENT, PASSED, WRONG, made, timing

from benchd.daemon.records import Case, ModelFacts, ProcessResult, Variant
from benchd.daemon.verdicts.spiking import comparisons

FACTS = ModelFacts(
    options={"level": 8, "width": 16},
    input_shape=[3, 32, 32],
    inputs=[],
    parameters=1,
    weights="qann.safetensors",
    weights_sha256="a",
    code_sha256="c",
    data="demo",
)


def record(model, variant, median_ms, *, batch=1, joules=None, shares=(0.99, 1.0, 1.01), weights="a", **fields):
    steps = {"time_steps": 8} if model.startswith("snn") else {}
    energy = joules and msgspec.structs.replace(ENERGY, gross_per_inference_j=joules)
    return made(
        run_id=f"{model} {variant} {batch}",
        case=Case(model=model, variant=Variant.parse(variant), batch_size=batch),
        model=msgspec.structs.replace(FACTS, options=FACTS.options | steps, weights_sha256=weights),
        timing=timing(median_ms),
        energy=energy or None,
        processes=[ProcessResult(status="ok", timing=timing(median_ms * s), energy=energy or None) for s in shares],
        **{"check": PASSED} | fields,
    )


def snn(*given, **fields):
    return record("snn_stbif_resnet18", *given, **fields)


def ann(*given, **fields):
    return record("qann_resnet18", *given, **fields)


def only(*found):
    (one,) = comparisons(found)
    return one.line


def test_the_best_checked_variants_are_compared_and_named():
    found = [snn("eager", 9.0), snn("custom", 4.0), snn("compile", 1.0, check=WRONG)]
    found += [ann("eager", 5.0), ann("onnxruntime", 2.0), ann("custom", 1.0, check=WRONG), ann("custom", 1.0, batch=4)]
    assert only(*found) == (
        "SNN/ANN b1 T 8: snn_stbif_resnet18 over qann_resnet18: "
        "latency 2x [1.96, 2.05] (custom 4 ms over onnxruntime 2 ms); energy not measured"
    )


def test_energy_has_its_own_best_variants_and_its_error_bars():
    found = [snn("eager", 9.0, joules=0.001), snn("custom", 4.0, joules=0.004)]
    found += [ann("eager", 5.0, joules=0.003), ann("onnxruntime", 2.0, joules=0.002)]
    assert only(*found).endswith("energy 0.5x [0.467, 0.536] (eager 1 mJ over onnxruntime 2 mJ)")


def test_no_difference_is_claimed_that_is_not_told_apart():
    near = [snn("custom", 2.0, shares=(0.9, 1.0, 1.1)), ann("custom", 2.1)]
    assert "not told apart" in only(*near)
    assert "latency 2x without interval" in only(snn("custom", 4.0, shares=(1.0,)), ann("custom", 2.0, shares=(1.0,)))


def test_a_side_without_a_checked_variant_has_no_ratio():
    assert "latency not known: no checked variant of qann_resnet18;" in only(
        snn("custom", 4.0), ann("custom", 2, check=WRONG)
    )
    other = msgspec.structs.replace(ENVIRONMENT, fingerprint="g", kernel="6.2")
    told = only(snn("custom", 4.0), ann("custom", 2.0, environment=other))
    assert "latency not known: measured in another environment (kernel: 6.1 and 6.2)" in told


@pytest.mark.parametrize(
    "other", [ann("custom", 2.0, weights="b"), ann("custom", 2.0, batch=4), ann("custom", 2.0, device_id="another")]
)
def test_only_an_ann_of_the_same_weights_on_the_same_machine_counts(other):
    assert comparisons([snn("custom", 4.0), other]) == []
