"""What a worker says of a GPU beside its times: memory, probes, and inputs as a GPU copies them."""

import msgspec
import pytest
import torch
from worker_jobs import job, run, user_module

from benchd.daemon.records import Variant
from benchd.daemon.worker import probes, steps

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
BYTES = 2**28
WORKS = f"images = images + torch.zeros({BYTES // 4}, device=images.device).sum()"
IN_FLOAT64 = (
    f"if images.dtype == torch.float64 and images.is_cuda: "
    f"sys.kept = torch.zeros({BYTES}, dtype=torch.uint8, device=images.device)"
)


def peak_bytes(folder, variant, forward):
    """Return the device's peak of a module with this line in its forward."""
    a_job = job(folder, module=user_module(folder, forward=forward), variant=Variant.parse(variant))
    outcome = run(msgspec.structs.replace(a_job, device="cuda", artifacts=str(folder / "artifacts")))
    assert (outcome.process.status, outcome.process.reason) == ("ok", None)
    return outcome.process.memory.device_peak_bytes


@pytest.mark.parametrize("variant", ["eager", "cudagraph"])
def test_the_peak_holds_what_a_run_works_in(variant, tmp_path):
    assert peak_bytes(tmp_path, variant, WORKS) >= BYTES


def test_the_peak_of_a_runtime_holds_nothing_of_the_check(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime", reason="is the backend")
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has no provider for CUDA")
    plain, greedy = (tmp_path / name for name in ("plain", "greedy"))
    plain.mkdir()
    greedy.mkdir()
    taken = [peak_bytes(plain, "onnxruntime", "pass"), peak_bytes(greedy, "onnxruntime", IN_FLOAT64)]
    assert abs(taken[1] - taken[0]) < BYTES / 2


def test_a_run_is_probed_behind_another_so_that_no_launch_is_waited_for():
    runs = []
    probes._seconds(lambda: runs.append(None), CUDA)
    assert len(runs) == 2


def test_inputs_lie_where_a_gpu_copies_them_from():
    assert all(batch.is_pinned() for batch in steps.pinned([torch.ones(3), torch.ones(2)], CUDA))
