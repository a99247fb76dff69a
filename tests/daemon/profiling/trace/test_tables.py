"""Tables of traces that are made by hand, and of real ones beside what torch itself makes of them."""

import msgspec
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from traces_made import ORIN, annotation, call, kernel, launch, memory_operation, operator

from benchd.daemon.errors import UsageError
from benchd.daemon.profiling.trace import tables, trace
from benchd.daemon.profiling.trace.trace import Trace


def table_of(cuda=False, **rows):
    return tables.torch_profile(Trace(devices=[ORIN], **rows), "trace.json", cuda)


def by_name(rows):
    return {row.name: row for row in rows}


def test_self_time_leaves_out_what_was_called_on_the_same_thread():
    torch_profile = table_of(
        operators=[
            operator("aten::linear", 0, 100, 1),
            operator("aten::addmm", 10, 60, 2),
            operator("aten::mm", 20, 30, thread=2),
        ],
        runtime_calls=[call("cudaLaunchKernel", 20, 15)],
    )
    rows = by_name(torch_profile.operators)
    assert {name: (row.cpu_ns, row.self_cpu_ns) for name, row in rows.items()} == {
        "aten::linear": (100_000, 40_000),
        "aten::addmm": (60_000, 45_000),
        "aten::mm": (30_000, 30_000),
        "cudaLaunchKernel": (15_000, 15_000),
    }
    assert (torch_profile.cpu_ns, torch_profile.launches) == (130_000, 1)


def test_device_time_goes_to_the_operator_that_launched_and_to_those_around_it():
    torch_profile = table_of(
        cuda=True,
        annotations=[annotation("nn.Module: Net", 0, 100)],
        operators=[operator("aten::linear", 0, 50, 1), operator("aten::addmm", 10, 30, 2)],
        runtime_calls=[
            call("cudaLaunchKernel", 15, 5, correlation=7),
            call("cuLaunchKernelEx", 60, 5, correlation=8),
            call("cudaMemcpyAsync", 42, 5, correlation=9),
        ],
        kernels=[
            kernel(100, 40, launch("gemm"), correlation=7, external_id=2),
            kernel(140, 8, launch("triton"), correlation=8),
            kernel(150, 3, launch("of nobody"), correlation=99, external_id=99),
        ],
        memcpys=[memory_operation("Memcpy HtoD", 160, 2, correlation=9)],
    )
    rows = by_name(torch_profile.operators)
    assert {name: (row.device_ns, row.self_device_ns) for name, row in rows.items() if row.device_ns} == {
        "aten::linear": (42_000, 2_000),
        "aten::addmm": (40_000, 40_000),
    }
    assert torch_profile.modules[0].device_ns == 50_000
    assert torch_profile.device_ns == 53_000
    assert {row.name: row.operator for row in torch_profile.kernels} == {
        "gemm": "aten::addmm",
        "triton": None,
        "of nobody": None,
    }
    assert [row.name for row in torch_profile.operators][:2] == ["aten::addmm", "aten::linear"]


@pytest.mark.parametrize("column", tables.COLUMNS)
def test_operators_sort_by_every_column(column):
    torch_profile = table_of(
        cuda=True,
        operators=[
            operator("b", 0, 50, 1),
            operator("a", 10, 30, 2),
            operator("a", 60, 10, 3),
            operator("c", 80, 70, 4),
        ],
        kernels=[kernel(100, 40, external_id=2), kernel(150, 10, external_id=1)],
    )
    rows = tables.sorted_by(torch_profile.operators, column)
    order = {
        "name": "abc",
        "calls": "a",
        "self_cpu_ns": "cab",
        "self_cpu_share": "cab",
        "cpu_ns": "cba",
        "cpu_share": "cba",
        "cpu_mean_ns": "cba",
        "self_device_ns": "abc",
        "self_device_share": "abc",
        "device_ns": "bac",
        "device_mean_ns": "bac",
    }[column]
    assert "".join(row.name for row in rows).startswith(order)


def test_an_unknown_column_is_told_with_the_closest():
    with pytest.raises(UsageError, match="unknown column 'self_cpu'; did you mean 'self_cpu_ns'"):
        tables.sorted_by([], "self_cpu")


def test_a_step_is_divided_to_the_nanosecond_the_device_before_the_host():
    torch_profile = table_of(
        cuda=True,
        annotations=[
            annotation("ProfilerStep#4", 0, 100),
            annotation("ProfilerStep#5", 100, 50),
            annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 2, 10),
        ],
        operators=[
            operator("aten::stack", 4, 4),
            operator("aten::item", 14, 80),
            operator("aten::add", 20, 10, thread=9),
        ],
        runtime_calls=[call("cudaStreamSynchronize", 20, 70)],
        kernels=[kernel(30, 40), kernel(50, 40), kernel(95, 15)],
        memcpys=[memory_operation("Memcpy DtoH", 85, 7), memory_operation("Memcpy DtoD (Device -> Device)", 91, 2)],
        memsets=[memory_operation("Memset", 12, 1)],
    )
    first, second = torch_profile.steps
    assert (first.number, first.duration_ns, second.number) == (4, 100_000, 5)
    assert first.by_category == {
        "kernel": 65_000,
        "device_copy": 2_000,
        "memcpy": 1_000,
        "memset": 1_000,
        "runtime": 10_000,
        "data_loader": 10_000,
        "cpu": 7_000,
        "other": 4_000,
    }
    assert second.by_category["kernel"] == 10_000
    assert [sum(step.by_category.values()) for step in torch_profile.steps] == [100_000, 50_000]


