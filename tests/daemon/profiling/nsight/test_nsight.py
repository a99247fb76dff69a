import ast
import os
import re
import sys
import uuid
from pathlib import Path

import msgspec
import psutil
import pytest
from waiting import wait_for

import benchd.kernels.lif
import benchd.kernels.selective_scan
import benchd.kernels.stbif
from benchd.daemon.machine import interpreter
from benchd.daemon.measuring.plan import PRESETS
from benchd.daemon.profiling.nsight import nsight, nsight_csv
from benchd.daemon.profiling.profile import CollectedProfile, NsightSystems, ProfileJob
from benchd.daemon.records import Case

# `nsys stats` of 2023.1 to 2025.3: columns as in docs.nvidia.com/nsight-systems/AnalysisGuide, the lines around the
# tables as nsys prints them in issues that quote it (vllm#31337, nsys_easy#1)
NSYS = """Generating SQLite file /out/nsys.sqlite from /out/nsys.nsys-rep
Processing [/out/nsys.sqlite] with [/opt/nvidia/nsight-systems/2024.5.1/host-linux-x64/reports/cuda_gpu_kern_sum.py]...
Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name
75.0,"6,000",4,1500.5,1500.0,1200,1800,8313.1,"void elementwise_kernel<(int)4, CUDAFunctor_add<float>>(int, T2)"
25.0,2000,1,2000.0,2000.0,2000,2000,0.0,ampere_sgemm_128x64_tn

Processing [/out/nsys.sqlite] with [/opt/nvidia/nsight-systems/2024.5.1/host-linux-x64/reports/cuda_api_sum.py]...
Time (%),Total Time (ns),Num Calls,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name
81.2,131012864,5,26202572.8,26000000.0,25000000,31012864,7724.7,cudaDeviceSynchronize

Processing [/out/nsys.sqlite] with [/opt/nvidia/nsight-systems/2024.5.1/host-linux-x64/reports/nvtx_sum.py]...
Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Style,Range
100.0,5000,2,2500.0,2500.0,2400,2600,10.0,PushPop,:Model_Forward_Pass
"""

# `ncu --csv --page=raw` of 2022 to 2025: one row a launch below a row of units, numbers with separators of thousands,
# n/a where the GPU does not count a metric (docs.nvidia.com/nsight-compute/NsightComputeCli, and its output on GB10)
_NCU_HEAD = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size"]
_NCU_HEAD += ["Grid Size", "Device", "CC"]


def ncu(*launches, units=("ns", "%", "%", "register/thread", "byte/block", "byte/block", "inst", "%"), extra=""):
    """Return a raw page of launches given as (name, the values of the first eight metrics, blocks that each limits)."""
    metrics = nsight_csv.METRICS
    lines = [_line([*_NCU_HEAD, *metrics]), _line([""] * len(_NCU_HEAD) + [*units, *["block"] * 4])]
    for number, (name, values, limits) in enumerate(launches):
        identity = [number, 4711, "python3.11", "127.0.0.1", name, 1, 7, "(256, 1, 1)", "(4,096, 1, 1)", 0, "8.7"]
        lines.append(_line([*identity, *values, *limits]))
    return "\n".join([extra, *lines, ""])


def _line(cells):
    return ",".join(f'"{cell}"' for cell in cells)


SCAN = "void selective_scan_fwd_kernel<Traits<(int)32, float>>(SSMParamsBase, int)"
NCU = ncu(
    (SCAN, ["15,297,000", "31.50", "33.33", "120", "0", "3,200", "0", "n/a"], [5, 12, 16, 16]),
    (SCAN, ["5,099,000", "27.50", "33.33", "120", "0", "3,200", "0", "n/a"], [5, 12, 16, 16]),
    ("ampere_h16816gemm", ["900", "62.5", "66.67", "80", "1,024", "0", "4,194,304", "n/a"], [9, 6, 6, 16]),
    extra="==PROF== Connected to process 4711 (/usr/bin/python3.11)",
)


@pytest.fixture
def job(tmp_path):
    return ProfileJob(
        case=Case(model="vim_tiny"),
        limits=PRESETS["quick"],
        workload="forward",
        methods=["torch", "nsys"],
        warm_up=1,
        steps=3,
        runs=5,
        device="cuda",
        output=str(tmp_path),
        cache=str(tmp_path),
    )


