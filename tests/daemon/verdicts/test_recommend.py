"""Which variant to ship: ranked by interval, each other one excluded for a reason that is named."""

import re

import msgspec
import pytest
import records_made
from records_made import ENVIRONMENT, PASSED, accuracy, made, timing

from benchd.daemon.records import Case, Memory, ModelFacts, ProcessResult, Summary, Variant, Window
from benchd.daemon.verdicts.recommend import Requirements, decide, line, untried

ENERGY = msgspec.structs.replace(records_made.ENERGY, energy_j=10.0, energy_err_j=0.2, gross_per_inference_j=0.031)


NOTHING_MUCH = msgspec.structs.replace(ENERGY, gross_per_inference_j=0.001)


def _scaled(energy, share):
    joules = energy and energy.gross_per_inference_j * share
    return energy and msgspec.structs.replace(energy, gross_per_inference_j=joules)


def candidate(variant, median_ms, **fields):
    """Return a record of a variant that passed its check."""
    case = Case(
        model=fields.pop("model", "vim_tiny"),
        variant=Variant.parse(variant),
        batch_size=fields.pop("batch", 1),
        provider=fields.pop("provider", None),
    )
    place = {name: fields.pop(name) for name in ("device", "power_mode", "threads") if name in fields}
    times_ms = [median_ms * (1 + share / 1e3) for share in (-10, 0, 10)[: fields.pop("count", 3)]]
    given = {"run_id": f"{case.case_id} {median_ms}", "check": PASSED, "timing": timing(median_ms)}
    given["processes"] = [
        ProcessResult(
            status="ok", timing=timing(time_ms), energy=_scaled(fields.get("energy"), median_ms and time_ms / median_ms)
        )
        for time_ms in times_ms
    ]
    return made(case=case, environment=msgspec.structs.replace(ENVIRONMENT, **place), **given | fields)


def only(records, **requirements):
    (decision,) = decide(records, Requirements(**requirements))
    return decision


def test_the_fastest_ships_and_the_line_says_by_how_much():
    slower = candidate("custom-fp16", 9.43, kernels_ran="triton")
    decision = only([candidate("tensorrt-fp16", 4.1, energy=ENERGY), slower])
    lead = "custom (triton)-fp16 takes 2.3x [2.26, 2.34] as long"
    wanted = f"vim_tiny b1: ship: tensorrt-fp16  4.1 ms  31 mJ ±2 %  check ok  ({lead})"
    assert line(decision) == wanted


def test_the_line_says_where_images_get_another_class_though_the_check_passed():
    turned = msgspec.structs.replace(
        PASSED, rule="codes", images=64, argmax_disagreements=3, ties=4, tie_disagreements=2
    )
    assert "check ok, 59 of 60 images agree (2 of 4 ties)" in line(only([candidate("bf16", 4.1, check=turned)]))


def test_a_variant_that_names_other_classes_does_not_ship_unasked():
    turned = msgspec.structs.replace(PASSED, rule="codes", images=64, argmax_disagreements=53)
    decision = only([candidate("bf16", 4.1, check=turned), candidate("eager", 9.0)])
    assert decision.ship == "eager"
    assert decision.excluded == {"eager-bf16": "agreement on 11 of 64 images is below 0.98"}


def test_classes_that_are_nearly_all_the_same_say_nothing():
    constant = msgspec.structs.replace(PASSED, images=64, argmax_disagreements=9, commonest_class_share=1.0)
    decision = only([candidate("bf16", 4.1, check=constant)])
    assert decision.ship == "eager-bf16"
    assert "agree" not in line(decision)


def test_a_faster_variant_that_may_lose_too_much_is_out_and_without_a_limit_it_is_in():
    records = [
        candidate("eager", 8.0, accuracy=accuracy(right=900, images=1000)),
        candidate("bf16", 4.0, accuracy=accuracy(right=880, lost=20, images=1000)),
        candidate("fp16", 5.0, accuracy=accuracy(right=898, gained=1, lost=3, images=1000)),
    ]
    assert only(records).ship == "eager-bf16"
    strict = only(records, max_accuracy_drop=0.01)
    assert (strict.ship, list(strict.excluded)) == ("eager-fp16", ["eager-bf16"])


