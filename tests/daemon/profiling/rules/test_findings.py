from typing import Any, NamedTuple

import msgspec
import pytest
from profiles_made import (
    CLEAN_CATEGORIES,
    STEP_NS,
    STEPS,
    gpu,
    kernel,
    layer,
    layers,
    on_cpu,
    on_gpu,
    operator,
    profile,
)

from benchd.daemon.profiling import verification
from benchd.daemon.profiling.profile import (
    Allocation,
    BenchmarkProfile,
    Distribution,
    MemoryProfile,
    NsightCompute,
    Profile,
    Synchronization,
)
from benchd.daemon.profiling.rules import findings
from benchd.daemon.records import Case, Variant
from benchd.daemon.verdicts import effects
from benchd.daemon.verdicts.compare import Comparison


def sync(idle_share, operator="aten::item"):
    """Return one wait a step, after which the GPU idles for `idle_share` of it."""
    return Synchronization(
        name="cudaStreamSynchronize",
        operator=operator,
        calls=STEPS,
        waited_ns=STEPS * STEP_NS // 2,
        idle_after_ns=round(idle_share * STEPS * STEP_NS),
        launches_after=60,
    )


def trained(forward_ms, backward_ms):
    def times(ms):
        names = ("median_ns", "low_ns", "high_ns", "mean_ns", "min_ns", "max_ns")
        return Distribution(**dict.fromkeys(names, ms * 1e6), runs=10)

    step, forward, backward = (times(ms) for ms in (forward_ms + backward_ms, forward_ms, backward_ms))
    return BenchmarkProfile(step=step, throughput_per_s=216.0, forward=forward, backward=backward, overhead=None)


def memory(activations_mib):
    return MemoryProfile(
        device="cpu",
        peak_bytes=(activations_mib + 10) * 2**20,
        peak_by_category={"parameters": 8 * 2**20, "inputs": 2 * 2**20, "activations": activations_mib * 2**20},
        timeline=[],
        largest=[Allocation(bytes=128 * 2**20, module="OnePass.lif1", operator="aten::empty", category="activations")],
        snapshot=None,
    )


def beside(*kernels):
    """Return these kernels and, for the rest of 94 % of the step, one of no interest."""
    share = sum(row.total_ns for row in kernels) / STEPS / STEP_NS
    rest = [kernel(f"reduce_kernel_{number}", (0.94 - share) / 4, operator="aten::sum") for number in range(4)]
    return [*kernels, *rest]


def categories(**shares):
    """Return a step's categories with these shares; the kernels take the rest."""
    others = {name: share for name, share in CLEAN_CATEGORIES.items() if name != "kernel"} | shares
    return {"kernel": 1 - sum(others.values())} | others


# as in the Vim write-up, of which the shares are: 60.6 % scan, 26 % products, 5.4 % flips
VIM = on_gpu(
    "eager",
    kernels=[
        kernel("selective_scan_fwd_kernel", 0.6026, operator="SelectiveScanFn", occupancy=0.33, limits=["registers"]),
        kernel("ampere_sgemm_128x64_tn", 0.11, operator="aten::mm", occupancy=0.33),
        kernel("ampere_sgemm_64x64_tt", 0.15, operator="aten::mm", occupancy=0.33),
        kernel("index_elementwise_kernel", 0.054, operator="aten::flip", occupancy=1.0),
        kernel("causal_conv1d_fwd_kernel", 0.052, occupancy=1.0),
        kernel("vectorized_elementwise_kernel", 0.0261, operator="aten::add", occupancy=1.0),
    ],
    by_category={"kernel": 0.9947, "memcpy": 0.0021, "cpu": 0.0032},
)

