"""The nesting of one step, from traces made by hand: whose time a frame holds, and under whom it stands."""

import msgspec
from traces_made import annotation, call, kernel, launch, operator

from benchd.daemon.profiling.profile import Frame
from benchd.daemon.profiling.trace.icicle import icicle
from benchd.daemon.profiling.trace.trace import Trace

STEPS = [annotation("ProfilerStep#1", 0, 100), annotation("ProfilerStep#2", 100, 100)]
HOST = Trace(
    annotations=[*STEPS, annotation("nn.Module: Net", 110, 80)],
    operators=[
        operator("aten::conv2d", 10, 80),
        operator("aten::conv2d", 110, 40),
        operator("aten::add", 120, 10),
        operator("aten::conv2d", 150, 30),
        operator("backward", 120, 20, thread=2),
    ],
)


def test_the_host_s_time_of_the_last_step_with_equal_paths_merged():
    assert icicle(HOST) == [
        Frame("step 2", None, 120_000),
        Frame("nn.Module: Net", 0, 80_000),
        Frame("aten::conv2d", 1, 70_000),
        Frame("aten::add", 2, 10_000),
        Frame("backward", 0, 20_000),
    ]


def test_it_is_the_median_step_that_is_shown():
    steps = [annotation(f"ProfilerStep#{n}", start, us) for n, start, us in ((1, 0, 50), (2, 50, 900), (3, 950, 100))]
    frames = icicle(Trace(annotations=steps, operators=[operator("aten::add", 1000, 40)]))
    assert frames == [Frame("step 3", None, 100_000), Frame("aten::add", 0, 40_000)]


def test_the_device_s_time_stands_under_the_operator_that_launched_it():
    rows = [
        kernel(125, 300, launch("gemm"), correlation=7),
        kernel(450, 100, launch("gemm"), correlation=8),
        kernel(20, 999, launch("old"), correlation=9),
    ]
    calls = [call("cudaLaunchKernel", start_us, 1, correlation) for start_us, correlation in ((122, 7), (160, 8))]
    frames = icicle(msgspec.structs.replace(HOST, kernels=rows, runtime_calls=calls))
    assert frames[0] == Frame("step 2", None, 400_000)
    named = {(frame.name, frames[frame.parent].name): frame.ns for frame in frames[1:]}
    assert named == {
        ("nn.Module: Net", "step 2"): 400_000,
        ("aten::conv2d", "nn.Module: Net"): 400_000,
        ("aten::add", "aten::conv2d"): 300_000,
        ("gemm", "aten::add"): 300_000,
        ("gemm", "aten::conv2d"): 100_000,
    }


def test_what_could_not_be_seen_is_left_out_and_no_step_is_no_icicle():
    small = [operator("aten::small", 185, 0), *HOST.operators]
    assert "aten::small" not in [frame.name for frame in icicle(msgspec.structs.replace(HOST, operators=small))]
    assert icicle(Trace()) == []