def test_intervals_that_overlap_are_too_close_to_call():
    decision = only([candidate("fp16", 5.0), candidate("eager", 5.05), candidate("bf16", 5.2)])
    assert (decision.ship, decision.tied) == (None, ["eager-fp16", "eager"])
    assert line(decision) == (
        "vim_tiny b1: inconclusive: eager-fp16 and eager cannot be told apart here: they differ by 1 %; "
        "the noise is ±1.8 % (3 processes); eager is the simplest"
    )


def test_one_process_names_the_fastest_here_and_ships_nothing():
    decision = only([candidate("custom", 4.1, count=1), candidate("eager", 8.2)])
    assert (decision.ship, decision.fastest, decision.ratio_interval) == (None, "custom", None)
    assert line(decision) == (
        "vim_tiny b1: fastest here (one process): custom; --processes 5 confirms it "
        "(4.1 ms, energy not measured, check ok, eager takes 2x as long, no interval)"
    )
    alone = only([candidate("custom", 4.1, count=1)])
    assert (alone.ship, alone.fastest) == (None, "custom")
    assert only([candidate("custom", 4.1, count=1)], max_latency_ms=50.0).ship is None
    close = line(only([candidate("custom", 4.1, count=1), candidate("eager", 4.15)]))
    assert re.search(r"they differ by 1\.2 %; the noise is ±\S+ % \(one process\); eager is the simplest$", close)
    frugal = [candidate("custom", 4.1, count=2, energy=NOTHING_MUCH), candidate("eager", 4.0, energy=ENERGY)]
    assert "least energy here (2 processes): custom; --processes 5" in line(only(frugal, objective="energy"))


@pytest.mark.parametrize("flag", ["sources_disagree", "gaps", "outlier", "late", "glitch", "counter_reset: it fell"])
def test_flags_that_put_the_joules_in_doubt_are_named_where_joules_decide_or_are_limited(flag):
    doubtful = msgspec.structs.replace(ENERGY, flags=["no_idle_baseline", flag])
    records = [candidate("custom", 4.0, energy=doubtful), candidate("eager", 8.0, energy=ENERGY)]
    for requirements in ({"objective": "energy"}, {"max_energy_j": 1.0}):
        assert f"doubtful: custom {flag.partition(':')[0].replace('_', ' ')})" in line(only(records, **requirements))
    assert "doubtful" not in line(only(records))


def test_the_line_gives_the_figure_that_the_latency_limit_was_compared_with():
    many = candidate("eager", 4.0, timing=timing(4.0, low_ms=3.9, high_ms=4.1, p99_ms=9.155))
    assert line(only([many], max_latency_ms=33.0)).startswith("vim_tiny b1: ship: eager  4 ms, p99 9.155 of 33 ms  ")
    few = candidate("eager", 4.0, timing=timing(4.0, low_ms=3.9, high_ms=4.1), count=1)
    assert "(4 ms, latency 4.1 of 33 ms, energy not measured" in line(only([few], max_latency_ms=33.0))


def test_flags_that_put_a_time_in_doubt_and_other_runs_are_named():
    best = candidate("custom", 4.0, flags=["busy_machine", "service", "warm_up_not_steady"])
    decided = line(only([best, candidate("eager", 8.0, flags=["low_clock"], suite_id="s2")]))
    flagged = "(doubtful: custom busy machine, not warmed up; eager low clock)"
    assert decided.endswith(f"(eager takes 2x [1.96, 2.05] as long)  (from different runs)  {flagged}")