def install(folder, monkeypatch, name, *, makes, says, reads="", status=0):
    """Put a program of this name on the PATH: it keeps its arguments and input, and prints what the tool recorded."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.made").write_text(makes)
    (folder / f"{name}.read").write_text(reads)
    lines = [
        f"#!{sys.executable}",
        "import pathlib, sys",
        "here, arguments = pathlib.Path(__file__).parent, sys.argv[1:]",
        "makes = any(argument.endswith('worker.profiling') for argument in arguments)",
        f"kept = here / ('{name}.made.arguments' if makes else '{name}.read.arguments')",
        "kept.write_text('\\n'.join(arguments))",
        f"(here / '{name}.stdin').write_bytes(sys.stdin.buffer.read()) if makes else None",
        f"print((here / ('{name}.made' if makes else '{name}.read')).read_text())",
        f"print({says!r}, file=sys.stderr)",
        f"sys.exit({status} if makes else 0)",
    ]
    (folder / name).write_text("\n".join(lines))
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_nsys_tables_are_read_in_nanoseconds():
    systems = nsight_csv.systems(NSYS, "/out/nsys.nsys-rep")
    add, gemm = systems.kernels
    assert add.name == "void elementwise_kernel<(int)4, CUDAFunctor_add<float>>(int, T2)"
    assert (add.calls, add.total_ns, add.mean_ns, add.min_ns, add.max_ns) == (4, 6000, 1500.5, 1200, 1800)
    assert (gemm.name, gemm.total_ns) == ("ampere_sgemm_128x64_tn", 2000)
    assert [(call.name, call.calls, call.self_cpu_ns) for call in systems.runtime] == [
        ("cudaDeviceSynchronize", 5, 131012864)
    ]
    assert [(row.name, row.calls, row.mean_ns) for row in systems.ranges] == [("Model_Forward_Pass", 2, 2500.0)]


def test_ncu_launches_become_one_row_a_kernel():
    scan, gemm = nsight_csv.compute(NCU, "/out/ncu.ncu-rep").kernels
    assert (scan.name, scan.calls, scan.total_ns) == (SCAN, 2, 20_396_000)
    assert (scan.min_ns, scan.max_ns, scan.mean_ns) == (5_099_000, 15_297_000, 10_198_000)
    assert scan.measured_occupancy == pytest.approx(0.75 * 0.315 + 0.25 * 0.275)
    assert scan.theoretical_occupancy == pytest.approx(0.3333)
    assert (scan.estimated_occupancy, scan.registers, scan.shared_bytes) == (None, 120, 3200)
    assert (scan.limits, scan.tensor_cores, scan.tensor_cores_by) == (["registers"], False, "counters")
    assert (gemm.limits, gemm.tensor_cores, gemm.shared_bytes) == (["shared memory", "warps"], True, 1024)


def test_what_the_gpu_does_not_count_stays_unknown():
    (row,) = nsight_csv.compute(ncu(("k", ["900", *["n/a"] * 7], ["n/a"] * 4)), "r").kernels
    assert (row.measured_occupancy, row.registers, row.shared_bytes) == (None, None, None)
    assert (row.tensor_cores, row.tensor_cores_by, row.limits) == (None, None, [])


def test_nsys_runs_the_child_between_start_and_stop(job, tmp_path, monkeypatch):
    install(tmp_path / "bin", monkeypatch, "nsys", makes="", says="Generating report", reads=NSYS)
    systems = nsight.systems(job, 60)
    assert isinstance(systems, NsightSystems)
    assert systems.report == str(tmp_path / "nsys.nsys-rep")
    arguments = (tmp_path / "bin/nsys.made.arguments").read_text().split("\n")
    assert {"--capture-range=cudaProfilerApi", f"--output={tmp_path / 'nsys'}"} < set(arguments)
    assert arguments[-4:] == interpreter.of_module("benchd.daemon.worker.profiling")
    assert (tmp_path / "bin/nsys.read.arguments").read_text().endswith(f"\n{systems.report}")
    child = msgspec.json.decode((tmp_path / "bin/nsys.stdin").read_bytes(), type=ProfileJob)
    assert child == msgspec.structs.replace(job, capture=True)


@pytest.mark.parametrize(
    ("tool", "package", "run"),
    [("nsys", "nsight-systems", nsight.systems), ("ncu", "nsight-compute", nsight.compute)],
)
def test_without_the_tool_the_package_and_the_line_to_type_are_said(tool, package, run, job, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    if (Path("/usr/local/cuda/bin") / tool).exists():
        pytest.skip(f"{tool} is installed where it is looked for besides the PATH")
    reason = run(job, 60)
    assert reason.startswith(f"{tool} is not installed: sudo apt install {package} ")
    typed = reason.partition("; then: ")[2]
    # the line runs as it stands, in a shell, once there is a tool
    install(tmp_path / "bin", monkeypatch, tool, makes="", says="", reads="table")
    assert os.system(f"{typed} > {tmp_path}/typed") == 0  # noqa: S605
    assert (tmp_path / "typed").read_text().strip() == "table"


def test_a_profile_of_the_cpu_is_not_run(job, tmp_path, monkeypatch):
    install(tmp_path / "bin", monkeypatch, "nsys", makes="", says="", reads=NSYS)
    reason = nsight.systems(msgspec.structs.replace(job, device="cpu"), 60)
    assert "nsys records GPUs" in reason
    assert not (tmp_path / "bin/nsys.stdin").exists()


# as ncu prints it (TensorRT-LLM#183); the exit status is the program's own
DENIED = (
    "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the "
    "target device 0. For instructions on enabling permissions and to get more information see "
    "https://developer.nvidia.com/ERR_NVGPUCTRPERM"
)


def test_missing_permission_is_said_with_its_cure(job, tmp_path, monkeypatch):
    install(tmp_path / "bin", monkeypatch, "ncu", makes=DENIED, says="", reads=NCU)
    reason = nsight.compute(job, 60)
    assert "NVreg_RestrictProfilingToAdminUsers=0" in reason
    assert "CAP_SYS_ADMIN" in reason


def test_what_the_child_answers_is_said_where_it_failed(job, tmp_path, monkeypatch):
    answer = msgspec.json.encode(CollectedProfile(error='Unsupported: "x.py" has no build')).decode()
    install(tmp_path / "bin", monkeypatch, "nsys", makes=f"Collecting data...\n{answer}Generating", says="", reads=NSYS)
    assert 'nsys ran, but its child failed: Unsupported: "x.py" has no build; by hand:' in nsight.systems(job, 60)
    well = msgspec.json.encode(CollectedProfile()).decode()
    install(tmp_path / "bin", monkeypatch, "nsys", makes=well, says="", reads=NSYS)
    assert isinstance(nsight.systems(job, 60), NsightSystems)


def test_one_that_hangs_is_ended_with_all_it_started(job, tmp_path, monkeypatch):
    seconds = f"6000.{uuid.uuid4().int}"
    (tmp_path / "ncu").write_text(f"#!/bin/sh\n/bin/sleep {seconds} &\nwait\n")
    (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "ncu was stopped after 1 s" in nsight.compute(job, 1.0)
    wait_for(lambda: not running(seconds))  # what is killed may take its time to go


def running(word):
    """Return the command lines that hold this word."""
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if word in line]


def triton_kernels(package):
    tree = ast.parse(Path(package.__file__).with_name("triton_impl.py").read_text())
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [name for name in functions if name.endswith("_kernel")]


def test_the_neurons_kernels_are_found_by_name_and_others_are_not():
    neurons = triton_kernels(benchd.kernels.lif) + triton_kernels(benchd.kernels.stbif)
    neurons += ["LIFNodeFPTTHardResetKernel", "void ST_BIFNodeATGF_MS_forward<float>(int)", "spike_forward"]
    others = triton_kernels(benchd.kernels.selective_scan)
    others += ["void at::native::avg_pool2d_out_cuda_frame<float>(int)", "ampere_sgemm_128x64_tn", "reduce_kernel"]
    assert len(neurons) > 3
    assert [name for name in neurons if not re.search(nsight.SNN_KERNELS, name)] == []
    assert [name for name in others if re.search(nsight.SNN_KERNELS, name)] == []
