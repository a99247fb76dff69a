"""Runs Nsight Systems and Nsight Compute, if they are installed, and builds their command lines.

Both start the profiling child, which opens the capture range around its active steps. Its job is a file in the output
folder, so that the printed command can be run by hand. If a tool is missing, the answer gives the package that provides
it and the command to run.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import msgspec

from benchd.daemon.errors import Unsupported
from benchd.daemon.machine import interpreter
from benchd.daemon.measuring import process
from benchd.daemon.profiling.nsight import nsight_csv
from benchd.daemon.profiling.profile import NsightCompute, NsightSystems, ProfileJob
from benchd.daemon.profiling.trace.trace import COUNTERS_CURE

SNN_KERNELS = r"[Ll]if|LIF|[Ss][Tt]_?[Bb][Ii][Ff]|[Ss]pik|^_(sum|pool|unpool)_kernel"
"""Matches kernels of spiking neurons: benchd's, named as in kernels/lif and kernels/stbif, and other common names."""

_CHILD = interpreter.of_module("benchd.daemon.worker.profiling")
_CUDA_PATH = ":/usr/local/cuda/bin"  # not on the PATH of sudo and services
_PACKAGES = {"nsys": "nsight-systems", "ncu": "nsight-compute"}
_BRINGS = (
    "sudo apt install {0} (Debian non-free, Ubuntu multiverse, NVIDIA's CUDA repository or a Jetson's), or "
    "conda install -c nvidia {0}"
)
_NO_PERMISSION = ("ERR_NVGPUCTRPERM", "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

_NSYS_PROFILE = [
    "profile",
    "--trace=cuda,nvtx,osrt",
    "--sample=none",
    "--cpuctxsw=none",
    "--cuda-graph-trace=node",
    "--capture-range=cudaProfilerApi",
    "--capture-range-end=stop",
    "--force-overwrite=true",
]
_NSYS_STATS = [
    "stats",
    "--report=cuda_gpu_kern_sum",
    "--report=cuda_api_sum",
    "--report=nvtx_sum",
    "--format=csv",
    "--force-export=true",
]

_NCU_PROFILE = [
    "--profile-from-start=off",
    "--target-processes=all",
    "--clock-control=none",
    "--force-overwrite",
    f"--metrics={','.join(nsight_csv.METRICS)}",
]
# base units, because values in other units are rounded to three digits
_NCU_PAGE = ["--csv", "--page=raw", "--print-units=base"]


def systems(job: ProfileJob, deadline_s: float) -> NsightSystems | str:
    """Return nsys's tables of the job's active steps, or why there are none, with the package and the command."""
    stem = Path(job.output, "nsys").resolve()
    report = f"{stem}.nsys-rep"
    record = ["nsys", *_NSYS_PROFILE, f"--output={stem}", *_CHILD]
    try:
        return nsight_csv.systems(_printed(job, record, ["nsys", *_NSYS_STATS, report], deadline_s), report)
    except Unsupported as error:
        return str(error)


def compute(job: ProfileJob, deadline_s: float, kernel_regex: str | None = None) -> NsightCompute | str:
    """Return ncu's counters of one active step, for the kernels that match `kernel_regex`, or why there are none.

    One step is enough: ncu replays each kernel until all counters are read.
    """
    stem = Path(job.output, "ncu").resolve()
    report = f"{stem}.ncu-rep"
    only = ["--kernel-name-base=demangled", f"--kernel-name=regex:{kernel_regex}"] if kernel_regex else []
    record = ["ncu", *_NCU_PROFILE, *only, f"--export={stem}", *_CHILD]
    one_step = msgspec.structs.replace(job, steps=1)
    try:
        printed = _printed(one_step, record, ["ncu", f"--import={report}", *_NCU_PAGE], deadline_s)
        return nsight_csv.compute(printed, report)
    except Unsupported as error:
        return str(error)


def _printed(job: ProfileJob, record: list[str], read: list[str], deadline_s: float) -> str:
    """Record the job and return the printed report; raise Unsupported with the reason and the command to run."""
    name, stdin = record[0], _job_file(job, record[0])
    typed = f"{shlex.join(record)} < {shlex.quote(str(stdin))} && {shlex.join(read)}"
    tool = shutil.which(name, path=os.environ.get("PATH", os.defpath) + _CUDA_PATH)
    if tool is None:
        raise Unsupported(f"{name} is not installed: {_BRINGS.format(_PACKAGES[name])}; then: {typed}")
    if job.device == "cpu":
        raise Unsupported(f"{name} records GPUs only, but this is a CPU profile; on a machine with a GPU: {typed}")
    environment = process.environment(job.device, job.cache, job.gpu_uuid)
    try:
        if reason := _reason(_run([tool, *record[1:]], stdin, deadline_s, environment)):
            raise Unsupported(f"ran, but its child failed: {reason}")
        return _run([tool, *read[1:]], stdin, deadline_s, environment)
    except Unsupported as error:
        raise Unsupported(f"{name} {error}; by hand: {typed}") from error


def _job_file(job: ProfileJob, tool: str) -> Path:
    """Write the child's job to a file, so that it can be rerun by hand; raise Unsupported if that fails."""
    path = Path(job.output, f"{tool}.job.json").resolve()
    try:
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(job, capture=True)))
    except OSError as error:
        raise Unsupported(f"{path}: {error.strerror}") from error
    return path


def _reason(output: str) -> str | None:
    """Return why the child failed, from its answer in the printed output; None if it did not say."""
    match = re.search(r'"error":("(?:[^"\\]|\\.)*")', output)
    return msgspec.json.decode(match[1], type=str) if match else None


def _run(command: list[str], stdin: Path, deadline_s: float, environment: dict[str, str]) -> str:
    """Run a tool and its child, end all their processes and return their output; raise Unsupported if they fail."""
    with (
        stdin.open("rb") as job,
        subprocess.Popen(
            command,
            stdin=job,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as child,
    ):
        try:
            output, _ = child.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            raise Unsupported(f"was stopped after {deadline_s:g} s") from None
        finally:
            with suppress(ProcessLookupError):  # already gone
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()  # after an interrupt, Popen itself waits only a quarter of a second
    if any(mark in output for mark in _NO_PERMISSION):
        raise Unsupported(f"is not permitted to read the GPU's counters: {COUNTERS_CURE}")
    if child.returncode:
        raise Unsupported(f"ended with status {child.returncode}{nsight_csv.last_words(output)}")
    return output