def test_a_figure_without_an_interval_cannot_be_told_apart():
    unsure = candidate("fp16", 9.0, count=1, timing=timing(9.0, low_ms=None, high_ms=None))
    assert only([unsure, candidate("eager", 1.0)]).tied == ["eager", "eager-fp16"]
    assert only([unsure]).fastest == "eager-fp16"
    words = "eager leads, and eager-fp16 takes 9x as long, no interval (one process); --processes 5 decides"
    assert line(only([unsure, candidate("eager", 1.0, count=1)])) == f"vim_tiny b1: inconclusive: {words}"
    reason = only([unsure], max_latency_ms=10.0).excluded["eager-fp16"]
    assert reason == "has no interval to compare with 10 ms: measure longer, for example with --preset standard"


@pytest.mark.parametrize(("low_ms", "high_ms"), [(0.1, 9.0), (4.5, 40.0), (None, None)])
def test_nobody_is_named_beside_one_that_may_be_faster(low_ms, high_ms):
    unknown = candidate("bf16", 4.8, count=1, timing=timing(4.8, low_ms=low_ms, high_ms=high_ms))
    decision = only([candidate("eager", 4.6, count=1), candidate("compile", 9.0, count=1), unknown])
    assert (decision.ship, decision.fastest) == (None, None)
    assert set(decision.tied) >= {"eager", "eager-bf16"}


def heating(variant, median_ms, starts_ns, suite_id):
    """Return a record whose processes begin at these times, each 5 % slower than the one before it."""
    times_ms = [median_ms * 1.05**place for place in range(-2, 3)]
    processes = [
        ProcessResult(status="ok", timing=timing(time_ms), window=Window(start_ns, start_ns + 10))
        for time_ms, start_ns in zip(times_ms, starts_ns, strict=True)
    ]
    return candidate(variant, median_ms, processes=processes, suite_id=suite_id)


@pytest.mark.parametrize(
    ("starts", "suite_ids", "are_paired"),
    [
        (((0, 20, 40, 60, 80), (10, 30, 50, 70, 90)), ("s1", "s1"), True),
        (((0, 30, 40, 70, 90), (10, 20, 50, 60, 80)), ("s1", "s1"), True),
        (((0, 10, 20, 30, 40), (50, 60, 70, 80, 90)), ("s1", "s1"), False),  # one case after the other
        (((0, 20, 40, 60, 80), (10, 30, 50, 70, 90)), ("s1", "s2"), False),
    ],
)
def test_only_the_processes_of_one_round_are_paired(starts, suite_ids, are_paired):
    sides = zip(("eager", "fp16"), (8.8, 8.0), starts, suite_ids, strict=True)
    assert (only([heating(*side) for side in sides]).ship == "eager-fp16") is are_paired


WRONG = msgspec.structs.replace(PASSED, passed=False)
VOID = msgspec.structs.replace(WRONG, void=True, note="rounding alone moves the output")
UNSURE = msgspec.structs.replace(PASSED, argmax_disagreements=1)
MOSTLY_TIES = msgspec.structs.replace(PASSED, argmax_disagreements=7, ties=7, tie_disagreements=7)
HALF_RIGHT = msgspec.structs.replace(PASSED, argmax_disagreements=4, ties=8, tie_disagreements=4)
COUNTED = [ProcessResult(status="ok", energy=ENERGY, window=Window(0, 10**9))] * 2
NOTHING = msgspec.structs.replace(ENERGY, gross_per_inference_j=0.0)
RAILS = {"power_w@VDD_IN": Summary(9, 12.0, 15, 9, "ina3221"), "power_w@VDD_SOC": Summary(1, 2, 3, 9, "ina3221")}


