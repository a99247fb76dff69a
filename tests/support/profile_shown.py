"""A Profile with something in every table, as a GPU would give it, and one of a CPU; some of its names are hostile."""

from typing import Any

import msgspec
from records_made import ENVIRONMENT

from benchd.daemon.profiling.profile import (
    Allocation,
    BenchmarkProfile,
    Distribution,
    Finding,
    GpuUse,
    KernelRow,
    LayerRow,
    LayersProfile,
    MemoryPoint,
    MemoryProfile,
    Module,
    NsightCompute,
    NsightSystems,
    Operator,
    Profile,
    Range,
    StepTime,
    Synchronization,
    TorchProfile,
)
from benchd.daemon.records import Case

EVIL = "void k<float, 4>(</script><img src=x onerror=alert(1)>|`*)"
SCAN = "selective_scan_fwd_kernel"


def operator(name: str, self_cpu_ns: int, self_device_ns: int = 0, calls: int = 3) -> Operator:
    """Return an operator whose totals are twice its own."""
    return Operator(
        name=name,
        calls=calls,
        cpu_ns=2 * self_cpu_ns,
        self_cpu_ns=self_cpu_ns,
        device_ns=2 * self_device_ns,
        self_device_ns=self_device_ns,
    )


def distribution(median_ns: float, **fields: Any) -> Distribution:
    """Return ten runs around `median_ns`."""
    given = {"low_ns": 0.9, "high_ns": 1.1, "mean_ns": 1.0, "min_ns": 0.8, "max_ns": 1.5}
    return Distribution(median_ns=median_ns, runs=10, **{name: share * median_ns for name, share in given.items()})


KERNELS = [
    KernelRow(name=SCAN, calls=144, total_ns=2_202_707_000, mean_ns=15_297e3, min_ns=15_000_000, max_ns=16_000_000),
    KernelRow(
        name=EVIL,
        calls=72,
        total_ns=403_751_000,
        mean_ns=5_608e3,
        min_ns=5_000_000,
        max_ns=6_000_000,
        blocks_per_sm=24.5,
        registers=96,
        shared_bytes=16384,
        estimated_occupancy=0.333,
        limits=["registers", "shared memory"],
        tensor_cores=False,
        tensor_cores_by="name",
        operator="aten::addmm",
    ),
]
TORCH = TorchProfile(
    trace="trace.json.gz",
    steps=[
        StepTime(number=n, duration_ns=1_233_983_000, by_category={"kernel": 1_227_437_000, "data_loader": 6_546_000})
        for n in (1, 2, 3)
    ],
    operators=[
        operator("aten::item", 1_000_000),
        operator(EVIL, 3_000_000, 9_000_000),
        operator("cudaFree", 2_000_000),
    ],
    modules=[Module(name="VisionMamba", calls=3, host_ns=593_596_000, device_ns=3_600_000_000)],
    kernels=KERNELS,
    gpus=[
        GpuUse(
            name="Orin",
            compute_capability="8.7",
            utilization=0.9927,
            sm_efficiency=0.9927,
            estimated_occupancy=0.4527,
            tensor_core_share_by_name=0.0,
        )
    ],
    synchronizations=[
        Synchronization(
            name="cudaStreamSynchronize",
            operator="aten::item",
            calls=3,
            waited_ns=1_900_000_000,
            idle_after_ns=2_000_000,
            launches_after=1200,
        )
    ],
    launches=5000,
    cpu_ns=6_000_000,
    device_ns=9_000_000,
)
MEMORY = MemoryProfile(
    device="cuda",
    peak_bytes=300 * 2**20,
    peak_by_category={"parameters": 100 * 2**20, "activations": 150 * 2**20},
    timeline=[
        MemoryPoint(t_ns=0, by_category={"parameters": 100 * 2**20}),
        MemoryPoint(t_ns=5_000_000, by_category={"parameters": 100 * 2**20, "activations": 150 * 2**20}),
    ],
    largest=[Allocation(bytes=50 * 2**20, module=EVIL, operator="aten::empty", category="activations")],
    snapshot="memory.pickle",
)
LAYERS = LayersProfile(
    components=[LayerRow(name="Model_Reset", ns=218e3, share=0.034), LayerRow(name="other", ns=6.18e6, share=0.966)],
    layers=[
        LayerRow(
            name="Layer3_ResBlocks",
            ns=1.86e6,
            share=0.29,
            low_ns=1.8e6,
            high_ns=1.9e6,
            flops=2_000_000,
            bytes=4_000_000,
            x_of_floor=12.5,
            binding="matrix",
            spike_rate=0.125,
            wasted_spikes=0.5,
            synaptic_operations=1.5e6,
            modelled_energy_j=2e-6,
        ),
        LayerRow(name=EVIL, ns=4.54e6, share=0.71),
    ],
    fused_ns=6e6,
    synchronised_ns=6.4e6,
    run_ns=[6e6] * 5,
    variation=0.01,
    notes=["no state to reset"],
)
FINDINGS = [
    Finding(
        rule="dominant_kernel",
        title=f"{SCAN} takes 60.6 % of the device's time",
        evidence=["2203 ms of 3634 ms", EVIL],
        advice="try the two-level scan",
        expected=0.5,
        variant="custom",
        options={"scan": "two_level"},
        measured=1.25,
        verdict="refuted",
    ),
    Finding(rule="gpu_bound", title="the GPU is the bottleneck", evidence=["99.47 % kernels"], advice="leave the host"),
]


