"""Profiles of a GPU and of a CPU for tests, in which nothing is wrong, and their rows."""

import msgspec
from records_made import ENVIRONMENT

from benchd.daemon.profiling.profile import (
    GpuUse,
    KernelRow,
    LayerRow,
    LayersProfile,
    Operator,
    Profile,
    StepTime,
    TorchProfile,
)
from benchd.daemon.records import Case, Variant

STEPS = 3
STEP_NS = 10_000_000


def kernel(name, share, *, calls=10, operator=None, occupancy=0.8, tensor_cores=False, **fields):
    """Return a kernel that takes `share` of all steps, and so of a step's time."""
    total_ns = round(share * STEPS * STEP_NS)
    return KernelRow(
        name=name,
        calls=calls * STEPS,
        total_ns=total_ns,
        mean_ns=total_ns / calls / STEPS,
        min_ns=1,
        max_ns=total_ns,
        estimated_occupancy=occupancy,
        tensor_cores=tensor_cores,
        tensor_cores_by="name",
        operator=operator,
        **fields,
    )


def operator(name, share, *, calls=10):
    """Return an operator of a CPU that takes `share` of all steps by itself."""
    ns = round(share * STEPS * STEP_NS)
    return Operator(name=name, calls=calls * STEPS, cpu_ns=ns, self_cpu_ns=ns, device_ns=0, self_device_ns=0)


def layer(name, share, **fields):
    """Return a layer that takes `share` of the forward pass."""
    return LayerRow(name=name, ns=share * STEP_NS, share=share, **fields)


def layers(*rows, variation=0.01):
    """Return the layers of a forward pass."""
    return LayersProfile(
        components=[],
        layers=list(rows),
        fused_ns=STEP_NS,
        synchronised_ns=STEP_NS,
        run_ns=[STEP_NS] * 5,
        variation=variation,
    )


def torch(kernels=(), operators=(), by_category=None, gpus=(), launches=300, synchronizations=()):
    """Return the tables of three steps; `by_category` gives shares of a step."""
    shares = by_category or {"cpu": 1.0}
    step = {category: round(share * STEP_NS) for category, share in shares.items()}
    return TorchProfile(
        trace="trace.json.gz",
        steps=[StepTime(number=number, duration_ns=STEP_NS, by_category=step) for number in range(STEPS)],
        operators=list(operators),
        modules=[],
        kernels=list(kernels),
        gpus=list(gpus),
        synchronizations=list(synchronizations),
        launches=launches,
        cpu_ns=sum(row.self_cpu_ns for row in operators),
        device_ns=sum(row.total_ns for row in kernels),
    )


def gpu(utilization=0.94, sm_efficiency=0.9, long_waits_share=0.2):
    """Return an Orin's own figures."""
    return GpuUse(
        name="Orin",
        compute_capability="8.7",
        utilization=utilization,
        sm_efficiency=sm_efficiency,
        estimated_occupancy=0.8,
        tensor_core_share_by_name=0.4,
        long_waits_share=long_waits_share,
    )


# fp16 on our kernels: products on tensor cores, no kernel far beyond the others, and the GPU at work 94 % of the time
CLEAN_KERNELS = (
    kernel("ampere_fp16_s16816gemm_fp16_128x64", 0.28, operator="aten::bmm", tensor_cores=True, occupancy=0.33),
    kernel("ampere_fp16_s16816gemm_fp16_64x64", 0.17, operator="aten::mm", tensor_cores=True, occupancy=0.33),
    kernel("_scan_kernel", 0.2, operator="benchd::bidirectional_scan", occupancy=0.67),
    kernel("_kernel", 0.2, operator="benchd::causal_conv1d"),
    kernel("vectorized_elementwise_kernel", 0.09, operator="aten::add"),
)
CLEAN_CATEGORIES = {"kernel": 0.94, "memcpy": 0.01, "runtime": 0.03, "cpu": 0.01, "data_loader": 0.01}
CLEAN_LAYERS = layers(
    layer("layers.0", 0.5, flops=500, x_of_floor=2.0, binding="bytes"),
    layer("layers.1", 0.4, flops=450, x_of_floor=1.8, binding="bytes"),
    layer("head", 0.1, flops=50, x_of_floor=4.0, binding="matrix"),
)


def profile(case=None, workload="forward", **fields):
    """Return a profile of this case, by default of Vim on a CPU without a table."""
    case = case or Case(model="vim_tiny")
    return Profile(
        run_id="r",
        device_id="bench-abc123",
        case_id=case.case_id,
        case=case,
        workload=workload,
        t_wall="2026-01-01T00:00:00Z",
        tool_version="0.1.0",
        command="benchd profile",
        device="cpu",
        device_name=None,
        environment=ENVIRONMENT,
        **fields,
    )


def on_gpu(variant="custom-fp16", *, model="vim_tiny", options=None, workload="forward", **tables):
    """Return a clean profile of a GPU, with other tables where they are given."""
    case = Case(model=model, variant=Variant.parse(variant), batch_size=4, options=options or {})
    methods = {name: tables.pop(name) for name in ("layers", "memory", "benchmark", "ncu") if name in tables}
    given = {"kernels": CLEAN_KERNELS, "by_category": CLEAN_CATEGORIES, "gpus": [gpu()]} | tables
    fields = {"torch": torch(**given), "layers": CLEAN_LAYERS} | methods
    return msgspec.structs.replace(profile(case, workload, **fields), device="cuda")


def on_cpu(variant="custom", *, model="snn_onepass", options=None, workload="forward", **tables):
    """Return a clean profile of a CPU, with other tables where they are given."""
    case = Case(model=model, variant=Variant.parse(variant), batch_size=64, options=options or {})
    methods = {name: tables.pop(name) for name in ("layers", "memory", "benchmark") if name in tables}
    operators = (
        operator("benchd::spike_conv2d", 0.5),
        operator("aten::addmm", 0.25),
        operator("benchd::lif_pool", 0.2),
        operator("aten::add", 0.03),
    )
    given = {"operators": operators, "launches": 0} | tables
    return profile(case, workload, **({"torch": torch(**given), "layers": CLEAN_LAYERS} | methods))
