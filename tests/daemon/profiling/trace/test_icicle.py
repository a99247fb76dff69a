"""The nesting of one step, from traces made by hand: whose time a frame holds, and under whom it stands."""

import msgspec
from traces_made import kernel, launch

from benchd.daemon.profiling.profile import Frame
from benchd.daemon.profiling.trace.icicle import icicle
from benchd.daemon.profiling.trace.trace import Annotation, RuntimeCall, Trace, TracedOperator


def span(start_us, end_us):
    return {"start_ns": start_us * 1000, "duration_ns": (end_us - start_us) * 1000}


def annotation(name, start_us, end_us, thread=1):
    return Annotation(name=name, thread=thread, on_gpu=False, **span(start_us, end_us))


def operator(name, start_us, end_us, thread=1, external_id=None):
    return TracedOperator(name=name, thread=thread, external_id=external_id, **span(start_us, end_us))


def launched(start_us, correlation):
    return RuntimeCall(name="cudaLaunchKernel", thread=1, correlation=correlation, **span(start_us, start_us + 1))


STEPS = [annotation("ProfilerStep#1", 0, 100), annotation("ProfilerStep#2", 100, 200)]
HOST = Trace(
    annotations=[*STEPS, annotation("nn.Module: Net", 110, 190)],
    operators=[
        operator("aten::conv2d", 10, 90),
        operator("aten::conv2d", 110, 150),
        operator("aten::add", 120, 130),
        operator("aten::conv2d", 150, 180),
        operator("backward", 120, 140, thread=2),
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
    steps = [
        annotation(f"ProfilerStep#{n}", start, end) for n, start, end in ((1, 0, 50), (2, 50, 950), (3, 950, 1050))
    ]
    frames = icicle(Trace(annotations=steps, operators=[operator("aten::add", 1000, 1040)]))
    assert frames == [Frame("step 3", None, 100_000), Frame("aten::add", 0, 40_000)]


def test_the_device_s_time_stands_under_the_operator_that_launched_it():
    rows = [kernel(125, 300, launch("gemm")), kernel(450, 100, launch("gemm")), kernel(20, 999, launch("old"))]
    rows = [msgspec.structs.replace(row, correlation=number) for row, number in zip(rows, (7, 8, 9), strict=True)]
    trace = msgspec.structs.replace(HOST, kernels=rows, runtime_calls=[launched(122, 7), launched(160, 8)])
    frames = icicle(trace)
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
    small = [operator("aten::small", 185, 185), *HOST.operators]
    assert "aten::small" not in [frame.name for frame in icicle(msgspec.structs.replace(HOST, operators=small))]
    assert icicle(Trace()) == []