@pytest.mark.parametrize(
    ("fields", "requirements", "reason"),
    [
        ({"check": WRONG}, {}, "fails its numerical check"),
        ({"check": None}, {}, "was not checked"),
        ({"check": VOID}, {}, "its check is void: rounding alone moves the output"),
        ({"flags": ["repeated_input_faster"]}, {}, "answers repeated inputs faster"),
        ({"flags": ["output_changed"]}, {}, "gave different answers while it was timed"),
        ({"flags": ["weak_typing"]}, {}, "did not run as requested (weak_typing)"),
        ({"flags": ["provider_fallback"]}, {}, "did not run as requested (provider_fallback)"),
        ({"status": "failed", "reason": "no memory", "timing": None}, {}, "failed: no memory"),
        ({}, {"max_latency_ms": 4.0}, "latency 4.04 ms is above 4 ms"),
        ({"timing": timing(4.0, p99_ms=9.0)}, {"max_latency_ms": 5.0}, "p99 9 ms is above 5 ms"),
        ({"telemetry": RAILS}, {"max_power_w": 10.0}, "power 12 W is above 10 W"),
        ({}, {"max_power_w": 10.0}, "power was not measured"),
        ({"energy": ENERGY, "processes": COUNTED}, {"max_power_w": 4.0}, "power 5.1 W is above 4 W"),
        (
            {"memory": Memory(rss_peak_bytes=3 * 2**30)},
            {"max_memory_bytes": 2**31},
            "memory 3072 MiB is above 2048 MiB",
        ),
        ({}, {"max_memory_bytes": 2**31}, "memory was not measured"),
        (
            {"memory": Memory(rss_peak_bytes=2**20), "device": "cuda"},
            {"max_memory_bytes": 2**31},
            "memory was not measured",
        ),
        (
            {"memory": Memory(rss_peak_bytes=2**20, device_peak_bytes=3 * 2**30), "device": "cuda"},
            {"max_memory_bytes": 2**31},
            "memory 3072 MiB is above 2048 MiB",
        ),
        ({"check": UNSURE}, {"min_agreement": 0.995}, "agreement on 7 of 8 images is below 0.995"),
        ({"check": MOSTLY_TIES}, {}, "it agrees with float64 on the class of 1 of 8 images, most of them ties"),
        (
            {"check": HALF_RIGHT},
            {"min_agreement": 0.995},
            "it agrees with float64 on the class of 4 of 8 images, most of them ties, which is below 0.995",
        ),
        (
            {"check": msgspec.structs.replace(PASSED, commonest_class_share=1.0)},
            {"min_agreement": 0.9},
            "has no agreement to compare with 0.9: float64 gives nearly all images the same class",
        ),
        (
            {"check": msgspec.structs.replace(PASSED, argmax_disagreements=None)},
            {"min_agreement": 0.9},
            "has no agreement to compare with 0.9: its outputs are not class scores",
        ),
        (
            {"accuracy": accuracy(lost=9)},
            {"max_accuracy_drop": 0.01},
            "accuracy drop 9.00 [4.81, 16.23] % is not below 1 %",
        ),
        ({"missing": {"accuracy": "no data"}}, {"max_accuracy_drop": 0.01}, "accuracy was not measured (no data)"),
        ({"missing": {"energy": "no_sensor"}}, {"objective": "energy"}, "energy was not measured (no_sensor)"),
        ({"energy": NOTHING}, {"objective": "energy"}, "reports an impossible energy of 0 J"),
        ({"timing": timing(0.0)}, {}, "reports an impossible time of 0 ms"),
        ({"batch": 0}, {"objective": "throughput"}, "reports an impossible batch size of 0"),
    ],
)
def test_what_excludes_a_variant_is_named(fields, requirements, reason):
    decision = only([candidate("eager", 4.0, **fields)], **requirements)
    assert list(decision.excluded.values()) == [reason]
    assert line(decision).endswith("nothing to ship")


def test_joules_whose_error_bars_overlap_are_too_close_to_call():
    """Their processes alone would tell them apart: they share a sensor, and its error."""

    def steady(variant, joules):
        energy = msgspec.structs.replace(ENERGY, gross_per_inference_j=joules)
        processes = [ProcessResult(status="ok", timing=timing(4.0), energy=energy)] * 3
        return candidate(variant, 4.0, energy=energy, processes=processes)

    decision = only([steady("eager", 0.031), steady("fp16", 0.03)], objective="energy")
    assert (decision.ship, decision.tied) == (None, ["eager-fp16", "eager"])
    assert decision.ratio_interval.low > 1.0