# as in the OnePass write-up: on a CPU, and with autocast on a GPU
ONEPASS_CPU = on_cpu(
    "eager",
    operators=[
        operator("aten::_nnpack_spatial_convolution", 0.4838),
        operator("aten::avg_pool2d", 0.1154),
        operator("aten::where", 0.0733),
        operator("aten::copy_", 0.0674),
        operator("aten::add", 0.0637),
        operator("aten::mul", 0.0524),
        operator("aten::addmm", 0.14),
    ],
)
ONEPASS_AMP = on_gpu(
    "amp",
    model="snn_onepass",
    kernels=beside(
        kernel("direct_copy_kernel_cuda", 0.1948, operator="aten::copy_", calls=48),
        kernel("sm75_xmma_fprop_implicit_gemm_f16f16", 0.1529, operator="aten::cudnn_convolution", tensor_cores=True),
        kernel("vectorized_elementwise_kernel<where>", 0.1376, operator="aten::where"),
        kernel("vectorized_elementwise_kernel<add>", 0.1203, operator="aten::add"),
        kernel("avg_pool2d_out_cuda_frame", 0.098, operator="aten::avg_pool2d"),
    ),
    operators=[operator("aten::_to_copy", 0.0, calls=48)],
)

FAR = [layer(name, 0.33, x_of_floor=x) for name, x in (("a.scan", 20.0), ("b.scan", 35.0), ("c.scan", 26.0))]
STBIF = {"model": "snn_stbif_resnet18"}
WAITS = {"by_category": categories(runtime=0.4, other=0.19), "launches": STEPS * 30}
STAGES = layers(
    layer("conv1_block", 0.1, flops=100),
    *(layer(f"Layer{n}_ResBlocks", share, flops=225) for n, share in enumerate((0.15, 0.16, 0.29, 0.3), 1)),
    *(layer(f"layer4.{n}", 0.15, flops=112, parent="Layer4_ResBlocks") for n in (0, 1)),
)


class Planted(NamedTuple):
    """A rule, a profile in which it must fire and one like it in which it must not, and what it must then propose."""

    rule: str
    ill: Profile
    well: Profile
    expected: float | None = None
    variant: str | None = None
    options: dict[str, Any] | None = None
    batch_size: int | None = None
    says: str = ""


