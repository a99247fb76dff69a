"""ONNX Runtime on a real device: every model's numbers, the memory of a run, and one run at a time."""

import msgspec
import pytest
import torch
from worker_jobs import changed, job, run, user_module

from benchd.daemon.records import Variant
from benchd.daemon.worker import backends, workload
from benchd.daemon.worker.check import checking as check
from benchd.exporters import sessions
from benchd.models import catalog

pytestmark = [pytest.mark.gpu, pytest.mark.area("onnxruntime")]
BYTES = 2**28
IN_FLOAT64 = (
    f"if images.dtype == torch.float64 and images.is_cuda: "
    f"sys.kept = torch.zeros({BYTES}, dtype=torch.uint8, device=images.device)"
)
# fewer layers and channels run the same operators
SMALL = {"vim_tiny": {"depth": 2}, "snn_stbif_resnet18": {"width": 8}, "qann_resnet18": {"width": 8}}


@pytest.fixture(autouse=True)
def _onnxruntime():
    reason = sessions.why_not()
    if reason:
        pytest.skip(reason)
    onnxruntime = pytest.importorskip("onnxruntime")
    if sessions.PROVIDERS["cuda"] not in onnxruntime.get_available_providers():
        pytest.skip(f"this ONNX Runtime has no provider for CUDA: {sessions.cuda_build()}")


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("model", ["square", "vim_tiny", "snn_onepass", "qann_resnet18", "snn_stbif_resnet18"])
def test_a_model_agrees_with_float64_on_cuda(tmp_path, model, precision):
    a_job = job(tmp_path, model=model, variant=Variant("onnxruntime", precision), batch_size=2)
    options = catalog.entry(model).resolve(SMALL.get(model, {}))
    a_job = changed(a_job, options=options, device="cuda")
    built = workload.build(a_job)
    loaded = backends.load(a_job.case.variant, built.source, torch.device("cuda"), built.images[:2])
    assert loaded.runtime.provider == sessions.PROVIDERS["cuda"]
    result = check.check_and_answers(built, loaded, a_job).check
    assert result.passed, result


def measured(folder, forward, **fields):
    """Return the outcome of a module with this line in its forward."""
    folder.mkdir(exist_ok=True)
    a_job = job(folder, module=user_module(folder, forward=forward), variant=Variant("onnxruntime"), **fields)
    outcome = run(msgspec.structs.replace(a_job, device="cuda"))
    assert (outcome.process.status, outcome.process.reason) == ("ok", None)
    return outcome


def test_the_peak_holds_nothing_of_the_check(tmp_path):
    outcomes = [measured(tmp_path / name, forward) for name, forward in (("plain", "pass"), ("greedy", IN_FLOAT64))]
    missing = outcomes[0].missing.get("memory.device_peak_bytes")
    if missing:
        pytest.skip(missing)
    plain, greedy = (outcome.process.memory.device_peak_bytes for outcome in outcomes)
    assert abs(greedy - plain) < BYTES / 2


def test_offline_says_that_each_run_is_waited_for(tmp_path):
    assert "one_in_flight" in measured(tmp_path, "pass", scenario="offline").flags
