"""What the trace of a profile gives, and how one that is of no use becomes the reason of a failed method."""

import json
import re

import pytest

from benchd.daemon.profiling.collecting import Found, read_trace
from benchd.daemon.profiling.profile import Collected, ProfileJob
from benchd.daemon.records import Case


def complete(category, name, start_us, duration_us, **arguments):
    times = {"ts": start_us, "dur": duration_us}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "args": arguments, **times}


STEP = complete("user_annotation", "ProfilerStep#1", 0.0, 100.0)
ADD = complete("cpu_op", "aten::add", 10.0, 30.0, **{"External id": 5})
LAUNCH = complete("cuda_runtime", "cudaLaunchKernel", 15.0, 5.0, correlation=9)
KERNEL = complete("kernel", "add", 30.0, 50.0, correlation=9, device=0, stream=7, **{"External id": 5})


@pytest.fixture
def read(tmp_path):
    """Return a function that reads a trace of these events, or this text, and returns what was found."""

    def found(events, device="cpu"):
        text = events if isinstance(events, str) else json.dumps({"traceEvents": events})
        (tmp_path / "trace.json").write_text(text)
        job = ProfileJob(
            case=Case(model="square"),
            options={},
            workload="forward",
            methods=["torch"],
            warm_up=0,
            steps=1,
            runs=5,
            device=device,
            threads=None,
            output=str(tmp_path),
            cache="",
            artifacts="",
        )
        made = Found(Collected(), {}, [])
        read_trace(made, job, "trace.json")
        return made

    return found


def test_a_cpu_s_trace_gives_operators_and_frames(read):
    found = read([STEP, ADD])
    assert [row.name for row in found.torch.operators] == ["aten::add"]
    assert [(frame.name, frame.ns) for frame in found.nesting] == [("step 1", 100_000), ("aten::add", 30_000)]
    assert (found.missing, found.failed, found.occupancy) == ({}, [], None)


def test_a_gpu_s_trace_gives_kernels_and_the_occupancy_of_a_record(read):
    found = read([STEP, ADD, LAUNCH, KERNEL], "cuda")
    assert [row.name for row in found.torch.kernels] == ["add"]
    assert found.occupancy.kernels == 1
    assert found.nesting[-1].name == "add"


@pytest.mark.parametrize(
    ("events", "device", "reason"),
    [
        ([STEP, ADD, LAUNCH], "cuda", "1 launches and no kernel.*NVreg_RestrictProfilingToAdminUsers"),
        ("", "cpu", "empty"),
        (json.dumps({"traceEvents": [STEP, ADD]})[:-20], "cpu", "damaged, cut short"),
        ([], "cpu", ""),
    ],
    ids=["no kernel", "empty", "truncated", "no event"],
)
def test_a_trace_of_no_use_is_a_failed_method_with_its_reason(read, events, device, reason):
    found = read(events, device)
    assert (found.torch, found.failed) == (None, ["torch"])
    assert re.search(reason, found.missing["torch"])