PLANTED = [
    Planted("gpu_bound", VIM, on_gpu("eager"), 0.50265, "custom-fp16", says="data loader 0 %"),
    Planted(
        "launch_bound",
        on_gpu("fp16", **STBIF, **WAITS),
        on_gpu("fp16", **STBIF, **WAITS, gpus=[gpu(long_waits_share=0.8)]),
        0.4,
        "custom-cudagraph-fp16",
        says="30 launches per step, and the GPU waits 200 us",
    ),
    Planted(
        "input_bound",
        on_gpu(by_category=categories(data_loader=0.5)),
        on_gpu(by_category=categories(data_loader=0.05)),
        0.5,
        says="data loader 50 %",
    ),
    Planted("transfers", on_gpu(by_category=categories(memcpy=0.2)), on_gpu(), 0.8),
    Planted(
        "synchronization",
        on_gpu(synchronizations=[sync(0.15), sync(0.001, None)]),
        on_gpu(synchronizations=[sync(0.002)]),
        0.849,
        says="aten::item: 1 calls per step wait 5 ms, then the GPU waits 1.5 ms; 20 launches",
    ),
    Planted(
        "low_utilization",
        on_gpu(gpus=[gpu(0.9, 0.3)]),
        on_gpu(gpus=[gpu(0.3)], by_category=categories(data_loader=0.6)),
        0.3,
        "custom-fp16",
        batch_size=16,
    ),
    Planted("unsteady", on_gpu(layers=layers(variation=0.3)), on_gpu()),
    Planted(
        "scan", VIM, on_gpu(), 1 - 0.6026 * 0.67, "custom", {"scan": "two_level"}, says="occupancy of its kernel 33 %"
    ),
    Planted("sequence_length", VIM, on_gpu(), 1 - 0.9947 * (1 - 50 / 197), "eager", {"patch_size": 32, "stride": 32}),
    Planted(
        "dominant_kernel",
        on_gpu("eager", kernels=beside(kernel("max_pool_forward_nchw", 0.5))),
        VIM,
        0.5,
        "custom",
        says="max_pool_forward_nchw: 53.19 % of the work",
    ),
    Planted("low_occupancy", VIM, on_gpu(), 1 - 0.8626 * 0.34, "custom", says="occupancy 33 %"),
    Planted(
        "low_occupancy",
        on_gpu(kernels=beside(kernel("k", 0.4, occupancy=0.1, limits=["grid"]))),
        on_gpu(kernels=beside(kernel("k", 0.4, occupancy=0.5))),
        1 - 0.4 * 0.8,
        "custom-fp16",
        batch_size=16,
    ),
    Planted("no_tensor_cores", VIM, on_gpu("amp", kernels=VIM.torch.kernels), 1 - 0.26 * 7 / 8, "fp16"),
    Planted("casts_and_copies", ONEPASS_AMP, VIM, 1 - 0.1948, "custom-fp16", says="48 casts (aten::_to_copy) per step"),
    Planted("flips", VIM, on_gpu(), 1 - 0.054, "custom", says="index_elementwise_kernel"),
    Planted("cpu_convolution", ONEPASS_CPU, on_cpu(), 1 - 0.4838, "custom", says="48.57 % of the work"),
    Planted("elementwise_chain", ONEPASS_CPU, on_cpu(), 1 - 0.3048 * 0.75, "custom", says="4 operators"),
    Planted("elementwise_chain", ONEPASS_AMP, VIM, 1 - 0.3559 * 2 / 3, "custom-amp"),
    Planted(
        "neurons",
        on_gpu("custom", **STBIF, kernels=beside(kernel("_stbif_kernel", 0.5, blocks_per_sm=96.0, registers=40))),
        on_gpu(**STBIF),
        0.75,
        "custom-fp16",
        says="_stbif_kernel, 96 blocks per SM, 40 registers",
    ),
    Planted("time_steps", ONEPASS_CPU, on_cpu(), 0.5, "eager", {"time_steps": 4}),
    Planted(
        "time_steps",
        on_gpu("custom", **STBIF, options={"level": 16}, kernels=beside(kernel("_stbif_kernel", 0.5))),
        on_gpu("custom", **STBIF, options={"level": 16}),
        0.5,
        "custom",
        {"time_steps": 4, "level": 10},
    ),
    Planted(
        "out_of_line",
        on_gpu("eager", layers=layers(layer("a", 0.6, flops=100), layer("b", 0.4, flops=900))),
        on_gpu(),
        0.5,
        "custom",
        says="a: 6 ms, 60 % of the time for 10 % of the FLOPs",
    ),
    Planted(
        "far_from_floor",
        on_gpu(layers=layers(*FAR)),
        on_gpu(layers=layers(*FAR, layer("in_proj", 0.01, x_of_floor=1.4))),
        0.05,
        says="clocks locked unknown",
    ),
    Planted(
        "memory_access",
        on_gpu(
            "eager",
            layers=layers(
                layer("norm", 0.4, x_of_floor=20.0, binding="bytes"),
                *(layer(name, 0.2, x_of_floor=2.0, binding="matrix") for name in "abc"),
            ),
        ),
        on_gpu("eager"),
        1 - 0.4 * 0.9,
        "custom",
    ),
    Planted("late_stages", on_gpu(**STBIF, layers=STAGES), on_gpu(**STBIF), 1 - 0.14, "custom-fp16", batch_size=16),
    Planted(
        "backward",
        on_gpu("eager", **STBIF, workload="train", benchmark=trained(8, 66)),
        on_gpu("eager", **STBIF, workload="train", benchmark=trained(8, 17)),
        24 / 74,
        "custom",
        says="89.19 % of both",
    ),
    Planted("memory_peak", on_cpu("eager", memory=memory(250)), on_cpu("eager", memory=memory(20)), None, "custom"),
]


def fired(made):
    return {finding.rule: finding for finding in findings.find(made)}


