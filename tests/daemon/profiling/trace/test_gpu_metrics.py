import pytest
from traces_made import ORIN, annotation, kernel, launch

from benchd.daemon.profiling.trace.gpu_metrics import by_device, occupancy, uses_tensor_cores_by_name
from benchd.daemon.profiling.trace.trace import Trace, TracedGpu

EXACT = {"rel": 0, "abs": 1e-9}


def step(number, start_us, duration_us, on_gpu=False):
    return annotation(f"ProfilerStep#{number}", start_us, duration_us, on_gpu=on_gpu)


def over(kernels, start_us, end_us):
    """Return the metrics of a device that the trace does not describe, over one step."""
    (metrics,) = by_device(Trace(kernels=kernels, annotations=[step(1, start_us, end_us - start_us)])).values()
    return metrics


def golden():
    rows = [(100, 100, 0.5, 25), (150, 100, 2.0, 50), (400, 100, 0.25, 0), (900, 300, 1.0, 100), (600, 50, 1.0, None)]
    return [
        kernel(start, duration, launch(blocks_per_sm=blocks, percent=percent))
        for start, duration, blocks, percent in rows
    ]


def test_the_golden_vector():
    metrics = over(golden(), 150, 1_000)  # cuts the first kernel, and the last one ends at 1,200
    assert metrics.utilization == pytest.approx(550 / 1050, **EXACT)
    assert metrics.sm_efficiency == pytest.approx(475 / 1050, **EXACT)
    assert metrics.estimated_occupancy == pytest.approx(36250 / 550 / 100, **EXACT)
    assert (metrics.kernels, metrics.without_occupancy) == (5, 1)


def test_overlapping_kernels_are_summed_before_the_cap():
    pair = [kernel(0, 10, launch(blocks_per_sm=0.25)), kernel(0, 10, launch(blocks_per_sm=0.5))]
    assert over(pair, 0, 10).sm_efficiency == pytest.approx(0.75, **EXACT)
    assert over([*pair, *pair], 0, 10).sm_efficiency == pytest.approx(1.0, **EXACT)
    assert over(pair, 0, 20).utilization == pytest.approx(0.5, **EXACT)


def test_a_kernel_without_its_blocks_leaves_no_efficiency():
    metrics = over([kernel(0, 10, launch(blocks_per_sm=None)), kernel(20, 10)], 0, 30)
    assert metrics.sm_efficiency is None
    assert metrics.utilization == pytest.approx(2 / 3, **EXACT)


@pytest.mark.parametrize(
    ("name", "uses"),
    [
        ("volta_h884gemm_128x128_nn", True),
        ("turing_fp16_s1688cudnn_fp16_128x128", True),
        ("ampere_fp16_s16816gemm_fp16_64x64_ldg8_f2f_stages_64x5_tn", True),
        ("sm80_xmma_fprop_implicit_gemm_f16f16_f16f16_f16_nhwckrsc_nhwc_tilesize128x128x32", True),
        ("nvjet_hsh_192x192_64x3_2x1_v_bz_coopA_NNT", True),
        ("cutlass3x_sm90_tensorop_h64x128x16gemm_f16_f16_f32", True),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", True),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4_alignc4", False),
        ("cutlass_80_simt_sgemm_128x64_8x5_nn_align1", False),
        ("ampere_sgemm_128x64_tn", False),
        ("triton_poi_fused_add_16816", False),
        ("void at::native::vectorized_elementwise_kernel<4>", False),
    ],
)
def test_names_that_give_tensor_cores_away(name, uses):
    assert uses_tensor_cores_by_name(name) is uses


@pytest.mark.parametrize(
    ("facts", "theoretical", "estimated", "limits"),
    [
        # 48 warps an SM: 12 blocks of 4 warps fit
        ({"grid": (96, 1, 1)}, 1.0, 1.0, ("warps",)),
        ({"grid": (1000, 10, 10)}, 1.0, 1.0, ("warps",)),
        # 3 blocks over 8 SMs: 3/8 * 128/1536, which a trace rounds to 3 %
        ({"grid": (3, 1, 1)}, 1.0, 3 / 8 * 128 / 1536, ("grid",)),
        ({"grid": (800, 1, 1), "registers": 128}, 16 / 48, 16 / 48, ("registers",)),
        ({"grid": (800, 1, 1), "shared_bytes": 80 * 1024}, 8 / 48, 8 / 48, ("shared memory",)),
        ({"grid": (800, 1, 1), "block": (32, 1, 1)}, 16 / 48, 16 / 48, ("blocks",)),
        # 33 threads take two warps; the trace's formula counts threads
        ({"grid": (800, 1, 1), "block": (33, 1, 1)}, 32 / 48, 16 * 33 / 1536, ("blocks",)),
        # what the trace's own calculator found goes first
        ({"grid": (800, 1, 1), "active_blocks_per_sm": 3, "limits": ("barriers",)}, 12 / 48, 0.25, ("barriers",)),
    ],
)
def test_the_occupancy_of_a_launch_unrounded(facts, theoretical, estimated, limits):
    figures = occupancy(launch(**facts), ORIN)
    assert (figures.theoretical, figures.estimated, figures.limits) == (
        pytest.approx(theoretical, **EXACT),
        pytest.approx(estimated, **EXACT),
        limits,
    )


H200 = TracedGpu(id=1, compute_major=9, compute_minor=0, num_sms=132, max_threads_per_multiprocessor=2048)
VOLTA = TracedGpu(id=2, compute_major=7, compute_minor=0, num_sms=80, max_threads_per_multiprocessor=2048)


@pytest.mark.parametrize(
    ("launched", "device"),
    [
        (launch(percent=None), ORIN),
        (launch(grid=None), ORIN),
        (launch(registers=None), ORIN),
        (launch(), VOLTA),
        (launch(grid=(800, 1, 1), shared_bytes=300 * 1024), H200),
        (launch(), TracedGpu(id=0, name="another maker's")),
    ],
)
def test_an_occupancy_that_cannot_be_computed(launched, device):
    assert occupancy(launched, device) is None


def test_each_device_for_itself_and_an_unknown_one_by_the_traces_percents():
    trace = Trace(devices=[ORIN], kernels=[kernel(0, 10), kernel(0, 20, launch(percent=7), device=1)])
    per_device = by_device(trace)
    assert {number: metrics.estimated_occupancy for number, metrics in per_device.items()} == {
        0: pytest.approx(128 / 1536, **EXACT),
        1: pytest.approx(0.07, **EXACT),
    }
    assert per_device[0].utilization == 1
