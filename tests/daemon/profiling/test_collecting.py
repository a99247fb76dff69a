"""What the trace of a profile gives, and how one that is of no use becomes the reason of a failed method."""

import json
import re

import msgspec
import pytest
from gaps import without_gaps
from profile_jobs import own_job, profile_job
from profile_shown import shown
from sessions_made import session
from waiting import WAIT_S

from benchd.daemon.machine.signals import as_interrupt
from benchd.daemon.measuring.plan import PRESETS
from benchd.daemon.profiling.collecting import gather, read_trace
from benchd.daemon.profiling.profile import METHODS, ProfileJob
from benchd.daemon.records import Case


def complete(category, name, start_us, duration_us, **arguments):
    times = {"ts": start_us, "dur": duration_us}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "args": arguments, **times}


STEP = complete("user_annotation", "ProfilerStep#1", 0.0, 100.0)
ADD = complete("cpu_op", "aten::add", 10.0, 30.0, **{"External id": 5})
LAUNCH = complete("cuda_runtime", "cudaLaunchKernel", 15.0, 5.0, correlation=9)
KERNEL = complete("kernel", "add", 30.0, 50.0, correlation=9, device=0, stream=7, **{"External id": 5})


def empty():
    """Return a profile without results."""
    return shown(**dict.fromkeys(method.replace("-", "_") for method in METHODS), findings=[], missing={})


@pytest.fixture
def read(tmp_path):
    """Return a function that reads a trace of these events, or this text, and returns what was found."""

    def found(events, device="cpu"):
        text = events if isinstance(events, str) else json.dumps({"traceEvents": events})
        (tmp_path / "trace.json").write_text(text)
        job = ProfileJob(
            case=Case(model="square"),
            limits=PRESETS["quick"],
            workload="forward",
            methods=["torch"],
            warm_up=0,
            steps=1,
            runs=5,
            device=device,
            output=str(tmp_path),
            cache="",
        )
        profile = empty()
        read_trace(profile, job, "trace.json")
        return profile

    return found


def test_a_gpu_s_trace_gives_kernels_and_the_occupancy_of_a_record(read):
    results = read([STEP, ADD, LAUNCH, KERNEL], "cuda")
    assert [row.name for row in results.torch.kernels] == ["add"]
    assert results.occupancy.kernels == 1


@pytest.mark.parametrize(
    ("events", "device", "reason"),
    [
        ([STEP, ADD, LAUNCH], "cuda", "1 launches but no kernels.*NVreg_RestrictProfilingToAdminUsers"),
        ("", "cpu", "damaged, truncated"),
        (json.dumps({"traceEvents": [STEP, ADD]})[:-20], "cpu", "damaged, truncated"),
        ([], "cpu", ""),
    ],
    ids=["no kernel", "empty", "truncated", "no event"],
)
def test_a_trace_of_no_use_is_a_failed_method_with_its_reason(read, events, device, reason):
    results = read(events, device)
    assert (results.torch, results.failed) == (None, ["torch"])
    assert re.search(reason, results.missing["torch"])


def gathered(folder, job, source, deadline_s=WAIT_S):
    profile = empty()
    with session(folder, source=source) as bench_session, bench_session.measuring(ending=()):
        gather(profile, bench_session, job, deadline_s, None)
    return profile


def test_a_child_that_takes_too_long_is_ended_with_its_reason(tmp_path):
    job = own_job(tmp_path, build="time.sleep(1000)")
    profile = gathered(tmp_path, job, "procfs", deadline_s=2.0)
    assert {profile.missing[method] for method in job.methods} == {"it took longer than 2 s"}


def test_an_interrupt_of_a_tool_costs_what_had_not_ended(tmp_path, monkeypatch):
    # a second later, because Popen forgets a child if it is interrupted before it returns
    (tmp_path / "ncu").write_text("#!/bin/sh\n/bin/sleep 1\nkill -TERM $PPID\nexec /bin/sleep 6000\n")
    (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    job = msgspec.structs.replace(profile_job(tmp_path, methods=["nsys", "ncu"]), device="cuda")
    with as_interrupt(), session(tmp_path, source="procfs") as bench_session, bench_session.measuring(ending=()):
        gather(profile := empty(), bench_session, job, WAIT_S, None)
    assert profile.interrupted
    assert profile.missing["ncu"] == "interrupted"
    assert "nsys is not installed" in profile.missing["nsys"]


def test_the_layers_have_the_energy_of_a_pass_from_the_sensor_beside_the_child(tmp_path):
    watts = [5.01, 15.02, 7.03, 6.04, 9.05, 12.06, 5.57]
    metric = {"metric": "power_w", "scope": "module input VDD_IN", "values": watts, "period_s": 0.05}
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"metrics": [metric]}))
    options = {"time_steps": 2}
    job = profile_job(tmp_path, options=options, methods=["layers"])
    layers = without_gaps(
        lambda: gathered(tmp_path, job, f"fake={script}").layers,
        lambda layers: [layers.notes[-1].removeprefix("Measured energy: ")],
    )
    assert layers.energy_scope == "module input VDD_IN, by fake"
    assert 5.0 < layers.measured_energy_j * layers.energy_images / layers.energy_window.seconds < 15.1