@pytest.mark.parametrize("planted", PLANTED, ids=[f"{example.rule}-{number}" for number, example in enumerate(PLANTED)])
def test_a_planted_bottleneck_is_found_with_its_remedy_and_not_where_it_is_not(planted):
    finding = fired(planted.ill)[planted.rule]
    assert finding.expected == (None if planted.expected is None else pytest.approx(planted.expected, abs=1e-3))
    proposed = (finding.variant, finding.options or None, finding.batch_size)
    assert proposed == (planted.variant, planted.options, planted.batch_size)
    assert planted.says in " ".join(finding.evidence)
    assert finding.title
    assert finding.advice
    assert finding.verdict == "not measured"
    assert planted.rule not in fired(planted.well)


@pytest.mark.parametrize(
    ("variant", "proposed"),
    [
        ("fp16", ["cudagraph-fp16", "compile-fp16"]),
        ("compile-fp16", ["cudagraph-fp16", None]),
        ("cudagraph-fp16", [None, None]),
        ("onnxruntime-fp16", [None, None]),
        ("tensorrt-fp16", [None, None]),
    ],
)
def test_what_pytorch_runs_may_be_captured_or_compiled_and_no_other_runtime_is_proposed(variant, proposed):
    """Another runtime's time would not tell whether the finding was the cause."""
    by_rule = fired(on_gpu(variant, model="square", kernels=beside(kernel("k", 0.5)), **WAITS))
    assert [by_rule[rule].variant for rule in ("launch_bound", "dominant_kernel")] == proposed


def test_every_rule_is_planted_once():
    assert {rule.__name__ for rule in findings.RULES} == {planted.rule for planted in PLANTED}


@pytest.mark.parametrize("clean", [on_gpu(), on_cpu(), profile()], ids=["gpu", "cpu", "no method ran"])
def test_nothing_is_found_in_a_clean_profile(clean):
    assert findings.find(clean) == []


def test_the_vim_write_up_has_all_its_directions_the_largest_gain_first():
    proposals = findings.find(VIM)
    assert {finding.rule for finding in proposals} == {
        "gpu_bound",
        "scan",
        "sequence_length",
        "low_occupancy",
        "no_tensor_cores",
        "flips",
    }
    assert proposals[0].rule == "sequence_length"
    assert [finding.expected for finding in proposals] == sorted(finding.expected for finding in proposals)
    assert "retraining" in fired(VIM)["scan"].advice


# a product as torch.profiler and as ncu print it
TRACED_PRODUCT = "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32>(cutlass_80_simt_sgemm_128x32::Params)"
COUNTED_PRODUCT = "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32>(T1::Params)"


@pytest.mark.parametrize(
    ("counted", "said"),
    [
        ([], "that use no tensor cores, judging by the kernels' names"),
        ([COUNTED_PRODUCT], "that use no tensor cores, 1 of them identified by counters and 1 by name"),
        ([COUNTED_PRODUCT, "my_gemm"], "that use no tensor cores, according to hardware counters"),
    ],
)
def test_by_counters_is_said_of_what_was_counted(counted, said):
    products = [kernel(TRACED_PRODUCT, 0.3), kernel("my_gemm", 0.2)]
    rows = [kernel(name, 0.1) for name in [*counted, "another"]]
    profiled = on_gpu("eager", kernels=beside(*products), ncu=NsightCompute(report="r", kernels=rows))
    assert fired(profiled)["no_tensor_cores"].evidence[0].endswith(said)


def test_a_scan_without_kernels_of_its_own_is_known_by_its_layers():
    parts = [layer("layers.0.scan", 0.7, parent="layers.0"), layer("layers.0.in_proj", 0.3, parent="layers.0")]
    profiled = on_gpu("eager", layers=layers(layer("layers.0", 1.0), *parts))
    assert fired(profiled)["scan"].evidence[0] == "layers named scan: 70 % of the forward pass"