def test_batch_sizes_compete_for_throughput_and_for_nothing_else():
    records = [candidate("eager", 4.0), candidate("eager", 10.0, batch=4)]
    decision = only(records, objective="throughput")
    assert (decision.ship, decision.ratio) == ("eager b4", pytest.approx(1.6))
    assert [choice.subject for choice in decide(records, Requirements())] == ["vim_tiny b1", "vim_tiny b4"]


def test_offline_ranks_by_throughput_whatever_the_batch_size():
    offline = Case(model="vim_tiny", scenario="offline")
    records = [
        made(run_id=str(size), case=msgspec.structs.replace(offline, batch_size=size), timing=timing(ms), check=PASSED)
        for size, ms in ((1, 4.0), (4, 10.0), (16, 50.0))
    ]
    decision = only(records)
    assert (decision.subject, list(decision.candidates)) == ("vim_tiny offline", ["eager b4", "eager b16", "eager b1"])


def test_within_a_boot_the_monotonic_clock_says_which_is_newest():
    def at(median_ms, t_mono_ns, day, boot_id="b1"):
        t_wall = f"2026-01-0{day}T00:00:00.000Z"
        return candidate("eager", median_ms, t_mono_ns=t_mono_ns, t_wall=t_wall, boot_id=boot_id)

    set_back = [at(4.0, 1, 9), at(9.0, 2, 1)]
    assert only([*set_back, candidate("fp16", 5.0)]).ship == "eager-fp16"
    assert only([*reversed(set_back), candidate("fp16", 5.0)]).ship == "eager-fp16"
    later_boot = [at(9.0, 1, 2, "b2"), at(4.0, 5, 1)]
    assert only([*later_boot, candidate("fp16", 5.0)]).ship == "eager-fp16"


def test_devices_of_one_machine_and_power_modes_are_decided_apart():
    records = [candidate("eager", 100.0, device="cpu"), candidate("custom", 1.0, device="cuda")]
    decisions = decide(records, Requirements())
    assert [(decision.subject, decision.ship) for decision in decisions] == [
        ("vim_tiny b1 on cpu", "eager"),
        ("vim_tiny b1 on cuda", "custom"),
    ]
    swept = [candidate("eager", ms, power_mode=mode) for mode, ms in (("15W", 9.0), ("25W", 5.0))]
    subjects = [decision.subject for decision in decide(swept, Requirements())]
    assert subjects == ["vim_tiny b1 at 15W", "vim_tiny b1 at 25W"]


FACTS = ModelFacts(
    options={}, input_shape=[4], parameters=1, weights="demo", weights_sha256="0", read={"net.py": "c"}, data="random"
)


def of_run(day, variant, median_ms, *, environment=ENVIRONMENT, **changes):
    record = candidate(variant, median_ms, suite_id=f"s{day}", t_wall=f"2026-01-0{day}T00:00:00.000Z", t_mono_ns=day)
    return msgspec.structs.replace(
        record, environment=environment, model=msgspec.structs.replace(FACTS, **changes), run_id=f"{variant} {day}"
    )


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"read": {"net.py": "d"}}, "with different code or data"),
        ({"options": {"t": 2}}, "with different options (t 2 and None)"),
        ({"weights_sha256": "1"}, "with different weights"),
        ({"weights": "random, seed 0"}, "with different weights (random, seed 0 and demo)"),
        ({"parameters": 2}, "with a different number of parameters (2 and 1)"),
        (
            {"environment": msgspec.structs.replace(ENVIRONMENT, fingerprint="g", versions={"torch": "1.0"})},
            "in a different environment (torch: 1.0 and unset)",
        ),
    ],
)
def test_what_an_older_run_measured_otherwise_is_set_aside(changes, what):
    newer, older = of_run(2, "eager", 9.0), of_run(1, "custom", 4.0, **changes)
    decision = only([newer, older, of_run(1, "fp16", 5.0)])
    assert decision.ship == "eager-fp16"
    assert decision.excluded == {"custom": f"measured {what} than eager; measure it again"}


