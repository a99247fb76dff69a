"""The ratio of a spiking net to its ANN: of the best checked variants, on one machine, with its interval."""

import msgspec
import pytest
from records_made import ENERGY, ENVIRONMENT, PASSED, QANN, WRONG, made, timing

from benchd.daemon.records import Case, ProcessResult, Variant, Window
from benchd.daemon.verdicts.spiking import comparisons

SHARES = (0.99, 1.0, 1.01)
WINDOWS = {
    "snn_stbif_resnet18": [Window(start_ns, start_ns + 9) for start_ns in (0, 10, 20)],
    "qann_resnet18": [Window(start_ns, start_ns + 9) for start_ns in (30, 40, 50)],
}


def record(
    model, variant, median_ms, *, batch=1, joules=None, scope="module", shares=SHARES, weights="a", code="c", **fields
):
    steps = {"time_steps": 8} if model.startswith("snn") else {}
    energy = joules and msgspec.structs.replace(ENERGY, gross_per_inference_j=joules, scope=scope)
    return made(
        run_id=f"{model} {variant} {batch}",
        case=Case(model=model, variant=Variant.parse(variant), batch_size=batch),
        model=msgspec.structs.replace(
            QANN, options=QANN.options | steps, weights_sha256=weights, read={"benchd": code}
        ),
        energy=energy or None,
        processes=[
            ProcessResult(status="ok", timing=timing(median_ms * share), energy=energy or None, window=window)
            for share, window in zip(shares, WINDOWS[model], strict=False)
        ],
        **{"check": PASSED, "timing": timing(median_ms)} | fields,
    )


def snn(*given, **fields):
    return record("snn_stbif_resnet18", *given, **fields)


def ann(*given, **fields):
    return record("qann_resnet18", *given, **fields)


def only(*found):
    (comparison,) = comparisons(found)
    return comparison.line


def test_the_best_checked_variants_are_compared_and_named():
    records = [snn("eager", 9.0), snn("custom", 4.0), snn("compile", 1.0, check=WRONG)]
    records += [
        ann("eager", 5.0),
        ann("onnxruntime", 2.0),
        ann("custom", 1.0, check=WRONG),
        ann("custom", 1.0, batch=4),
    ]
    assert only(*records) == (
        "SNN/ANN b1 T 8: snn_stbif_resnet18 over qann_resnet18: "
        "latency 2x [1.96, 2.05] (custom 4 ms over onnxruntime 2 ms); energy not measured"
    )


def test_energy_has_its_own_best_variants_and_its_error_bars():
    records = [snn("eager", 9.0, joules=0.001), snn("custom", 4.0, joules=0.004)]
    records += [ann("eager", 5.0, joules=0.003), ann("onnxruntime", 2.0, joules=0.002)]
    assert only(*records).endswith("energy 0.5x [0.467, 0.536] (eager 1 mJ over onnxruntime 2 mJ)")


def test_no_difference_is_claimed_that_is_not_told_apart():
    near = [snn("custom", 2.0, shares=(0.9, 1.0, 1.1)), ann("custom", 2.1)]
    assert "cannot be told apart" in only(*near)
    assert "latency 2x no interval" in only(snn("custom", 4.0, shares=(1.0,)), ann("custom", 2.0, shares=(1.0,)))


def test_a_side_without_a_checked_variant_has_no_ratio():
    assert "latency not known: no checked, comparable variant of qann_resnet18;" in only(
        snn("custom", 4.0), ann("custom", 2, check=WRONG)
    )
    other = msgspec.structs.replace(ENVIRONMENT, fingerprint="g", kernel="6.2")
    line = only(snn("custom", 4.0), ann("custom", 2.0, environment=other))
    assert "latency not known: measured in a different environment (kernel: 6.1 and 6.2)" in line


OLD = {"suite_id": "s0", "t_mono_ns": 0}


@pytest.mark.parametrize(
    "excluded",
    [
        snn("custom", 1.0, code="old", **OLD),
        snn("custom", 1.0, environment=msgspec.structs.replace(ENVIRONMENT, fingerprint="g", kernel="6.2"), **OLD),
    ],
    ids=["code", "environment"],
)
def test_a_variant_that_the_decision_excludes_is_not_the_best(excluded):
    assert "latency 2x [1.96, 2.05] (eager 4 ms over custom 2 ms)" in only(
        excluded, snn("eager", 4.0), ann("custom", 2.0)
    )


def test_joules_of_another_scope_than_the_majoritys_are_not_the_best():
    records = [snn("custom", 4.0, joules=0.001, scope="GPU board"), snn("eager", 9.0, joules=0.004)]
    records += [snn("compile", 9.0, joules=0.005), ann("custom", 2.0, joules=0.002)]
    assert "(eager 4 mJ over custom 2 mJ)" in only(*records)


@pytest.mark.parametrize("status", ["unsupported", "failed"])
def test_a_variant_without_a_model_has_no_line_of_its_own(status):
    none = {"status": status, "model": None, "timing": None, "processes": [], "check": None}
    dead = [msgspec.structs.replace(make("tensorrt", 1.0), **none) for make in (snn, ann)]
    assert "T 8" in only(snn("custom", 4.0), ann("custom", 2.0), *dead)
    assert comparisons(dead) == []


@pytest.mark.parametrize(
    "other", [ann("custom", 2.0, weights="b"), ann("custom", 2.0, batch=4), ann("custom", 2.0, device_id="another")]
)
def test_only_an_ann_of_the_same_weights_on_the_same_machine_counts(other):
    assert comparisons([snn("custom", 4.0), other]) == []