def test_layers_of_one_kind_are_judged_together():
    names = [(number, part) for number in range(24) for part in ("conv1d", "in_proj")]
    rows = [layer(f"layers.{n}.{part}", 1 / 48, flops=1 + 99 * (part == "in_proj")) for n, part in names]
    finding = fired(on_gpu("eager", layers=layers(*rows)))["out_of_line"]
    assert finding.evidence == ["layers.*.conv1d: 5 ms, 50 % of the time for 0.9901 % of the FLOPs"]


def test_on_a_cpu_the_scan_has_one_form_and_proposes_the_kernels_alone():
    profiled = on_cpu("eager", model="vim_tiny", layers=layers(layer("scan", 0.7)))
    assert (fired(profiled)["scan"].variant, fired(profiled)["scan"].options) == ("custom", {})
    custom = on_cpu("custom", model="vim_tiny", layers=layers(layer("scan", 0.7)))
    assert fired(custom)["scan"].variant is None


def test_a_module_of_the_users_own_has_no_kernels_of_ours():
    profiled = msgspec.structs.replace(VIM, case=Case(model="own.net.build"))
    by_rule = fired(profiled)
    assert (by_rule["gpu_bound"].variant, by_rule["flips"].variant) == ("fp16", None)
    assert "sequence_length" not in by_rule
    assert by_rule["scan"].options == {}


def test_every_proposed_case_can_be_planned():
    for planted in PLANTED:
        finding = fired(planted.ill)[planted.rule]
        case = verification.case_for(planted.ill, finding)
        assert (case is None) == (planted.variant is None)
        if case:
            assert case != planted.ill.case
            assert case.variant.name == planted.variant


def test_the_case_of_a_finding_is_the_profiled_one_with_its_change():
    finding = fired(VIM)["scan"]
    case = verification.case_for(VIM, finding)
    assert case.case_id == "vim_tiny,custom,b4,scan=two_level"
    back = msgspec.structs.replace(finding, options={"scan": "serial"}, variant="eager", batch_size=8)
    assert verification.case_for(VIM, back) == Case(model="vim_tiny", variant=Variant(), batch_size=8)


@pytest.mark.parametrize(
    ("variant_ms", "verdict"),
    [
        ([6.0, 6.1, 5.9], "confirmed"),
        ([12.0, 12.1, 11.9], "refuted"),
        ([10.0, 10.01, 9.99], "refuted"),
        ([5.0, 20.0, 9.0], "inconclusive"),
    ],
)
def test_measurement_confirms_or_refutes(variant_ms, verdict):
    finding = fired(VIM)["flips"]
    verified = verification.verified(VIM, finding, compared([10.0, 10.0, 10.0], variant_ms))
    assert verified.verdict == verdict
    assert verified.evidence[-1].startswith(
        f"predicted 0.946 of the time, measured {verified.measured:.3g}: 10 ms and "
    )
    assert verified.expected == finding.expected


def compared(base_ms, variant_ms, *, check_failed=False, ratios=None):
    ratios = ratios or [variant / base for base, variant in zip(base_ms, variant_ms, strict=True)]
    return Comparison(
        first="base",
        second="variant",
        verdict=effects.judge(effects.paired_effect(ratios)),
        first_ms=base_ms,
        second_ms=variant_ms,
        medians_ms=(None, None),
        check_failed=check_failed,
        ratios=ratios,
    )


def test_the_pairs_decide_and_not_the_medians_of_a_side():
    apart = compared([10.0, 20.0, 10.0], [18.0, 9.0, 9.0], ratios=[0.9, 0.9, 0.9])
    verified = verification.verified(VIM, fired(VIM)["flips"], apart)
    assert (verified.verdict, round(verified.measured, 3)) == ("confirmed", 0.9)


def test_a_larger_batch_is_judged_by_the_image():
    ill = on_gpu(gpus=[gpu(0.9, 0.3)])
    finding = fired(ill)["low_utilization"]
    verified = verification.verified(ill, finding, compared([10.0, 10.0, 10.0], [20.0, 20.1, 19.9]))
    assert (verified.verdict, round(verified.measured, 2)) == ("confirmed", 0.5)
    assert "measured 0.5: 10 ms and 5 ms" in verified.evidence[-1]
