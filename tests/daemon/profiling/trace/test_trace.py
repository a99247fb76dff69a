import json
from textwrap import indent

import pytest

from benchd.daemon.errors import UsageError
from benchd.daemon.profiling.trace import trace
from benchd.daemon.profiling.trace.trace import LaunchConfiguration, read

H200 = {
    "id": 0,
    "name": "NVIDIA H200",
    "computeMajor": 9,
    "computeMinor": 0,
    "numSms": 132,
    "maxThreadsPerMultiprocessor": 2048,
    "warpSize": 32,
}
KERNEL = {
    "External id": 5,
    "queued": 0,
    "device": 0,
    "context": 1,
    "stream": 7,
    "correlation": 9,
    "registers per thread": 32,
    "shared memory": 1024,
    "blocks per SM": 0.5,
    "warps per SM": 2.0,
    "grid": [66, 1, 1],
    "block": [128, 1, 1],
    "est. achieved occupancy %": 3,
}
CALCULATED = {"activeBlocksPerMultiprocessor": 16, "limitingFactors": "REGS|WARPS|NEW", "blockLimitRegs": 16}


def complete(cat, name, /, ts=1.0, dur=2.0, pid=0, tid=7, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def write_trace(path, events, devices=(H200,), **dumps):
    content = {"schemaVersion": 1, "deviceProperties": list(devices), "traceEvents": events, "traceName": "t.json"}
    path.write_text(json.dumps(content, **dumps))
    return path


def test_every_kind_of_row(tmp_path):
    path = write_trace(
        tmp_path / "t.json",
        [
            {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": 0.0, "args": {"name": "python"}},
            complete("user_annotation", "ProfilerStep#2", ts=20.0, dur=9.5, tid=11),
            complete("user_annotation", "ProfilerStep#1", ts=10.0, dur=8.0, tid=11),
            complete("gpu_user_annotation", "ProfilerStep#1", ts=12.0, dur=8.0),
            complete("cpu_op", "aten::add", tid=11, **{"External id": 5, "Input Dims": [[2, 2], []], "stream": "x"}),
            complete("cuda_runtime", "cudaLaunchKernel", tid=11, correlation=9, cbid=211),
            complete("cuda_driver", "cuLaunchKernelEx", tid=11, correlation=10),
            complete("kernel", "add", ts=4416952146536.301, dur=0.257, **KERNEL),
            complete("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", device=1, stream=8, correlation=3, bytes=4096),
            complete("gpu_memset", "Memset (Device)", stream=8, correlation=4, bytes=16),
            complete("overhead", "Activity Buffer Request", pid=-1),
            complete("Trace", "PyTorch Profiler (0)", pid="Spans", tid="PyTorch Profiler"),
            {"ph": "s", "id": 9, "pid": 0, "tid": 11, "ts": 1.0, "cat": "ac2g", "name": "ac2g"},
            {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 2.0},
        ],
    )
    recorded_trace = read(path)
    (device,), (kernel,), (memcpy,), (memset,) = (
        recorded_trace.devices,
        recorded_trace.kernels,
        recorded_trace.memcpys,
        recorded_trace.memsets,
    )
    assert (device.name, device.num_sms, device.compute_major) == ("NVIDIA H200", 132, 9)
    assert kernel.launch == LaunchConfiguration(
        name="add",
        grid=(66, 1, 1),
        block=(128, 1, 1),
        registers=32,
        shared_bytes=1024,
        blocks_per_sm=0.5,
        estimated_occupancy_percent=3,
        active_blocks_per_sm=None,
        limits=(),
    )
    assert (kernel.start_ns, kernel.duration_ns, kernel.end_ns) == (4416952146536301, 257, 4416952146536558)
    assert (kernel.device, kernel.correlation, kernel.external_id) == (0, 9, 5)
    assert (memcpy.correlation, memcpy.name[:11]) == (3, "Memcpy HtoD")
    assert memset.correlation == 4
    assert [(call.name, call.correlation) for call in recorded_trace.runtime_calls] == [
        ("cudaLaunchKernel", 9),
        ("cuLaunchKernelEx", 10),
    ]
    assert [(op.name, op.thread, op.external_id) for op in recorded_trace.operators] == [("aten::add", 11, 5)]
    assert [row.on_gpu for row in recorded_trace.annotations] == [False, False, True]
    assert [(step.number, step.start_ns, step.end_ns) for step in recorded_trace.steps] == [
        (1, 10000, 18000),
        (2, 20000, 29500),
    ]
    assert recorded_trace.missing_kernels() is None


@pytest.mark.parametrize(
    ("changed", "percent", "blocks", "limits"),
    [
        ({}, 3, None, ()),
        ({"est. achieved occupancy %": -100}, None, None, ()),
        ({"est. achieved occupancy %": None}, None, None, ()),
        ({"occupancy": CALCULATED}, 3, 16, ("registers", "warps", "new")),
        ({"occupancy": {"activeBlocksPerMultiprocessor": 0, "limitingFactors": "none"}}, 3, 0, ()),
    ],
)
def test_occupancy_as_old_and_new_traces_tell_it(changed, percent, blocks, limits, tmp_path):
    (kernel,) = read(write_trace(tmp_path / "t.json", [complete("kernel", "k", **KERNEL | changed)])).kernels
    launch = kernel.launch
    assert (launch.estimated_occupancy_percent, launch.active_blocks_per_sm, launch.limits) == (percent, blocks, limits)


def test_a_trace_as_libkineto_writes_it_is_read_in_pieces_that_keep_every_event(tmp_path, monkeypatch):
    awkward = {"name": 'a"\n  },\n  {"ph": "X"', "inner": [{"a": 1}, {"name": 2}] * 5}
    events = [complete("kernel", f'k{i % 3} "}},{{', ts=float(i), **KERNEL | awkward) for i in range(300)]
    path = write_trace(tmp_path / "t.json", [], indent=2)
    listed = ",\n".join(indent(json.dumps(event, indent=2), "  ") for event in events)
    path.write_text(path.read_text().replace('"traceEvents": []', f'"traceEvents": [\n{listed}\n]'))
    whole = read(path)
    monkeypatch.setattr(trace, "PIECE_BYTES", 2**14)
    with path.open("rb") as file:
        assert len(list(trace._pieces(file))) > 5
    assert read(path) == whole
    assert [kernel.start_ns for kernel in whole.kernels] == [1000 * i for i in range(300)]
    assert len(whole.devices) == 1
    assert len({id(kernel.launch) for kernel in whole.kernels}) == 3


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "truncated"),
        (b"not a trace", "malformed"),
        (b'{"traceEvents": {}}', "array"),
        (b'{"traceEvents": [{"name": "no phase"}]}', "ph"),
        (b'{"traceEvents": [{"ph": "X", "ts": "soon"}]}', "float"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "args": {"grid": 1}}]}', "array"),
        (b'{"deviceProperties": 1, "traceEvents": []}', "array"),
        (b'{"traceEvents": [{"ph": "X", "name": "\xff"}]}', "utf-8"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "ts": 1e30}]}', "float"),
        (b"\x1f\x8b damaged", "cannot be read"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_its_name(content, why, tmp_path):
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=why) as error:
        read(path)
    assert str(path) in str(error.value)