def shown(**fields: Any) -> Profile:
    """Return the profile of a GPU, `fields` replaced."""
    case = fields.pop("case", Case(model="vim_tiny", batch_size=4))
    given: dict[str, Any] = {
        "run_id": "r1",
        "device_id": "bench-abc123",
        "case_id": case.case_id,
        "case": case,
        "workload": "eval",
        "t_wall": "2026-01-01T00:00:00.000Z",
        "tool_version": "0.1.0",
        "command": "benchd profile vim_tiny",
        "device": "cuda",
        "device_name": "Orin",
        "environment": msgspec.structs.replace(ENVIRONMENT, device="cuda"),
        "torch": TORCH,
        "memory": MEMORY,
        "benchmark": BenchmarkProfile(
            step=distribution(1.2e9),
            throughput_per_s=3.33,
            forward=distribution(6.2e6),
            backward=distribution(0.7e9),
            overhead=0.04,
        ),
        "layers": LAYERS,
        "nsys": NsightSystems(
            report="nsys.nsys-rep",
            kernels=[KERNELS[0]],
            runtime=[operator("cudaLaunchKernel", 5_000)],
            ranges=[Range(name="Model_Forward_Pass", calls=5, total_ns=30_000_000, mean_ns=6e6)],
        ),
        "ncu": NsightCompute(
            report="ncu.ncu-rep", kernels=[msgspec.structs.replace(KERNELS[1], measured_occupancy=0.31)]
        ),
        "findings": FINDINGS,
        "missing": {"energy": "no_sensor"},
    }
    return Profile(**given | fields)


def shown_on_cpu(**fields: Any) -> Profile:
    """Return a profile of a CPU with the torch method alone."""
    traced = msgspec.structs.replace(
        TORCH,
        steps=[StepTime(number=1, duration_ns=200_000_000, by_category={"cpu": 190_000_000, "other": 10_000_000})],
        operators=[operator("aten::_nnpack_spatial_convolution", 97_000_000), operator("aten::where", 3_000_000)],
        kernels=[],
        gpus=[],
        synchronizations=[],
        launches=0,
        cpu_ns=100_000_000,
        device_ns=0,
    )
    absent = dict.fromkeys(("memory", "benchmark", "layers", "nsys", "ncu"))
    given = {"device": "cpu", "device_name": None, "environment": ENVIRONMENT, "torch": traced, "findings": []}
    return shown(**absent | given | {"missing": {}} | fields)