def test_an_older_record_of_other_weights_is_named():
    records = [of_run(2, "eager", 9.0), of_run(1, "eager", 4.0, weights="random, seed 0", weights_sha256="1")]
    decision = only(records)
    assert (decision.ship, decision.candidates["eager"]) == ("eager", records[0])
    assert decision.excluded == {
        "eager of 2026-01-01T00:00:00.000Z": "a newer record has different weights (random, seed 0 and demo)"
    }


def test_variants_of_more_than_one_model_do_not_ship():
    def of(facts, *given, **fields):
        return msgspec.structs.replace(candidate(*given, **fields), model=facts)

    facts = msgspec.structs.replace(FACTS, weights="a.pt")
    later = msgspec.structs.replace(facts, weights_sha256="1")
    decision = only([of(facts, "eager", 9.0), of(later, "fp16", 4.0)])
    assert (decision.ship, decision.candidates) == (None, {})
    assert line(decision).startswith("vim_tiny b1: nothing to ship: different weights: a.pt was replaced; ")
    failed = of(later, "fp16", 4.0, status="failed", reason="gone")
    assert only([of(facts, "eager", 9.0), failed]).ship == "eager"


def test_joules_of_another_scope_are_not_ranked():
    board = msgspec.structs.replace(ENERGY, scope="GPU board", gross_per_inference_j=0.001)
    records = [
        candidate("eager", 9.0, energy=ENERGY),
        candidate("fp16", 5.0, energy=msgspec.structs.replace(ENERGY, gross_per_inference_j=0.02)),
        candidate("tensorrt", 4.0, energy=board),
    ]
    decision = only(records, objective="energy")
    assert decision.ship == "eager-fp16"
    assert decision.excluded == {"tensorrt": "energy scope is GPU board, not module"}


def test_of_a_module_of_one_s_own_it_is_said_what_was_not_tried():
    def decided(model, weights, *variants):
        facts = ModelFacts(
            options={}, input_shape=[4], parameters=1, weights=weights, weights_sha256="0", data="random"
        )
        records = [candidate(variant, 1.0, model=model, device="cpu") for variant in variants]
        return only([msgspec.structs.replace(record, model=facts) for record in records])

    module = decided("own.net.build", "of the module", "eager", "compile", "onnxruntime", "bf16")
    compiled = ["compile-fp16", "compile-bf16", "compile-amp", "aoti", "aoti-fp16", "aoti-bf16"]
    assert untried(module) == ["fp16", "amp", *compiled, "onnxruntime-fp16"]
    assert untried(decided("own.v2.net", "v2.net.onnx", "onnxruntime")) == []
    assert untried(decided("vim_tiny", "random, seed 0", "eager")) == []


def test_int8_ships_by_accuracy_if_labels_were_given_and_by_agreement_otherwise():
    accurate = candidate("onnxruntime-int8", 2.0, accuracy=accuracy(right=950, gained=5, lost=5, images=5000))
    lost = candidate("onnxruntime-int8", 2.0, accuracy=accuracy(right=900, lost=100, images=5000))
    half = candidate("onnxruntime", 3.0, accuracy=accuracy(right=900, lost=100, images=5000))
    few = msgspec.structs.replace(PASSED, argmax_disagreements=PASSED.images // 4)
    assert only([accurate, half]).ship == "onnxruntime-int8"
    differing = msgspec.structs.replace(accurate, check=few)
    assert only([differing, half]).ship == "onnxruntime-int8"
    assert only([differing, half], min_agreement=0.98).ship == "onnxruntime"
    decision = only([lost, half])
    assert decision.ship == "onnxruntime"
    assert "accuracy drop 2.00" in decision.excluded["onnxruntime-int8"]
    assert "agreement on" in only([candidate("onnxruntime-int8", 2.0, check=few), half]).excluded["onnxruntime-int8"]