def test_modules_by_class_count_a_nested_one_of_their_class_once():
    torch_profile = table_of(
        annotations=[
            annotation("nn.Module: Sequential", 0, 90),
            annotation("nn.Module: Sequential", 10, 30),
            annotation("nn.Module: CrossEntropyLoss", 95, 5),
            annotation("nn.Module: Sequential", 12, 3, on_gpu=True),
        ],
        operators=[operator("aten::add", 12, 2)],
    )
    assert [(row.name, row.calls, row.host_ns) for row in torch_profile.modules] == [
        ("Sequential", 2, 90_000),
        ("CrossEntropyLoss", 1, 5_000),
    ]


def test_kernels_by_name_with_the_launch_that_took_longest():
    wide, small = (
        launch("scan", grid=(96, 1, 1), registers=64),
        launch("scan", grid=(3, 1, 1), percent=3, blocks_per_sm=0.4),
    )
    unknown = launch("foreign", percent=None, blocks_per_sm=None)
    gemm = launch("ampere_fp16_s16816gemm", grid=None, percent=33)
    torch_profile = table_of(
        cuda=True,
        operators=[operator("scan_a", 0, 1, 1), operator("scan_b", 2, 1, 2)],
        kernels=[
            kernel(0, 30, wide, external_id=2),
            kernel(30, 6, small, external_id=1),
            kernel(36, 4, small, external_id=1),
            kernel(50, 5, unknown),
            kernel(60, 50, gemm),
        ],
    )
    tensor, scan, foreign = torch_profile.kernels
    assert (scan.calls, scan.total_ns, scan.mean_ns, scan.min_ns, scan.max_ns) == (3, 40_000, 40_000 / 3, 4_000, 30_000)
    # 64 registers of 128 threads: 8 blocks of the 12 that the warps would allow
    assert scan.estimated_occupancy == pytest.approx(0.75 * 8 * 128 / 1536 + 0.25 * 3 / 8 * 128 / 1536, rel=1e-12)
    assert scan.blocks_per_sm == pytest.approx(0.75 * 1.0 + 0.25 * 0.4)
    assert (scan.registers, scan.limits, scan.operator) == (64, ["registers"], "scan_a")
    assert (tensor.estimated_occupancy, tensor.tensor_cores, tensor.tensor_cores_by) == (0.33, True, "name")
    assert (foreign.estimated_occupancy, foreign.blocks_per_sm, foreign.limits) == (None, None, [])
    (gpu,) = torch_profile.gpus
    assert (gpu.name, gpu.compute_capability) == ("Orin", "8.7")
    assert gpu.utilization == pytest.approx(95 / 110)
    assert gpu.tensor_core_share_by_name == pytest.approx(50 / 95)


def test_synchronisations_with_what_waits_on_them():
    torch_profile = table_of(
        cuda=True,
        operators=[
            operator("aten::item", 10, 60, 1),
            operator("aten::_local_scalar_dense", 11, 58, 2),
            operator("aten::add", 80, 10, 3),
        ],
        runtime_calls=[
            call("cudaLaunchKernel", 0, 2, correlation=1),
            call("cudaMemcpyAsync", 12, 3, correlation=2),
            call("cudaStreamSynchronize", 15, 50, correlation=3),
            call("cudaDeviceSynchronize", 72, 1),  # the device is idle already: the gap is the first wait's
            call("cudaLaunchKernel", 81, 2, correlation=4),
            call("cudaLaunchKernel", 84, 2, correlation=5),
            call("cudaMemcpy", 95, 45),
            call("cudaEventSynchronize", 300, 1, thread=2),
        ],
        kernels=[kernel(2, 50, correlation=1), kernel(90, 10, correlation=4), kernel(100, 30, correlation=5)],
        memcpys=[memory_operation("Memcpy DtoH", 52, 8, correlation=2)],
    )
    assert [msgspec.structs.astuple(row) for row in torch_profile.synchronizations] == [
        ("cudaStreamSynchronize", "aten::item", 1, 50_000, 30_000, 0),
        ("cudaMemcpy", None, 1, 45_000, 0, 0),
        ("cudaDeviceSynchronize", None, 1, 1_000, 0, 2),
        ("cudaEventSynchronize", None, 1, 1_000, 0, 0),
    ]


def test_real_operators_are_those_of_key_averages(tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    images, labels = torch.randn(2, 3, 8, 8), torch.tensor([0, 1])
    path = tmp_path / "trace.json"
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=2, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        acc_events=True,
    ) as profiler:
        for _ in range(3):
            nn.functional.cross_entropy(net(images), labels).backward()
            profiler.step()
    torch_profile = tables.torch_profile(trace.read(path), path.name, False)
    torchs = {row.key: row for row in profiler.key_averages()}
    assert len(torch_profile.operators) > 30
    for row in torch_profile.operators:
        assert row.calls == torchs[row.name].count
        assert row.cpu_ns == pytest.approx(torchs[row.name].cpu_time_total * 1000, rel=1e-3, abs=2 * row.calls)
        assert row.self_cpu_ns == pytest.approx(
            torchs[row.name].self_cpu_time_total * 1000, rel=1e-3, abs=5 * row.calls
        )
    assert torch_profile.cpu_ns == pytest.approx(profiler.key_averages().self_cpu_time_total * 1000, rel=1e-3)
