"""The fingerprint of real workers: each variable that changes how a process computes changes it, and nothing else."""

import functools
import os
import platform

import msgspec
import pytest
from forked import workers_apart
from records_made import ENVIRONMENT
from worker_jobs import job, run

from benchd.daemon.machine.environment import fingerprint
from benchd.daemon.measuring import recording
from benchd.daemon.measuring.recording import RunHeader, RunId
from benchd.daemon.records import Variant
from benchd.daemon.verdicts.sameness import environment_difference as difference
from benchd.daemon.verdicts.sameness import environment_differences as differences

CHANGES = {
    "ATEN_CPU_CAPABILITY": "default",
    "CUDA_LAUNCH_BLOCKING": "1",
    "CUDA_MODULE_LOADING": "EAGER",
    "DNNL_PRIMITIVE_CACHE_CAPACITY": "0",
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",
    "GOMP_SPINCOUNT": "0",
    "KMP_AFFINITY": "compact",
    "KMP_BLOCKTIME": "0",
    "LD_PRELOAD": "libm.so.6",
    "MALLOC_ARENA_MAX": "1",
    "MKL_CBWR": "COMPATIBLE",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "OMP_DYNAMIC": "true",
    "OMP_NUM_THREADS": "2",
    "OMP_PROC_BIND": "close",
    "OMP_WAIT_POLICY": "active",
    "ONEDNN_DEFAULT_FPMATH_MODE": "BF16",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "ORT_DISABLE_ALL_TELEMETRY": "1",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0",
}


def measured(folder, variant="eager", **changes):
    """Return the environment in the record of a real process: a cold start, which ends after its first runs."""
    with pytest.MonkeyPatch.context() as patch:
        for name in filter(CHANGES.__contains__, list(os.environ)):
            patch.delenv(name)
        for name, value in changes.items():
            patch.setenv(name, value)
        a_job = job(folder, scenario="cold_start", variant=Variant.parse(variant))
        outcome = run(a_job)
    assert outcome.process.status == "ok", outcome.process.reason
    shared = RunHeader(device_id="d", boot_id="b", suite_id="s", tool_version="1", environment=ENVIRONMENT)
    return recording.record(a_job.case, "quick", shared, RunId.new(), [outcome]).environment


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    folder = tmp_path_factory.mktemp("usual")
    return functools.cache(lambda: measured(folder))


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("changed")

    @functools.cache
    def measured_apart():
        """Take an interpreter of its own: what torch reads as it is loaded a forked worker does not read."""
        with pytest.MonkeyPatch.context() as patch:
            workers_apart(patch)
            return measured(folder, **CHANGES)

    return measured_apart


@pytest.mark.parametrize("name", CHANGES)
def test_a_variable_is_in_the_fingerprint(name, usual, changed):
    assert f"{name}: unset and {CHANGES[name]}" in list(differences(usual(), changed()))
    alone = msgspec.structs.replace(usual(), variables=usual().variables | {name: changed().variables[name]})
    assert fingerprint(alone) != usual().fingerprint == fingerprint(usual())


def test_two_processes_have_one_fingerprint(tmp_path, usual):
    again = measured(tmp_path, HOME=str(tmp_path), TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert (again.fingerprint, difference(usual(), again)) == (usual().fingerprint, None)


def test_what_the_worker_was_built_from(usual, changed):
    wanted = {"torch_commit", "torch_build", "cpu_capability", "libraries", "c_kernels", "benchd_sources"}
    assert wanted <= set(usual().software)
    least = changed().software
    assert least["cpu_capability"] in ("DEFAULT", "NO AVX")  # by the version of torch
    if platform.machine() == "x86_64":  # elsewhere the least may be the usual one
        assert least["cpu_capability"] != usual().software["cpu_capability"]
    assert least["torch_build"] == usual().software["torch_build"]


def test_onnx_runtime_is_named_by_its_build(tmp_path, usual):
    runtime = pytest.importorskip("onnxruntime")
    with_file = measured(tmp_path, "onnxruntime")
    assert with_file.software["onnxruntime_build"] in runtime.get_build_info()
    assert difference(usual(), with_file) is None
